"""Sums of tokens by the warp-specialized moe_gemm_rs, on the CPU and in random order."""

import itertools
from types import SimpleNamespace

import numpy as np
import pytest

from tdkernels.ops.experts.tp_moe import launch_gemm_rs
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import Piece
from tdkernels.ops.experts.tp_moe.launch_specialized import packed, slices_of
from tdkernels.ops.experts.tp_moe.specialized import slices
from tdkernels.rounding import next_power_of_2, round_up
from tests.ops.experts.tp_moe.specialized_protocol import (
    ADD_SOURCE,
    SEEDS,
    STRIDE,
    Constexpr,
    Pointer,
    code_of_values,
)
from tests.ops.experts.tp_moe.specialized_sums import AddRun
from tests.support.mutants import check_found, mutated
from tests.support.thread_schedule import Stuck

MAX_SLICES, NO_SLICE = slices.MAX_SLICES.value, slices.NO_SLICE.value

BLOCK_COLUMNS, NARROW = 512, launch_gemm_rs._NARROW


def _columns(n):
    return min(next_power_of_2(n), BLOCK_COLUMNS)


def test_slices():
    """A slice has whole blocks of columns, and there are at most as many as the kernel can take."""
    widths = [*range(8, 9000, 8), *range(9000, 40000, 264), 1 << 17, 1 << 18]
    for n, most in itertools.product(widths, (BLOCK_COLUMNS, NARROW)):
        columns = min(_columns(n), most)
        firsts, unit = slices_of(n, columns)
        assert unit * 256 % columns == 0 and len(firsts) <= MAX_SLICES and firsts[0] == 0
        assert sorted(set(firsts)) == firsts and firsts[-1] * unit * 256 < n and firsts[-1] < NO_SLICE
        number = packed(firsts)
        assert 1 << 32 < number < 1 << 63, "Triton would pass it as a number of another type"
        assert [number >> 8 * i & 255 for i in range(8)] == firsts + [NO_SLICE] * (8 - len(firsts))


@pytest.mark.parametrize("tokens, n, ranks, columns", [
    (16, 4096, 8, 256), (17, 4096, 8, 512), (16, 8192, 8, 512), (1, 200, 2, 256), (1, 100, 2, 128), (512, 4096, 8, 512),
])
def test_width_of_pieces(tokens, n, ranks, columns):
    """Pieces are narrower if there are fewer than 128."""
    routing = SimpleNamespace(world_size=ranks, tokens=tokens, num_choices=2)
    assert launch_gemm_rs.sum_piece_of(n, routing) == Piece(16, columns, 2)


# Tokens of a rank, N, tokens of a chunk, rows of tiles.
SUMS = [
    (5, 1032, 256, 2), (40, 1032, 16, 3), (70, 4200, 32, 1), (20, 128, 16, 2), (30, 200, 48, 4), (1, 8, 16, 1),
    (100, 264, 96, 2), (20, 600, 16, 0),
]


@pytest.mark.parametrize("rows, n, chunk_rows, tile_rows", SUMS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("has_large", [False, True])
def test_sums_in_any_order(ranks, rows, n, chunk_rows, tile_rows, has_large):
    for seed in range(SEEDS):
        columns = min(_columns(n), NARROW if seed % 2 else BLOCK_COLUMNS)
        sizes = ranks, rows, n, columns, slices_of(n, columns), chunk_rows, tile_rows
        AddRun(seed, *sizes, 1 + seed % 3, None if has_large else 0, own_delay=1 + seed % 5)()


@pytest.mark.parametrize("columns, firsts, unit, large, delay", [
    (256, [0, 2, 3], 2, 2, 1), (128, [0, 1, 2, 3, 4, 5], 1, 3, 2), (512, [0, 1], 4, 1, 3), (512, [0], 6, 0, 1),
    (512, [0, 1, 2], 2, 3, 2), (256, [0, 3, 5], 1, 1, 4),
])
def test_sums_of_other_slices(columns, firsts, unit, large, delay):
    """Blocks of columns, slices and orders that no launch has with this N."""
    for seed in range(SEEDS):
        AddRun(seed, 2, 20, 1296, columns, (firsts, unit), 16, 2, 1 + seed % 3, large, own_delay=delay)()


FOR_PEER = """    add_for_peer(
        tensors, data_at(ctx, half, owner) + me * shard_bytes, owner, token,
        gl.minimum(token + count * _TOKENS, M_shard), block * COLUMNS, M_shard, N, COLUMNS, CHOICES, WARPS,
        tokens_of_pass(CHOICES, WARPS, PROMOTE, COLUMNS), passes_in_flight(CHOICES, PROMOTE),
    )
"""
NOTIFY = """    notify_by_warps(ctx, signal_at(ctx, half, me * of_shard + first), blocks, count, owner, signal, WARPS)
"""
ADD_SOURCE_OF_PEER = ADD_SOURCE[ADD_SOURCE.index(FOR_PEER) : ADD_SOURCE.index(NOTIFY) + len(NOTIFY)]
REST = ADD_SOURCE_OF_PEER[len(FOR_PEER) : -len(NOTIFY)]
OWN_FIRST = """        of_peers, of_own = _items_of_turn(1, queue, COLUMNS, RANKS)
        slice_id, within = item // (of_peers + of_own), item % (of_peers + of_own)
        is_own = within < of_own
        number = within - gl.where(is_own, 0, of_own)
"""
SUM_MUTANTS = {
    "a signal is set before its sums are stored": (FOR_PEER + REST + NOTIFY, REST + NOTIFY + FOR_PEER),
    "signals of a work item have a distance of 1": (
        "+ first), blocks, count, owner", "+ first), 1, count, owner",
    ),
    "a work item has one signal": (
        "+ first), blocks, count, owner", "+ first), blocks, gl.minimum(count, 1), owner",
    ),
    "the last turn is lost": ("range(last + 1 + own_delay)", "range(last + own_delay)"),
    "own tokens have the numbers of the peers' tokens": ("- gl.where(is_own, of_peers, 0)", "- 0"),
    "a turn has no items for own tokens": ("end += of_peers + of_own", "end += of_peers"),
    "the first item of a turn is in the turn before": ("turn += gl.where(item >= end", "turn += gl.where(item > end"),
    "a turn begins with its last item": ("first = gl.where(item >= end, end, first)", "first = end"),
    "slices are not awaited": (
        "        complete = _await_tiles(ctx, slice_id, complete, slices, tiles_n, done_ptr, me)\n", "",
    ),
    "the last slice is not awaited": ("while complete <= slice_id", "while complete < slice_id"),
    "a slice is awaited without those before": (
        "        complete += 1\n    return complete", "        complete = slice_id + 1\n    return complete",
    ),
    "one tile is not awaited": (
        "slices[0] * columns_of_slice(slices, complete, tiles_n)",
        "slices[0] * columns_of_slice(slices, complete, tiles_n) - 1",
    ),
    "all slices have as many tiles as the first": (
        "columns_of_slice(slices, complete, tiles_n)", "columns_of_slice(slices, 0, tiles_n)",
    ),
    "the last item is lost": ("while item < num_items", "while item < num_items - 1"),
    "own tokens do not wait for the peers": (
        "    if RANKS > 1:  # producer", "    if RANKS > 9:  # producer",
    ),
    "own tokens wait for another piece": (
        "wait_for_ranks(ctx, signal_at(ctx, half, first)", "wait_for_ranks(ctx, signal_at(ctx, half, group * blocks)",
    ),
    "ranks share signals": ("signal_at(ctx, half, me * of_shard + first)", "signal_at(ctx, half, first)"),
    "signals of a rank overlap": ("blocks, num_chunks * groups * blocks,", "blocks, num_chunks * groups,"),
    "the last slice has as many blocks as the others": ("* BLOCK_N // COLUMNS, blocks)", "* BLOCK_N // COLUMNS, 99)"),
    "a work item has groups of the next chunk": ("count = gl.minimum(signals, groups - group)", "count = signals"),
    "groups of a chunk that do not fill a work item are lost": (
        "of_peers *= (RANKS - 1) * num_chunks * ((groups + signals - 1) // signals)",
        "of_peers *= (RANKS - 1) * num_chunks * (groups // signals)",
    ),
    "peers' tokens are this rank's": ("chunk_at_turn(num_chunks + number", "chunk_at_turn(number"),
    "parts of own tokens are lost": ("+ number % parts) * (_TOKENS", ") * (_TOKENS"),
    "a part has the tokens of a signal": ("gl.minimum(token + _TOKENS // parts", "gl.minimum(token + _TOKENS"),
    "items of all slices are large": (
        "signals, parts = _size_of_items(slice_id,", "signals, parts = _size_of_items(0,",
    ),
    "the peers' items are counted as large": ("_size_of_items(turn, large_slices)", "_size_of_items(0, large_slices)"),
    "own items are counted as large": ("_size_of_items(own, large_slices)", "_size_of_items(0, large_slices)"),
    "signals are in the order of the blocks": (
        "first = (chunk * groups + group) * blocks + block",
        "first = (chunk * groups + group) + block * groups * num_chunks",
    ),
    "each partition has a fixed share": (
        "            item = _run_item_for_peer(", "            item += 9\n            _run_item_for_peer(",
    ),
    "blocks of a slice are those of the first": ("block, rest = first_block + number", "block, rest = number"),
}


SLICES = [0, 1, 2], 2  # of two tile columns each


def _with_error(seed, source):
    """Return a run with 3 slices, of 2, 2 and 1 blocks, and 6 groups in a chunk, or one with 3 slices of one block."""
    sizes = [(3, 150, 1160, 256, SLICES, 96, 2), (2, 48, 1296, 512, SLICES, 16, 3)][seed % 2]
    return AddRun(seed, *sizes, 2, source=source)


@pytest.mark.parametrize("mutant", SUM_MUTANTS)
def test_errors_in_sums_are_found(mutant):
    check_found(_with_error, ADD_SOURCE, SUM_MUTANTS[mutant])


def test_own_tokens_that_come_before_the_tokens_of_peers_are_found():
    """All warps that add wait for peers, whose warps wait, too."""
    place = "        slice_id, is_own, number = _place_of_item(item, queue, COLUMNS, RANKS)\n"
    source = mutated(ADD_SOURCE, (place, OWN_FIRST))
    with pytest.raises(Stuck, match="all wait"):
        AddRun(0, 2, 150, 1160, 256, SLICES, 96, 2, 1, source=source)()


@pytest.mark.parametrize("columns", [8, 16, 32])
@pytest.mark.parametrize("weighted, passes, few", [(False, 1, False), (True, 2, False), (True, 4, True)])
def test_values_of_sums(columns, weighted, passes, few):
    """Rank 1 stores its sums for the tokens of rank 2, and adds up its own."""
    code, memory = code_of_values(ADD_SOURCE)
    rng, tokens, choices, ranks, n = np.random.default_rng(1), 21, 3, 3, 24
    rows = rng.integers(-1, 40, ranks * tokens * choices)
    out, z, weights = rng.random(40 * n), np.full(tokens * n, np.nan), rng.random(len(rows))
    weights[rows < 0] = np.nan  # must not be read
    dtype = SimpleNamespace(element_ty=Constexpr(2))
    z_ptr = Pointer(z)
    z_ptr.dtype = dtype
    tensors = Pointer(out), z_ptr, Pointer(rows), Pointer(weights) if weighted else None
    memory[1], memory[2] = rng.random(ranks * tokens * n), np.full(ranks * tokens * n, np.nan)
    for token in range(0, round_up(tokens, 16), 16):
        end = min(token + 16, tokens)
        for column in range(0, n, columns):
            sizes, to = (token, end, column, tokens, n), 2 * STRIDE + 2 * tokens * n
            code["add_for_peer"](tensors, to, 2, *sizes, columns, choices, 2, 4, passes)
            code["add_own"](tensors, STRIDE, 2 * tokens * n, *sizes, 1, columns, choices, ranks, True, 4, few)
    chosen = out.reshape(-1, n)[rows] * (weights[:, None] if weighted else 1)
    chosen = np.where(rows[:, None] >= 0, chosen, 0)
    sums = chosen.reshape(ranks, tokens, choices, n).sum(2)
    found = memory[2].reshape(ranks, tokens, n)
    np.testing.assert_allclose(found[1], sums[2])
    assert np.isnan(found[[0, 2]]).all()
    parts = memory[1].reshape(ranks, tokens, n)
    np.testing.assert_allclose(z.reshape(tokens, n), parts[0] + sums[1] + parts[2])
