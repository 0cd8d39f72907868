"""Problems of a fault campaign: dense operators and collectives."""

import torch
import torch.distributed as dist

import tdkernels
from tests.chaos.base import EXACT_DTYPES, FP32, ExactCase, NamedResults, Problem
from tests.ops.collectives import cases as collective
from tests.ops.collectives.norm_oracle import NormCase, normalized
from tests.ops.collectives.norm_oracle import config_of as norm_config_of
from tests.ops.dense.cases import config_for
from tests.ops.dense.gemm_ar_norm_cases import CONFIGS as GEMM_NORM_CONFIGS
from tests.ops.dense.gemm_ar_norm_oracle import NormCase as GemmNormCase
from tests.ops.dense.gemm_ar_norm_oracle import exact_norm
from tests.support.dense_oracle import Case
from tests.support.ranks import device


class Dense(ExactCase):
    SHAPES = [(5, 3, 7), (6, 3, 7), (9, 4, 6), (70, 6, 5)]  # rows, n, k per rank; the last has several tiles

    def __init__(self, operator, changes, shape, seed, group):
        dtype = EXACT_DTYPES[seed // 100 % len(EXACT_DTYPES)]
        self.case = Case(operator, dtype, *self.SHAPES[shape], exact=True, seed=seed)
        self.options = {"config": config_for(self.case, **changes)}
        self.group, self.results = group, {}

    def _call(self):
        return self.case.call(group=self.group, **self.options)


class Collective(Problem):
    SHAPES = [(5, 3), (7, 3), (4, 5), (150, 3)]

    def __init__(self, operator, changes, shape, seed, group):
        self.operator, self.group, self.results = operator, group, {}
        rank, shape = dist.get_rank(), self.SHAPES[shape]
        dtype = EXACT_DTYPES[seed // 100 % len(EXACT_DTYPES)]
        full = collective.draw_operands(operator, shape, FP32, seed).to(dtype)
        self.expected = {"output": collective.expected_of(operator, full)}
        if operator == "all_reduce":
            dy = dx = collective.draw_operands(operator, shape, FP32, seed + 50)[0].to(dtype)
        else:
            dual = {"all_gather": "reduce_scatter", "reduce_scatter": "all_gather"}[operator]
            dys = collective.draw_operands(dual, shape, FP32, seed + 50).to(dtype)
            dy, dx = dys[rank], collective.expected_of(dual, dys)
        self.expected["dx"], self.dy = dx, dy.to(device())
        self.x = full[rank].to(device()).requires_grad_()
        self.options = {"config": collective.config_of(changes)}

    def steps(self, backward):
        output = getattr(tdkernels, self.operator)(self.x, group=self.group, **self.options)
        self.results = {"output": output.detach()}
        yield
        if backward:
            output.backward(self.dy)
            self.results["dx"] = self.x.grad
            yield

    def check(self):
        for name, got in self.results.items():
            assert collective.same(got, self.expected[name]), f"{name} of {self.operator}"


class ReducedNorm(NamedResults):
    SHAPES = [(5, 3), (7, 3), (4, 5), (30, 33)]

    def __init__(self, operator, changes, shape, seed, group):
        self.case = NormCase(operator, self.SHAPES[shape], FP32, seed)
        self.own = {name: operand.requires_grad_() for name, operand in zip("xswb", self.case.operands(), strict=True)}
        self.options, self.group, self.results = {"config": norm_config_of(changes)}, group, {}
        generator = torch.Generator().manual_seed(seed + 50)
        self.gradients = [torch.randn(self.SHAPES[shape], generator=generator) for _ in "yr"]

    def _call(self):
        x, residual, weight, bias = self.own.values()
        y, r = getattr(tdkernels, self.case.operator)(
            x, residual, weight, bias=bias, eps=1e-3, group=self.group, **self.options
        )
        return {"y": y, "r": r}, [gradient.to(device()) for gradient in self.gradients]

    def _gradients(self):
        return {f"d{name}": operand.grad for name, operand in self.own.items()}

    def _expected(self):
        r, weight, bias = (
            operand.detach().double().requires_grad_() for operand in (self.case.r(), self.case.weight, self.case.bias)
        )
        y = normalized(r, weight, bias, self.case.is_layer_norm)[0]
        torch.autograd.backward([y, r], [gradient.double() for gradient in self.gradients])
        return {"y": y, "r": r, "dx": r.grad, "ds": r.grad, "dw": weight.grad, "db": bias.grad}


class ReducedProductNorm(NamedResults):
    SHAPES = [(5, 3, 7), (7, 3, 7), (4, 40, 9), (18, 33, 5)]  # rows, n, k of a rank; the last two have several tiles

    def __init__(self, operator, changes, shape, seed, group):
        self.case = GemmNormCase(operator, FP32, *self.SHAPES[shape], seed=seed)
        self.options, self.group, self.results = {"config": GEMM_NORM_CONFIGS[changes]}, group, {}

    def _call(self):
        y, r = self.case.call(**self.options)
        return {"y": y, "r": r}, [self.case.dy, self.case.dr]

    def _gradients(self):
        return {f"d{name}": operand.grad for name, operand in self.case.operands().items()}

    def _expected(self):
        case, r = self.case, self.case.expected_sum()
        y = exact_norm(r, case.norm_weight, case.norm_bias, case.eps, case.is_layer_norm)
        gradients = case.expected_gradients(r, "yr")
        return {"y": y, "r": r, **{f"d{name}": gradient for name, gradient in gradients.items()}}
