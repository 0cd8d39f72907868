"""Sums of tokens by the warp-specialized moe_gemm_rs, on the CPU and in random order."""

from types import SimpleNamespace

import numpy as np
import pytest

from tdkernels.ops.experts.tp_moe.launch_specialized import _slice_columns
from tdkernels.rounding import cdiv, next_power_of_2, round_up
from tests.ops.experts.tp_moe.specialized_protocol import (
    ADD_SOURCE,
    MAX_STAGES,
    SEEDS,
    STRIDE,
    Constexpr,
    Pointer,
    code_of_values,
)
from tests.ops.experts.tp_moe.specialized_sums import AddRun
from tests.support.mutants import check_found, mutated
from tests.support.thread_schedule import Stuck

BLOCK_COLUMNS = 512


def _columns(n):
    return min(next_power_of_2(n), BLOCK_COLUMNS)


def test_slices():
    """A slice has whole blocks of columns, and there are at most as many as counters."""
    for n in [*range(8, 9000, 8), *range(9000, 40000, 264), 1 << 17]:
        columns, slice_columns = _columns(n), _slice_columns(n, _columns(n))
        assert slice_columns * 256 % columns == 0 and cdiv(cdiv(n, 256), slice_columns) <= MAX_STAGES


# Tokens of a rank, N, tokens of a chunk, rows of tiles.
SUMS = [
    (5, 1032, 256, 2), (40, 1032, 16, 3), (70, 4200, 32, 1), (20, 128, 16, 2), (30, 200, 48, 4), (1, 8, 16, 1),
    (100, 264, 96, 2), (20, 600, 16, 0),
]


@pytest.mark.parametrize("rows, n, chunk_rows, tile_rows", SUMS)
@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("has_large", [False, True])
def test_sums_in_any_order(ranks, rows, n, chunk_rows, tile_rows, has_large):
    columns = _columns(n)
    for seed in range(SEEDS):
        sizes = ranks, rows, n, columns, _slice_columns(n, columns), chunk_rows, tile_rows
        AddRun(seed, *sizes, 1 + seed % 3, has_large)()


@pytest.mark.parametrize("columns, slice_columns", [(256, 2), (128, 1), (512, 4), (512, 6)])
def test_sums_of_other_slices(columns, slice_columns):
    """Blocks of columns and slices that no launch has with this N."""
    for seed in range(SEEDS):
        AddRun(seed, 2, 20, 1296, columns, slice_columns, 16, 2, 1 + seed % 3)()


FOR_PEER = """    _add_for_peer(
        tensors, data_at(ctx, half, owner) + me * shard_bytes, owner, token,
        gl.minimum(token + count * _TOKENS, M_shard), block * COLUMNS, M_shard, N, COLUMNS, CHOICES, WARPS,
        _tokens_of_pass(CHOICES, WARPS, PROMOTE), _passes_in_flight(CHOICES, PROMOTE),
    )
"""
NOTIFY = """    notify_by_warps(ctx, signal_at(ctx, half, me * of_shard + first), blocks, count, owner, signal, WARPS)
"""
ADD_SOURCE_OF_PEER = ADD_SOURCE[ADD_SOURCE.index(FOR_PEER) : ADD_SOURCE.index(NOTIFY) + len(NOTIFY)]
REST = ADD_SOURCE_OF_PEER[len(FOR_PEER) : -len(NOTIFY)]
OWN_FIRST = """        slice_id, within = item // (large[0] + large[1]), item % (large[0] + large[1])
        is_own = within < large[1]
        number = within - gl.where(is_own, 0, large[1])
"""
SUM_MUTANTS = {
    "a signal is set before its sums are stored": (FOR_PEER + REST + NOTIFY, REST + NOTIFY + FOR_PEER),
    "signals of a work item have a distance of 1": (
        "+ first), blocks, count, owner", "+ first), 1, count, owner",
    ),
    "a work item has one signal": (
        "+ first), blocks, count, owner", "+ first), blocks, gl.minimum(count, 1), owner",
    ),
    "the first slice has no own tokens": ("last * of_peers - gl.maximum(last - 1, 0)", "last * of_peers - last"),
    "own tokens of the slice before are those of the last": ("(own >= 0) & (own < of_before)", "own < 0"),
    "items for the last slice are those of the slice before": ("last - gl.where(is_before, 1, 0))", "last - 1)"),
    "the slice of own tokens is one too high": ("group + gl.where(is_own, 0, 1)", "group + 1"),
    "own tokens have the numbers of the peers' tokens": (
        "within - gl.where(is_own, of_peers, 0)", "within",
    ),
    "slices are not awaited": (
        "        complete = _await_tiles(ctx, slice_id, complete, slices, tiles_n, done_ptr, me)\n", "",
    ),
    "the last slice is not awaited": ("while complete <= slice_id", "while complete < slice_id"),
    "a slice is awaited without those before": (
        "        complete += 1\n    return complete", "        complete = slice_id + 1\n    return complete",
    ),
    "one tile is not awaited": (
        "rows * gl.minimum(columns, tiles_n - complete * columns)",
        "rows * gl.minimum(columns, tiles_n - complete * columns) - 1",
    ),
    "the last slice has as many tiles as the others": (
        "rows * gl.minimum(columns, tiles_n - complete * columns)", "rows * columns",
    ),
    "own items of the last slice are lost": (
        "+ small[0] + small[1])", "+ small[0])",
    ),
    "the last item is lost": ("while item < num_items", "while item < num_items - 1"),
    "own tokens do not wait for the peers": (
        "        if RANKS > 1:  # producer", "        if RANKS > 9:  # producer",
    ),
    "own tokens wait for another piece": (
        "wait_for_ranks(ctx, signal_at(ctx, half, first)", "wait_for_ranks(ctx, signal_at(ctx, half, group * blocks)",
    ),
    "ranks share signals": ("signal_at(ctx, half, me * of_shard + first)", "signal_at(ctx, half, first)"),
    "signals of a rank overlap": ("blocks, num_chunks * groups * blocks,", "blocks, num_chunks * groups,"),
    "the last slice has as many blocks as the others": (
        "count = gl.where(block < blocks, gl.minimum(signals, groups - group), 0)",
        "count = gl.minimum(signals, groups - group)",
    ),
    "a work item has groups of the next chunk": ("gl.minimum(signals, groups - group), 0)", "signals, 0)"),
    "groups of a chunk that do not fill a work item are lost": (
        "((groups + signals - 1) // signals) * of_slice", "(groups // signals) * of_slice",
    ),
    "peers' tokens are this rank's": ("chunk_at_turn(num_chunks + number", "chunk_at_turn(number"),
    "parts of own tokens are lost": ("+ number % parts) * (_TOKENS", ") * (_TOKENS"),
    "a part has the tokens of a signal": ("gl.minimum(token + _TOKENS // parts", "gl.minimum(token + _TOKENS"),
    "items of the last slice are large": ("gl.where(slice_id < last, signals, 1)", "signals"),
    "parts of the last slice are large": ("gl.where(slice_id < last, parts, PARTS)", "parts"),
    "signals are in the order of the blocks": (
        "first = (chunk * groups + group) * blocks + block",
        "first = (chunk * groups + group) + block * groups * num_chunks",
    ),
    "each partition has a fixed share": ("        item = item_of_warps(answer)\n", "        item += 9\n"),
    "blocks of a slice are those of the first": (
        "block, rest = slice_id * of_slice + number", "block, rest = number",
    ),
}


def _with_error(seed, source):
    """Return a run with 3 slices, of 2, 2 and 1 blocks, and 6 groups in a chunk, or one with 3 slices of one block."""
    sizes = [(3, 150, 1160, 256, 2, 96, 2), (2, 48, 1296, 512, 2, 16, 3)][seed % 2]
    return AddRun(seed, *sizes, 2, source=source)


@pytest.mark.parametrize("mutant", SUM_MUTANTS)
def test_errors_in_sums_are_found(mutant):
    check_found(_with_error, ADD_SOURCE, SUM_MUTANTS[mutant])


def test_own_tokens_that_come_before_the_tokens_of_peers_are_found():
    """All warps that add wait for peers, whose warps wait, too."""
    place = "        slice_id, is_own, number = _place_of_item(item, last, large, small)\n"
    source = mutated(ADD_SOURCE, (place, OWN_FIRST))
    with pytest.raises(Stuck, match="all wait"):
        AddRun(0, 2, 150, 1160, 256, 2, 96, 2, 1, source=source)()


@pytest.mark.parametrize("columns", [8, 16, 32])
@pytest.mark.parametrize("weighted, passes", [(False, 1), (True, 2), (True, 4)])
def test_values_of_sums(columns, weighted, passes):
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
            code["_add_for_peer"](tensors, to, 2, *sizes, columns, choices, 2, 4, passes)
            code["_add_own"](tensors, STRIDE, 2 * tokens * n, *sizes, 1, columns, choices, ranks, True, 4, 8)
    chosen = out.reshape(-1, n)[rows] * (weights[:, None] if weighted else 1)
    chosen = np.where(rows[:, None] >= 0, chosen, 0)
    sums = chosen.reshape(ranks, tokens, choices, n).sum(2)
    found = memory[2].reshape(ranks, tokens, n)
    np.testing.assert_allclose(found[1], sums[2])
    assert np.isnan(found[[0, 2]]).all()
    parts = memory[1].reshape(ranks, tokens, n)
    np.testing.assert_allclose(z.reshape(tokens, n), parts[0] + sums[1] + parts[2])
