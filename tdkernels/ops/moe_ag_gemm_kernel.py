"""The kernel behind moe_ag_gemm: tokens are pushed to all peers while tiles of experts whose tokens have come are done.

Signal number ``source * num_chunks + chunk`` of a half is raised by ``source`` when that chunk of its tokens stands in
our memory; the waiters are the tiles that need its rows. A tile's rows are those of one expert, wherever their tokens
lie: the rows of A are read from addresses, which costs little beside the copy of all rows that it saves.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops import _device, _operands
from tdkernels.ops._config import text_of
from tdkernels.ops._gather import Gather
from tdkernels.ops._gather_kernels import push_shard
from tdkernels.ops._gemm import as_aligned, store_rows, swizzle
from tdkernels.ops._grouped import grouped_tile
from tdkernels.ops._swiglu import HALVES, NUMBERS
from tdkernels.ops._tiles import Tiles, default_tiles
from tdkernels.ops.group_gemm_kernel import planes_of, store_product, tma_fits, weight_descriptor, weight_layout
from tdkernels.ops.moe_route_kernel import TILE_WORDS, TILES, chunk_at_turn
from tdkernels.symm import get_workspace

_COPY_WORDS = 4096
_COLUMNS = tl.constexpr(64)  # of a gradient's tile that are stored at a time


@dataclass(frozen=True)
class MoeTpConfig:
    """How ``moe_ag_gemm``, ``moe_gemm_rs`` and ``tp_moe`` run.

    method:        "fused", or "torch": plain collectives and torch's grouped product
    tiles:         the tile of the products, see ``Tiles``; None takes the default for the device and shape
    num_comm_sms:  programs that push tokens at the same time, before they multiply like the others
    chunk_rows:    tokens that travel together under one signal, a power of two of at least 16; more if there would be
                   too many chunks
    """

    method: str = "fused"
    tiles: Tiles | None = None
    num_comm_sms: int = 16
    chunk_rows: int = 256

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            known = device.type == "cpu" or dtype == torch.bfloat16 and _device.has_tma(device)
            return None if known else f'method "torch" needs bfloat16 and sm_90 or sm_100, not {dtype} on {device}'
        if self.num_comm_sms < 1:
            return f"num_comm_sms must be at least 1, not {self.num_comm_sms}"
        if device.type == "cuda" and self.num_comm_sms >= _device.num_sms(device):
            return f"num_comm_sms must leave some of the {_device.num_sms(device)} free, not be {self.num_comm_sms}"
        if self.chunk_rows < 16 or self.chunk_rows & (self.chunk_rows - 1):
            return f"chunk_rows must be a power of two of at least 16, not {self.chunk_rows}"
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def default_config(tokens, choices, experts, n, dtype, device):
    """The config for ``tokens`` of ``choices`` of ``experts`` experts, weights of n rows, that nobody has tuned."""
    tiles = default_tiles(tokens * choices // experts, n, dtype, device)
    if device.type == "cpu":
        return MoeTpConfig(tiles=tiles, num_comm_sms=2, chunk_rows=16)
    return MoeTpConfig(tiles=tiles)


@td.jit
def rows_of_tile(slots_ptr, row, count, x, slots, width_bytes, me, slot_rows, BLOCK_M: tl.constexpr):
    """The addresses of a tile's rows: our own tokens' in x, those of others where they were gathered."""
    within = tl.minimum(tl.arange(0, BLOCK_M), count - 1)
    slot = tl.load(slots_ptr + row + within)
    own = slot - me * slot_rows
    is_own = (own >= 0) & (own < slot_rows)
    at = tl.where(is_own, own, slot).to(tl.int64) * width_bytes
    return tl.where(is_own, x, slots) + at


@td.jit
def _store_gradient(
    acc, y_ptr, h_ptr, weighted_ptr, weight, offs_m, end, col, N, BLOCK_M: tl.constexpr, WIDTH: tl.constexpr
):  # fmt: skip
    """Store WIDTH columns of the rows' gradients, and of the rows h, both times the weights of the rows' choices.

    Returns the columns' part of the product of each row's unweighted gradient with its h, fp32 [BLOCK_M].
    """
    if WIDTH > _COLUMNS:
        # A part at a time: the rows h and the accumulator do not fit the registers together.
        HALF: tl.constexpr = WIDTH // 2
        left, right = acc.reshape(BLOCK_M, 2, HALF).permute(0, 2, 1).split()
        dots = _store_gradient(left, y_ptr, h_ptr, weighted_ptr, weight, offs_m, end, col, N, BLOCK_M, HALF)
        dots += _store_gradient(right, y_ptr, h_ptr, weighted_ptr, weight, offs_m, end, col + HALF, N, BLOCK_M, HALF)
        return dots
    else:
        dtype: tl.constexpr = y_ptr.dtype.element_ty
        offs_n = col + tl.arange(0, WIDTH)
        mask = (offs_m < end)[:, None] & (offs_n < N)[None, :]
        h = td.to_float32(tl.load(h_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :], mask=mask, other=0.0))
        store_rows(weighted_ptr, td.from_float32(h * weight[:, None], dtype), offs_m, offs_n, end, N)
        store_rows(y_ptr, td.from_float32(acc * weight[:, None], dtype), offs_m, offs_n, end, N)
        return td.sum_of(tl.where(mask, acc, 0.0) * h, 1)


# Compiled once for a tile, whatever the shape and plan: that is what makes tuning cheap.
@td.jit(do_not_specialize=[
    "M_shard", "R", "N", "K", "stride_plane", "stride_w", "slot_rows", "plan", "num_comm", "chunk_rows", "group_m",
])  # fmt: skip
def moe_ag_gemm_kernel(
    ctx, x_ptr, w_ptr, w_desc, slots_ptr, table_ptr, facts_ptr, y_ptr, pre_ptr,
    h_ptr, weighted_ptr, weights_ptr, dots_ptr, choices_ptr,
    M_shard, R, N, K, stride_plane, stride_w, slot_rows, plan, num_comm, chunk_rows, group_m,
    COPY_WORDS: tl.constexpr, FIXED_HALF: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ELEM_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN_K: tl.constexpr, TMA_W: tl.constexpr, W_IS_KN: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y [R, N] = the tokens of the rows, of all ranks, times the weights of the rows' experts.

    Pieces 0 … num_comm - 1 push our tokens to the peers; each later one computes one tile, in the order of the table.
    With ``weights_ptr``: the gradients of rows h, and what else is made of them, see ``_store_gradient``. FIXED_HALF:
    as in ``ag_gemm_kernel``.
    """
    N = as_aligned(N, ALIGNED)
    K = as_aligned(K, ALIGNED)
    stride_plane = as_aligned(stride_plane, ALIGNED)
    stride_w = as_aligned(stride_w, ALIGNED)
    PAIR: tl.constexpr = ACTIVATION == HALVES
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    if FIXED_HALF:
        epoch = td.epoch(ctx)
        half = tl.full((), 0, tl.int32)
    else:
        epoch = td.epoch(ctx) + 1
        half = (epoch % 2).to(tl.int32)
    signal = (epoch << 8) | plan
    num_chunks = (M_shard + chunk_rows - 1) // chunk_rows
    row_bytes = tl.cast(K, tl.int64) * ELEM_BYTES
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tl.load(facts_ptr + TILES)
    pieces = num_comm + tiles * tiles_n
    come = tl.full((), 0, tl.int32)  # the last turn whose tokens are known to be here
    seen = tl.full((), 0, tl.int64)

    piece = td.ticket_of(td.take_ticket(ctx))
    while piece < pieces:
        if piece < num_comm:
            push_shard(
                ctx, x_ptr.to(tl.int64), half, signal, M_shard * row_bytes, chunk_rows * row_bytes, num_chunks,
                slot_rows * row_bytes, piece, num_comm, COPY_OWN=FIXED_HALF, COPY_WORDS=COPY_WORDS, trace=(None, 0),
            )  # fmt: skip
            answer = td.take_ticket(ctx)
        else:
            number, pid_n = swizzle(piece - num_comm, tiles, tiles_n, group_m)
            entry = table_ptr + number * TILE_WORDS
            expert, row, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
            last = tl.load(entry + 3)
            col = pid_n * BLOCK_N
            for turn in range(come + 1, last + 1):
                source, chunk = chunk_at_turn(turn, me, ranks)
                # producer: push_shard of the source
                seen = td.wait_plan(ctx, td.signal_at(ctx, half, source * num_chunks + chunk), signal, source)
            come = tl.maximum(come, last)
            slots = td.consume_token(td.data_at(ctx, half, me), seen)
            x_at = rows_of_tile(slots_ptr, row, count, x_ptr.to(tl.int64), slots, row_bytes, me, slot_rows, BLOCK_M)
            offs_m = row + tl.arange(0, BLOCK_M)
            end = row + count
            acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
            acc, second = grouped_tile(
                acc, acc, x_at, None, row, offs_m < end,
                w_ptr, w_desc, expert * (2 if PAIR else 1), col, stride_plane, stride_w, N, K, x_ptr.dtype.element_ty,
                BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, False, TMA_W, W_IS_KN, PAIR, PRECISION,
            )  # fmt: skip
            answer = td.take_ticket(ctx)
            if weights_ptr is not None:
                choice = tl.load(choices_ptr + offs_m, mask=offs_m < end, other=0)
                weight = tl.load(weights_ptr + choice, mask=offs_m < end, other=0.0)
                dots = _store_gradient(
                    acc, y_ptr, h_ptr, weighted_ptr, weight, offs_m, end, col, N, BLOCK_M, BLOCK_N
                )  # fmt: skip
                # This tile column's part; the host adds them up.
                tl.store(dots_ptr + pid_n.to(tl.int64) * R + offs_m, dots, mask=offs_m < end)
            else:
                store_product(acc, second, y_ptr, pre_ptr, offs_m, end, col, N, ACTIVATION, BLOCK_M, BLOCK_N)
        piece = td.ticket_of(answer)
    td.finish(ctx, ADVANCE=FIXED_HALF == 0)


# ---- launcher ----


def plan_fields(x, w, routing, activation, config):
    """What must be the same on all ranks."""
    return {
        "M/W": x.shape[0], "K": x.shape[1], "w": tuple(w.shape), "k": routing.num_choices, "activation": activation,
        "dtype": str(x.dtype), "config": text_of(config),
    }  # fmt: skip


@dataclass
class Gradients:
    """What a launch for the gradient of ``h`` takes beside, and what it leaves."""

    h: torch.Tensor  # [R, N]
    weights: torch.Tensor  # [M, k] fp32
    weighted: torch.Tensor | None = None  # [R, N]: h times the weights of its rows
    dots: torch.Tensor | None = None  # [tile columns, R]


def product_constants(x, w, planes, n, strides, is_kn, activation, tiles):
    """(descriptor of the weight or None, the constexpr arguments that the kernels for experts share)"""
    stride_plane, stride_w = strides
    block_n = max(tiles.block_n // 2, 16) if activation == "swiglu" else tiles.block_n
    k = x.shape[1]
    tma = tma_fits(k, w, stride_plane, stride_w, is_kn, tiles)
    of_plane = Tiles(block_n=block_n, block_k=tiles.block_k)
    desc = weight_descriptor(w, planes, n, stride_plane, stride_w, is_kn, of_plane) if tma else None
    return desc, {
        **tiles.constants(), "BLOCK_N": block_n, "ALIGNED": _operands.aligned(n, k, stride_plane, stride_w),
        "EVEN_K": k % tiles.block_k == 0, "TMA_W": tma, "W_IS_KN": is_kn,
        "PRECISION": _operands.dot_precision(x.dtype), **tiles.options(),
    }  # fmt: skip


def launch(x, w, routing, config, activation=None, keep=False, gradients=None, keep_gathered=False):
    """(y [R, ·], what SwiGLU was made of if ``keep`` or None, the Gather of x if kept, to be closed, or None)."""
    x = _operands.rows_contiguous(x)
    rows, k = x.shape
    tiles = config.tiles
    w, *strides, is_kn = weight_layout(w, activation)
    planes, n = planes_of(w, activation)
    total = routing.choices.shape[0]
    y = x.new_empty(total, w.shape[1] // 2 if activation else w.shape[1])
    pre = x.new_empty(total, w.shape[1]) if keep and activation else None
    tiling = routing.tiling(tiles.block_m)
    desc, constants = product_constants(x, w, planes, n, strides, is_kn, activation, tiles)
    tiles_n = -(-n // constants["BLOCK_N"])
    if gradients is not None:
        gradients.weighted = torch.empty_like(y)
        gradients.dots = x.new_empty(tiles_n, total, dtype=torch.float32)

    gather = None
    num_comm = config.num_comm_sms if routing.world_size > 1 else 0
    fields = plan_fields(x, w, routing, activation, config)
    half_bytes = routing.world_size * routing.slot_rows * k * x.element_size()
    if keep_gathered and num_comm:
        gather = Gather("moe_ag_gemm", fields, x, routing.group, routing.chunk_rows)
        workspace, plan = gather.workspace, gather.plan
        gather.begin()
    else:
        workspace = get_workspace(routing.group, x.device, "moe_ag_gemm")
        plan = workspace.prepare(
            "moe_ag_gemm", fields, half_bytes if num_comm else 256, max(routing.world_size * routing.num_chunks, 1)
        )
        workspace.before_launch()
    most = num_comm + tiling.most * tiles_n
    of_gradient = (None,) * 5
    if gradients is not None:
        of_gradient = gradients.h, gradients.weighted, gradients.weights, gradients.dots, routing.choices
    moe_ag_gemm_kernel[(min(most, _device.resident_programs(x.device, tiles, x.dtype)),)](
        workspace.ctx, x, w, desc, routing.slots, tiling.table, tiling.facts, y, pre, *of_gradient,
        rows, total, n, k, *strides, routing.slot_rows, plan, num_comm, routing.chunk_rows, tiles.group_m,
        COPY_WORDS=_COPY_WORDS, FIXED_HALF=gather is not None, ACTIVATION=NUMBERS[activation],
        ELEM_BYTES=x.element_size(), **constants,
    )  # fmt: skip
    if gather is None:
        workspace.after_launch()
    elif x.device.type == "cpu":
        workspace.check()
    return y, pre, gather
