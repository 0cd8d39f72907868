"""Sums of tokens by the warp-specialized moe_gemm_rs, on the CPU and in random order."""

from types import SimpleNamespace

import numpy as np
import pytest

from tdkernels.ops.experts.tp_moe.launch_specialized import _slice_columns
from tdkernels.rounding import cdiv, next_power_of_2, round_up
from tests.ops.dense.specialized_protocol import Stuck
from tests.ops.experts.tp_moe.specialized_protocol import (
    ADD_SOURCE,
    MAX_STAGES,
    SEEDS,
    Constexpr,
    Pointer,
    code_of_values,
)
from tests.ops.experts.tp_moe.specialized_sums import AddRun
from tests.support.mutants import check_found, mutated

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
def test_sums_in_any_order(ranks, rows, n, chunk_rows, tile_rows):
    columns = _columns(n)
    for seed in range(SEEDS):
        AddRun(seed, ranks, rows, n, columns, _slice_columns(n, columns), chunk_rows, tile_rows, 1 + seed % 3)()


@pytest.mark.parametrize("columns, slice_columns", [(256, 2), (128, 1), (512, 4), (512, 6)])
def test_sums_of_other_slices(columns, slice_columns):
    """Blocks of columns and slices that no launch has with this N."""
    for seed in range(SEEDS):
        AddRun(seed, 2, 20, 1296, columns, slice_columns, 16, 2, 1 + seed % 3)()


FOR_PEER = """            for other in range(count):
                _add_for_peer(
                    ctx, tensors, half, owner, token + other * _TOKENS, column, M_shard, N, shard_bytes, me, COLUMNS,
                    CHOICES, WARPS, AT_ONCE,
                )
"""
NOTIFY = """            # waiter: the owner's work items for the same tokens and columns
            to = signal_at(ctx, half, me * of_shard + first)
            notify_by_warps(ctx, to, blocks, count, owner, signal, WARPS)
"""
OWN_FIRST = """        slice_id, within = item // (of_own + of_peers), item % (of_own + of_peers)
        is_own = within < of_own
        number = within - gl.where(is_own, 0, of_own)
"""
SUM_MUTANTS = {
    "a signal is set before its sums are stored": (FOR_PEER + NOTIFY, NOTIFY + FOR_PEER),
    "signals of a work item have a distance of 1": (
        "notify_by_warps(ctx, to, blocks, count", "notify_by_warps(ctx, to, 1, count",
    ),
    "a work item has one signal": (
        "notify_by_warps(ctx, to, blocks, count", "notify_by_warps(ctx, to, blocks, gl.minimum(count, 1)",
    ),
    "own tokens of the last slice come after tokens of peers": (
        "is_last = group == num_slices - 1", "is_last = group == num_slices",
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
        "sizes[0] * (of_peers + of_own))", "sizes[0] * (of_peers + of_own) - of_own)",
    ),
    "the last item is lost": ("while item < num_items", "while item < num_items - 1"),
    "own tokens do not wait for the peers": (
        "            if RANKS > 1:  # producer", "            if RANKS > 9:  # producer",
    ),
    "own tokens wait for another piece": (
        "wait_for_ranks(ctx, signal_at(ctx, half, first)", "wait_for_ranks(ctx, signal_at(ctx, half, first - block)",
    ),
    "ranks share signals": ("signal_at(ctx, half, me * of_shard + first)", "signal_at(ctx, half, first)"),
    "signals of a rank overlap": ("of_shard = num_chunks * groups * blocks", "of_shard = num_chunks * groups"),
    "the last slice has as many blocks as the others": (
        "count = gl.where(block < blocks, gl.minimum(count, groups - group), 0)",
        "count = gl.minimum(count, groups - group)",
    ),
    "a work item has groups of the next chunk": ("gl.minimum(count, groups - group), 0)", "count, 0)"),
    "groups of a chunk that do not fill a work item are lost": (
        "wide_groups = (groups + _GROUPS - 1) // _GROUPS", "wide_groups = groups // _GROUPS",
    ),
    "peers' tokens are this rank's": ("gl.where(is_own, 0, num_chunks), me, RANKS", "0, me, RANKS"),
    "signals are in the order of the blocks": (
        "first = (chunk * groups + group) * blocks + block",
        "first = (chunk * groups + group) + block * groups * num_chunks",
    ),
    "each partition has a fixed share": ("        item = item_of_warps(answer)\n", "        item += 9\n"),
    "blocks of a slice are those of the first": (
        "block = slice_id * of_slice + number % of_slice", "block = number % of_slice",
    ),
}


def _with_error(seed, source):
    """Return a run with 3 slices, of 2, 2 and 1 blocks, and 6 groups in a chunk, or one with 3 slices of one block."""
    sizes = [(3, 150, 1160, 256, 2, 96, 2), (2, 40, 1296, 512, 2, 16, 3)][seed % 2]
    return AddRun(seed, *sizes, 2, source)


@pytest.mark.parametrize("mutant", SUM_MUTANTS)
def test_errors_in_sums_are_found(mutant):
    check_found(_with_error, ADD_SOURCE, SUM_MUTANTS[mutant])


def test_own_tokens_that_come_before_the_tokens_of_peers_are_found():
    """All warps that add wait for peers, whose warps wait, too."""
    source = mutated(ADD_SOURCE, ("        slice_id, is_own, number = _place_of_item(item, sizes)\n", OWN_FIRST))
    with pytest.raises(Stuck, match="all wait"):
        AddRun(0, 2, 150, 1160, 256, 2, 96, 2, 1, source)()


@pytest.mark.parametrize("columns", [8, 16, 32])
@pytest.mark.parametrize("weighted", [False, True])
def test_values_of_sums(columns, weighted):
    """Rank 1 stores its sums for the tokens of rank 2, and adds up its own."""
    code, memory = code_of_values(ADD_SOURCE)
    rng, tokens, choices, ranks, n = np.random.default_rng(1), 21, 3, 3, 24
    rows = rng.integers(-1, 40, ranks * tokens * choices)
    out, z, weights = rng.random(40 * n), np.full(tokens * n, np.nan), rng.random(len(rows))
    dtype = SimpleNamespace(element_ty=Constexpr(2))
    z_ptr = Pointer(z)
    z_ptr.dtype = dtype
    tensors = Pointer(out), z_ptr, Pointer(rows), Pointer(weights) if weighted else None
    memory[1], memory[2] = rng.random(ranks * tokens * n), np.full(ranks * tokens * n, np.nan)
    for token in range(0, round_up(tokens, 16), 16):
        for column in range(0, n, columns):
            shared = token, column, tokens, n, 2 * tokens * n, 1, columns, choices
            code["_add_for_peer"](None, tensors, 1, 2, *shared, 2, 4)
            code["_add_own"](None, tensors, 1, *shared, ranks, True, 4, 8)
    chosen = np.where(rows[:, None] >= 0, out.reshape(-1, n)[rows], 0) * (weights[:, None] if weighted else 1)
    sums = chosen.reshape(ranks, tokens, choices, n).sum(2)
    found = memory[2].reshape(ranks, tokens, n)
    np.testing.assert_allclose(found[1], sums[2])
    assert np.isnan(found[[0, 2]]).all()
    parts = memory[1].reshape(ranks, tokens, n)
    np.testing.assert_allclose(z.reshape(tokens, n), parts[0] + sums[1] + parts[2])
