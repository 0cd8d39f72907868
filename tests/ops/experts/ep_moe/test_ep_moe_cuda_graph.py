"""ep_moe in a CUDA graph: captured once, replayed with tokens that go elsewhere, between eager calls."""

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tests.ops.experts.ep_moe.cases import CONFIGS, Layer
from tests.support.moe_oracle import NAMES
from tests.support.ranks import DEVICE, device, on_ranks
from tests.test_protocol import failure_of

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="CUDA graphs need GPUs")

TOKENS, MOST = [33, 0, 70, 5], 70
SPEC = dict(tokens=TOKENS, k=3, experts_each=4, width=136, hidden=40)
IDS = ["any", "distinct", "one", "last", "none"]
BOUNDS = {"bound": {"max_tokens_per_rank": MOST}, "capacity": {"max_tokens": 3 * sum(TOKENS)}}


def step(layer, dy, options):
    y = layer.call(**options)
    gradients = torch.autograd.grad(y, [layer.own[name] for name in NAMES], dy)
    return dict(zip(("y", *(f"d{name}" for name in NAMES)), (y.detach(), *gradients), strict=True))


def dy_of(layer):
    return layer.all_dy[layer.case.mine].to(device())


def captured(options):
    """(a graph of a step, the layer and the dy that it reads, what it leaves)."""
    layer = Layer(**SPEC)
    for operand in layer.own.values():
        operand.requires_grad_()
    dy = dy_of(layer)
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
    """Put the operands of one layer where a graph reads those of another."""
    with torch.no_grad():
        for name in NAMES:
            static.own[name].copy_(fresh.own[name])
        static.case.ids.copy_(fresh.case.ids)
        dy.copy_(dy_of(fresh))


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
        # Eager calls of the same and of other sizes in between must not put the epochs of graph and workspace apart.
        eager = Layer(**SPEC, seed=seed)
        eager.check(eager.run(**options))
        other = Layer([4, 9, 0, 1], 2, 2, 20, 8, torch.float16, seed=seed)
        other.check(other.run(config=CONFIGS[config]))


def says_when_ids_of_a_replay_are_wrong(config):
    """Told once, on all ranks; the next replay is right."""
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


def is_launched_without_waiting(config):
    """All of a step is in the queue while the GPU is still busy with what came before."""
    options = {"config": CONFIGS[config], **BOUNDS["bound"]}
    layer = Layer(**SPEC)
    for operand in layer.own.values():
        operand.requires_grad_()
    dy = dy_of(layer)
    step(layer, dy, options)
    torch.cuda.synchronize(device())
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    results = step(layer, dy, options)
    assert not busy.query(), "the host has waited for the GPU"
    layer.check(results)


either_way = pytest.mark.parametrize("config", ["default", "fused"])


@either_way
@pytest.mark.parametrize("bounds", BOUNDS)
@pytest.mark.parametrize("world_size", [2, 4])
def test_replay(world_size, config, bounds):
    on_ranks(world_size, replays_with_new_routing, config, bounds)


@either_way
def test_replay_of_wrong_ids(config):
    on_ranks(2, says_when_ids_of_a_replay_are_wrong, config)


@either_way
def test_the_host_never_waits(config):
    on_ranks(2, is_launched_without_waiting, config)
