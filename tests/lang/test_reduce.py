"""Sums along an axis, and codes of 8 bits, in the interpreter as on GPUs."""

import pytest
import torch
import triton.language as tl

from tdkernels import lang as td
from tests.lang.test_primitives import floats_to_round
from tests.support.ranks import DEVICE, device, on_ranks


@td.jit
def reduce_kernel(x_ptr, sums_ptr, most_ptr, running_ptr, AXIS: tl.constexpr, M: tl.constexpr, N: tl.constexpr):
    offs = tl.arange(0, M)[:, None] * N + tl.arange(0, N)[None, :]
    x = tl.load(x_ptr + offs)
    left = tl.arange(0, M if AXIS == 1 else N)
    tl.store(sums_ptr + left, td.sum_of(x, AXIS))
    tl.store(most_ptr + left, td.max_of(x, AXIS))
    tl.store(running_ptr + offs, td.running_sum(x, AXIS))


@td.jit
def total_kernel(x_ptr, total_ptr, most_ptr, N: tl.constexpr):
    x = tl.load(x_ptr + tl.arange(0, N))
    tl.store(total_ptr, td.sum_of(x))
    tl.store(most_ptr, td.max_of(x))


def adds_up():
    """Negative numbers, whose largest is not 0, and such as no narrower type holds; every sum is exact."""
    generator = torch.Generator().manual_seed(0)
    for dtype, low, high in (
        (torch.int32, -(1 << 20), -5), (torch.int64, -(1 << 50), 1 << 50), (torch.int64, -(1 << 40), -7),
        (torch.float32, -1000, -3), (torch.float32, -1000, 1000),
    ):
        for m, n in ((8, 32), (1, 16), (64, 2)):
            x = torch.randint(low, high, (m, n), generator=generator).to(dtype)
            for axis in (0, 1):
                left = m if axis == 1 else n
                sums, most = (torch.zeros(left, dtype=dtype, device=device()) for _ in range(2))
                running = torch.zeros(m, n, dtype=dtype, device=device())
                reduce_kernel[(1,)](x.to(device()), sums, most, running, AXIS=axis, M=m, N=n)
                what = f"{dtype} [{m}, {n}] along {axis}"
                assert torch.equal(sums.cpu(), x.sum(axis, dtype=dtype)), f"sum_of {what}"
                assert torch.equal(most.cpu(), x.amax(axis)), f"max_of {what}"
                assert torch.equal(running.cpu(), x.cumsum(axis, dtype=dtype)), f"running_sum {what}"
            total, most = (torch.zeros(1, dtype=dtype, device=device()) for _ in range(2))
            total_kernel[(1,)](x.to(device()), total, most, N=m * n)
            assert total.item() == x.sum().item() and most.item() == x.max().item(), f"{dtype} [{m * n}]"


def test_sums_and_largest():
    on_ranks(1, adds_up)


@td.jit
def pick_kernel(values_ptr, indices_ptr, out_ptr, N: tl.constexpr, COUNT: tl.constexpr):
    values, indices = tl.load(values_ptr + tl.arange(0, N)), tl.load(indices_ptr + tl.arange(0, N))
    for i in range(COUNT):
        tl.store(out_ptr + i, td.gather_lane(values, indices, i))


def picks():
    """Values of -1 and 0 are values; an index that is not there gives -1."""
    for dtype in (torch.int32, torch.int64):
        values = torch.tensor([5, -1, 0, 1 << 30, 7, 8, 9, 10], dtype=dtype)
        indices = torch.tensor([3, 1, 0, 5, -1, 9, 7, 6], dtype=torch.int32)
        out = torch.full((8,), -7, dtype=dtype, device=device())
        pick_kernel[(1,)](values.to(device()), indices.to(device()), out, N=8, COUNT=8)
        assert out.tolist() == [0, -1, -1, 5, -1, 1 << 30, 10, 9], out.tolist()


def test_pick():
    on_ranks(1, picks)


@td.jit
def turns_kernel(there_ptr, turns_ptr, count_ptr, N: tl.constexpr):
    offs = tl.arange(0, N)
    turns, count = td.compact_indices(tl.load(there_ptr + offs) != 0)
    tl.store(turns_ptr + offs, turns)
    tl.store(count_ptr, count)


def takes_turns():
    for there in ([1], [0], [0, 1, 1, 0, 1, 0, 0, 1], [1] * 8, [0] * 8, [0] * 7 + [1]):
        turns = torch.full((len(there),), -7, dtype=torch.int32, device=device())
        count = torch.full((1,), -7, dtype=torch.int32, device=device())
        turns_kernel[(1,)](torch.tensor(there, device=device()), turns, count, N=len(there))
        expected = [sum(there[:i]) if own else -1 for i, own in enumerate(there)]
        assert turns.tolist() == expected and count.item() == sum(there), f"{there}: {turns.tolist()}"


def test_turns():
    on_ranks(1, takes_turns)


@td.jit
def to_e4m3_kernel(x_ptr, codes_ptr, BLOCK: tl.constexpr, CONVERTS: tl.constexpr):
    offs = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(codes_ptr + offs, td.to_e4m3(tl.load(x_ptr + offs), CONVERTS))


def has_the_codes_of_torch(by_instruction=False):
    """All bf16 and fp16 numbers, so all of e4m3 and the middles between them, and those next to the middles."""
    codes = torch.arange(128).to(torch.uint8).view(torch.float8_e4m3fn).float()[:127]
    middles = torch.cat([(codes[1:] + codes[:-1]) / 2, torch.tensor([448.0, 464.0, 480.0, 512.0])]).view(torch.int32)
    near = torch.cat([middles + offset for offset in (-1, 0, 1)]).view(torch.float32)
    x = torch.cat([floats_to_round(), near, -near])
    x = torch.nn.functional.pad(x, (0, -x.numel() % 8192), value=torch.inf)
    found = torch.empty(x.shape, dtype=torch.uint8, device=device())
    to_e4m3_kernel[(x.numel() // 8192,)](x.to(device()), found, BLOCK=8192, CONVERTS=by_instruction)
    expected = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)  # torch's own cast has no largest number, but NaN
    assert x.isnan().any() and x.isinf().any() and len(expected.view(torch.uint8).unique()) == 256
    differs = found.cpu() != expected.view(torch.uint8)
    if by_instruction:  # what is no number may lose its sign
        differs &= ~(x.isnan() & (found.cpu() & 0x7F == 0x7F))
    wrong = differs.nonzero().flatten()
    some = [(x[i].item(), found[i].item()) for i in wrong[:5]]
    assert len(wrong) == 0, f"{len(wrong)} of {x.numel()} have another code, such as {some}"


def test_codes_are_those_of_torch():
    on_ranks(1, has_the_codes_of_torch)


@pytest.mark.skipif(
    DEVICE == "cpu" or not torch.cuda.is_available() or torch.cuda.get_device_capability() < (8, 9),
    reason="needs a GPU that makes codes of numbers",
)
def test_codes_by_instruction_are_those_of_torch():
    on_ranks(1, has_the_codes_of_torch, True)
