"""Test bodies for calls of ag_gemm and gemm_rs with wire compression: arguments, caches, disagreeing ranks, graphs.

Every rank runs them; see test_wire.py. Tests of values are in wire_cases.py.
"""

import math

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import PeerTimeoutError, PlanMismatchError
from tests.ops.dense.wire_cases import CONFIGS, Problem, computes, parts
from tests.support.ranks import a_group, device
from tests.support.simulated_nodes import a_group_on_nodes
from tests.test_protocol import failure_of, timeout

BF16, FP32 = torch.bfloat16, torch.float32


def caches_calls_by_wire(operator):
    """Check calls with and without wire, and of other shapes, in turn: each has its own result."""
    case = Problem(operator, FP32, 16, 20, 33)
    other = Problem(operator, FP32, 24, 20, 33, seed=1)
    exact, compressed = case.call(wire=None), case.call()
    assert not torch.equal(exact, compressed)
    with torch.no_grad():
        for _ in range(3):
            assert torch.equal(case.call(wire=None), exact) and torch.equal(case.call(), compressed)
            other.check(other.call())
            torch.testing.assert_close(case.call(config=parts(operator, 2)), compressed)
    for x in (case.x, case.weight):
        x.mul_(2)  # new values, the same layout
    torch.testing.assert_close(case.call() - case.bias, 4 * (compressed - case.bias), rtol=1e-4, atol=1e-3)


def supports_empty_operands(operator):
    x = torch.empty(0, 8, device=device(), requires_grad=True)
    weight = torch.ones(5, 8, device=device(), requires_grad=True)
    output = getattr(tdkernels, operator)(x, weight, wire="fp8")
    output.sum().backward()
    assert output.shape == (0, 5) and x.grad.shape == x.shape and not weight.grad.any()


def follows_autocast(operator):
    case = Problem(operator, FP32, 8, 16, 32)
    with torch.autocast(device().type, BF16):
        output = case.call()
    assert output.dtype == BF16
    case.x, case.weight, case.bias = (t.to(BF16) for t in (case.x, case.weight, case.bias))
    assert torch.equal(output, case.call())


def rejects(operator):
    """Check that every rank raises for invalid arguments, and that the next call works."""
    case = Problem(operator, BF16, 8, 16, 32)
    run, config = getattr(tdkernels, operator), CONFIGS[operator]
    one = torch.ones(1, device=device())
    for wire in ("fp4", "", True, 8, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match=f'{operator}: wire must be None or "fp8"'):
            case.call(wire=wire)
    with pytest.raises(TypeError, match=rf"{operator}: x \[.*\] is torch.float8_e4m3fn; wire="):
        run(case.x.to(torch.float8_e4m3fn), case.weight, wire="fp8")
    for name, value in (("scale_x", one), ("scale_w", one), ("out_dtype", BF16), ("use_fast_accum", True)):
        with pytest.raises(TypeError, match=f"{operator}: {name} is for float8 operands"):
            case.call(**{name: value})
    for method in ("fused", "torch"):
        with pytest.raises(ValueError, match='config must be None or have method "parts"'):
            case.call(config=config(method=method))
    with pytest.raises(TypeError, match="config must be a"):
        case.call(config=tdkernels.CollectiveConfig())
    with pytest.raises(ValueError, match="the same K"):
        run(case.x[:, 1:], case.weight, wire="fp8")
    with pytest.raises(TypeError, match=f"{operator}: x is torch.bfloat16 but weight is torch.float32"):
        run(case.x, case.weight.float(), wire="fp8")
    with pytest.raises(ValueError, match="dim must be 0 or 1"):
        case.call(dim=2)
    if operator == "gemm_rs" and case.ranks > 1:
        with pytest.raises(ValueError, match="must be divisible"):
            run(case.x[1:], case.weight, wire="fp8")
    case.check(case.call())


def reports_disagreement(operator):
    """Check that every rank raises if rank 1 of three does not compress, and that the group stays usable."""
    for odd in ({"wire": None}, {"wire": None, "config": parts(operator, 1)}):
        with a_group() as group:
            case = Problem(operator, FP32, 12, 16, 32)
            error = failure_of(case.call, group=group, **(odd if case.rank == 1 else {}))
            assert type(error) is ValueError and 'wire is "fp8" on ranks 0, 2, "absent" on rank 1' in str(error), error
            case.check(case.call(group=group))
            del group


def detects_mismatch_of_cached_calls(operator):
    """Check that calls fail if all ranks know both calls but rank 1 makes the uncompressed one."""
    with a_group() as group:
        case = Problem(operator, FP32, 12, 16, 32)
        for _ in range(2):
            case.call(group=group)
            case.call(group=group, wire=None, config=parts(operator, 1))
        dist.barrier()
        odd = {"wire": None, "config": parts(operator, 1)} if case.rank == 1 else {}
        with timeout(1.0):
            error = failure_of(case.call, group=group, **odd)
        assert isinstance(error, PlanMismatchError | PeerTimeoutError), repr(error)
        del group


def across_nodes(local):
    """Check that ag_gemm runs on several nodes, and that every rank of gemm_rs raises."""
    with a_group_on_nodes(local) as group:
        computes("ag_gemm", BF16, [(13, 9, 70), (24, 16, 256)], 2, group)
        case = Problem("gemm_rs", BF16, 8, 16, 32)
        with pytest.raises(NotImplementedError, match='gemm_rs with wire="fp8": runs on one node'):
            case.call(group=group)
        del group


class Layer(torch.nn.Module):
    """ag_gemm, an elementwise operation and gemm_rs, and an all_reduce, all of them compressed."""

    def __init__(self):
        super().__init__()
        self.up, self.gate = (torch.nn.Parameter(torch.randn(24, 16)) for _ in range(2))
        self.bias, self.down = torch.nn.Parameter(torch.randn(24)), torch.nn.Parameter(torch.randn(16, 24))

    def forward(self, x):
        up, gate = tdkernels.ag_gemm(x, [self.up, self.gate], [self.bias, None], wire="fp8")
        z = tdkernels.gemm_rs(torch.relu(up) * gate.sigmoid(), self.down, wire="fp8")
        return z + tdkernels.ag_gemm(x, self.up, wire="fp8").mean() + tdkernels.all_reduce(x, quantize="fp8")


def compiles():
    """Check that a compiled graph computes the same as eager mode, forward and backward, for changing shapes."""
    torch._dynamo.reset()
    torch.manual_seed(dist.get_rank())
    layer = Layer().to(device())
    compiled = torch.compile(layer, fullgraph=True, backend="inductor" if device().type == "cuda" else "aot_eager")
    for rows in (4, 4, 6):
        x = torch.randn(rows, 2, 16, device=device())
        results = []
        for module in (compiled, layer):
            leaf = x.clone().requires_grad_()
            y = module(leaf)
            results.append([y.detach(), *torch.autograd.grad(y.square().sum(), [leaf, *layer.parameters()])])
        for got, expected in zip(*results, strict=True):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-3)
    tdkernels.synchronize()


def replays_in_a_cuda_graph():
    """Check replays with new data, between eager calls, against eager calls."""
    ranks = dist.get_world_size()
    x, weight = torch.randn(16 * ranks, 256, device=device()), torch.randn(48, 256, device=device())

    def step():
        y = tdkernels.ag_gemm(x, weight, wire="fp8")
        return y, tdkernels.gemm_rs(x, weight, wire="fp8"), tdkernels.all_reduce(x, quantize="fp8")

    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for _ in range(3):
        x.normal_()
        for output in captured:
            output.fill_(math.nan)
        graph.replay()
        tdkernels.synchronize()
        assert all(torch.equal(got, expected) for got, expected in zip(captured, step(), strict=True))


def passes_opcheck():
    """Check schemas and fake implementations. Collective."""
    group, ranks = dist.group.WORLD.group_name, dist.get_world_size()
    x, weight, bias = (torch.randn(*shape, device=device()) for shape in ((3 * ranks, 8), (5, 8), (5,)))
    ops = torch.ops.tdkernels
    tests = ("test_schema", "test_faketensor")
    for call in (
        (ops.ag_gemm_wire, x[:3], [weight, weight[:2]], [bias, None], 3, True, "fp8", group, ""),
        (ops.gemm_rs_wire, x, weight, bias, "fp8", 3, group, ""),
        (ops.all_reduce_quantized, x, "fp8", group, ""),
    ):
        torch.library.opcheck(call[0].default, call[1:], test_utils=tests)
