"""ep_moe in a CUDA graph: captured once, replayed with new routing, between eager calls."""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tests.ops.experts.ep_moe.cases import CONFIGS, Layer
from tests.support.moe_oracle import NAMES
from tests.support.ranks import DEVICE, device, on_ranks
from tests.test_protocol import failure_of

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="CUDA graphs need GPUs")

TOKENS, MAX_TOKENS_PER_RANK = [33, 0, 70, 5], 70
SPEC = dict(tokens=TOKENS, k=3, experts_each=4, width=136, hidden=40)
IDS = ["any", "distinct", "one", "last", "none"]
BOUNDS = {"bound": {"max_tokens_per_rank": MAX_TOKENS_PER_RANK}, "capacity": {"max_tokens": 3 * sum(TOKENS)}}


def step(layer, dy, options):
    y = layer.call(**options)
    gradients = torch.autograd.grad(y, [layer.own[name] for name in NAMES], dy)
    return dict(zip(("y", *(f"d{name}" for name in NAMES)), (y.detach(), *gradients), strict=True))


def local_dy(layer):
    return layer.all_dy[layer.case.mine].to(device())


def captured(options):
    """Capture a step; return (graph, static layer, static dy, results)."""
    layer = Layer(**SPEC)
    for operand in layer.own.values():
        operand.requires_grad_()
    dy = local_dy(layer)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            step(layer, dy, options)
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step(layer, dy, options)
    return graph, layer, dy, results


def refill(static, dy, fresh):
    """Copy the operands of layer ``fresh`` into the static operands of a graph."""
    with torch.no_grad():
        for name in NAMES:
            static.own[name].copy_(fresh.own[name])
        static.case.ids.copy_(fresh.case.ids)
        dy.copy_(local_dy(fresh))


def replays_with_new_routing(config, bounds):
    options = {"config": CONFIGS[config], **BOUNDS[bounds]}
    graph, static, dy, results = captured(options)
    seed = 1
    for replays in (1, 2, 3, 5):
        for _ in range(replays):
            fresh = Layer(**SPEC, ids=IDS[seed % len(IDS)], seed=seed)
            refill(static, dy, fresh)
            for result in results.values():
                result.fill_(torch.nan)
            graph.replay()
            fresh.check(results)
            seed += 1
        # Eager calls of the same and of other sizes must not desynchronize the epochs of the graph and the workspace.
        eager = Layer(**SPEC, seed=seed)
        eager.check(eager.run(**options))
        other = Layer([4, 9, 0, 1], 2, 2, 20, 8, torch.float16, seed=seed)
        other.check(other.run(config=CONFIGS[config]))


def reports_invalid_ids_of_a_replay(config):
    """A replay with invalid ids raises an error once, on all ranks; the next replay is correct."""
    graph, static, dy, results = captured({"config": CONFIGS[config], **BOUNDS["bound"]})
    for seed in (1, 2):
        fresh = Layer(**SPEC, seed=seed)
        refill(static, dy, fresh)
        if dist.get_rank() == 0:
            static.case.ids[0, 0] = 100

        def replay():
            graph.replay()
            tdkernels.synchronize()

        error = failure_of(replay)
        assert type(error) is ValueError and "topk_ids of rank 0 are out of range" in str(error), repr(error)
        refill(static, dy, fresh)
        graph.replay()
        fresh.check(results)


def launches_without_host_wait(config):
    """The host enqueues a whole step while the GPU is still busy with earlier work."""
    options = {"config": CONFIGS[config], **BOUNDS["bound"]}
    layer = Layer(**SPEC)
    for operand in layer.own.values():
        operand.requires_grad_()
    dy = local_dy(layer)
    step(layer, dy, options)
    torch.cuda.synchronize(device())
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    results = step(layer, dy, options)
    assert not busy.query(), "the host waited for the GPU"
    layer.check(results)


each_config = pytest.mark.parametrize("config", ["default", "fused"])


@each_config
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_replay(world_size, config, bounds):
    on_ranks(world_size, replays_with_new_routing, config, bounds)


@each_config
def test_replay_with_invalid_ids(config):
    on_ranks(2, reports_invalid_ids_of_a_replay, config)


@each_config
def test_no_host_wait(config):
    on_ranks(2, launches_without_host_wait, config)
