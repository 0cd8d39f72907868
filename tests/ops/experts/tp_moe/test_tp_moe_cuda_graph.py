"""tp_moe in a CUDA graph: captured once, replayed with new tokens, ids and weights, between eager calls."""

import pytest
import torch

import tdkernels
from tests.ops.experts.tp_moe.oracle import FP32, Sliced
from tests.support.moe_oracle import NAMES
from tests.support.ranks import DEVICE, a_group, device, on_ranks

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="CUDA graphs need GPUs")

SPEC = dict(tokens=70, k=3, experts=6, width=136, hidden=40)
IDS = ["any", "distinct", "one", "few", "none"]


def step(layer):
    y = layer.call()
    gradients = torch.autograd.grad(y, [layer.own[name] for name in NAMES], layer.dy)
    return dict(zip(("y", *(f"d{name}" for name in NAMES)), (y.detach(), *gradients), strict=True))


def captured(layer, function):
    """Capture ``function(layer)`` after a warm-up on a side stream; return (graph, results)."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            function(layer)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = function(layer)
    return graph, results


def refill(static, fresh):
    """Copy the operands of layer ``fresh`` into the static operands of a graph."""
    with torch.no_grad():
        for name in NAMES:
            static.own[name].copy_(fresh.own[name])
        static.ids.copy_(fresh.ids)
        static.dy.copy_(fresh.dy)


def replays_with_new_data(backward):
    static = Sliced(**SPEC)
    static.require(NAMES if backward else ())
    graph, results = captured(static, step if backward else lambda layer: {"y": layer.call()})
    seed = 1
    for replays in (1, 2, 3, 5):
        for _ in range(replays):
            fresh = Sliced(**SPEC, ids=IDS[seed % len(IDS)], seed=seed)
            refill(static, fresh)
            for result in results.values():
                result.fill_(torch.nan)
            graph.replay()
            fresh.check(results)
            seed += 1
        # Eager calls of the same and of other sizes must not desynchronize the epochs of the graph and the workspace.
        eager = Sliced(**SPEC, seed=seed)
        eager.check(eager.run())
        other = Sliced(9, 2, 3, 20, 5, FP32, seed=seed)
        other.check(other.run())


def keeps_buffers_after_workspace_growth():
    """A graph keeps its captured buffers if later calls need larger ones."""
    static = Sliced(**SPEC)
    static.require()
    graph, results = captured(static, step)
    large = Sliced(600, 3, 6, 4 * 136, 40, seed=9)
    large.check(large.run())
    for seed in (1, 2, 3):
        fresh = Sliced(**SPEC, seed=seed)
        refill(static, fresh)
        graph.replay()
        fresh.check(results)


def reports_invalid_ids_of_a_replay():
    """A replay with invalid ids raises an error once, on all ranks; the next replay is correct."""
    static = Sliced(**SPEC)
    static.require()
    graph, results = captured(static, step)
    for seed in (1, 2):
        fresh = Sliced(**SPEC, seed=seed)
        refill(static, fresh)
        if fresh.rank == 0:
            static.ids[0, 0] = 100
        with pytest.raises(ValueError, match="1 of all ranks' topk_ids are not -1 to num_experts - 1 = 5"):
            graph.replay()
            tdkernels.synchronize()
        refill(static, fresh)
        graph.replay()
        fresh.check(results)


def rejects_capture_of_first_call():
    with a_group() as group:
        layer = Sliced(**SPEC, group=group)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="before capture|capturing|captured"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                layer.call()
        torch.cuda.synchronize()
        layer.check({"y": layer.call()})
        del group, layer


def launches_without_host_wait():
    """The host enqueues a whole step while the GPU is still busy with earlier work."""
    layer = Sliced(**SPEC)
    layer.require()
    step(layer)
    torch.cuda.synchronize(device())
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    results = step(layer)
    assert not busy.query(), "the host waited for the GPU"
    layer.check(results)


each_world_size = pytest.mark.parametrize("world_size", [1, 2, 4])


@each_world_size
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
def test_replay(world_size, backward):
    on_ranks(world_size, replays_with_new_data, backward)


def test_workspace_growth():
    on_ranks(2, keeps_buffers_after_workspace_growth)


def test_replay_with_invalid_ids():
    on_ranks(2, reports_invalid_ids_of_a_replay)


def test_unsupported_capture():
    on_ranks(2, rejects_capture_of_first_call)


@each_world_size
def test_no_host_wait(world_size):
    on_ranks(world_size, launches_without_host_wait)
