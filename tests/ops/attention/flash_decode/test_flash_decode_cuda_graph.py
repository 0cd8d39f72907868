"""flash_decode in a CUDA graph: captured once, replayed with new lengths, keys and pages between eager calls."""

import pytest
import torch

import tdkernels
from tests.ops.attention.flash_decode.cases import refill
from tests.ops.attention.flash_decode.oracle import FP16, OPERANDS, Decode, enlarge
from tests.ops.experts.tp_moe.test_tp_moe_cuda_graph import captured
from tests.support.ranks import DEVICE, a_group, device, on_ranks

pytestmark = pytest.mark.skipif(DEVICE == "cpu" or not torch.cuda.is_available(), reason="CUDA graphs need GPUs")

SPECS = {
    "plain": dict(batch=5, heads=16, kv_heads=4, dim=128, keys=700),
    "paged": dict(batch=5, heads=16, kv_heads=4, dim=64, keys=300, page=16, tokens=2, window=350),
}
TOKENS = dict(SPECS["plain"], tokens=3, page=16)  # torch copies the pages
LENS = ["ragged", "full", "none", "one", "last", "not first", "some none"]
each_spec = pytest.mark.parametrize("spec", SPECS)
each_world_size = pytest.mark.parametrize("world_size", [1, 2, 4])


def forward(case):
    with torch.no_grad():
        o, lse = case.call(return_lse=True)
    return {"o": o, "lse": lse}


def forward_by_torch(case):
    with torch.no_grad():
        o, lse = case.call(return_lse=True, config=tdkernels.FlashDecodeConfig(method="torch"))
    return {"o": o, "lse": lse}


def replays_method_torch(spec):
    """Check that lengths and pages may change between replays of torch's attention and all-gather."""
    static = Decode(**spec)
    static.check(forward_by_torch(static))
    graph, results = captured(static, forward_by_torch)
    for seed, lens in enumerate(LENS):
        fresh = Decode(**spec, lens=lens, seed=seed)
        refill(static, fresh)
        for result in results.values():
            result.fill_(torch.nan)
        graph.replay()
        fresh.check(results)


def step(case):
    o, lse = case.call(return_lse=True)
    gradients = torch.autograd.grad([o, lse], [getattr(case, name) for name in OPERANDS], [case.do, case.dlse])
    gradients = dict(zip((f"d{name}" for name in OPERANDS), gradients, strict=True))
    return {"o": o.detach(), "lse": lse.detach(), **gradients}


def replays_with_new_lens(spec, backward):
    static = Decode(**spec)
    static.require(OPERANDS if backward else ())
    graph, results = captured(static, step if backward else forward)
    seed = 1
    for replays in (1, 2, 4, 7):
        for _ in range(replays):
            fresh = Decode(**spec, lens=LENS[seed % len(LENS)], seed=seed)
            refill(static, fresh)
            for result in results.values():
                result.fill_(torch.nan)
            graph.replay()
            fresh.check(results)
            seed += 1
        # Eager calls between replays must not desynchronize the epochs of graph and workspace.
        eager = Decode(**spec, seed=seed)
        eager.check(eager.run())
        other = Decode(**enlarge(dict(batch=2, heads=4, kv_heads=2, dim=80, keys=33, dtype=FP16)), seed=seed)
        other.check(other.run())


def survives_growth(spec):
    """Check that a graph keeps its buffers if later calls need larger ones."""
    static = Decode(**spec)
    graph, results = captured(static, forward)
    large = Decode(64, 96, 12, 128, 100, seed=9)
    large.check({"o": large.call()})
    for seed in (1, 2, 3):
        fresh = Decode(**spec, seed=seed)
        refill(static, fresh)
        graph.replay()
        fresh.check(results)


def rejects_capture_of_first_call(spec):
    with a_group() as group:
        case = Decode(**spec, group=group)
        torch.cuda.synchronize()
        with pytest.raises(RuntimeError, match="before capture|capturing|captured"):
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                case.call()
        torch.cuda.synchronize()
        case.check({"o": case.call()})
        del group, case


def does_not_block_host(spec):
    """Check that the host enqueues a whole step while the GPU is still busy with earlier work."""
    case = Decode(**spec)
    case.require()
    step(case)
    torch.cuda.synchronize(device())
    torch.cuda._sleep(2_000_000_000)  # about a second
    busy = torch.cuda.Event()
    busy.record()
    results = step(case)
    assert not busy.query(), "the host waited for the GPU"
    tdkernels.synchronize()
    case.check(results)


@each_world_size
@each_spec
@pytest.mark.parametrize("backward", [False, True], ids=["forward", "forward and backward"])
def test_replay(world_size, spec, backward):
    on_ranks(world_size, replays_with_new_lens, SPECS[spec], backward)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("spec", [SPECS["plain"], TOKENS, SPECS["paged"]], ids=["flash", "flash, tokens", "plain"])
def test_replay_of_method_torch(world_size, spec):
    on_ranks(world_size, replays_method_torch, spec)


@each_spec
def test_growth(spec):
    on_ranks(2, survives_growth, SPECS[spec])


def test_first_call_cannot_be_captured():
    on_ranks(2, rejects_capture_of_first_call, SPECS["plain"])


@each_world_size
@each_spec
def test_host_does_not_block(world_size, spec):
    on_ranks(world_size, does_not_block_host, SPECS[spec])
