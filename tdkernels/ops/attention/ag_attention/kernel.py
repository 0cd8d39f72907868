"""The kernel behind ag_attention: some programs push our keys and values, the others attend to what has arrived.

Pieces of work, by number: the first push (``push_rows``); then come tiles, a block of queries of one head
each, those with most keys first; the last one waits until every peer has begun the call. A tile goes through its own
rank's keys first, then through those of the ranks below, one by one. The first tile of a program waits chunk by chunk;
what a program once knows to be there its later tiles read without a wait.
"""

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.attention.tile import (
    ALL,
    CONTIGUOUS,
    LN_2,
    LOG2_E,
    ZIGZAG,
    accumulate,
    await_chunks,
    await_peers,
    blocks_of,
    chunks_of,
    keys_seen,
    load_rows,
    pieces_of,
    push_rows,
    slot_bytes,
    store_rows_of,
)
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import text_of
from tdkernels.ops.common.tile_config import next_power_of_2
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, launch_kept, to_be_made
from tdkernels.symm import get_workspace

_COPY_WORDS = 4096


# ---- the kernel ----


@td.jit
def _attend(
    acc, top, total, q, k_desc, v_desc, k_at, v_at, plane, sheet, first_row, head, heads, first, last, limits, stop,
    scale, DTYPE: tl.constexpr, D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, USE_TMA: tl.constexpr, MASKED: tl.constexpr, CLEAN: tl.constexpr,
    PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The online softmax, over blocks ``first`` to ``last`` of keys of one shard; (acc, top, total) after them.

    ``acc`` are the weighted values, ``total`` the weights' sums, relative to 2 ** ``top``. If MASKED, a query sees the
    keys below its limit. ``stop``: how many keys there are.
    """
    for block in tl.range(first, last, num_stages=STAGES):
        row = block * BLOCK_K
        k = load_rows(
            k_desc, k_at, plane, sheet, first_row, head, heads, row, stop,
            DTYPE, D, BLOCK_K, BLOCK_D, USE_TMA, CLEAN,
        )  # fmt: skip
        scores = td.dot(q, k.T, tl.full((BLOCK_Q, BLOCK_K), 0.0, tl.float32), PRECISION)
        if MASKED:
            offs = row + tl.arange(0, BLOCK_K)
            scores = tl.where(offs[None, :] < limits[:, None], scores, float("-inf"))
        higher = tl.maximum(top, td.max_of(scores, 1) * scale)
        weights = tl.exp2(scores * scale - higher[:, None])
        shrink = tl.exp2(top - higher)
        total = total * shrink + td.sum_of(weights, 1)
        acc = acc * shrink[:, None]
        v = load_rows(
            v_desc, v_at, plane, sheet, first_row, head, heads, row, stop,
            DTYPE, DV, BLOCK_K, BLOCK_DV, USE_TMA, CLEAN,
        )  # fmt: skip
        acc = accumulate(acc, weights, v, PRECISION)
        top = higher
    return acc, top, total


@td.jit
def query_tile(tile, batch, rows, heads, kv_heads, BLOCK_Q: tl.constexpr):
    """(batch entry, head, its head of keys, first query) of a tile; later queries, which see more, come first."""
    per_block = batch * heads
    row = ((rows + BLOCK_Q - 1) // BLOCK_Q - 1 - tile // per_block) * BLOCK_Q
    entry = tile % per_block // heads
    head = tile % per_block % heads
    return entry, head, head // (heads // kv_heads), row


@td.jit
def own_blocks(row, rows, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MASK: tl.constexpr):
    """(limits of the queries of a tile among its own rank's keys, blocks without a mask, all blocks).

    Causal, they are the same whether the rank has one piece or two: positions grow with rows.
    """
    offs = row + tl.arange(0, BLOCK_Q)
    if MASK == ALL:
        return offs * 0 + rows, rows // BLOCK_K, (rows + BLOCK_K - 1) // BLOCK_K
    else:
        stop = tl.minimum(row + BLOCK_Q, rows)
        return tl.minimum(offs + 1, rows), tl.minimum(row + 1, rows) // BLOCK_K, (stop + BLOCK_K - 1) // BLOCK_K


@td.jit
def far_limits(row, source, me, rows, BLOCK_Q: tl.constexpr, MASK: tl.constexpr):
    """(limits of the queries of a tile among the keys of another rank, the least of them, the greatest)."""
    of_first, of_second = keys_seen(source, me, rows, MASK)
    piece = pieces_of(rows)
    limits = tl.where(row + tl.arange(0, BLOCK_Q) < piece, of_first, of_second)
    least = tl.where(row < piece, of_first, of_second)
    return limits, least, tl.where(tl.minimum(row + BLOCK_Q, rows) > piece, of_second, of_first)


@td.jit(do_not_specialize=["batch", "rows", "heads", "kv_heads", "plan", "num_comm", "chunk_rows"])
def ag_attention_kernel(
    ctx, q_ptr, k_ptr, v_ptr, o_ptr, lse_ptr, q_desc, k_desc, v_desc, far_k_desc, far_v_desc,
    scale, batch, rows, heads, kv_heads, plan, num_comm, chunk_rows,
    D: tl.constexpr, DV: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_DV: tl.constexpr,
    BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, MASK: tl.constexpr, ELEM_BYTES: tl.constexpr,
    STRADDLES: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
    COPY_WORDS: tl.constexpr, trace_ptr=None,
):  # fmt: skip
    """o [B, S / W, Hq, DV] and lse [B, S / W, Hq]; ``scale`` has the factor for powers of two in it."""
    DTYPE: tl.constexpr = q_ptr.dtype.element_ty
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    epoch, half, signal = td.call(ctx, plan)
    positions = batch * rows
    num_chunks = (positions + chunk_rows - 1) // chunk_rows
    k_bytes, v_bytes = kv_heads * (D * ELEM_BYTES), kv_heads * (DV * ELEM_BYTES)
    k_slot, v_slot = slot_bytes(positions, k_bytes), slot_bytes(positions, v_bytes)
    tiles = (rows + BLOCK_Q - 1) // BLOCK_Q * batch * heads
    pieces = num_comm + tiles + tl.where(ranks > 1, 1, 0)
    known = tl.full((), 0, tl.int32)  # chunks of the peers, as they arrive, that this program has waited for

    piece = td.ticket_of(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        if piece < num_comm:
            push_rows(
                ctx, half, signal, piece, num_comm, rows, positions, chunk_rows, k_ptr.to(tl.int64), k_bytes,
                v_ptr.to(tl.int64), v_bytes, None, 0, MASK, False, COPY_WORDS, trace,
            )  # fmt: skip
            answer = td.take_ticket(ctx)
        elif piece >= num_comm + tiles:
            td.mark(trace, "waits", ALL_PEERS)
            await_peers(ctx, half, signal, num_chunks)
            answer = td.take_ticket(ctx)
        else:
            entry, head, kv_head, row = query_tile(piece - num_comm, batch, rows, heads, kv_heads, BLOCK_Q)
            first_row = entry * rows
            q = load_rows(
                q_desc, q_ptr.to(tl.int64), 0, entry, first_row, head, heads, row, rows,
                DTYPE, D, BLOCK_Q, BLOCK_D, USE_TMA, False,
            )  # fmt: skip
            acc = tl.full((BLOCK_Q, BLOCK_DV), 0.0, tl.float32)
            top = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
            total = tl.full((BLOCK_Q,), 0.0, tl.float32)
            limits, plain, blocks = own_blocks(row, rows, BLOCK_Q, BLOCK_K, MASK)
            k_at, v_at = k_ptr.to(tl.int64), v_ptr.to(tl.int64)
            td.mark(trace, "multiplies", me)
            acc, top, total = _attend(
                acc, top, total, q, k_desc, v_desc, k_at, v_at, 0, entry, first_row, kv_head, kv_heads,
                0, plain, limits, rows, scale,
                DTYPE, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K, USE_TMA, False, False, PRECISION, STAGES,
            )  # fmt: skip
            acc, top, total = _attend(
                acc, top, total, q, k_desc, v_desc, k_at, v_at, 0, entry, first_row, kv_head, kv_heads,
                plain, blocks, limits, rows, scale,
                DTYPE, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K, USE_TMA, True, False, PRECISION, 1,
            )  # fmt: skip
            for step in range(1, ranks):
                source = (me + ranks - step) % ranks
                limits, least, most = far_limits(row, source, me, rows, BLOCK_Q, MASK)
                before = (step - 1) * num_chunks
                segments, last_chunk = chunks_of(first_row, 0, most, chunk_rows, known, before)
                for segment in range(0, segments):
                    chunk, start, stop = blocks_of(
                        segment, segments, last_chunk, first_row, 0, most, chunk_rows, BLOCK_K
                    )  # fmt: skip
                    td.mark(trace, "waits", source, 2 * (before + chunk))
                    at = await_chunks(
                        ctx, half, signal, td.data_at(ctx, half, me), known, before + chunk + 1, rows, positions,
                        chunk_rows, MASK, False, USE_TMA,
                    )  # fmt: skip
                    td.mark(trace, "multiplies", source, 2 * (before + chunk) + 1)
                    known = tl.maximum(known, before + chunk + 1)
                    k_at, v_at = at + source * k_slot, at + ranks * k_slot + source * v_slot
                    middle = tl.minimum(tl.maximum(least // BLOCK_K, start), stop)
                    acc, top, total = _attend(
                        acc, top, total, q, far_k_desc, far_v_desc, k_at, v_at, half, source * batch + entry,
                        first_row, kv_head, kv_heads, start, middle, limits, most, scale,
                        DTYPE, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K, USE_TMA, False, False, PRECISION, STAGES,
                    )  # fmt: skip
                    acc, top, total = _attend(
                        acc, top, total, q, far_k_desc, far_v_desc, k_at, v_at, half, source * batch + entry,
                        first_row, kv_head, kv_heads, middle, stop, limits, most, scale,
                        DTYPE, D, DV, BLOCK_D, BLOCK_DV, BLOCK_Q, BLOCK_K, USE_TMA, True, STRADDLES, PRECISION, 1,
                    )  # fmt: skip
            answer = td.take_ticket(ctx)
            td.mark(trace, "stores")
            store_rows_of(o_ptr, acc / total[:, None], first_row, head, heads, row, rows, DV, BLOCK_Q, BLOCK_DV)
            offs = row + tl.arange(0, BLOCK_Q)
            places = (tl.cast(first_row, tl.int64) + offs) * heads + head
            tl.store(lse_ptr + places, (top + tl.log2(total)) * LN_2, mask=offs < rows)
        td.mark(trace, "finishes")
        piece = td.ticket_of(answer)
        td.mark(trace, "ends")
    td.finish(ctx)


# For tdkernels.sanitizer: ``known`` keeps what a program has waited for from one tile to the next.
ag_attention_kernel.program_keeps = "waits"


# ---- launcher ----


def mask_of(causal, sharding):
    return ALL.value if not causal else ZIGZAG.value if sharding == "zigzag" else CONTIGUOUS.value


def straddles(rows, block_k, causal, sharding):
    """Whether a block of keys has some of both pieces of a rank, of which the second may not have been sent."""
    return causal and sharding == "zigzag" and (rows + 1) // 2 % block_k != 0


def problem_fields(q, k, v, causal, sharding, scale):
    """What must be the same on all ranks before a config is chosen."""
    return {
        "B": q.shape[0], "S/W": q.shape[1], "Hq": q.shape[2], "Hkv": k.shape[2], "D": q.shape[3], "Dv": v.shape[3],
        "dtype": str(q.dtype), "causal": causal, "sharding": sharding, "scale": scale,
    }  # fmt: skip


def plan_fields(q, k, v, causal, sharding, scale, config):
    """What must be the same on all ranks."""
    return {**problem_fields(q, k, v, causal, sharding, scale), "config": text_of(config)}


def uses_tma(*tensors):
    """Whether tensor descriptors can be made for tensors [B, S, H, D]."""
    # The descriptor takes the shared-memory layout that wgmma wants for 16-bit types only.
    fit = all(tensor.element_size() == 2 and tensor.shape[3] % 8 == 0 for tensor in tensors)
    return fit and gpu.has_tma(tensors[0].device)


def width_of(size):
    """The block that takes a head's elements."""
    return max(16, next_power_of_2(size))


def widths_of(k, v):
    """The blocks that take the elements of a head of keys and queries, and of values and what comes of them.

    For Hopper ptxas 12.8, which Triton brings, leaves out where narrow values lie in shared memory when those of keys
    are wider: it takes the address of their second 16 rows from a register that nothing has written.
    """
    wide, narrow = width_of(k.shape[3]), width_of(v.shape[3])
    if k.element_size() == 2 and gpu.capability(k.device)[0] == 9:
        narrow = max(narrow, min(wide, 64))
    return wide, narrow


def shard_descriptor(x, block, width):
    """Of a tensor [B, S, H, D], as [1, B, H, S, D]."""
    batch, rows, heads, d = x.shape
    shape, strides = [1, batch, heads, rows, d], [x.numel(), rows * heads * d, d, heads * d, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, 1, block, width])


def gathered_descriptor(workspace, first_byte, like, ranks, block, width):
    """Of all ranks' tensors ``like`` in both halves, as [2, W * B, H, S, D]; of some memory without a workspace."""
    if workspace is None:
        return shard_descriptor(like, block, width)
    batch, rows, heads, d = like.shape
    size = like.element_size()
    data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset + first_byte :].view(like.dtype)
    shape = [2, ranks * batch, heads, rows, d]
    strides = [workspace.half_bytes // size, rows * heads * d, d, heads * d, 1]
    return TensorDescriptor(data.as_strided((1, d), (d, 1)), shape, strides, [1, 1, 1, block, width])


def slot_size(x):
    """Bytes of a tensor's slot; see ``attention.tile.slot_bytes``."""
    return -(-x.numel() * x.element_size() // 16) * 16


def resident_programs(device, num_warps):
    """As many programs as there may be at a time, by their threads; more than fit do no harm."""
    return gpu.num_sms(device) * max(1, 8 // num_warps)


def prepare_keys(workspace, k, v, config, fields):
    """The plan of a launch for which keys and values go through a workspace, and how many programs push."""
    ranks = workspace.world_size
    num_chunks = -(-k.shape[0] * k.shape[1] // config.chunk_rows)
    half_bytes = ranks * (slot_size(k) + slot_size(v)) if ranks > 1 else 256
    plan = workspace.prepare("ag_attention", fields, half_bytes, ranks * num_chunks + ranks)
    return plan, config.num_comm_sms if ranks > 1 else 0


def key_descriptors(workspace, k, v, ranks, block_k):
    """Descriptors of k and v, and of those of all ranks; on one rank there are none but ours."""
    wide, narrow = widths_of(k, v)
    own = shard_descriptor(k, block_k, wide), shard_descriptor(v, block_k, narrow)
    if ranks == 1:
        return *own, *own
    far_v = gathered_descriptor(workspace, ranks * slot_size(k), v, ranks, block_k, narrow)
    return *own, gathered_descriptor(workspace, 0, k, ranks, block_k, wide), far_v


def bases_of(descriptors):
    """What they describe, for ``Launch``: those of gathered memory, or of operands, which are told apart there."""
    return [descriptor.base for descriptor in descriptors if descriptor is not None]


def _descriptors(workspace, q, k, v, ranks, config):
    """Of q, k and v, and of all ranks' k and v; None where the kernel takes none."""
    if not uses_tma(q, k, v):
        return (None,) * 5
    of_queries = shard_descriptor(q, config.block_q, widths_of(k, v)[0])
    return of_queries, *key_descriptors(workspace, k, v, ranks, config.block_k)


def _arguments(ctx, q, k, v, o, lse, descriptors, causal, sharding, scale, plan, num_comm, config):
    """The kernel's arguments."""
    batch, rows, heads, d = q.shape
    block_d, block_dv = widths_of(k, v)
    args = (
        ctx, q, k, v, o, lse, *descriptors, scale * LOG2_E.value, batch, rows, heads, k.shape[2], plan, num_comm,
        config.chunk_rows,
    )  # fmt: skip
    constants = {
        "D": d, "DV": v.shape[3], "BLOCK_D": block_d, "BLOCK_DV": block_dv, "BLOCK_Q": config.block_q,
        "BLOCK_K": config.block_k, "MASK": mask_of(causal, sharding), "ELEM_BYTES": q.element_size(),
        "USE_TMA": descriptors[0] is not None, "STRADDLES": straddles(rows, config.block_k, causal, sharding),
        "PRECISION": gemm_operands.dot_precision(q.dtype), "STAGES": config.num_stages, "COPY_WORDS": _COPY_WORDS,
        "trace_ptr": None, "num_warps": config.num_warps, "num_stages": config.num_stages,
    }  # fmt: skip
    return args, constants


def compile(q, k, v, causal, sharding, world_size, config):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    q, k, v = (gemm_operands.rows_contiguous(x) for x in (q, k, v))
    ctx = torch.empty(1, dtype=torch.int64, device=q.device)
    made = q.new_empty(1), q.new_empty(1, dtype=torch.float32)
    descriptors = _descriptors(None, q, k, v, world_size, config)
    args, constants = _arguments(ctx, q, k, v, *made, descriptors, causal, sharding, 1.0, 0, 1, config)
    ag_attention_kernel.warmup(*args, grid=(1,), **constants)


def launch(q, k, v, causal, sharding, scale, group, config):
    """(o, lse) of contiguous q, k and v [B, S / W, ·, ·] that are not empty; ``config`` is complete."""
    workspace = get_workspace(group, q.device, "ag_attention")
    call = causal, sharding, scale, config
    return launch_kept(
        workspace, ("o", *call, gemm_operands.dot_precision(q.dtype)), (q, k, v),
        lambda *of: _prepare(workspace, *of, *call),
    )  # fmt: skip


def _prepare(workspace, q, k, v, causal, sharding, scale, config):
    ranks, (batch, rows, heads, _) = workspace.world_size, q.shape
    fields = plan_fields(q, k, v, causal, sharding, scale, config)
    plan, num_comm = prepare_keys(workspace, k, v, config, fields)
    made = to_be_made(q, *q.shape[:3], v.shape[3]), to_be_made(q, *q.shape[:3], dtype=torch.float32)
    descriptors = _descriptors(workspace, q, k, v, ranks, config)
    args, constants = _arguments(
        workspace.ctx, q, k, v, *made, descriptors, causal, sharding, scale, plan, num_comm, config
    )  # fmt: skip
    pieces = num_comm + -(-rows // config.block_q) * batch * heads + (ranks > 1)
    far_chunks = (ranks - 1) * -(-batch * rows // config.chunk_rows)
    constants["trace_ptr"] = recorder.buffer(q.device, pieces, 2 * far_chunks)
    grid = (min(pieces, resident_programs(q.device, config.num_warps)),)
    fixed = workspace.ctx, *bases_of(descriptors[-2:])
    return Launch(workspace, ag_attention_kernel, grid, args, constants, (q, k, v), made, fixed)
