"""Dispatch and combine in a CUDA graph: captured once, replayed with new routing, between eager calls."""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tests.ops.experts.dispatch.all_to_all_cases import AllToAllCase
from tests.ops.experts.dispatch.oracle import BF16, FP32, Routed
from tests.support.ranks import DEVICE, a_group, device, on_ranks
from tests.test_protocol import failure_of

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="CUDA graphs need GPUs")

K, EXPERTS_EACH, WIDTH, CAPACITY = 3, 4, 136, 600


def new_case(seed, ids="any", tokens=(33, 0, 70, 5)):
    world_size = dist.get_world_size()
    return Routed(list(tokens[:world_size]), K, EXPERTS_EACH * world_size, WIDTH, ids=ids, seed=seed)


def step(x, ids, weights, dy, **bounds):
    """Run a layer whose experts double their inputs; return (recv, y, dx, dtopk_weights)."""
    recv, handle = tdkernels.ep_dispatch(
        x, ids, weights, num_experts=EXPERTS_EACH * dist.get_world_size(), max_tokens=CAPACITY, **bounds
    )
    y = tdkernels.ep_combine(recv.x * 2, handle)
    return recv, y.detach(), *torch.autograd.grad(y, [x, weights], dy)


def check_step(case, all_dy, recv, y, dx, dw):
    """Compare the results of ``step`` with the unsharded layer, for equality."""
    case.check_received(recv, capacity=CAPACITY)
    doubled = 2 * case.all_x.repeat_interleave(K, 0)
    case.check_numbers("y", y, *case.combined(doubled, case.all_weights))
    case.check_numbers("dx", dx, *case.combined(2 * all_dy.repeat_interleave(K, 0), case.all_weights))
    dots = 2 * (case.all_x.float() * all_dy.float()).sum(1, keepdim=True).where(case.valid, 0.0)[case.mine]
    case.check_numbers("dtopk_weights", dw, dots.double(), dots)


def gradient_of(case):
    return case.draw(sum(case.tokens), WIDTH, BF16)


def captured(**bounds):
    """Capture a step; return (graph, static inputs, results)."""
    case = new_case(0)
    dy = gradient_of(case)[case.mine].to(device())
    static = [case.x.requires_grad_(), case.ids, case.weights.requires_grad_(), dy]
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(*static, **bounds)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(*static, **bounds)
    return graph, static, results


def refill(static, case, all_dy):
    with torch.no_grad():
        for tensor, fresh in zip(static, (case.x, case.ids, case.weights, all_dy[case.mine]), strict=True):
            tensor.copy_(fresh)


def replays_with_new_routing(**bounds):
    graph, static, (recv, *others) = captured(**bounds)
    seed = 1
    for replays in (1, 2, 3, 5):
        for _ in range(replays):
            fresh = new_case(seed, ids=["any", "distinct", "one", "last", "none"][seed % 5])
            all_dy = gradient_of(fresh)
            refill(static, fresh, all_dy)
            for result in (recv.x, recv.topk_weights, *others):
                result.detach().fill_(torch.nan)
            graph.replay()
            check_step(fresh, all_dy, recv, *others)
            seed += 1
        # Eager calls of the same and of other sizes must not desynchronize the epochs of the graph and the workspace.
        eager = new_case(seed)
        all_dy = gradient_of(eager)
        own = [eager.x.requires_grad_(), eager.ids, eager.weights.requires_grad_(), all_dy[eager.mine].to(device())]
        check_step(eager, all_dy, *step(*own))
        other = Routed([4, 9, 0, 1][: dist.get_world_size()], 2, 2 * dist.get_world_size(), 20, FP32, seed=seed)
        recv_of_other, handle = other.dispatch()
        other.check_received(recv_of_other)
        other.check_combined(tdkernels.ep_combine(other.expert_out(), handle))


def keeps_buffers_after_workspace_growth():
    """A graph keeps its captured buffers if later calls need larger ones."""
    graph, static, results = captured()
    large = Routed([400] * dist.get_world_size(), K, EXPERTS_EACH * dist.get_world_size(), 4 * WIDTH, seed=9)
    recv, handle = large.dispatch()
    large.check_received(recv)
    large.check_combined(tdkernels.ep_combine(large.expert_out(), handle))
    for seed in (1, 2, 3):
        fresh = new_case(seed)
        all_dy = gradient_of(fresh)
        refill(static, fresh, all_dy)
        graph.replay()
        check_step(fresh, all_dy, *results)


def reports_invalid_ids_of_a_replay(**bounds):
    """A replay with invalid ids raises an error once, on all ranks; the next replay is correct."""
    graph, static, results = captured(**bounds)
    for seed in (1, 2):
        fresh = new_case(seed)
        all_dy = gradient_of(fresh)
        refill(static, fresh, all_dy)
        if dist.get_rank() == 0:
            static[1][0, 0] = 100
        error = failure_of(graph.replay)
        assert type(error) is ValueError and "topk_ids of rank 0 are out of range" in str(error), repr(error)
        tdkernels.synchronize()
        refill(static, fresh, all_dy)
        graph.replay()
        check_step(fresh, all_dy, *results)


def rejects_unsupported_capture():
    case = new_case(0)
    with a_group() as group:
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="before capture"):  # a group without earlier calls
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                case.dispatch(group=group, max_tokens=CAPACITY)
        torch.cuda.synchronize()
        recv, _ = case.dispatch(group=group)
        case.check_received(recv)
        with pytest.raises(RuntimeError, match="without max_tokens the host waits"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                case.dispatch(group=group)
        torch.cuda.synchronize()
        recv, _ = case.dispatch(group=group)
        case.check_received(recv)
        del group, recv


def replays_all_to_all():
    """Replay all_to_all with other splits each time; their sum equals the number of captured rows."""
    rank, world_size = dist.get_rank(), dist.get_world_size()

    def new_all_to_all_case(seed):
        generator = torch.Generator().manual_seed(seed)
        ends = torch.randint(0, 41, (world_size, world_size - 1), generator=generator).sort(1).values
        edges = torch.nn.functional.pad(torch.nn.functional.pad(ends, (1, 0)), (0, 1), value=40)
        return AllToAllCase(edges.diff(dim=1).tolist(), 24, FP32, seed=seed)

    static = new_all_to_all_case(0)
    x, splits = static.x, static.own_splits
    for _ in range(2):
        tdkernels.all_to_all(x, splits, max_tokens=40 * world_size)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out, out_splits, _ = tdkernels.all_to_all(x, splits, max_tokens=40 * world_size)
    for seed in range(1, 6):
        fresh = new_all_to_all_case(seed)
        x.copy_(fresh.all_x[rank])
        splits.copy_(fresh.splits[rank])
        out.fill_(torch.nan)
        graph.replay()
        fresh.check(out, out_splits, 40 * world_size)
        fresh.check(*fresh.call()[:2])


@pytest.mark.parametrize("world_size", [2, 4])
def test_replay(world_size):
    on_ranks(world_size, replays_with_new_routing)


@pytest.mark.parametrize("world_size", [2, 4])
def test_replay_of_low_latency(world_size):
    on_ranks(world_size, replays_with_new_routing, max_tokens_per_rank=80)


def test_workspace_growth():
    on_ranks(2, keeps_buffers_after_workspace_growth)


def test_replay_with_invalid_ids():
    on_ranks(2, reports_invalid_ids_of_a_replay)


def test_low_latency_replay_with_invalid_ids():
    on_ranks(2, reports_invalid_ids_of_a_replay, max_tokens_per_rank=70)


def test_unsupported_capture():
    on_ranks(2, rejects_unsupported_capture)


@pytest.mark.parametrize("world_size", [2, 4])
def test_replay_of_all_to_all(world_size):
    on_ranks(world_size, replays_all_to_all)
