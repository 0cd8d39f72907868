"""ag_attention in a CUDA graph: captured once, replayed with new data between eager calls."""

import functools

import pytest
import torch

from tdkernels import AgAttentionConfig
from tests.ops.attention.ag_attention.oracle import FP16, NAMES, Sharded, enlarge
from tests.ops.experts.tp_moe.test_tp_moe_cuda_graph import captured
from tests.support.ranks import DEVICE, a_group, device, on_ranks

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="CUDA graphs need GPUs")

SPEC = dict(rows=300, heads=4, kv_heads=2, d=64, dv=64, sharding="zigzag")


def step(case, config=None):
    o, lse = case.call(config=config)
    outputs, given = ([o, lse], [case.do, case.dlse]) if case.lse else (o, case.do)
    gradients = torch.autograd.grad(outputs, [case.own[name] for name in NAMES], given)
    return dict(zip(("o", "lse", *(f"d{name}" for name in NAMES)), (o.detach(), lse.detach(), *gradients), strict=True))


def forward(case, config=None):
    return dict(zip(("o", "lse"), case.call(config=config), strict=True))


def refill(static, fresh):
    """Copy the operands of ``fresh`` into the tensors that the graph of ``static`` reads."""
    with torch.no_grad():
        for name in NAMES:
            static.own[name].copy_(fresh.own[name])
        static.do.copy_(fresh.do)
        static.dlse.copy_(fresh.dlse)


def replays_with_new_data(backward, method):
    config = AgAttentionConfig(method=method)
    spec = dict(SPEC, lse=method == "fused")
    static = Sharded(**spec)
    static.require(NAMES if backward else ())
    graph, results = captured(static, functools.partial(step if backward else forward, config=config))
    seed = 1
    for replays in (1, 2, 3):
        for _ in range(replays):
            fresh = Sharded(**spec, seed=seed)
            refill(static, fresh)
            for result in results.values():
                result.fill_(torch.nan)
            graph.replay()
            fresh.check(results)
            seed += 1
        # Eager calls between replays must not desynchronize the epochs of graph and workspace.
        eager = Sharded(**spec, seed=seed)
        eager.check(eager.run(config=config))
        other = Sharded(**enlarge(dict(rows=33, d=32)), dtype=FP16, seed=seed)
        other.check(other.run())


def rejects_capture_of_first_call():
    with a_group() as group:
        case = Sharded(**SPEC, group=group)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="before capture|capturing|captured"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                case.call()
        torch.cuda.synchronize()
        case.check(forward(case))
        del group, case


def does_not_block_host(method):
    """Check that the host enqueues a whole step while the GPU is still busy with earlier work."""
    case, config = Sharded(**SPEC, lse=method == "fused"), AgAttentionConfig(method=method)
    case.require()
    step(case, config)
    torch.cuda.synchronize(device())
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    results = step(case, config)
    assert not busy.query(), "the host waited for the GPU"
    case.check(results)


each_method = pytest.mark.parametrize("method", ["fused", "flash", "cudnn"])
each_world_size = pytest.mark.parametrize("world_size", [1, 2, 4])


@each_world_size
@each_method
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
def test_replay(world_size, backward, method):
    on_ranks(world_size, replays_with_new_data, backward, method)


def test_first_call_cannot_be_captured():
    on_ranks(2, rejects_capture_of_first_call)


@each_world_size
@each_method
def test_host_does_not_block(world_size, method):
    on_ranks(world_size, does_not_block_host, method)
