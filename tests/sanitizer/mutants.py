"""Mutants: kernels with a planted bug; the interpreter executes their source text with one line replaced."""

import contextlib
from dataclasses import dataclass
from importlib import import_module

from tdkernels.lang import signals


@contextlib.contextmanager
def mutated(kernel, old, new):
    """Make interpreted launches run ``kernel`` (a ``td.jit`` function) with ``old`` replaced by ``new``.

    Raises:   AssertionError if ``old`` does not occur exactly once in the source: then the mutant must be updated
    """
    rewriter, interpreted = kernel._interpreted.rewriter, kernel._interpreted
    prepare = rewriter._prepare_source

    def prepare_mutated(lines):
        source = prepare(lines)
        assert source.count(old) == 1, f"{old!r} is {source.count(old)} times in {kernel.fn.__name__}"
        assert old.count("\n") == new.count("\n"), "line numbers would change"
        return source.replace(old, new)

    rewriter._prepare_source = prepare_mutated
    interpreted.rewritten_fn.pop(kernel.fn, None)
    try:
        interpreted.rewrite()
        yield
    finally:
        del rewriter._prepare_source
        interpreted.rewritten_fn.pop(kernel.fn, None)


@dataclass(frozen=True)
class Mutant:
    """A bug that causes a data race in a variant.

    Attributes: variant, a name of ``tests.support.variants``; module, kernel, old, new as for ``mutated``; file, which
    one of the two accesses of a race must be in; calls, their number; backward, whether each call has a backward pass.
    A backward runs another operator, which orders accesses that would otherwise be a race; nvidia, (module, kernel,
    old, new) of the same bug in the code for NVIDIA GPUs, if that is another branch or function.
    """

    variant: str
    module: str
    kernel: str
    old: str
    new: str
    file: str
    calls: int = 2
    backward: bool = True
    nvidia: tuple = ()

    def planted(self):
        """Plant the bug in interpreted kernels; ``compiled_mutants.planted`` plants it in compiled ones."""
        return mutated(getattr(import_module(self.module), self.kernel), self.old, self.new)


# The steps of push_shard for a chunk and a peer.
_PUT = "        td.put(dst, shard + start, tl.minimum(chunk_bytes, shard_bytes - start), COPY_WORDS)\n"
_PUT_SCALES = (
    "        if scales is not None:\n"
    "            _push_scales(td.data_at(ctx, half, peer), chunk, scales)\n"
)
_NOTIFY = (
    "        word = td.signal_at(ctx, half, (me * num_chunks + chunk) * SLICES)\n"
    "        td.notify(ctx, word, peer, signal)  # waiter: the peer's tiles of this chunk\n"
)

# The steps of all_reduce_rms_norm for a piece of a row.
_SEND_PIECE = "        _send_to_all(ctx, slot, values, columns, mask & sent, me, RANKS, DTYPE)\n"
_NOTIFY_PIECE = (
    "        # waiter: the programs of every peer that receive this row\n"
    "        td.notify_all(ctx, signals + (me * tl.cast(rows, tl.int64) + row) * pieces + piece, signal)\n"
)

# The wait of gemm_ar_rms_norm for the tiles of a row.
_AWAIT_TILES = "        td.wait_plan_all(ctx, signals, tiles_m, signal, WITH_OWN=True)\n"

# The last steps of method "split" of flash_decode for a tile, and for all tiles of a program.
_STORE_TILE = "            store_parts(ctx, half, signal, o, lse, rows, tile, tiles, RANKS, RP, DVP)\n"
_MERGE_TILES = (
    "        else:\n"
    "            _store((o_ptr, lse_ptr, lse2_ptr), o, lse, entry, head, block_r * RP + rows, columns, heads, TILE)\n"
    "    if RANKS > 1:\n"
    "        merge_ranks(\n"
    "            ctx, td.rank(ctx), half, signal, begin, end - begin, tiles, tiles_of_entry, heads, o_ptr, lse_ptr,\n"
    "            lse2_ptr, RANKS, TILE, RP, False, (None, 0),\n"
    "        )\n"
    "        td.finish(ctx)"
)
_MERGE_TILE = (
    "            merge_ranks(\n"
    "                ctx, td.rank(ctx), half, signal, tile, 1, tiles, tiles_of_entry, heads, o_ptr, lse_ptr,\n"
    "                lse2_ptr, RANKS, TILE, RP, False, (None, 0),\n"
    "            )\n"
)


def _spin_with(load):
    """Return ``nvidia`` of a mutant that reads signals with another instruction; the function inserts a constant."""
    return "tdkernels.lang.signals", "_spin_ptx", "_SPIN,", f"{signals._SPIN.value.replace('ld.acquire.sys', load)!r},"


# The letters refer to the reliability report.
MUTANTS = {
    "A: push_shard notifies before it puts": Mutant(
        "ag_gemm push", "tdkernels.ops.collectives.kernel_async_all_gather", "push_shard",
        f"{_PUT}{_PUT_SCALES}{_NOTIFY}", f"{_NOTIFY}{_PUT}{_PUT_SCALES}", "kernel_async_all_gather.py",
    ),
    "the scales of a chunk are sent after its signal": Mutant(
        "ag_gemm push scaled by block", "tdkernels.ops.collectives.kernel_async_all_gather", "push_shard",
        f"{_PUT}{_PUT_SCALES}{_NOTIFY}", f"{_PUT}{_NOTIFY}{_PUT_SCALES}", "kernel_async_all_gather.py",
    ),
    "C: a call always uses half 0": Mutant(
        "ag_gemm push", "tdkernels.lang.calls", "call",
        "(number % 2).to(tl.int32)", "(number * 0).to(tl.int32)", "kernel_async_all_gather.py", 3, False,
    ),
    "F: begin_kernel does not wait": Mutant(
        "ag_gemm copy_engine", "tdkernels.ops.collectives.kernel_async_all_gather", "begin_kernel",
        "        td.wait_plan(ctx, td.ready_at(ctx, peer), signal, peer)", "        pass", "async_all_gather.py", 3,
    ),
    "H: gemm_rs forwards without waiting for its own tiles": Mutant(
        "gemm_rs forward", "tdkernels.ops.common.staging", "copy_out_staged",
        '        td.wait(ctx, td.flag_at(ctx, staged + i), epoch, me, SCOPE="gpu")', "        pass", "staging.py",
    ),
    "I: a one-shot sum does not wait": Mutant(
        "gemm_ar one_shot", "tdkernels.ops.dense.kernel_one_shot", "gemm_one_shot_kernel",
        "td.wait_plan_all(ctx, td.signal_at(ctx, half, tile), tiles, signal)", "pass", "kernel_one_shot.py",
    ),
    "K: a release store is relaxed": Mutant(
        "gemm_rs forward", "tdkernels.lang.memory", "store_release_if",
        'sem="release", scope=SCOPE', 'sem="relaxed", scope=SCOPE', "staging.py",
        nvidia=("tdkernels.lang.memory", "store_release_if", "@first st.release.", "@first st.relaxed."),
    ),
    "L: an acquire load is relaxed": Mutant(
        "gemm_ar one_shot", "tdkernels.lang.memory", "load_acquire",
        'sem="acquire", scope=SCOPE', 'sem="relaxed", scope=SCOPE', "kernel_one_shot.py",
        nvidia=_spin_with("ld.relaxed.sys"),
    ),
    "a release between ranks has the scope of a GPU": Mutant(
        "ag_gemm push", "tdkernels.lang.signals", "notify",
        "store_release_if(remote, value, goes.to(tl.int32), SCOPE)",
        'store_release_if(remote, value, goes.to(tl.int32), "gpu")', "kernel_async_all_gather.py",
    ),
    "an acquire between ranks has the scope of a GPU": Mutant(
        "ag_gemm push", "tdkernels.lang.signals", "wait_plan",
        "_spin(ctx, signal_ptr, start, peer, SCOPE, 1)", '_spin(ctx, signal_ptr, start, peer, "gpu", 1)',
        "kernel_async_all_gather.py", nvidia=_spin_with("ld.acquire.gpu"),
    ),
    "the signal of a piece of a row is sent before the piece": Mutant(
        "all_reduce_rms_norm one_shot", "tdkernels.ops.collectives.norm.kernel", "_send_pieces",
        f"{_SEND_PIECE}{_NOTIFY_PIECE}", f"{_NOTIFY_PIECE}{_SEND_PIECE}", "rank_reduce.py",
    ),
    "rows of peers are normalized before they have arrived": Mutant(
        "all_reduce_layer_norm two_shot", "tdkernels.ops.collectives.norm.kernel", "all_reduce_norm_two_shot_kernel",
        "td.wait_plan_all(ctx, signals + RANKS * rounds + round_, rounds, signal)", "pass", "kernel.py",
    ),
    "every tile of a row sends the signal of the row": Mutant(
        "gemm_ar_rms_norm fused", "tdkernels.ops.dense.gemm_ar_norm.kernel", "_multiply",
        "if td.is_last_arriver(td.flag_at(ctx, tiles_m * tiles_n + tile_m), tiles_n):", "if tile_m >= 0:",
        "rank_reduce.py",
    ),
    "a row is normalized before its tiles have arrived": Mutant(
        "gemm_ar_layer_norm fused, split K", "tdkernels.ops.dense.gemm_ar_norm.kernel", "_receive_row",
        f"{_AWAIT_TILES}        r = _rounded_sum(", "        pass\n        r = _rounded_sum(", "rank_reduce.py",
    ),
    "a long row is normalized before its tiles have arrived": Mutant(
        "gemm_ar_rms_norm fused, wide", "tdkernels.ops.dense.gemm_ar_norm.kernel", "_receive_row",
        f"{_AWAIT_TILES}        for start in", "        pass\n        for start in", "rank_reduce.py",
    ),
    "a program does not wait for the tiles of its own rank": Mutant(
        "gemm_ar_layer_norm fused, shared rows", "tdkernels.ops.dense.gemm_ar_norm.kernel", "_receive_row",
        f"{_AWAIT_TILES}        r = _rounded_sum(", f"{_AWAIT_TILES.replace('WITH_OWN=True', 'WITH_OWN=False')}"
        "        r = _rounded_sum(", "rank_reduce.py",
    ),
    "is_last_arriver is relaxed": Mutant(
        "gemm_ar one_shot split K", "tdkernels.lang.signals", "is_last_arriver",
        'sem="acq_rel", scope="gpu"', 'sem="relaxed", scope="gpu"', "small_m_gemm.py",
    ),
    "the signal of a tile of a decode is sent before the tile": Mutant(
        "flash_decode split, 3 ranks", "tdkernels.ops.attention.flash_decode.kernel_split", "flash_decode_join_kernel",
        f"{_STORE_TILE}{_MERGE_TILES}", f"{_MERGE_TILE}{_STORE_TILE}\n\n\n    td.finish(ctx)", "kernel_merge.py",
    ),
    "tiles of a decode are merged before they have arrived": Mutant(
        "flash_decode split, 2 ranks", "tdkernels.ops.attention.flash_decode.kernel_merge", "merge_ranks",
        "td.wait_plan_all(ctx, td.signal_at(ctx, half, ours), tiles, signal, count=count)", "pass", "kernel_merge.py",
    ),
    "a network put is awaited without await_put": Mutant(
        "ag_gemm across nodes of 1", "tdkernels.ops.collectives.kernel_async_multinode", "await_chunk",
        "td.await_put(", "td.wait_plan(", "kernel_async_multinode.py",
    ),
}
