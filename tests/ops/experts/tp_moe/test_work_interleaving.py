"""Order of a work list in which work items of another kind are interleaved with the tiles of a stage."""

import pytest
import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.common.work_interleaving import split_piece
from tests.support.ranks import device, on_ranks


@td.jit(do_not_specialize=["items", "tiles", "others", "lead"])
def _split_kernel(is_other_ptr, number_ptr, items, tiles, others, lead, BLOCK: tl.constexpr):
    for first in range(0, items, BLOCK):
        item = first + tl.arange(0, BLOCK)
        is_other, number = split_piece(item, tiles, others, lead)
        tl.store(is_other_ptr + item, is_other.to(tl.int32), mask=item < items)
        tl.store(number_ptr + item, number, mask=item < items)


def check_interleaving(tiles, others, lead):
    """Check that each item occurs once, in the order of its kind, after ``lead`` tiles and with the smallest gaps."""
    items = tiles + others
    is_other, number = (torch.full((items,), -1, dtype=torch.int32, device=device()) for _ in range(2))
    _split_kernel[(1,)](is_other, number, items, tiles, others, lead, BLOCK=1024)
    is_other, number = is_other.cpu(), number.cpu()
    for kind, count in ((0, tiles), (1, others)):
        assert number[is_other == kind].tolist() == list(range(count))
    lead = min(lead, tiles)
    assert not is_other[:lead].any()
    if others:
        before_last = is_other[lead:].nonzero().flatten()
        gaps = torch.diff(before_last, prepend=torch.tensor([-1])) - 1
        assert gaps.max() <= (tiles - lead) // others


@pytest.mark.parametrize("tiles, others, lead", [
    (1, 0, 0), (7, 0, 0), (0, 9, 3), (1, 1, 0), (10, 10, 0), (10, 3, 0), (3, 10, 0), (100, 7, 13), (13, 100, 5),
    (7, 7, 100), (64, 63, 1), (3600, 4096, 0), (3520, 4096, 132), (30000, 50, 132), (50000, 1, 0), (0, 50000, 0),
])
def test_each_item_occurs_once(tiles, others, lead):
    on_ranks(1, check_interleaving, tiles, others, lead)
