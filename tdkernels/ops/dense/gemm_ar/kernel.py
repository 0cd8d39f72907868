"""The kernel behind GEMM-AR for many rows: partial tiles go to an owner, are summed there, and the sum goes to all.

Tiles are numbered along a path through z, ``item_tiles`` consecutive ones make an item, and item j is owned by rank
j mod W, so that sums become complete, and travel back, all the time and not only at the end. W consecutive items are a
round. The work goes through the rounds in numbered pieces; each round has, in this order, pieces that

    forward     an item that was computed ``lag`` items ago to its owner
    multiply    a tile each: the item of rank + 1, that of rank + 2 and so on, our own item of the round last
    reduce      a tile of our own item of ``reduce_after`` rounds ago: add all partials, send the sum to everybody
    receive     a tile of the peers' items of ``receive_after`` rounds ago: bring its sum from our buffer to z

Each waits for pieces of smaller numbers only, here and on every peer; after the last round a few more let the rest of
them come to their turn. Programs take the pieces by tickets (``lang.work_queue``) until none is left, so that what a
program has to look up and set up is looked up once and not for each tile.

Buffers keep tiles whole, so an item is one contiguous piece of memory: partials in register order
(``common.gemm_tile.in_register_order``), sums [tiles, BLOCK_M, BLOCK_N].
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common import gemm_operands, small_m_gemm
from tdkernels.ops.common.config import text_of
from tdkernels.ops.common.gemm_operands import launch_product
from tdkernels.ops.common.gemm_tile import as_aligned, from_register_order, store_rows, swizzle, with_bias
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.rank_reduce import sum_in_rank_order
from tdkernels.ops.common.staging import COPY_WORDS, forward_item
from tdkernels.ops.common.tile_config import Tiles, tiles_of_product
from tdkernels.ops.dense import kernel_one_shot as one_shot
from tdkernels.ops.dense.gemm_ar import kernel_multinode as nodes
from tdkernels.ops.dense.gemm_ar.tile import multiply_tile, receive_tile, slice_columns
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, to_be_made
from tdkernels.symm import get_workspace

# Up to so many rows each rank sums everything itself, which takes one way over the wire and not two, unless it sends so
# many bytes more than in two shots.
_ONE_SHOT_ROWS = {"cpu": 16, "cuda": 512}
_ONE_SHOT_MORE_BYTES = 4 << 20


@dataclass(frozen=True)
class GemmArConfig:
    """How ``gemm_ar`` runs.

    method:      "fused", or "torch": a plain GEMM, then a plain all-reduce
    exchange:    "two_shot": each tile is summed by one rank, which sends the sum to all; "one_shot": every rank gets
                 all partials and sums everything itself, for few rows; a group on several nodes has but one way
    tiles:       the tile of the product, see ``Tiles``; None takes the default for the device and shape
    item_tiles:  tiles that are forwarded together under one signal; not for one_shot on one node
    split_k:     programs that share the K of one tile; one_shot on one node only
    """

    method: str = "fused"
    exchange: str = "two_shot"
    tiles: Tiles | None = None
    item_tiles: int = 4
    split_k: int = 1

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # takes none of the rest
        if self.exchange not in ("two_shot", "one_shot"):
            return f'exchange must be "two_shot" or "one_shot", not {self.exchange!r}'
        for name in ("item_tiles", "split_k"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def default_config(rows, n, k, dtype, device, world_size):
    """The config for a product [rows, k] x [n, k] of a rank, of a shape that nobody has tuned."""
    more = (world_size - 1) * (world_size - 2) * rows * n * dtype.itemsize // world_size
    if rows <= _ONE_SHOT_ROWS[device.type] and more <= _ONE_SHOT_MORE_BYTES:
        tiles, split_k = small_m_gemm.default_tiles(rows, n, k, dtype, device)
        return GemmArConfig(exchange="one_shot", tiles=tiles, split_k=split_k)
    tiles = tiles_of_product(rows, n, 1, 2, dtype, device)
    return GemmArConfig(tiles=tiles, item_tiles=2 if device.type == "cpu" else 4)


def default_config_for(x, weight, world_size):
    """``default_config`` of operands [M, K / W] and [N, K / W]."""
    return default_config(x.shape[0], *weight.shape, x.dtype, x.device, world_size)


@td.jit
def _reduce_tile(
    ctx, parts, part_bytes, sums_offset, half, bias_ptr, z_ptr, row, col, M, N,
    RANKS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLICE_N: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Add all ranks' partials of a tile in fp32, in rank order; store the sum in z and in every peer's buffer.

    Partials are in register order, of which SLICE_N columns are one piece; the sums are in rows, as z is.
    """
    DTYPE: tl.constexpr = z_ptr.dtype.element_ty
    me = td.rank(ctx)
    rows = tl.arange(0, BLOCK_M)
    for first in range(0, BLOCK_N, SLICE_N):
        offs = first * BLOCK_M + tl.arange(0, BLOCK_M * SLICE_N)
        own = td.to_float32(tl.load(td.pointer_to(parts + me * part_bytes, DTYPE) + offs))
        total = sum_in_rank_order(parts, part_bytes, offs, offs >= 0, own, me, RANKS, DTYPE)
        total = from_register_order(total, BLOCK_M, SLICE_N)
        cols = first + tl.arange(0, SLICE_N)
        total = with_bias(total, bias_ptr, col + cols, N, HAS_BIAS)
        z = td.from_float32(total, DTYPE)
        for step in tl.static_range(1, RANKS):
            peer_sums = td.data_at(ctx, half, (me + step) % RANKS) + sums_offset
            tl.store(td.pointer_to(peer_sums, DTYPE) + rows[:, None] * BLOCK_N + cols[None, :], z)
        store_rows(z_ptr, z, row + rows, col + cols, M, N)


@td.jit
def _role(piece, ranks, item_tiles, lag, reduce_after, receive_after):
    """What is to be done, and to which tile: (forwards, multiplies, reduces, round, sequence, tile of the item).

    None of the three: it receives. ``sequence`` numbers the items in the order in which this rank computes them; there
    is nothing to do yet where the round is negative.
    """
    per_item = 1 + item_tiles
    in_round = piece % (ranks * (per_item + item_tiles))
    round_ = piece // (ranks * (per_item + item_tiles))
    multiplies = in_round < ranks * per_item
    forwards = multiplies & (in_round % per_item == 0)
    other = in_round - ranks * per_item  # which of those that reduce (the first item_tiles) or receive
    reduces = (multiplies == 0) & (other < item_tiles)
    place = tl.where(multiplies, in_round // per_item, tl.where(reduces, ranks - 1, other // item_tiles - 1))
    i = tl.where(multiplies, in_round % per_item - 1, other % item_tiles)
    sequence = round_ * ranks + place - tl.where(forwards, lag, 0)
    if multiplies == 0:
        sequence -= ranks * tl.where(reduces, reduce_after, receive_after)
    round_ = tl.where(sequence < 0, -1, sequence // ranks)
    return forwards, multiplies, reduces, round_, sequence, tl.where(forwards, 0, i)


# Compiled once for a tile, whatever the shape, plan and size of an item: that is what makes tuning cheap.
@td.jit(do_not_specialize=[
    "M", "N", "K", "stride_w", "lag", "reduce_after", "receive_after", "plan", "item_tiles", "group_m",
])  # fmt: skip
def gemm_ar_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, z_ptr, stage_ptr,
    M, N, K, stride_w, lag, reduce_after, receive_after, plan, item_tiles, group_m,
    COPY_WORDS: tl.constexpr, SLICE_N: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ELEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, USE_TMA: tl.constexpr,
    W_IS_KN: tl.constexpr, PRECISION: tl.constexpr, trace_ptr=None,
):  # fmt: skip
    """z = the sum over ranks of x @ w.T, on every rank; x is [M, K], z is [M, N].

    Of a half's signals, number ``source * rounds + round`` says that the source's partials of our item of that round
    are here, number ``ranks * rounds + tile`` that the sum of a tile is. Of its data, the partials of our own items
    come first, [ranks, rounds * item_tiles] tiles, then the sums of all tiles.
    """
    N = as_aligned(N, ALIGNED)
    K = as_aligned(K, ALIGNED)
    stride_w = as_aligned(stride_w, ALIGNED)
    TILE_BYTES: tl.constexpr = BLOCK_M * BLOCK_N * ELEM_BYTES
    me = td.rank(ctx)
    ranks = RANKS
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    items = (tiles + item_tiles - 1) // item_tiles
    rounds = (items + ranks - 1) // ranks
    part_bytes = tl.cast(rounds, tl.int64) * item_tiles * TILE_BYTES  # of one source
    sums_offset = ranks * part_bytes
    pieces = (rounds + receive_after) * ranks * (1 + 2 * item_tiles)

    piece = td.ticket_of(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        forwards, multiplies, reduces, round_, sequence, i = _role(
            piece, ranks, item_tiles, lag, reduce_after, receive_after
        )
        owner = (me + 1 + sequence % ranks + ranks) % ranks
        tile = (round_ * ranks + owner) * item_tiles + i
        staged = sequence.to(tl.int64) * item_tiles + i
        stage = stage_ptr.to(tl.int64) + staged * TILE_BYTES
        slot = (tl.cast(round_, tl.int64) * item_tiles + i) * TILE_BYTES  # among the partials of the owner's items

        if (round_ >= 0) & (tile < tiles):
            pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
            row = pid_m * BLOCK_M
            col = pid_n * BLOCK_N
            own_parts = td.data_at(ctx, half, me) + slot
            if forwards:
                if owner != me:
                    dst = td.data_at(ctx, half, owner) + me * part_bytes + slot
                    answer = forward_item(
                        ctx, stage, dst, staged, tl.minimum(item_tiles, tiles - tile), owner,
                        td.signal_at(ctx, half, me * rounds + round_), signal, epoch, TILE_BYTES, COPY_WORDS,
                        trace,
                    )  # fmt: skip
                else:
                    answer = td.take_ticket(ctx)
            elif multiplies:
                dst = tl.where(owner == me, own_parts + me * part_bytes, stage)
                answer = multiply_tile(
                    ctx, x_ptr, x_desc, w_ptr, w_desc, dst, staged, pid_m, pid_n, M, N, K, stride_w, epoch,
                    BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, W_IS_KN, PRECISION, trace,
                )  # fmt: skip
            elif reduces:
                td.mark(trace, "waits", me)
                td.wait(ctx, td.flag_at(ctx, staged), epoch, me, SCOPE="gpu")  # producer: our own multiply_tile
                td.mark(trace, "waits", ALL_PEERS, 0)
                # producer: every peer's _forward_item
                td.wait_plan_all(ctx, td.signal_at(ctx, half, round_), rounds, signal)
                td.mark(trace, "sums", ALL_PEERS)
                tile_sums = sums_offset + tl.cast(tile, tl.int64) * TILE_BYTES
                _reduce_tile(
                    ctx, own_parts, part_bytes, tile_sums, half, bias_ptr, z_ptr, row, col, M, N,
                    RANKS, BLOCK_M, BLOCK_N, SLICE_N, HAS_BIAS,
                )  # fmt: skip
                answer = td.take_ticket(ctx)
                # waiter: every peer's program that receives the tile
                td.notify_all(ctx, td.signal_at(ctx, half, ranks * rounds + tile), signal, PASSES_ON=True)
            else:
                td.mark(trace, "waits", owner)
                # producer: the owner's program that reduces the tile
                seen = td.wait_plan(ctx, td.signal_at(ctx, half, ranks * rounds + tile), signal, owner)
                answer = td.take_ticket(ctx)
                td.mark(trace, "receives", owner)
                src = td.data_at(ctx, half, me) + sums_offset + tl.cast(tile, tl.int64) * TILE_BYTES
                receive_tile(td.consume_token(src, seen), z_ptr, row, col, M, N, BLOCK_M, BLOCK_N)
        else:
            answer = td.take_ticket(ctx)
        td.mark(trace, "finishes")
        piece = td.ticket_of(answer)
        td.mark(trace, "ends")
    td.finish(ctx)


def problem_fields(x, weight):
    """What must be the same on all ranks before a config is chosen."""
    return {"M": x.shape[0], "N": weight.shape[0], "K/W": x.shape[1], "dtype": str(x.dtype)}


def plan_fields(x, weight, config):
    """What must be the same on all ranks."""
    return {**problem_fields(x, weight), "config": text_of(config)}


@dataclass(frozen=True)
class _Schedule:
    """How many rounds there are, and by how much the roles follow one another."""

    rounds: int
    lag: int
    reduce_after: int
    receive_after: int

    @classmethod
    def of(cls, tiles, item_tiles, world_size, num_sms):
        items = -(-tiles // item_tiles)
        rounds = -(-items // world_size)
        # Late enough that the tiles of an item are ready when its forwarding program starts: a wave of tiles.
        lag = min(-(-num_sms // item_tiles), rounds * world_size)
        # As many rounds until the last partial is on its way. A program that comes too early keeps a multiprocessor
        # waiting, one that comes late costs nothing but at the end, where nothing else is left to do: so one more wave
        # for partials to arrive, and another for the sums.
        wave = -(-lag // world_size)
        return cls(rounds, lag, 2 * wave + 1, 3 * wave + 2)

    def num_pieces(self, item_tiles, world_size):
        return (self.rounds + self.receive_after) * world_size * (1 + 2 * item_tiles)


def _arguments(ctx, x, weight, bias, z, stage, schedule, plan, world_size, config):
    """The kernel's arguments."""
    tiles = config.tiles
    m, k = x.shape
    n = weight.shape[0]
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles)
    args = (
        ctx, x, x_desc, weight, w_desc, bias, z, stage,
        m, n, k, stride_w, schedule.lag, schedule.reduce_after, schedule.receive_after, plan,
        config.item_tiles, tiles.group_m,
    )  # fmt: skip
    return args, {"COPY_WORDS": COPY_WORDS, "SLICE_N": slice_columns(tiles), "RANKS": world_size, **constants}


def compile(x, weight, bias, world_size, config, num_nodes=1):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    if x.device.type == "cpu":
        return  # interpreted
    if num_nodes > 1:
        nodes.compile(x, weight, bias, world_size, config, num_nodes)
    elif config.exchange == "one_shot":
        one_shot.compile(x, weight, bias, world_size, config, scatters=False)
    else:
        x = gemm_operands.rows_contiguous(x)
        ctx = torch.empty(1, dtype=torch.int64, device=x.device)
        args, constants = _arguments(
            ctx, x, weight, bias, x.new_empty(1), x.new_empty(1), _Schedule(1, 1, 1, 1), 0, world_size, config
        )
        gemm_ar_kernel.warmup(*args, grid=(1,), **constants)


def launch(x, weight, bias, group, config):
    """Launch the fused operator on 2-D operands."""
    across = spans_nodes(group)
    name = "gemm_ar one shot" if config.exchange == "one_shot" and not across else "gemm_ar"
    workspace = get_workspace(group, x.device, name, across_nodes=across)
    z, *_ = launch_product(workspace, x, weight, bias, config, _prepare)
    return z


def _prepare(workspace, x, weight, bias, config):
    fields = plan_fields(x, weight, config)
    if workspace.group.topology.num_nodes > 1:
        return nodes.prepare(workspace, x, weight, bias, config, fields)
    if config.exchange == "one_shot":
        return one_shot.prepare(workspace, "gemm_ar", x, weight, bias, config, fields, scatters=False)
    m, n = x.shape[0], weight.shape[0]
    world_size = workspace.world_size
    tiles = config.tiles
    count = tiles.count(m, n)
    schedule = _Schedule.of(count, config.item_tiles, world_size, gpu.num_sms(x.device))
    slots = schedule.rounds * world_size * config.item_tiles  # tiles, the last item filled up
    tile_bytes = tiles.block_m * tiles.block_n * x.element_size()
    plan = workspace.prepare(
        "gemm_ar", fields, 2 * slots * tile_bytes, world_size * schedule.rounds + count,
        num_flags=slots,
    )  # fmt: skip
    stage = to_be_made(x, slots * tiles.block_m * tiles.block_n)
    z = to_be_made(x, m, n)
    args, constants = _arguments(workspace.ctx, x, weight, bias, z, stage, schedule, plan, world_size, config)
    pieces = schedule.num_pieces(config.item_tiles, world_size)
    programs = min(pieces, gpu.resident_programs(x.device, tiles, x.dtype))
    constants["trace_ptr"] = recorder.buffer(x.device, pieces, 1)
    operands, made = (x, weight, bias), (z, stage)
    return Launch(workspace, gemm_ar_kernel, (programs,), args, constants, operands, made, [workspace.ctx])
