"""The calls of a fault campaign: every operator, with small operands whose results each rank can compute alone.

    problem = make_problem("gemm_rs forward", shape=0, seed=7, group=group)
    for _ in problem.steps(backward=True):   # one public call or one backward pass per step
        pass
    problem.check()                          # raises AssertionError for a wrong result

The operands of all ranks are derived from the seed, so a check needs no communication and works when a peer is dead.
"""

import random

import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, EpMoeConfig
from tests.chaos import specialized
from tests.ops.attention.ag_attention import cases as attention
from tests.ops.attention.ag_attention.oracle import Sharded
from tests.ops.attention.flash_decode import cases as decoding
from tests.ops.attention.flash_decode.oracle import CACHES, Decode
from tests.ops.attention.ulysses import cases as sequence_parallel
from tests.ops.attention.ulysses.cases import Projection
from tests.ops.collectives import cases as collective
from tests.ops.collectives.norm_oracle import NormCase, normalized
from tests.ops.collectives.norm_oracle import config_of as norm_config_of
from tests.ops.collectives.test_collectives import VARIANTS as COLLECTIVE_VARIANTS
from tests.ops.collectives.test_norm import VARIANTS as NORM_VARIANTS
from tests.ops.dense.cases import config_for
from tests.ops.dense.gemm_ar_norm_cases import CONFIGS as GEMM_NORM_CONFIGS
from tests.ops.dense.gemm_ar_norm_oracle import NormCase as GemmNormCase
from tests.ops.dense.gemm_ar_norm_oracle import exact_norm
from tests.ops.experts.dispatch.all_to_all_cases import AllToAllCase
from tests.ops.experts.dispatch.cases import expected_gradients_of_combine
from tests.ops.experts.dispatch.oracle import Routed
from tests.ops.experts.dispatch.rank_cases import padded
from tests.ops.experts.ep_moe.cases import Layer
from tests.ops.experts.tp_moe import cases as tensor_experts
from tests.ops.experts.tp_moe.oracle import Sliced
from tests.support.dense_oracle import Case
from tests.support.ranks import DEVICE, device
from tests.test_protocol import VARIANTS as DENSE_VARIANTS

BF16, FP32 = torch.bfloat16, torch.float32
MAX_TOKENS, CAPACITY = 6, 64  # tokens per rank of an expert operator; capacity in rows of any rank
EXACT_DTYPES = (BF16,) if DEVICE == "cuda" else (BF16, FP32)  # on a GPU each dtype is compiled
TOLERANCE = 2e-2 if DEVICE == "cuda" else 1e-3  # TF32, fp32; wrong data is off by about 1


def assert_near(name, got, exact, tolerance=TOLERANCE):
    """Raise AssertionError unless each element of ``got`` is within the tolerance of ``exact``, which is in fp64."""
    got, exact = got.detach().cpu().double(), exact.detach().cpu().double()
    assert got.shape == exact.shape, f"{name}: shape {list(got.shape)}, not {list(exact.shape)}"
    infinite = exact.isinf()
    assert torch.equal(got[infinite], exact[infinite]), f"{name}: finite elements where infinity is expected"
    got, exact = got[~infinite], exact[~infinite]
    if exact.numel():
        bound = tolerance * (exact.abs() + exact.square().mean().sqrt()) + 1e-6
        wrong = ~((got - exact).abs() <= bound)  # a NaN is wrong, too
        assert not wrong.any(), f"{name}: {int(wrong.sum())} of {wrong.numel()} elements are wrong"


class Problem:
    """One call on every rank of the group.

    Attributes:
        options: further arguments of the first public call; a fault may change them.
        results: by name, available after ``steps``.
    """

    bounded = True  # whether no step waits for its device, so that the host can run ahead

    def corrupt_ids(self):
        """Put an out-of-range id or split into this rank's operands."""
        raise NotImplementedError

    @classmethod
    def has_ids(cls):
        return cls.corrupt_ids is not Problem.corrupt_ids


class Dense(Problem):
    SHAPES = [(5, 3, 7), (6, 3, 7), (9, 4, 6), (70, 6, 5)]  # rows, n, k per rank; the last has several tiles

    def __init__(self, operator, changes, shape, seed, group):
        dtype = EXACT_DTYPES[seed // 100 % len(EXACT_DTYPES)]
        self.case = Case(operator, dtype, *self.SHAPES[shape], exact=True, seed=seed)
        self.options = {"config": config_for(self.case, **changes)}
        self.group, self.results = group, {}

    def steps(self, backward):
        output = self.case.call(group=self.group, **self.options)
        self.results = {"output": output.detach()}
        yield
        if backward:
            output.backward(self.case.dy)
            self.results |= self.case.gradients()
            yield

    def check(self):
        self.case.check(self.results)


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


class AllToAll(Problem):
    SHAPES = [8, 12, 7, 24]

    def __init__(self, operator, changes, shape, seed, group):
        world_size = dist.get_world_size()
        rng = random.Random(seed)
        splits = [[rng.randrange(4) for _ in range(2 * world_size)] for _ in range(world_size)]
        self.case = case = AllToAllCase(splits, self.SHAPES[shape], FP32, values="exact", seed=seed)
        all_d = [case.draw(len(x), self.SHAPES[shape], FP32) for x in case.all_x]
        self.d_out, self.d_x = case.received(all_d).to(device()), all_d[case.rank]
        case.x.requires_grad_()
        self.options, self.group, self.results = dict(changes), group, {}
        self.bounded = "max_tokens" in changes

    def steps(self, backward):
        out, splits, _ = self.case.call(group=self.group, **self.options)
        self.results = {"out": out.detach(), "splits": splits}
        yield
        if backward:
            out.backward(padded(self.d_out, self.options.get("max_tokens")))
            self.results["dx"] = self.case.x.grad
            yield

    def check(self):
        self.case.check(self.results["out"], self.results["splits"], self.options.get("max_tokens"))
        if "dx" in self.results:
            assert collective.same(self.results["dx"], self.d_x), "dx of all_to_all"

    def corrupt_ids(self):
        self.case.own_splits = self.case.own_splits.clone()
        self.case.own_splits[0] = -3


class Experts(Problem):
    """A dispatch and the combine with its handle; ``halves``: split into send and receive, without gradients."""

    SHAPES = [8, 12, 7, 24]

    def __init__(self, operator, changes, shape, seed, group):
        changes, world_size = dict(changes), dist.get_world_size()
        self.halves, self.combine = changes.pop("halves", False), changes.pop("combine", "per_rank")
        rng = random.Random(seed)
        tokens = [rng.randrange(MAX_TOKENS + 1) for _ in range(world_size)]
        width = self.SHAPES[shape]
        self.case = case = Routed(tokens, 2, 2 * world_size, width, FP32, seed=seed)
        changes["config"] = EpConfig(combine=self.combine, num_senders=2, num_receivers=2, num_warps=1)
        self.options, self.group, self.results = changes, group, {}
        self.bounded = "max_tokens" in changes or "max_tokens_per_rank" in changes
        self.expert_out = case.expert_out()
        if not self.halves:
            case.x.requires_grad_()
            case.weights.requires_grad_()
        self.all_dy = case.draw(sum(tokens), width, FP32)
        self.d_rows = case.draw(case.all_ids.numel(), width, FP32)
        self.d_weights = case.draw(case.all_ids.numel(), 1, FP32)

    def steps(self, backward):
        case, group = self.case, self.group
        if self.halves:
            yield from self._send_and_receive()
            return
        recv, handle = case.dispatch(group=group, **self.options)
        self.recv = recv
        yield
        rows = recv.x.shape[0]
        expert_out = padded(self.expert_out, rows if rows != case.num_rows else None).detach().requires_grad_()
        self.y = y = tdkernels.ep_combine(expert_out, handle, group=group)
        yield
        if backward:
            dy = self.all_dy[case.mine].to(device())
            self.results["d_out"], self.results["dw"] = torch.autograd.grad(y, [expert_out, case.weights], dy)
            yield
            d_recv = padded(self.d_rows[case.order].to(device()), rows)
            d_row_weights = padded(self.d_weights.flatten()[case.order].to(device()), rows)
            self.results["dx"], self.results["dw of dispatch"] = torch.autograd.grad(
                [recv.x, recv.topk_weights], [case.x, case.weights], [d_recv, d_row_weights]
            )
            yield

    def _send_and_receive(self):
        case, group = self.case, self.group
        with torch.no_grad():
            sent = tdkernels.ep_dispatch_send(
                case.x, case.ids, case.weights, num_experts=case.experts, group=group, **self.options
            )
            self.recv, handle = sent.receive()
            yield
            rows = self.recv.x.shape[0]
            expert_out = padded(self.expert_out, rows if rows != case.num_rows else None)
            self.y = tdkernels.ep_combine_send(expert_out, handle, group=group).receive()
            yield

    def check(self):
        case, results = self.case, self.results
        case.check_received(self.recv, capacity=self.recv.x.shape[0] if self.bounded else None)
        case.check_combined(self.y, combine=self.combine)
        if not results:
            return
        d_rows, exact, low = expected_gradients_of_combine(case, self.all_dy, case.all_weights)
        assert collective.same(results["d_out"][: case.num_rows], d_rows), "dexpert_out"
        case.check_numbers("dtopk_weights of combine", results["dw"], exact, low)
        case.check_numbers("dx of dispatch", results["dx"], *case.combined(self.d_rows, None, self.combine))
        d_weights = self.d_weights.view(case.valid.shape).where(case.valid, 0.0)[case.mine]
        assert collective.same(results["dw of dispatch"], d_weights), "dtopk_weights of dispatch"

    def corrupt_ids(self):
        self.case.ids = _with_wrong_id(self.case.ids, self.case.experts)


def _with_wrong_id(ids, experts):
    if ids.numel():
        ids = ids.clone()
        ids.view(-1)[-1] = experts + 71
    return ids


class NamedResults(Problem):
    """A problem whose results and fp64 references are dictionaries; subclasses define its calls."""

    tolerance = TOLERANCE

    def steps(self, backward):
        self.case.group = self.group
        outputs, gradients = self._call()
        self.results = {name: output.detach() for name, output in outputs.items()}
        yield
        if backward:
            torch.autograd.backward(list(outputs.values()), gradients)
            self.results |= self._gradients()
            yield

    def check(self):
        tdkernels.synchronize()
        expected = self._expected()
        for name, got in self.results.items():
            assert_near(name, got, expected[name], self.tolerance)


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


class ExpertParallelLayer(NamedResults):
    SHAPES = [(16, 8), (24, 8), (20, 12), (32, 16)]  # (width, hidden); all ranks must pass the same width

    def __init__(self, operator, changes, shape, seed, group):
        rng, world_size = random.Random(seed), dist.get_world_size()
        tokens = [rng.randrange(MAX_TOKENS + 1) for _ in range(world_size)]
        self.case = case = Layer(tokens, 2, 2, *self.SHAPES[shape], FP32, seed=seed, ids="distinct")
        case.own = {name: operand.detach().requires_grad_() for name, operand in case.own.items()}
        self.options, self.group, self.results = dict(changes), group, {}
        self.bounded = "max_tokens" in changes

    def _call(self):
        y = self.case.call(group=self.group, **self.options)
        return {"y": y}, [self.case.all_dy[self.case.case.mine].to(device())]

    def _gradients(self):
        return {f"d{name}": operand.grad for name, operand in self.case.own.items()}

    def _expected(self):
        layer, rank = self.case, self.case.case.rank
        each = layer.experts // layer.case.world_size
        whole = layer.expected(torch.double)
        mine = {name: slice(rank * each, (rank + 1) * each) if "_" in name and "topk" not in name else layer.case.mine
                for name in whole}
        return {name: of_all[mine[name]] for name, of_all in whole.items()}

    def corrupt_ids(self):
        self.case.case.ids = _with_wrong_id(self.case.case.ids, self.case.experts)


class TensorParallelExperts(NamedResults):
    SHAPES, DTYPE = [(6, 10, 3), (7, 10, 3), (6, 12, 5), (20, 16, 8)], FP32  # tokens, width, hidden

    def __init__(self, operator, changes, shape, seed, group):
        tokens, width, hidden = self.SHAPES[shape]
        self.case = Sliced(tokens, 2, 3, width, hidden, self.DTYPE, seed=seed)
        self.case.require()
        self.options = {"config": changes}
        self.group, self.results = group, {}

    def _call(self):
        return {"y": self.case.call(**self.options)}, [self.case.dy]

    def _gradients(self):
        return self.case.gradients()

    def _expected(self):
        whole, rank = self.case.expected(torch.double), self.case.rank
        return {name: self.case.part(name.removeprefix("d"), of_all, rank) for name, of_all in whole.items()}

    def corrupt_ids(self):
        self.case.ids = _with_wrong_id(self.case.ids, 3)


class Decoding(NamedResults):
    # All ranks must pass the same batch, but not the same number of keys.
    SHAPES = [dict(batch=2, keys=7), dict(batch=3, keys=7), dict(batch=1, keys=20), dict(batch=4, keys=40)]

    def __init__(self, operator, changes, shape, seed, group):
        self.case = Decode(heads=4, kv_heads=2, dim=16, dtype=FP32, seed=seed, **self.SHAPES[shape])
        self.case.require()
        self.options = {"config": decoding.config_of(changes)}
        self.group, self.results = group, {}

    def _call(self):
        o, lse = self.case.call(return_lse=True, **self.options)
        return {"o": o, "lse": lse}, [self.case.do, self.case.dlse]

    def _gradients(self):
        return self.case.gradients()

    def check(self):
        tdkernels.synchronize()
        case, expected = self.case, self.case.expected(torch.double, True)
        first = int(case.all_lens[: case.rank].sum())
        for name, got in self.results.items():
            if name[1:] in CACHES:
                parts = torch.cat(case._key_gradients(name, got))
                assert_near(name, parts, expected[name][first : first + len(parts)])
            else:
                assert_near(name, got, expected[name])


class Attention(NamedResults):
    SHAPES = [dict(rows=9), dict(rows=10), dict(rows=7, batch=2), dict(rows=21, sharding="zigzag")]

    def __init__(self, operator, changes, shape, seed, group):
        self.case = Sharded(heads=2, kv_heads=1, d=16, dv=16, dtype=FP32, seed=seed, **self.SHAPES[shape])
        self.case.require()
        self.options = {"config": attention.CONFIGS[changes]}
        self.group, self.results = group, {}

    def _call(self):
        o, lse = self.case.call(**self.options)
        return {"o": o, "lse": lse}, [self.case.do, self.case.dlse]

    def _gradients(self):
        return self.case.gradients()

    def _expected(self):
        return {name: self.case.part(whole) for name, whole in self.case.expected(torch.double).items()}


class Ulysses(Problem):
    SHAPES = [(5, 7, 3), (6, 7, 3), (9, 8, 4), (20, 12, 9)]  # positions, k, n

    def __init__(self, operator, changes, shape, seed, group):
        positions, k, n = self.SHAPES[shape]
        self.case = Projection(operator, FP32, positions, k, n, batch=1, exact=True, seed=seed)
        self.options = {"config": sequence_parallel.CONFIGS[changes]}
        self.group, self.results = group, {}

    def steps(self, backward):
        self.case.group = self.group
        output = self.case.call(**self.options)
        self.results = {"output": output.detach()}
        yield
        if backward:
            output.backward(self.case.dy)
            self.results |= self.case.gradients()
            yield

    def check(self):
        self.case.check(self.results)


class Specialized:
    """A problem whose forward must run warp-specialized kernels; ``check`` fails if others ran.

    Attributes:
        kernels: their names.
        splits: whether they must split tiles along K.
    """

    kernels, splits = (), False

    def steps(self, backward):
        steps = super().steps(backward)
        with specialized.gluon_launches() as self.launched:
            next(steps)
        yield
        yield from steps

    def check(self):
        self._check_kernels()
        super().check()

    def _check_kernels(self):
        expected = {(name, self.splits) for name in self.kernels}
        launched = {(name, num_splits > 1) for name, num_splits in self.launched}
        assert launched == expected, f"kernels and whether they split K: {launched}, not {expected}"


class SpecializedDense(Specialized, Dense):
    def __init__(self, operator, changes, shape, seed, group):
        fields, self.splits = changes
        self.kernels = (f"{operator}_specialized_kernel",)
        sizes = specialized.shape_of(operator, self.splits, shape, dist.get_world_size())
        self.case = specialized.SparseCase(operator, *sizes, seed)
        self.options = {"config": config_for(self.case, **fields)}
        self.group, self.results = group, {}


class SpecializedExperts(Specialized, TensorParallelExperts):
    SHAPES, DTYPE = specialized.EXPERTS_SHAPES, BF16
    kernels = "moe_ag_gemm_specialized_kernel", "moe_gemm_rs_specialized_kernel"
    tolerance = 0.1  # torch in bf16 is off by up to 0.033, because it rounds the rows between the stages, too


def _table():
    """Return {name: (class, operator, changes)}."""
    table = {}
    for operator, changes in DENSE_VARIANTS:
        table[f"{operator} {next(iter(changes.values()))}"] = Dense, operator, changes
    for operator, changes in COLLECTIVE_VARIANTS:
        table[f"{operator} {changes.get('exchange', 'one_shot')}"] = Collective, operator, changes
    for operator, changes in NORM_VARIANTS:
        table[f"{operator} {changes.get('exchange', 'one_shot')}"] = ReducedNorm, operator, changes
    table["gemm_ar_rms_norm fused"] = ReducedProductNorm, "gemm_ar_rms_norm", "fused"
    table["gemm_ar_layer_norm fused, split K"] = ReducedProductNorm, "gemm_ar_layer_norm", "fused, split K"
    capacity, bound = {"max_tokens": CAPACITY}, {"max_tokens_per_rank": MAX_TOKENS}
    table |= {
        "all_to_all": (AllToAll, "all_to_all", {}),
        "all_to_all bounded": (AllToAll, "all_to_all", capacity),
        "ep two-phase": (Experts, "ep_dispatch", {}),
        "ep two-phase bounded": (Experts, "ep_dispatch", capacity),
        "ep two-phase per_expert": (Experts, "ep_dispatch", {"combine": "per_expert"}),
        "ep low-latency": (Experts, "ep_dispatch", bound),
        "ep low-latency per_expert": (Experts, "ep_dispatch", {**bound, **capacity, "combine": "per_expert"}),
        "ep halves": (Experts, "ep_dispatch", {**capacity, "halves": True}),
        "ep halves low-latency": (Experts, "ep_dispatch", {**bound, "halves": True}),
    }
    for method in ("sequence", "fused"):
        config = {"config": EpMoeConfig(method=method)}
        table[f"ep_moe {method}"] = ExpertParallelLayer, "ep_moe", config
        table[f"ep_moe {method} bounded"] = ExpertParallelLayer, "ep_moe", {**config, **bound, **capacity}
    for name in ("default", "two stages"):
        table[f"tp_moe {name}"] = TensorParallelExperts, "tp_moe", tensor_experts.CONFIGS[name]
    table |= {f"flash_decode {name}": (Decoding, "flash_decode", name) for name in ("default", "small blocks", "split")}
    table |= {f"ag_attention {name}": (Attention, "ag_attention", name) for name in ("default", "small blocks")}
    table["ulysses_out default"] = Ulysses, "ulysses_out", "default"
    table["ulysses_out sources at once"] = Ulysses, "ulysses_out", "pulled at once"
    table["ulysses_qkv pull"] = Ulysses, "ulysses_qkv", "pulled at once"
    table["ulysses_qkv push"] = Ulysses, "ulysses_qkv", "pushed"
    return table


def specialized_table():
    """Return the entries of TABLE for the warp-specialized kernels.

    TABLE has them on Hopper GPUs only, so a seed is another case there than on other devices.
    """
    table = {name: (SpecializedDense, operator, changes) for name, (operator, *changes) in specialized.DENSE.items()}
    table["tp_moe specialized"] = SpecializedExperts, "tp_moe", specialized.EXPERTS_CONFIG
    return table


TABLE = _table() | (specialized_table() if specialized.on_hopper() else {})
OPERATORS = sorted({operator for _, operator, _ in TABLE.values()} | {"ep_combine", "moe_ag_gemm", "moe_gemm_rs"})


def make_problem(name, shape, seed, group):
    """Return the problem of a key of TABLE, with this rank's operands and expected results."""
    kind, operator, changes = TABLE[name]
    return kind(operator, changes, shape, seed, group)
