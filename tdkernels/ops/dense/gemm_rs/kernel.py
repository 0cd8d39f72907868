"""The kernel behind GEMM-RS: partial tiles are staged, forwarded to their owners and summed there.

The work is a list of pieces, in periods of ``1 + item_tiles``. In each period the first piece forwards one item
(item_tiles consecutive tiles) that was computed ``lag`` periods before; the others compute a tile each. The tiles of
rank + 1 come first, then those of rank + 2, and so on; the rank's own tiles come last and take the peers' partials into
their epilogue. Pieces that forward are short and spread over the list, so that no multiprocessor is set aside for
communication. ``lag`` is at most a shard's number of periods, therefore a piece waits only for pieces of smaller
numbers, here and on every peer.

Programs take the pieces by tickets (``lang.work_queue``) until none is left, so that what a program has to look up and
set up is looked up once and not for each tile.

Buffers keep tiles whole, in the order in which they are computed, and each tile in register order
(``in_register_order``). An item is then one contiguous piece of memory whatever the shape, and both ends agree on
the order.
"""

from dataclasses import dataclass

import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang.profile import ALL_PEERS
from tdkernels.ops.common import gemm_operands, small_m_gemm
from tdkernels.ops.common.config import METHODS, text_of
from tdkernels.ops.common.gemm_operands import launch_product
from tdkernels.ops.common.gemm_tile import as_aligned, gemm_tile, in_register_order, store_rows, swizzle
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.rank_reduce import sum_of_tile
from tdkernels.ops.common.staging import COPY_WORDS, forward_item
from tdkernels.ops.common.tile_config import Tiles, tiles_of_product
from tdkernels.ops.dense import kernel_one_shot as one_shot
from tdkernels.ops.dense.gemm_rs import kernel_direct as direct
from tdkernels.ops.dense.gemm_rs import kernel_multinode as nodes
from tdkernels.ops.dense.gemm_rs import pipelined as parts
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, to_be_made
from tdkernels.symm import get_workspace

# Up to so many rows of all ranks what is hidden counts less than what it takes to hide it.
_ONE_SHOT_ROWS = {"cpu": 16, "cuda": 512}
_ONE_SHOT_ROWS_OF_TWO = 1024  # of two ranks on Hopper; of more it has not been measured


@dataclass(frozen=True)
class GemmRsConfig:
    """How ``gemm_rs`` runs.

    method:      "fused"; "parts": torch's GEMM of a part of the rows at a time, which the copy engine brings to their
                 owner; or "torch": a plain GEMM, then a plain reduce-scatter; several nodes know no parts
    tiles:       the tile of the product, see ``Tiles``; None takes the default for the device and shape
    transport:   "forward": partial tiles are staged and sent on by other programs; "direct": they are sent from
                 where they were computed, while the next one is; "one_shot": by programs of one tile each, with all
                 rows in it, for few rows; a group on several nodes always forwards
    item_tiles:  tiles that are forwarded together under one signal; forward only
    split_k:     programs that share the K of one tile; one_shot only
    pieces:      in which the rows of an owner are multiplied and travel; parts only, which takes none of the others
    """

    method: str = "fused"
    tiles: Tiles | None = None
    transport: str = "forward"
    item_tiles: int = 4
    split_k: int = 1
    pieces: int = 1

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in METHODS:
            return f'method must be "fused", "parts" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # takes none of the rest
        if self.pieces < 1:
            return f"pieces must be at least 1, not {self.pieces}"
        if self.method == "parts":
            return None  # takes no others
        if self.transport not in ("forward", "direct", "one_shot"):
            return f'transport must be "forward", "direct" or "one_shot", not {self.transport!r}'
        for name in ("item_tiles", "split_k"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        if self.tiles is None:
            return None
        return self.tiles.illegal(device, dtype, direct.shared_memory_bytes(self, device, dtype))


def default_config(rows, n, k, dtype, device, world_size):
    """The config for rows of an output [rows, n] of a shape that nobody has tuned."""
    of_two = world_size == 2 and gpu.capability(device) >= (9, 0)
    if rows * world_size <= (_ONE_SHOT_ROWS_OF_TWO if of_two else _ONE_SHOT_ROWS[device.type]):
        tiles, split_k = small_m_gemm.default_tiles(rows * world_size, n, k, dtype, device)
        return GemmRsConfig(transport="one_shot", tiles=tiles, split_k=split_k)
    tiles = tiles_of_product(rows, n, world_size, 2, dtype, device)
    return GemmRsConfig(tiles=tiles, item_tiles=2 if device.type == "cpu" else 4)


def default_config_for(x, weight, world_size):
    """``default_config`` of operands [M, K / W] and [N, K / W]."""
    return default_config(x.shape[0] // world_size, *weight.shape, x.dtype, x.device, world_size)


# Compiled once for a tile, whatever the shape, plan and size of an item: that is what makes tuning cheap.
@td.jit(do_not_specialize=["M_shard", "N", "K", "stride_w", "lag", "plan", "item_tiles", "group_m"])
def gemm_rs_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, z_ptr, stage_ptr,
    M_shard, N, K, stride_w, lag, plan, item_tiles, group_m,
    COPY_WORDS: tl.constexpr, RANKS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ELEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, USE_TMA: tl.constexpr,
    W_IS_KN: tl.constexpr, PRECISION: tl.constexpr, trace_ptr=None,
):  # fmt: skip
    """z = our rows of the sum over ranks of x @ w.T; x is [W * M_shard, K], z is [M_shard, N]."""
    N = as_aligned(N, ALIGNED)
    K = as_aligned(K, ALIGNED)
    stride_w = as_aligned(stride_w, ALIGNED)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    TILE_BYTES: tl.constexpr = TILE * ELEM_BYTES
    me = td.rank(ctx)
    ranks = RANKS
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M_shard + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    items = (tiles + item_tiles - 1) // item_tiles
    pieces = ranks * items * (1 + item_tiles)

    piece = td.ticket_of(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        period = piece // (1 + item_tiles)
        place = piece % (1 + item_tiles)
        if place == 0:
            item = period - lag
            if (item >= 0) & (item < items * (ranks - 1)):
                owner = (me + 1 + item // items) % ranks
                first = item % items * item_tiles  # of its tiles
                staged = item.to(tl.int64) * item_tiles
                slot = (me * items).to(tl.int64) * item_tiles + first
                answer = forward_item(
                    ctx, stage_ptr.to(tl.int64) + staged * TILE_BYTES, td.data_at(ctx, half, owner) + slot * TILE_BYTES,
                    staged, tl.minimum(item_tiles, tiles - first), owner,
                    td.signal_at(ctx, half, me * items + item % items), signal, epoch, TILE_BYTES, COPY_WORDS, trace,
                )  # fmt: skip
            else:
                answer = td.take_ticket(ctx)
        else:
            tile = period % items * item_tiles + place - 1
            if tile < tiles:
                pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
                row = pid_m * BLOCK_M
                col = pid_n * BLOCK_N
                owner = (me + 1 + period // items) % ranks
                td.mark(trace, "multiplies", owner)
                acc = gemm_tile(
                    tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), x_ptr, x_desc, 0, owner * M_shard + row,
                    ranks * M_shard, w_ptr, w_desc, col, stride_w, N, K, K,
                    BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, W_IS_KN, PRECISION,
                )  # fmt: skip
                answer = td.take_ticket(ctx)
                if owner != me:
                    td.mark(trace, "stores")
                    staged = period.to(tl.int64) * item_tiles + place - 1
                    partial = in_register_order(td.from_float32(acc, x_ptr.dtype.element_ty), BLOCK_M, BLOCK_N)
                    tl.store(stage_ptr + staged * TILE + tl.arange(0, TILE), partial)
                    # waiter: the program of this rank that forwards the item
                    td.store_release(td.flag_at(ctx, staged), epoch, SCOPE="gpu")
                else:
                    td.mark(trace, "waits", ALL_PEERS)
                    # producer: _forward_item of every peer
                    td.wait_plan_all(ctx, td.signal_at(ctx, half, tile // item_tiles), items, signal)
                    td.mark(trace, "sums")
                    z = sum_of_tile(
                        acc, td.data_at(ctx, half, me) + tile.to(tl.int64) * TILE_BYTES,
                        tl.cast(items, tl.int64) * item_tiles * TILE_BYTES, bias_ptr, col, N, me,
                        z_ptr.dtype.element_ty, RANKS, BLOCK_M, BLOCK_N, HAS_BIAS,
                    )  # fmt: skip
                    store_rows(z_ptr, z, row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N), M_shard, N)
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


def _arguments(ctx, x, weight, bias, z, stage, rows, lag, plan, world_size, config):
    """The kernel's arguments."""
    tiles = config.tiles
    n, k = weight.shape
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles)
    args = (
        ctx, x, x_desc, weight, w_desc, bias, z, stage,
        rows, n, k, stride_w, lag, plan, config.item_tiles, tiles.group_m,
    )  # fmt: skip
    return args, {"COPY_WORDS": COPY_WORDS, "RANKS": world_size, **constants}


def compile(x, weight, bias, world_size, config, num_nodes=1):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    if x.device.type == "cpu" or config.method != "fused":
        return  # interpreted; nothing of it depends on the config
    if num_nodes > 1:
        return nodes.compile(x, weight, bias, world_size, config, num_nodes)
    if config.transport == "direct":
        return direct.compile(x, weight, bias, world_size, config)
    if config.transport == "one_shot":
        return one_shot.compile(x, weight, bias, world_size, config, scatters=True)
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    stage = x.new_empty(1)
    args, constants = _arguments(ctx, x, weight, bias, x.new_empty(1), stage, x.shape[0], 0, 0, world_size, config)
    gemm_rs_kernel.warmup(*args, grid=(1,), **constants)


def launch(x, weight, bias, group, config):
    """Launch an overlapping form on 2-D operands."""
    if config.method == "parts":
        return parts.launch(x, weight, bias, group, config, plan_fields(x, weight, config))
    across = spans_nodes(group)
    name = "gemm_rs one shot" if config.transport == "one_shot" and not across else "gemm_rs"
    workspace = get_workspace(group, x.device, name, across_nodes=across)
    z, *_ = launch_product(workspace, x, weight, bias, config, _prepare)
    return z


def _prepare(workspace, x, weight, bias, config):
    fields = plan_fields(x, weight, config)
    if workspace.group.topology.num_nodes > 1:
        return nodes.prepare(workspace, x, weight, bias, config, fields)
    if config.transport == "direct":
        return direct.prepare(workspace, x, weight, bias, config, fields)
    if config.transport == "one_shot":
        return one_shot.prepare(workspace, "gemm_rs", x, weight, bias, config, fields, scatters=True)
    n = weight.shape[0]
    world_size = workspace.world_size
    rows = x.shape[0] // world_size
    tiles = config.tiles
    count = tiles.count(rows, n)  # tiles of one shard
    items = -(-count // config.item_tiles)
    # Late enough that the tiles of an item are ready when its forwarding program starts, never later than a shard.
    lag = min(-(-gpu.num_sms(x.device) // config.item_tiles), items)
    slots = items * config.item_tiles
    plan = workspace.prepare(
        "gemm_rs", fields, world_size * slots * tiles.block_m * tiles.block_n * x.element_size(), world_size * items,
        num_flags=(world_size - 1) * slots,
    )  # fmt: skip
    stage = to_be_made(x, (world_size - 1) * slots * tiles.block_m * tiles.block_n)
    z = to_be_made(x, rows, n)
    args, constants = _arguments(workspace.ctx, x, weight, bias, z, stage, rows, lag, plan, world_size, config)
    pieces = world_size * items * (1 + config.item_tiles)
    programs = min(pieces, gpu.resident_programs(x.device, tiles, x.dtype))
    constants["trace_ptr"] = recorder.buffer(x.device, pieces)
    operands, made = (x, weight, bias), (z, stage)
    return Launch(workspace, gemm_rs_kernel, (programs,), args, constants, operands, made, [workspace.ctx])
