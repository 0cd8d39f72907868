"""Test bodies for all_reduce with quantization. Every rank runs them; see test_quantized_all_reduce.py."""

import math

import pytest
import torch
import torch.distributed as dist
from torch.autograd import forward_ad

import tdkernels
from tdkernels import CollectiveConfig, PeerTimeoutError, PlanMismatchError
from tdkernels.ops.collectives import launch_quantized
from tdkernels.ops.collectives.config import default_config
from tests.support.quantization_oracle import GROUP, bound, quantized, same, spoil
from tests.support.ranks import a_group, device
from tests.support.simulated_nodes import a_group_on_nodes
from tests.test_protocol import failure_of, in_any_order, poison, timeout

# More chunks than programs; blocks per chunk; elements per block, which is multiplied by the element size.
SMALL_CHUNKS = {"num_programs": 2, "piece_blocks": 1, "num_warps": 1, "block": 512}
LONG_CHUNKS = {"num_programs": 3, "piece_blocks": 3, "num_warps": 1, "block": 512}


def config_of(changes, dtype):
    """Return the config with these fields, and with ``block`` elements per block; None for None."""
    if changes is None:
        return None
    changes = dict(changes)
    return CollectiveConfig(exchange="two_shot", block_bytes=changes.pop("block") * dtype.itemsize, **changes)


def draw(shape, dtype, seed=0):
    """Return all ranks' x, [W, ...], on the CPU: normally distributed, with four magnitudes in turn."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(dist.get_world_size(), *shape, generator=generator)
    return (x * 4.0 ** (torch.arange(x.shape[-1]) % 4)).to(dtype)


def _groups(x):
    """Return x as rows of 128 consecutive elements, padded with zeros."""
    flat = x.reshape(-1)
    return torch.nn.functional.pad(flat, (0, -flat.numel() % GROUP)).view(-1, GROUP)


def exact_sum(full, config):
    """Return the result that the operator must have bit for bit: the owner of a chunk adds its own part exactly."""
    parts = [_groups(x.float()) for x in full]
    group = torch.arange(len(parts[0]))
    owner = group * GROUP // (config.block_bytes // full.element_size() * config.piece_blocks) % len(full)
    total = torch.zeros_like(parts[0])
    for rank, part in enumerate(parts):
        total += torch.where((owner == rank)[:, None], part, quantized(part))
    return quantized(total).reshape(-1)[: full[0].numel()].view(full.shape[1:]).to(full.dtype)


def check(output, full, config):
    """Check shape, dtype, the error bound, and on CPU ranks every bit; a GPU may fuse products and sums."""
    assert output.dtype == full.dtype and output.shape == full.shape[1:] and output.is_contiguous()
    config = config or default_config("all_reduce", full[0].nbytes, len(full), output.device, "two_shot")
    expected = exact_sum(full, config)
    if output.device.type == "cpu":
        assert same(output, expected)
    total, groups = full.double().sum(0), [_groups(x.double()) for x in full]
    before = sum(bound(part) for part in groups).nan_to_num(0.0, 0.0)
    # The sum has the error of the parts when it is quantized, and so has the largest magnitude of its group.
    after = bound(_groups(total)) + 2.0**-4 * before + 2.0**-18 * before.amax(1, keepdim=True)
    allowed = (before + after).reshape(-1)[: total.numel()].view(total.shape)
    allowed = allowed + torch.finfo(full.dtype).eps * (total.abs() + allowed)
    error = (output.cpu().double() - total).abs()
    wrong = ~(error <= allowed) & total.isfinite()
    assert not wrong.any(), (error / allowed)[wrong]
    assert torch.equal(output.cpu().isnan(), expected.isnan())
    has_same_bits_on_all_ranks(output)
    return error, total


def has_same_bits_on_all_ranks(output):
    own = output.reshape(-1).view(torch.uint8)
    rank_0 = own.clone()
    dist.broadcast(rank_0, 0)
    assert torch.equal(own, rank_0)


def computes(dtype, shapes, changes):
    """Check results for each shape, twice: the second call comes from the cache."""
    for seed, shape in enumerate(shapes):
        full, config = draw(shape, dtype, seed), config_of(changes, dtype)
        x = full[dist.get_rank()].to(device())
        for _ in range(2):
            output = tdkernels.all_reduce(x, quantize="fp8", config=config)
            tdkernels.synchronize()
            if dist.get_world_size() == 1:
                assert same(output, full[0])
            else:
                check(output, full, config)
            assert same(x, full[dist.get_rank()]) and output.data_ptr() != x.data_ptr()
            output.fill_(math.nan)


def has_the_error_of_fp8(dtype):
    """Check that the error is that of two roundings to fp8: neither zero nor much larger."""
    full = draw((40, 512), dtype)
    error, total = check(tdkernels.all_reduce(full[dist.get_rank()].to(device()), quantize="fp8"), full, None)
    relative = (error.square().mean() / total.square().mean()).sqrt()
    assert 0.028 <= relative <= 0.042, relative


def keeps_special_values(dtype):
    """Check zeros, tiny and large groups, NaN and infinity: those become NaN, and no other element changes."""
    full = draw((9, 3 * GROUP), dtype)
    for x in full[1:]:
        x[0], x[1, : GROUP // 2] = 0.0, 0.0
        x[2] *= 2.0**-12
    spoil(full[0])
    output = tdkernels.all_reduce(full[dist.get_rank()].to(device()), quantize="fp8")
    check(output, full, None)
    assert output.isnan().sum() == 3 and not output[0].any()


def is_bounded_by_the_wire(dtype, factor):
    """Check the memory that parts and sums take in a buffer: 33/32 bytes per element."""
    world_size, n = dist.get_world_size(), 1 << 20
    config = default_config("all_reduce", n * dtype.itemsize, world_size, torch.device("cpu"), "two_shot")
    rounds, nbytes, signals = launch_quantized.sizes(n, dtype.itemsize, world_size, config)
    assert signals == 2 * rounds * world_size and n * 2 * 33 / 32 <= nbytes <= n * 2 * 33 / 32 * 1.01
    assert nbytes <= 1.01 * 33 / 32 * factor * 2 * n * dtype.itemsize


def supports_any_layout():
    full = draw((6, 700), torch.bfloat16)
    for layout in (
        lambda t: t.t().contiguous().t(), lambda t: torch.cat([t.new_ones(1), t.flatten()])[1:].view(t.shape),
        lambda t: t.repeat_interleave(2, 0)[::2],
    ):
        for _ in range(2):
            check(tdkernels.all_reduce(layout(full[dist.get_rank()].to(device())), quantize="fp8"), full, None)
    scalar = torch.tensor(dist.get_rank() + 1.0, device=device())
    total = sum(range(1, dist.get_world_size() + 1))
    assert abs(tdkernels.all_reduce(scalar, quantize="fp8").item() - total) <= 1e-5
    for shape in ((0,), (3, 0)):
        empty = torch.ones(shape, device=device())
        assert tdkernels.all_reduce(empty, quantize="fp8").shape == shape


def has_the_gradient_of_the_uncompressed_operator():
    full = draw((40, 30), torch.float32)
    x = full[dist.get_rank()].to(device()).requires_grad_()
    output = tdkernels.all_reduce(x, quantize="fp8")
    dz = torch.arange(1200.0, device=device()).view(40, 30)
    output.backward(dz)
    assert torch.equal(x.grad, dz) and not torch.equal(output.detach().cpu(), full.sum(0))
    with pytest.raises(RuntimeError, match="second derivative"):
        torch.autograd.grad(tdkernels.all_reduce(x, quantize="fp8").sum(), x, create_graph=True)
    with forward_ad.dual_level(), pytest.raises(NotImplementedError, match="jvp"):
        tdkernels.all_reduce(forward_ad.make_dual(x.detach(), dz), quantize="fp8")


def reuses_memory_in_any_order(changes):
    """Check calls with and without quantization in turn, on a workspace that is filled with NaN, with ranks ahead."""
    fulls = [draw((size,), torch.float32, seed) for seed, size in enumerate((5000, 100, 3000, 5000))]
    xs = [full[dist.get_rank()].to(device()) for full in fulls]
    config = config_of(changes, torch.float32)
    exact = [tdkernels.all_reduce(x) for x in xs]
    for _ in range(2):
        poison()
        with in_any_order(seed=5):
            outputs = [(tdkernels.all_reduce(x, quantize="fp8", config=config), tdkernels.all_reduce(x)) for x in xs]
        tdkernels.synchronize()
        for (output, plain), full, expected in zip(outputs, fulls, exact, strict=True):
            check(output, full, config)
            assert torch.equal(plain, expected)


def rejects():
    x = torch.ones(600, device=device())
    for quantize in ("fp4", "", True, torch.float8_e4m3fn):
        with pytest.raises(ValueError, match='all_reduce: quantize must be None or "fp8"'):
            tdkernels.all_reduce(x, quantize=quantize)
    for config in (CollectiveConfig(), CollectiveConfig(method="torch", exchange="two_shot")):
        with pytest.raises(ValueError, match='config must be None or have method "fused" and exchange "two_shot"'):
            tdkernels.all_reduce(x, quantize="fp8", config=config)
    for dtype, smallest in ((torch.float32, 2048), (torch.bfloat16, 1024)):
        config = CollectiveConfig(exchange="two_shot", block_bytes=smallest // 2)
        with pytest.raises(ValueError, match=rf"block_bytes must be at least {smallest} for x \[600\]"):
            tdkernels.all_reduce(x.to(dtype), quantize="fp8", config=config)
    with pytest.raises(TypeError, match="must be a CollectiveConfig"):
        tdkernels.all_reduce(x, quantize="fp8", config=tdkernels.GemmArConfig())
    for bad in (x.int(), x.to(torch.float8_e4m3fn)):
        with pytest.raises(TypeError, match="bfloat16, float16 and float32 are supported"):
            tdkernels.all_reduce(bad, quantize="fp8")
    with pytest.raises(TypeError, match="x must be a torch.Tensor"):
        tdkernels.all_reduce([1.0], quantize="fp8")


def reports_disagreement():
    """Check that every rank raises if rank 1 of three does not quantize, and that the group stays usable."""
    full = draw((700,), torch.float32)
    x, odd = full[dist.get_rank()].to(device()), dist.get_rank() == 1
    with a_group() as group:
        for options, words in (
            ({"quantize": None if odd else "fp8"}, 'quantize is "fp8" on ranks 0, 2, "absent" on rank 1'),
            ({"quantize": "fp8", "config": config_of(SMALL_CHUNKS if odd else None, torch.float32)}, "config is "),
        ):
            error = failure_of(tdkernels.all_reduce, x, group=group, **options)
            assert type(error) is ValueError and words in str(error), error
        check(tdkernels.all_reduce(x, quantize="fp8", group=group), full, None)
        del group


def detects_mismatch_of_cached_calls():
    """Check that calls fail if all ranks know both calls but rank 1 makes the one without quantization."""
    x = torch.ones(700, device=device())
    with a_group() as group:
        for _ in range(2):
            tdkernels.all_reduce(x, quantize="fp8", group=group)
            tdkernels.all_reduce(x, group=group)
        tdkernels.synchronize()
        dist.barrier()
        with timeout(1.0):
            error = failure_of(
                tdkernels.all_reduce, x, quantize=None if dist.get_rank() == 1 else "fp8", group=group
            )
        assert isinstance(error, PlanMismatchError | PeerTimeoutError) and "all_reduce" in str(error), repr(error)
        del group


def rejects_several_nodes(local):
    with a_group_on_nodes(local) as group:
        with pytest.raises(NotImplementedError, match='all_reduce with quantize="fp8": runs on one node'):
            tdkernels.all_reduce(torch.ones(5, device=device()), quantize="fp8", group=group)
        del group
