"""Collectives and dense operators in CUDA graphs: captured once, replayed with new data between eager calls."""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tests.ops.collectives import cases as collective
from tests.ops.collectives import norm_cases as norms
from tests.support.dense_oracle import OPERATORS, Case
from tests.support.ranks import DEVICE, a_group, device, on_ranks

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="CUDA graphs need GPUs")

SHAPE = (64, 72, 136)
# Each config uses a workspace of its own.
CONFIGS = {
    "ag_gemm": tdkernels.AgGemmConfig(transport="push"),
    "ag_gemm one shot": tdkernels.AgGemmConfig(transport="one_shot", split_k=2),
    "gemm_rs": tdkernels.GemmRsConfig(transport="forward"),
    "gemm_rs one shot": tdkernels.GemmRsConfig(transport="one_shot", split_k=2),
    "gemm_rs direct": tdkernels.GemmRsConfig(transport="direct"),
    "gemm_ar": tdkernels.GemmArConfig(exchange="two_shot"),
    "gemm_ar direct": tdkernels.GemmArConfig(exchange="two_shot", transport="direct"),
    "gemm_ar one shot": tdkernels.GemmArConfig(exchange="one_shot", split_k=2),
}


def _new_case(operator, seed):
    return Case(operator, torch.bfloat16, *SHAPE, bias=True, seed=seed)


def _refill(static, fresh):
    """Copy the operands of ``fresh`` into the tensors that the graph of ``static`` reads."""
    with torch.no_grad():
        for name in ("x", "weight", "bias", "dy"):
            getattr(static, name).copy_(getattr(fresh, name))


def _step(case, config):
    output = case.call(config=config)
    gradients = torch.autograd.grad(output, [case.x, case.weight, case.bias], case.dy)
    return dict(zip(("output", "dx", "dweight", "dbias"), (output.detach(), *gradients), strict=True))


def _capture(case, config):
    """Capture forward and backward, after a warm-up on a side stream."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            _step(case, config)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = _step(case, config)
    return graph, results


def replays_with_new_data(operator, config):
    static = _new_case(operator, seed=0)
    graph, results = _capture(static, config)
    seed = 1
    for replays in (1, 2, 3, 5):
        for _ in range(replays):
            fresh = _new_case(operator, seed)
            _refill(static, fresh)
            for result in results.values():
                result.fill_(torch.nan)
            graph.replay()
            fresh.check(results)
            seed += 1
        # Eager calls between replays must not desynchronize the epochs of graph and workspace.
        eager = _new_case(operator, seed)
        eager.check(_step(eager, config))
        other = Case(operator, torch.float16, 33, 40, 48, seed=seed)
        other.check(other.run())


def survives_growth_of_the_workspace(operator, config):
    """Check that a graph keeps its workspace buffer if later calls need a larger one."""
    static = _new_case(operator, seed=0)
    graph, results = _capture(static, config)
    large = Case(operator, torch.bfloat16, 8 * SHAPE[0], 2 * SHAPE[1], 4 * SHAPE[2])
    large.check(large.run(config=config))
    for seed in (1, 2, 3):
        fresh = _new_case(operator, seed)
        _refill(static, fresh)
        graph.replay()
        fresh.check(results)


def rejects_capture_of_new_shape(operator):
    case = Case(operator, torch.bfloat16, 17, 19, 23)
    with a_group() as group:  # a new group, without any earlier call
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="before capture"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                case.call(group=group)
        torch.cuda.synchronize()
        case.check(case.run(group=group))
        del group


# ---- collectives ----

COLLECTIVES = [
    ("all_gather", None),
    ("all_gather", {"exchange": "copy_engine"}),
    ("reduce_scatter", None),
    ("all_reduce", {"exchange": "one_shot"}),
    ("all_reduce", {"exchange": "two_shot", "num_programs": 4, "block_bytes": 512}),
]
each_collective = pytest.mark.parametrize("operator, changes", COLLECTIVES, ids=str)


def _captured_call(operator, changes, x):
    collective.call(operator, x, changes)  # consensus check, allocation, compilation
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        outputs = [collective.call(operator, x, changes) for _ in range(3)]  # uses both halves, and the first again
    return graph, outputs


def _check_replay(operator, x, graph, outputs, seed):
    full = collective.draw_operands(operator, (1000, 3), torch.bfloat16, seed)
    x.copy_(full[dist.get_rank()])
    for output in outputs:
        output.fill_(7)
    graph.replay()
    tdkernels.synchronize()
    assert all(collective.same(output, collective.expected_of(operator, full)) for output in outputs), (operator, seed)


def replays_collective(operator, changes):
    x = collective.draw_operands(operator, (1000, 3), torch.bfloat16)[dist.get_rank()].to(device())
    graph, outputs = _captured_call(operator, changes, x)
    for seed in range(1, 6):
        _check_replay(operator, x, graph, outputs, seed)
        # Eager calls between replays must not desynchronize the epochs of graph and workspace.
        collective.computes(operator, torch.bfloat16, [(1000, 3), (17, 5)], changes)
    collective.computes(operator, torch.bfloat16, [(40000, 3)], changes)  # the workspace grows; the graph keeps its own
    for seed in range(6, 9):
        _check_replay(operator, x, graph, outputs, seed)


@pytest.mark.parametrize("world_size", [2, 4])
@each_collective
def test_replay_collective(world_size, operator, changes):
    on_ranks(world_size, replays_collective, operator, changes)


def _copy_operands(operands, case):
    for operand, fresh in zip(operands, case.operands(), strict=True):
        operand.copy_(fresh)


def replays_norm(operator, changes):
    """Check r and y of each replay, with and without quantization, and eager calls in between."""
    operands = norms.NormCase(operator, (20, 1000), torch.bfloat16).operands()
    case = norms.NormCase(operator, (20, 1000), torch.bfloat16)
    for quantize in (None, "fp8"):
        case.call(changes, quantize, operands)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        calls = [(case.call(changes, None, operands), case.call(changes, "fp8", operands)) for _ in range(2)]
    for seed in range(1, 6):
        case = norms.NormCase(operator, (20, 1000), torch.bfloat16, seed)
        _copy_operands(operands, case)
        for output in (output for plain, quantized in calls for output in (*plain, *quantized)):
            output.view(torch.uint8).fill_(0xFF)
        graph.replay()
        tdkernels.synchronize()
        for plain, quantized in calls:
            case.check(plain)
            case.check_fp8(quantized, plain[0])
            norms.has_same_bits_on_all_ranks((*plain, *quantized))
        norms.computes(operator, torch.bfloat16, [(20, 1000), (3, 48)], changes, 1)


@pytest.mark.parametrize("world_size", [2, 4])
@pytest.mark.parametrize("exchange", ["one_shot", "two_shot"])
@pytest.mark.parametrize("operator", norms.OPERATORS)
def test_replay_norm(operator, exchange, world_size):
    on_ranks(world_size, replays_norm, operator, {"exchange": exchange, "num_warps": 4, "num_programs": 16})


# ---- dense operators ----


def each_config(**others):
    configs = CONFIGS | others
    cases = [pytest.param(name.split()[0], config, id=name) for name, config in configs.items()]
    return pytest.mark.parametrize("operator, config", cases)


@pytest.mark.parametrize("world_size", [2, 4])
@each_config(
    **{
        "ag_gemm copy engine": tdkernels.AgGemmConfig(transport="copy_engine"),
        "ag_gemm parts": tdkernels.AgGemmConfig(method="parts", pieces=2),
        "gemm_rs parts": tdkernels.GemmRsConfig(method="parts", pieces=2),
    }
)
def test_replay(world_size, operator, config):
    on_ranks(world_size, replays_with_new_data, operator, config)


@each_config()
def test_growth(operator, config):
    on_ranks(2, survives_growth_of_the_workspace, operator, config)


@pytest.mark.parametrize("operator", OPERATORS)
def test_new_shape(operator):
    on_ranks(2, rejects_capture_of_new_shape, operator)
