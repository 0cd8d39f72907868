"""Reductions along an axis, lane gather, index compaction and fp8 conversion, in the interpreter and on GPUs."""

import pytest
import torch
import triton.language as tl

from tdkernels import lang as td
from tests.lang.test_primitives import floats_to_round
from tests.support.ranks import DEVICE, device, on_ranks


@td.jit
def reduce_kernel(x_ptr, sums_ptr, largest_ptr, running_ptr, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs)
    kept = tl.arange(0, M if AXIS == 1 else N)
    tl.store(sums_ptr + kept, td.sum_of(x, AXIS))
    tl.store(largest_ptr + kept, td.max_of(x, AXIS))
    tl.store(running_ptr + offs, td.running_sum(x, AXIS))


@td.jit
def total_kernel(x_ptr, total_ptr, largest_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(total_ptr, td.sum_of(x))
    tl.store(largest_ptr, td.max_of(x))


def check_reductions():
    """Include negative numbers only, and values that no narrower type holds; every sum is exact."""
    generator = torch.Generator().manual_seed(0)
    for dtype, low, high in (
        (torch.int32, -(1 << 20), -5), (torch.int64, -(1 << 50), 1 << 50), (torch.int64, -(1 << 40), -7),
        (torch.float32, -1000, -3), (torch.float32, -1000, 1000),
    ):
        for m, n in ((8, 32), (1, 16), (64, 2)):
            x = torch.randint(low, high, (m, n), generator=generator).to(dtype)
            for axis in (0, 1):
                kept = m if axis == 1 else n
                sums, largest = (torch.zeros(kept, dtype=dtype, device=device()) for _ in range(2))
                running = torch.zeros(m, n, dtype=dtype, device=device())
                reduce_kernel[(1,)](x.to(device()), sums, largest, running, AXIS=axis, M=m, N=n)
                what = f"{dtype} [{m}, {n}] along {axis}"
                assert torch.equal(sums.cpu(), x.sum(axis, dtype=dtype)), f"sum_of {what}"
                assert torch.equal(largest.cpu(), x.amax(axis)), f"max_of {what}"
                assert torch.equal(running.cpu(), x.cumsum(axis, dtype=dtype)), f"running_sum {what}"
            total, largest = (torch.zeros(1, dtype=dtype, device=device()) for _ in range(2))
            total_kernel[(1,)](x.to(device()), total, largest, N=m * n)
            assert total.item() == x.sum().item() and largest.item() == x.max().item(), f"{dtype} [{m * n}]"


def test_reductions():
    on_ranks(1, check_reductions)


@td.jit
def gather_lane_kernel(values_ptr, indices_ptr, out_ptr, N: tl.constexpr, COUNT: tl.constexpr):
    values, indices = tl.load(values_ptr + tl.arange(0, N)), tl.load(indices_ptr + tl.arange(0, N))
    for i in range(COUNT):
        tl.store(out_ptr + i, td.gather_lane(values, indices, i))


def check_gather_lane():
    """Values of -1 and 0 are regular values; a missing index gives -1."""
    for dtype in (torch.int32, torch.int64):
        values = torch.tensor([5, -1, 0, 1 << 30, 7, 8, 9, 10], dtype=dtype)
        indices = torch.tensor([3, 1, 0, 5, -1, 9, 7, 6], dtype=torch.int32)
        out = torch.full((8,), -7, dtype=dtype, device=device())
        gather_lane_kernel[(1,)](values.to(device()), indices.to(device()), out, N=8, COUNT=8)
        assert out.tolist() == [0, -1, -1, 5, -1, 1 << 30, 10, 9], out.tolist()


def test_gather_lane():
    on_ranks(1, check_gather_lane)


@td.jit
def compact_indices_kernel(mask_ptr, indices_ptr, count_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    indices, count = td.compact_indices(tl.load(mask_ptr + offs) != 0)
    tl.store(indices_ptr + offs, indices)
    tl.store(count_ptr, count)


def check_compact_indices():
    for mask in ([1], [0], [0, 1, 1, 0, 1, 0, 0, 1], [1] * 8, [0] * 8, [0] * 7 + [1]):
        indices = torch.full((len(mask),), -7, dtype=torch.int32, device=device())
        count = torch.full((1,), -7, dtype=torch.int32, device=device())
        compact_indices_kernel[(1,)](torch.tensor(mask, device=device()), indices, count, N=len(mask))
        expected = [sum(mask[:i]) if own else -1 for i, own in enumerate(mask)]
        assert indices.tolist() == expected and count.item() == sum(mask), f"{mask}: {indices.tolist()}"


def test_compact_indices():
    on_ranks(1, check_compact_indices)


@td.jit
def to_e4m3_kernel(x_ptr, codes_ptr, BLOCK: tl.constexpr, CONVERTS: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes_ptr + offs, td.to_e4m3(tl.load(x_ptr + offs), CONVERTS))


def check_e4m3_codes(by_instruction=False):
    """Convert all bf16 and fp16 numbers, thus all of e4m3 and their midpoints, and the neighbors of the midpoints."""
    codes = torch.arange(128).to(torch.uint8).view(torch.float8_e4m3fn).float()[:127]
    midpoints = torch.cat([(codes[1:] + codes[:-1]) / 2, torch.tensor([448.0, 464.0, 480.0, 512.0])]).view(torch.int32)
    neighbors = torch.cat([midpoints + offset for offset in (-1, 0, 1)]).view(torch.float32)
    x = torch.cat([floats_to_round(), neighbors, -neighbors])
    x = torch.nn.functional.pad(x, (0, -x.numel() % 8192), value=torch.inf)
    found = torch.empty(x.shape, dtype=torch.uint8, device=device())
    to_e4m3_kernel[(x.numel() // 8192,)](x.to(device()), found, BLOCK=8192, CONVERTS=by_instruction)
    expected = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)  # torch's own cast does not saturate, but returns NaN
    assert x.isnan().any() and x.isinf().any() and len(expected.view(torch.uint8).unique()) == 256
    differs = found.cpu() != expected.view(torch.uint8)
    if by_instruction:  # a NaN may lose its sign
        differs &= ~(x.isnan() & (found.cpu() & 0x7F == 0x7F))
    wrong = differs.nonzero().flatten()
    some = [(x[i].item(), found[i].item()) for i in wrong[:5]]
    assert len(wrong) == 0, f"{len(wrong)} of {x.numel()} have another code, such as {some}"


def test_e4m3_codes_equal_torch():
    on_ranks(1, check_e4m3_codes)


@pytest.mark.skipif(
    DEVICE == "cpu" or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (9, 0),
    reason="needs a GPU with an e4m3 conversion instruction",
)
def test_e4m3_codes_by_instruction_equal_torch():
    on_ranks(1, check_e4m3_codes, True)
