"""The kernel behind moe_ag_gemm: tokens are pushed to all peers, sorted by expert and multiplied, all at the same time.

Pieces of work, by number: the first push our tokens to the peers; then, stage by stage (``moe_route_kernel``), come the
tiles of the stage before with pieces strewn in that copy tokens of this stage to their rows, one for each choice. A row
has to lie among those of its expert for the tensor memory accelerator, and to copy it takes less than what is lost by a
product that reads its rows from anywhere.

Signal number ``source * num_chunks + chunk`` of a half is raised by ``source`` when that chunk of its tokens stands in
our memory; the waiters are the pieces that copy its tokens. These count for each stage how many of them are done; the
waiters of that are the stage's tiles.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.collectives.kernel_async_all_gather import push_shard
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import text_of
from tdkernels.ops.common.gemm_tile import as_aligned, swizzle
from tdkernels.ops.common.tile_config import Tiles, default_tiles, next_power_of_2
from tdkernels.ops.common.work_interleaving import split_piece
from tdkernels.ops.experts.grouped_gemm.kernel import (
    planes_of,
    product_constants,
    rows_descriptor,
    store_product,
    weight_layout,
)
from tdkernels.ops.experts.grouped_gemm.swiglu import HALVES, NUMBERS
from tdkernels.ops.experts.grouped_gemm.tile import grouped_tile, store_gradient
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES, TILE_WORDS, chunk_at_turn, first_turn_of
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, launch_kept, to_be_made
from tdkernels.symm import get_workspace

_COPY_WORDS = 4096
BLOCK_TOKENS, BLOCK_COLUMNS = 16, 512  # of a piece that copies or adds up rows


@dataclass(frozen=True)
class MoeTpConfig:
    """How ``moe_ag_gemm``, ``moe_gemm_rs`` and ``tp_moe`` run.

    method:        "fused", or "torch": plain collectives and torch's grouped product
    tiles:         the tile of the products, see ``Tiles``; None takes the default for the device and shape
    num_comm_sms:  programs that push tokens at the same time, before they multiply like the others
    chunk_rows:    tokens that travel together under one signal, a multiple of 16
    stages:        how often the experts' weights are gone through, 1 to 8: once for our own tokens, the other times for
                   those of the others, in parts; 0: as often as pays, by the number of rows an expert has
    """

    method: str = "fused"
    tiles: Tiles | None = None
    num_comm_sms: int = 16
    chunk_rows: int = 256
    stages: int = 0

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            known = device.type == "cpu" or dtype == torch.bfloat16 and gpu.has_tma(device)
            return None if known else f'method "torch" needs bfloat16 and sm_90 or sm_100, not {dtype} on {device}'
        if self.num_comm_sms < 1:
            return f"num_comm_sms must be at least 1, not {self.num_comm_sms}"
        if device.type == "cuda" and self.num_comm_sms >= gpu.num_sms(device):
            return f"num_comm_sms must leave some of the {gpu.num_sms(device)} free, not be {self.num_comm_sms}"
        if self.chunk_rows < 16 or self.chunk_rows % BLOCK_TOKENS:
            return f"chunk_rows must be a multiple of {BLOCK_TOKENS}, not {self.chunk_rows}"
        if not 0 <= self.stages <= MAX_STAGES.value:
            return f"stages must be 0 to {MAX_STAGES.value}, not {self.stages}"
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def default_config(tokens, choices, experts, n, dtype, device):
    """The config for ``tokens`` of ``choices`` of ``experts`` experts, weights of n rows, that nobody has tuned."""
    tiles = default_tiles(tokens * choices // experts, n, dtype, device)
    if device.type == "cpu":
        return MoeTpConfig(tiles=tiles, num_comm_sms=2, chunk_rows=16)
    return MoeTpConfig(tiles=tiles)


@td.jit
def pieces_of_turn(chunk_rows, width, BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """How many pieces of BLOCK_TOKENS x BLOCK_COLUMNS each chunk of tokens has, one with fewer tokens too."""
    return chunk_rows // BLOCK_TOKENS * ((width + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS)


@td.jit
def piece_of_turn(piece, chunk, chunk_rows, width, BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr):
    """(the tokens of a rank, the columns) of a piece of a chunk."""
    blocks = (width + BLOCK_COLUMNS - 1) // BLOCK_COLUMNS
    tokens = chunk * chunk_rows + piece // blocks * BLOCK_TOKENS + tl.arange(0, BLOCK_TOKENS)
    return tokens, piece % blocks * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)


@td.jit
def _copy_to_rows(
    tokens_ptr, rows_ptr, sorted_ptr, tokens, first_token, M_shard, columns, K,
    CHOICES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
):  # fmt: skip
    """Copy columns of tokens of a rank, the first of which has number ``first_token``, to the rows of their choices."""
    there, inside = tokens < M_shard, columns < K
    at = tokens[:, None].to(tl.int64) * K + columns[None, :]
    block = tl.load(tokens_ptr + at, mask=there[:, None] & inside[None, :], other=0.0)
    for j in tl.static_range(CHOICES):
        choice = (first_token + tokens).to(tl.int64) * CHOICES + j
        row = tl.load(rows_ptr + choice, mask=there, other=-1)
        mask = (row >= 0)[:, None] & inside[None, :]
        tl.store(sorted_ptr + row[:, None].to(tl.int64) * K + columns[None, :], block, mask=mask)


@td.jit
def _copy_piece(
    ctx, half, signal, me, ranks, x_ptr, rows_ptr, sorted_ptr, turn, piece, num_chunks, chunk_rows, slot_rows,
    row_bytes, M_shard, K, CHOICES: tl.constexpr, BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr, trace,
):  # fmt: skip
    """Copy a piece of the tokens of a turn to their rows, when they have come."""
    source, chunk = chunk_at_turn(turn, me, ranks, num_chunks)
    tokens, columns = piece_of_turn(piece, chunk, chunk_rows, K, BLOCK_TOKENS, BLOCK_COLUMNS)
    at = x_ptr.to(tl.int64)
    if source != me:
        td.mark(trace, "waits", source)
        # producer: push_shard of the source
        seen = td.wait_plan(ctx, td.signal_at(ctx, half, source * num_chunks + chunk), signal, source)
        at = td.consume_token(td.data_at(ctx, half, me) + source.to(tl.int64) * slot_rows * row_bytes, seen)
    td.mark(trace, "copies", source)
    _copy_to_rows(
        td.pointer_to(at, x_ptr.dtype.element_ty), rows_ptr, sorted_ptr, tokens, source * M_shard, M_shard, columns, K,
        CHOICES, BLOCK_TOKENS, BLOCK_COLUMNS,
    )  # fmt: skip


# Compiled once for a tile and a number of choices, whatever the shape and plan: that is what makes tuning cheap.
@td.jit(do_not_specialize=[
    "M_shard", "R", "N", "K", "stride_plane", "stride_w", "slot_rows", "plan", "num_comm", "chunk_rows", "stages",
    "group_m",
])  # fmt: skip
def moe_ag_gemm_kernel(
    ctx, x_ptr, sorted_ptr, sorted_desc, w_ptr, w_desc, rows_ptr, table_ptr, begins_ptr, done_ptr, y_ptr, pre_ptr,
    h_ptr, weighted_ptr, weights_ptr, dots_ptr, choices_ptr,
    M_shard, R, N, K, stride_plane, stride_w, slot_rows, plan, num_comm, chunk_rows, stages, group_m,
    COPY_WORDS: tl.constexpr, ACTIVATION: tl.constexpr, CHOICES: tl.constexpr,
    BLOCK_TOKENS: tl.constexpr, BLOCK_COLUMNS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, ELEM_BYTES: tl.constexpr,
    ALIGNED: tl.constexpr, EVEN_K: tl.constexpr, USE_TMA: tl.constexpr, W_IS_KN: tl.constexpr, PRECISION: tl.constexpr,
    trace_ptr=None,
):  # fmt: skip
    """y [R, N] = the tokens of the rows, of all ranks, times the weights of the rows' experts; sorted [R, K] they.

    With ``weights_ptr``: the gradients of rows h, and what else is made of them, see ``store_gradient``.
    ``done_ptr``: of each stage, how many pieces have been copied; zeros at first.
    """
    N = as_aligned(N, ALIGNED)
    K = as_aligned(K, ALIGNED)
    stride_plane = as_aligned(stride_plane, ALIGNED)
    stride_w = as_aligned(stride_w, ALIGNED)
    PAIR: tl.constexpr = ACTIVATION == HALVES
    DTYPE: tl.constexpr = x_ptr.dtype.element_ty
    me, ranks = td.rank(ctx), td.num_ranks(ctx)
    epoch, half, signal = td.call(ctx, plan)
    num_chunks = (M_shard + chunk_rows - 1) // chunk_rows
    row_bytes = tl.cast(K, tl.int64) * ELEM_BYTES
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    of_turn = pieces_of_turn(chunk_rows, K, BLOCK_TOKENS, BLOCK_COLUMNS)
    pieces = num_comm + tl.load(begins_ptr + stages) * tiles_n + ranks * num_chunks * of_turn
    # The part of the list that we are in: up to ``end`` pieces are tiles of a stage, and copies for the next one. Where
    # it begins is not kept but found, for Triton (3.6, 3.7) loses one of two values with which a loop begins alike.
    stage = tl.full((), -1, tl.int32)
    end = num_comm
    first_tile, tiles, copies = tl.full((), 0, tl.int32), tl.full((), 0, tl.int32), tl.full((), 0, tl.int32)

    piece = td.ticket_of(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        if piece < num_comm:
            push_shard(
                ctx, x_ptr.to(tl.int64), half, signal, M_shard * row_bytes, chunk_rows * row_bytes, num_chunks,
                slot_rows * row_bytes, piece, num_comm, COPY_OWN=False, COPY_WORDS=COPY_WORDS, trace=trace,
            )  # fmt: skip
            answer = td.take_ticket(ctx)
        else:
            for _step in range(stage, stages):
                if piece >= end:
                    first_tile, tiles = tiles_of(begins_ptr, stage)
                    turns = first_turn_of(stage + 2, stages, ranks, num_chunks)
                    turns -= first_turn_of(stage + 1, stages, ranks, num_chunks)
                    copies = tl.where(stage + 1 < stages, turns * of_turn, 0)
                    end += tiles * tiles_n + copies
                    stage += 1
            is_copy, number = split_piece(piece - end + tiles * tiles_n + copies, tiles * tiles_n, copies, 0)
            if is_copy:
                _copy_piece(
                    ctx, half, signal, me, ranks, x_ptr, rows_ptr, sorted_ptr,
                    first_turn_of(stage, stages, ranks, num_chunks) + number // of_turn, number % of_turn,
                    num_chunks, chunk_rows, slot_rows, row_bytes, M_shard, K, CHOICES, BLOCK_TOKENS, BLOCK_COLUMNS,
                    trace,
                )  # fmt: skip
                answer = td.take_ticket(ctx)
                # waiter: the tiles of the stage
                td.add_release(done_ptr + stage, tl.full((), 1, tl.int64), SCOPE="gpu")
            else:
                pid_m, pid_n = swizzle(number, tiles, tiles_n, group_m)
                entry = table_ptr + (first_tile + pid_m) * TILE_WORDS
                expert, row, count = tl.load(entry), tl.load(entry + 1), tl.load(entry + 2)
                col = pid_n * BLOCK_N
                offs_m = row + tl.arange(0, BLOCK_M)
                past = row + count
                inside = tl.minimum(offs_m, past - 1).to(tl.int64)
                x_at = sorted_ptr.to(tl.int64) + inside * row_bytes
                td.mark(trace, "waits", me)
                for earlier in range(0, stage):
                    turns = first_turn_of(earlier + 1, stages, ranks, num_chunks)
                    turns -= first_turn_of(earlier, stages, ranks, num_chunks)
                    # producer: the pieces of this rank that copy the tokens of the stage
                    seen = td.wait(ctx, done_ptr + earlier, turns * of_turn, me, SCOPE="gpu", FOR_TMA=USE_TMA)
                    x_at = td.consume_token(x_at, seen)
                td.mark(trace, "multiplies")
                acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
                acc, second = grouped_tile(
                    acc, acc, x_at, sorted_desc, 0, row, offs_m < past,
                    w_ptr, w_desc, expert * (2 if PAIR else 1), col, stride_plane, stride_w, N, K, DTYPE,
                    BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, USE_TMA, USE_TMA, W_IS_KN, PAIR, PRECISION,
                )  # fmt: skip
                answer = td.take_ticket(ctx)
                td.mark(trace, "stores")
                if weights_ptr is not None:
                    choice = tl.load(choices_ptr + offs_m, mask=offs_m < past, other=0)
                    weight = tl.load(weights_ptr + choice, mask=offs_m < past, other=0.0)
                    dots = store_gradient(
                        acc, y_ptr, h_ptr, weighted_ptr, weight, offs_m, past, col, N, BLOCK_M, BLOCK_N
                    )  # fmt: skip
                    # This tile column's part; the host adds them up.
                    tl.store(dots_ptr + pid_n.to(tl.int64) * R + offs_m, dots, mask=offs_m < past)
                else:
                    store_product(acc, second, y_ptr, pre_ptr, offs_m, past, col, N, ACTIVATION, BLOCK_M, BLOCK_N)
        td.mark(trace, "finishes")
        piece = td.ticket_of(answer)
        td.mark(trace, "ends")
    td.finish(ctx)


@td.jit
def tiles_of(begins_ptr, stage):
    """(the first tile of a stage, how many it has); none for the stage before the first."""
    first = tl.load(begins_ptr + tl.maximum(stage, 0))
    last = tl.load(begins_ptr + stage + 1)  # of the stage -1: those before the first
    return first, last - first


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


@dataclass
class Launched:
    """What a launch leaves.

    y:       [R, ·]
    pre:     what SwiGLU was made of, or None
    rows:    [R, K], the tokens of all ranks by rows
    """

    y: torch.Tensor
    pre: torch.Tensor | None
    rows: torch.Tensor


def _arguments(ctx, x, w, routing, routed, made, done, plan, num_comm, config, activation, gradients=None):
    """The kernel's arguments and its constants; ``routed``: ``_tensors_of`` the routing, ``made``: Launched."""
    tokens, k = x.shape
    tiles, (of_choices, choices, table, begins) = config.tiles, routed
    w, *strides, is_kn = weight_layout(w, activation)
    planes, n = planes_of(w, activation)
    desc, constants = product_constants(k, w, planes, n, strides, is_kn, activation, tiles)
    of_gradient = (None,) * 5
    if gradients is not None:
        of_gradient = gradients.h, gradients.weighted, gradients.weights, gradients.dots, choices
    args = (
        ctx, x, made.rows, rows_descriptor(made.rows, constants, tiles), w, desc, of_choices, table,
        begins, done, made.y, made.pre, *of_gradient, tokens, choices.shape[0], n, k, *strides,
        routing.slot_rows, plan, num_comm, routing.chunk_rows, routing.num_stages, tiles.group_m,
    )  # fmt: skip
    return args, {
        "COPY_WORDS": _COPY_WORDS, "ELEM_BYTES": x.element_size(), "ACTIVATION": NUMBERS[activation],
        "CHOICES": routing.num_choices, "BLOCK_TOKENS": BLOCK_TOKENS,
        "BLOCK_COLUMNS": min(next_power_of_2(k), BLOCK_COLUMNS), "trace_ptr": None, **constants,
    }  # fmt: skip


def _make(x, w, rows, activation, keep):
    """Launched, of so many rows, to be made."""
    y = to_be_made(x, rows, w.shape[1] // 2 if activation else w.shape[1])
    pre = to_be_made(x, rows, w.shape[1]) if keep and activation else None
    return Launched(y, pre, to_be_made(x, rows, x.shape[1]))


def _tensors_of(routing, tile_rows):
    """What a kernel reads of a routing: (the rows of choices, the choices of rows, the table of tiles, its begins)."""
    tiling = routing.tiling(tile_rows)
    return routing.rows, routing.choices, tiling.table, tiling.begins


def compile(x, w, routing, config, activation=None, gradients=None):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    if x.device.type == "cpu":
        return  # interpreted
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    made = Launched(x.new_empty(1), None, x.new_empty(1, x.shape[1]))
    routed = _tensors_of(routing, config.tiles.block_m)
    if gradients is not None:
        made_of_h = x.new_empty(1), x.new_empty(1, dtype=torch.float32)
        gradients = Gradients(gradients.h, gradients.weights, *made_of_h)
    args, constants = _arguments(
        ctx, x, w, routing, routed, made, ctx, 0, config.num_comm_sms, config, activation, gradients
    )  # fmt: skip
    moe_ag_gemm_kernel.warmup(*args, grid=(1,), **constants)


def launch(x, w, routing, config, activation=None, keep=False, gradients=None):
    """The products of all ranks' tokens x [M / W, K] with the weights of their experts; ``keep`` what SwiGLU is of."""
    workspace = get_workspace(routing.group, x.device, "moe_ag_gemm")
    routed = _tensors_of(routing, config.tiles.block_m)
    done = torch.zeros(MAX_STAGES.value, dtype=torch.int64, device=x.device)
    of_gradient = (None, None) if gradients is None else (gradients.h, gradients.weights)
    differs = activation, keep, gradients is not None, gemm_operands.dot_precision(x.dtype)
    y, rows, *others = launch_kept(
        workspace, (config, routing.sizes, *differs), (x, w, *routed, done, *of_gradient),
        lambda *of: _prepare(workspace, routing, of, config, *differs[:3]),
        lambda x, w, *others: (gemm_operands.rows_contiguous(x), weight_layout(w, activation)[0], *others),
    )  # fmt: skip
    if gradients is not None:
        gradients.weighted, gradients.dots = others
        others = ()
    return Launched(y, others[0] if others else None, rows)


def _prepare(workspace, routing, operands, config, activation, keep, gradient):
    """The Launch for tensors of a routing; of the routing itself it takes nothing but sizes."""
    x, w, *routed, done, h, weights = operands
    _, choices, table, _ = routed
    k, tiles = x.shape[1], config.tiles
    made = _make(x, w, choices.shape[0], activation, keep)
    gradients, to_make = None, [made.y, made.rows]
    if gradient:
        dots = to_be_made(x, -(-w.shape[1] // tiles.block_n), choices.shape[0], dtype=torch.float32)
        gradients = Gradients(h, weights, to_be_made(x, *made.y.shape), dots)
        to_make += [gradients.weighted, dots]
    elif made.pre is not None:
        to_make.append(made.pre)
    num_comm = config.num_comm_sms if routing.world_size > 1 else 0
    half_bytes = routing.world_size * routing.slot_rows * k * x.element_size() if num_comm else 256
    fields = {**plan_fields(x, w, routing, activation, config), "gradient": gradient}
    plan = workspace.prepare("moe_ag_gemm", fields, half_bytes, routing.world_size * routing.num_chunks)
    args, constants = _arguments(
        workspace.ctx, x, w, routing, routed, made, done, plan, num_comm, config, activation, gradients
    )  # fmt: skip
    tiles_n = -(-planes_of(w, activation)[1] // constants["BLOCK_N"])
    blocks = -(-routing.chunk_rows // BLOCK_TOKENS) * -(-k // constants["BLOCK_COLUMNS"])
    most = num_comm + table.shape[0] * tiles_n + routing.world_size * routing.num_chunks * blocks
    grid = (min(most, gpu.resident_programs(x.device, tiles, x.dtype)),)
    turns = -(-routing.num_chunks * (routing.world_size - 1) // num_comm) if num_comm else 0
    constants["trace_ptr"] = recorder.buffer(x.device, most, turns, all_run=False)
    return Launch(workspace, moe_ag_gemm_kernel, grid, args, constants, operands, to_make, [workspace.ctx])
