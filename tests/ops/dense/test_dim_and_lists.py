"""ag_gemm with several weights, dim and return_gathered; gemm_rs with dim: values, gradients, and errors."""

import dataclasses
from unittest import mock

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from tdkernels.ops.dense.ag_gemm import multi
from tdkernels.ops.dense.ag_gemm.config import MAX_WEIGHTS, default_config_for
from tdkernels.ops.dense.gemm_rs.config import default_config_for as gemm_rs_default
from tests.support.ranks import device, on_ranks
from tests.support.simulated_nodes import a_group_on_nodes, needs_gpus

BF16, FP32 = torch.bfloat16, torch.float32
METHODS = [
    {}, {"method": "parts", "pieces": 2}, {"method": "torch"}, {"transport": "copy_engine"}, {"transport": "one_shot"},
]


def draw(*shape, seed, dtype=FP32):
    """Return integers from -1 to 1, the same on all ranks, so that all sums are exact."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-1, 2, shape, generator=generator).to(device(), dtype)


def own(x, dim=0):
    return x.chunk(dist.get_world_size(), dim)[dist.get_rank()].clone(memory_format=torch.contiguous_format)


class Problem:
    """x [lead], weights [n_i * W, K] and biases: the whole ones with the expected results, and this rank's shards."""

    def __init__(self, lead, sizes, k, dim, dtype=FP32, bias=True, seed=0):
        ranks = dist.get_world_size()
        lead = list(lead)
        lead[dim] *= ranks
        self.dim, self.dtype = dim, dtype
        whole = [draw(*lead, k, seed=seed, dtype=dtype)]
        whole += [draw(n * ranks, k, seed=seed + 1 + i, dtype=dtype) for i, n in enumerate(sizes)]
        whole += [draw(n * ranks, seed=seed + 11 + i, dtype=dtype) for i, n in enumerate(sizes)] if bias else []
        self.whole = [tensor.clone().requires_grad_() for tensor in whole]
        self.own = [own(tensor, dim if i == 0 else 0).requires_grad_() for i, tensor in enumerate(whole)]
        self.count = len(sizes)

    def parts(self, operands):
        x, *rest = operands
        return x, rest[: self.count], rest[self.count :] or None

    def expected(self, return_gathered):
        """Return the results of this rank and its shards of all gradients."""
        x, weights, biases = self.parts(self.whole)
        ys = [F.linear(x, w, b) for w, b in zip(weights, biases or [None] * self.count, strict=True)]
        loss = sum((y * self.scale(y)).sum() for y in ys)
        if return_gathered:
            loss = loss + dist.get_world_size() * (x * self.scale(x)).sum()  # each rank uses the whole x
        gradients = torch.autograd.grad(loss, self.whole)
        own_gradients = [own(g, self.dim if i == 0 else 0) for i, g in enumerate(gradients)]
        return [own(y.detach(), -1) for y in ys], own_gradients

    @staticmethod
    def scale(y):
        """Return a gradient that differs from row to row, the same for all columns."""
        rows = torch.arange(y.shape[:-1].numel(), device=y.device) % 3 - 1
        return rows.view(*y.shape[:-1], 1).to(y.dtype)

    def check(self, call, return_gathered=False):
        x, weights, biases = self.parts(self.own)
        results = call(x, weights, biases, dim=self.dim, return_gathered=return_gathered)
        ys, gathered = results if return_gathered else (results, None)
        loss = sum((y * self.scale(y)).sum() for y in ys)
        if return_gathered:
            assert torch.equal(gathered, self.whole[0]) and gathered.is_contiguous()
            loss = loss + (gathered * self.scale(gathered)).sum()
        gradients = torch.autograd.grad(loss, self.own)
        tdkernels.synchronize()
        expected, expected_gradients = self.expected(return_gathered)
        for got, wanted in zip([*ys, *gradients], [*expected, *expected_gradients], strict=True):
            assert got.is_contiguous()
            assert torch.equal(got, wanted), f"{list(got.shape)} {(got - wanted).abs().max().item()}"


CASES = [  # shape of x, sizes of the weights of a rank, K, dim
    ((5,), (3, 7), 9, 0),
    ((37,), (29, 8, 8), 51, 0),
    ((64,), (64, 16), 64, 0),
    ((2, 3), (4, 5), 8, 1),
    ((3, 17), (16,), 24, 1),
    ((1, 16), (8, 8), 16, 1),
    ((2, 5, 3), (8,), 8, 1),
    ((2, 128), (64, 16), 32, 1),
]


def computes(cases, dtype=FP32, transport=None, **changes):
    if transport is not None:
        changes["transport"] = transport
    for number, (lead, sizes, k, dim) in enumerate(cases):
        problem = Problem(lead, sizes, k, dim, dtype, bias=number % 2 == 0, seed=100 * number)
        x = problem.own[0].detach().reshape(-1, k)
        base = default_config_for(x, problem.own[1].detach(), dist.get_world_size())
        config = dataclasses.replace(base, **changes) if changes else None
        for return_gathered in (False, True):
            problem.check(lambda *a, config=config, **kw: tdkernels.ag_gemm(*a, config=config, **kw), return_gathered)


@pytest.mark.parametrize("changes", METHODS, ids=str)
def test_methods(changes):
    on_ranks(2, computes, CASES[:4] if changes else CASES, **changes)


def test_three_ranks():
    on_ranks(3, computes, CASES[2:5], BF16)


def test_one_rank():
    on_ranks(1, computes, CASES[:4])


def single_weight(cases):
    for lead, sizes, k, dim in cases:
        problem = Problem(lead, sizes[:1], k, dim)

        def call(x, weights, biases, **options):
            result = tdkernels.ag_gemm(x, weights[0], biases[0], **options)
            return ([result[0]], result[1]) if options["return_gathered"] else [result]

        for return_gathered in (False, True):
            problem.check(call, return_gathered)


def test_a_single_weight():
    on_ranks(2, single_weight, CASES[2:])


def partial_gradients():
    """Some operands need no gradient, and some outputs are not used."""
    problem = Problem((6,), (4, 8), 8, 0)
    x, (first, second), biases = problem.parts(problem.own)
    ys, gathered = tdkernels.ag_gemm(x.detach(), [first, second.detach()], biases, return_gathered=True)
    (got,) = torch.autograd.grad(ys[0].sum(), first)
    (wanted,) = torch.autograd.grad(F.linear(problem.whole[0].detach(), problem.whole[1]).sum(), problem.whole[1])
    assert torch.equal(got, own(wanted))
    ys, gathered = tdkernels.ag_gemm(x, [first, second], biases, return_gathered=True)
    (dx,) = torch.autograd.grad(gathered.sum(), x)  # no output of a GEMM is used
    assert torch.equal(dx, torch.full_like(dx, dist.get_world_size()))


def selects_the_method_that_keeps_x():
    """Large problems run "parts". Small ones run the kernel, if one launch serves all weights."""
    x, group = torch.zeros(2048, 64, device=device()), dist.group.WORLD
    for count, least_s, method in ((2, 0.0, "parts"), (2, 1.0, "fused"), (MAX_WEIGHTS + 1, 1.0, "parts")):
        weights = [torch.zeros(64, 64, device=device())] * count
        with mock.patch.object(multi, "_PARTS_LEAST_S", least_s):
            config = multi._resolved("", x, weights, [None] * count, x.shape[0], True, group, dict)
        assert config.method == method, (count, least_s, config)


def test_method_that_keeps_x():
    on_ranks(2, selects_the_method_that_keeps_x)


def compiles_without_a_graph_break():
    problem = Problem((2, 3), (4, 5), 8, 1)
    problem.check(torch.compile(tdkernels.ag_gemm, fullgraph=True, backend="aot_eager"), return_gathered=True)
    with torch.autocast(device().type, BF16):
        ys = tdkernels.ag_gemm(problem.own[0], problem.own[1:3], dim=1)
    assert [y.dtype for y in ys] == [BF16, BF16]


def has_no_rows():
    x, weight = torch.zeros(0, 8, device=device()), torch.zeros(4, 8, device=device())
    ys, gathered = tdkernels.ag_gemm(x, [weight, weight], return_gathered=True)
    assert [list(y.shape) for y in (*ys, gathered)] == [[0, 4], [0, 4], [0, 8]]


def rows_in_the_second_dimension():
    """gemm_rs with dim=1, against the whole product and its gradients.

    With 128 rows of a rank per sequence the kernels read x where it is, otherwise a copy.
    """
    ranks = dist.get_world_size()
    shapes = ((2, 3 * ranks), 5, 7), ((3, 8 * ranks), 16, 16), ((1, 4 * ranks, 3), 4, 4), ((2, ranks, 3), 4, 4)
    for lead, n, k in (*shapes, ((2, 128 * ranks), 64, 32)):
        x, weight = draw(*lead, k * ranks, seed=1), draw(n, k * ranks, seed=2)
        bias = draw(n, seed=3)
        whole = [t.clone().requires_grad_() for t in (x, weight, bias)]
        mine = [t.requires_grad_() for t in (own(x, -1), own(weight, -1), bias.clone())]
        expected = F.linear(*whole)
        base = gemm_rs_default(mine[0].detach().reshape(-1, k), mine[1].detach(), ranks)
        for transport in ("forward", "direct", "one_shot", None):
            config = transport and dataclasses.replace(base, transport=transport)
            z = tdkernels.gemm_rs(*mine, dim=1, config=config)
            assert torch.equal(z, own(expected.detach(), 1)) and z.is_contiguous()
        dz = Problem.scale(expected)
        got = torch.autograd.grad(z, mine, own(dz.expand_as(expected), 1))
        wanted = torch.autograd.grad(expected, whole, dz.expand_as(expected))
        for gradient, other, dim in zip(got, wanted, (-1, -1, None), strict=True):
            assert torch.equal(gradient, other if dim is None else own(other, dim))
        with torch.no_grad():
            for _ in range(2):  # the second call finds the first one in the cache, unless dim=1 prevents it
                assert torch.equal(tdkernels.gemm_rs(*mine, dim=1), z)
                assert torch.equal(tdkernels.gemm_rs_ref(*mine, dim=1), z)


def on_two_nodes():
    x, weights = draw(2, 5, 8, seed=dist.get_rank()), [draw(n, 8, seed=n) for n in (4, 7)]
    with a_group_on_nodes(1) as group:
        for options in ({}, {"dim": 1}, {"dim": 1, "return_gathered": True}):
            results = tdkernels.ag_gemm(x, weights, group=group, **options)
            expected = tdkernels.ag_gemm_ref(x, weights, group=group, **options)
            ys, wanted = ([*a[0], a[1]] if "return_gathered" in options else a for a in (results, expected))
            assert all(torch.equal(y, other) for y, other in zip(ys, wanted, strict=True))
        h, weight = draw(2, 6, 8, seed=dist.get_rank()), draw(5, 8, seed=9)
        z = tdkernels.gemm_rs(h, weight, dim=1, group=group)
        assert torch.equal(z, tdkernels.gemm_rs_ref(h, weight, dim=1, group=group))


@needs_gpus
def test_on_two_nodes():
    on_ranks(2, on_two_nodes)


def test_the_rest_on_two_ranks():
    checks = partial_gradients, compiles_without_a_graph_break, has_no_rows, rows_in_the_second_dimension
    for check in checks:
        on_ranks(2, check)


def rejects_invalid_arguments():
    x, weight = torch.zeros(4, 8, device=device()), torch.zeros(6, 8, device=device())
    bias = torch.zeros(6, device=device())
    for operands, options, error, message in (
        ((x, []), {}, ValueError, "ag_gemm: the list of weights is empty"),
        ((x, [weight], bias), {}, TypeError, "ag_gemm: weight is a list, so bias must be a list or None, not Tensor"),
        ((x, weight, [bias]), {}, TypeError, "ag_gemm: bias is a list, so weight must be"),
        ((x, [weight, weight], [bias]), {}, ValueError, "ag_gemm: there are 2 weights but 1 biases"),
        ((x, [weight, weight[:, :7]]), {}, ValueError, r"ag_gemm: .*\[4, 8\].*\[6, 7\]"),
        ((x, [weight, None]), {}, TypeError, "ag_gemm: weight must be a torch.Tensor, not NoneType"),
        ((x, weight), {"dim": 1}, ValueError, r"ag_gemm: x \[4, 8\] must have at least 3 dimensions if dim is 1"),
        ((x, weight), {"dim": 2}, ValueError, "ag_gemm: dim must be 0 or 1, not 2"),
        ((x, [weight]), {"config": tdkernels.GemmRsConfig()}, TypeError, "AgGemmConfig or None, not GemmRsConfig"),
    ):
        with pytest.raises(error, match=message):
            tdkernels.ag_gemm(*operands, **options)


def disagree():
    weight = torch.zeros(8, 8, device=device())
    sizes = [4, 2] if dist.get_rank() == 0 else [4, 3]
    with pytest.raises(ValueError, match="ag_gemm: the ranks.*N/W"):
        tdkernels.ag_gemm(torch.zeros(4, 8, device=device()), [weight[:size] for size in sizes])
    with pytest.raises(ValueError, match=r"gemm_rs: dimension 1 of x \[2, 3, 8\] must be divisible"):
        tdkernels.gemm_rs(torch.zeros(2, 3, 8, device=device()), weight, dim=1)


def test_errors():
    on_ranks(1, rejects_invalid_arguments)
    on_ranks(2, disagree)
