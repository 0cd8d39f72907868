"""The kernel behind GEMM-RS: partial tiles are staged, forwarded to their owners and summed there.

Programs come in periods of ``1 + item_tiles``. In each period the first program forwards one item (item_tiles
consecutive tiles) that was computed ``lag`` periods before; the others compute a tile each. The tiles of rank + 1 come
first, then those of rank + 2, and so on; the rank's own tiles come last and take the peers' partials into their
epilogue. Forwarding programs are short and spread over the launch, so that no multiprocessor is set aside for
communication. ``lag`` is at most a shard's number of periods, therefore a program waits only for programs with smaller
ids, here and on every peer.

Buffers keep tiles whole, in the order in which they are computed: [tiles, BLOCK_M, BLOCK_N]. An item is then one
contiguous piece of memory whatever the shape, and both ends agree on the order.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops import _device, _operands, _trace
from tdkernels.ops._config import text_of
from tdkernels.ops._gemm import as_aligned, gemm_tile, swizzle
from tdkernels.ops._tiles import Tiles, default_tiles
from tdkernels.symm import get_workspace

_COPY_WORDS = 4096


@dataclass(frozen=True)
class GemmRsConfig:
    """How ``gemm_rs`` runs.

    method:      "fused", or "torch": a plain GEMM, then a plain reduce-scatter
    tiles:       the tile of the product, see ``Tiles``; None takes the default for the device and shape
    item_tiles:  tiles that are forwarded together under one signal
    """

    method: str = "fused"
    tiles: Tiles | None = None
    item_tiles: int = 4

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # takes none of the rest
        if self.item_tiles < 1:
            return f"item_tiles must be at least 1, not {self.item_tiles}"
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def default_config(rows, n, k, dtype, device):
    """The config for rows of an output [rows, n] of a shape that nobody has tuned."""
    tiles = default_tiles(rows, n, dtype, device)
    return GemmRsConfig(tiles=tiles, item_tiles=2 if device.type == "cpu" else 4)


def default_config_for(x, weight, world_size):
    """``default_config`` of operands [M, K / W] and [N, K / W]."""
    return default_config(x.shape[0] // world_size, *weight.shape, x.dtype, x.device)


@td.jit
def _forward_item(
    ctx, item, items, item_tiles, tiles, stage, epoch, signal, half,
    TILE_BYTES: tl.constexpr, COPY_WORDS: tl.constexpr, trace_ptr,
):  # fmt: skip
    """Copy one finished item of the staging buffer to its owner and raise its signal."""
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    owner = (me + 1 + item // items) % ranks
    item_of_shard = item % items
    first = item_of_shard * item_tiles
    count = tl.minimum(item_tiles, tiles - first)
    staged = item.to(tl.int64) * item_tiles
    td.mark(trace_ptr, "waits", me)
    for i in range(count):
        # producer: the program of this rank that computed the tile
        td.wait(ctx, td.flag_at(ctx, staged + i), epoch, me, SCOPE="gpu")
    slot = (me * items + item_of_shard).to(tl.int64) * item_tiles
    dst = td.data_at(ctx, half, owner) + slot * TILE_BYTES
    td.mark(trace_ptr, "pushes", owner)
    td.put(dst, stage + staged * TILE_BYTES, count * TILE_BYTES, COPY_WORDS)
    # waiter: the owner's program for each tile of the item
    td.notify(ctx, td.signal_at(ctx, half, me * items + item_of_shard), owner, signal, PASSES_ON=True)


@td.jit
def _sum_in_rank_order(
    ctx, acc, received_ptr, slot_stride, bias_ptr, z_ptr, row, col, first_col, M_shard, N,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Add the peers' partials to ``acc``, columns first_col … + WIDTH of a tile, in rank order, and store the sum."""
    me = td.rank(ctx)
    rows = tl.arange(0, BLOCK_M)
    cols = first_col + tl.arange(0, WIDTH)
    total = tl.full((BLOCK_M, WIDTH), 0.0, tl.float32)
    for source in range(td.num_ranks(ctx)):
        if source == me:
            total += acc
        else:
            part_ptr = received_ptr + source * slot_stride
            total += td.to_float32(tl.load(part_ptr + rows[:, None] * BLOCK_N + cols[None, :]))
    offs_m = row + rows
    offs_n = col + cols
    if HAS_BIAS:
        total += td.to_float32(tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0))[None, :]
    mask = (offs_m < M_shard)[:, None] & (offs_n < N)[None, :]
    z = td.from_float32(total, z_ptr.dtype.element_ty)
    tl.store(z_ptr + offs_m[:, None].to(tl.int64) * N + offs_n[None, :], z, mask=mask)


# Compiled once for a tile, whatever the shape, plan and size of an item: that is what makes tuning cheap.
@td.jit(do_not_specialize=["M_shard", "N", "K", "stride_w", "lag", "plan", "item_tiles", "group_m"])
def gemm_rs_kernel(
    ctx, x_ptr, x_desc, w_ptr, w_desc, bias_ptr, z_ptr, stage_ptr,
    M_shard, N, K, stride_w, lag, plan, item_tiles, group_m,
    COPY_WORDS: tl.constexpr, SPLIT: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ELEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, USE_TMA: tl.constexpr,
    W_IS_KN: tl.constexpr, PRECISION: tl.constexpr, trace_ptr=None,
):  # fmt: skip
    """z = our rows of the sum over ranks of x @ w.T; x is [W * M_shard, K], z is [M_shard, N]."""
    td.mark(trace_ptr, "starts")
    N = as_aligned(N, ALIGNED)
    K = as_aligned(K, ALIGNED)
    stride_w = as_aligned(stride_w, ALIGNED)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    epoch = td.epoch(ctx) + 1
    half = (epoch % 2).to(tl.int32)
    signal = (epoch << 8) | plan
    tiles_m = (M_shard + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    items = (tiles + item_tiles - 1) // item_tiles
    period = tl.program_id(0) // (1 + item_tiles)
    place = tl.program_id(0) % (1 + item_tiles)

    if place == 0:
        item = period - lag
        if (item >= 0) & (item < items * (ranks - 1)):
            _forward_item(
                ctx, item, items, item_tiles, tiles, stage_ptr.to(tl.int64), epoch, signal, half,
                TILE * ELEM_BYTES, COPY_WORDS, trace_ptr,
            )  # fmt: skip
    else:
        tile = period % items * item_tiles + place - 1
        if tile < tiles:
            pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
            row = pid_m * BLOCK_M
            col = pid_n * BLOCK_N
            owner = (me + 1 + period // items) % ranks
            td.mark(trace_ptr, "multiplies", owner)
            acc = gemm_tile(
                tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), x_ptr, x_desc, 0, owner * M_shard + row, ranks * M_shard,
                w_ptr, w_desc, col, stride_w, N, K, K,
                BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, W_IS_KN, PRECISION,
            )  # fmt: skip
            if owner != me:
                td.mark(trace_ptr, "stores")
                staged = period.to(tl.int64) * item_tiles + place - 1
                offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
                tl.store(stage_ptr + staged * TILE + offs, td.from_float32(acc, stage_ptr.dtype.element_ty))
                # waiter: the program of this rank that forwards the item
                td.store_release(td.flag_at(ctx, staged), epoch, SCOPE="gpu")
            else:
                for step in range(1, ranks):
                    source = (me + ranks - step) % ranks
                    td.mark(trace_ptr, "waits", source, step - 1)
                    signal_ptr = td.signal_at(ctx, half, source * items + tile // item_tiles)
                    td.wait_plan(ctx, signal_ptr, signal, source)  # producer: _forward_item of the source
                td.mark(trace_ptr, "sums")
                received = td.pointer_to(td.data_at(ctx, half, me), z_ptr.dtype.element_ty) + tile.to(tl.int64) * TILE
                slot_stride = tl.cast(items, tl.int64) * item_tiles * TILE
                if SPLIT == 1:
                    _sum_in_rank_order(
                        ctx, acc, received, slot_stride, bias_ptr, z_ptr, row, col, 0, M_shard, N,
                        BLOCK_M, BLOCK_N, BLOCK_N, HAS_BIAS,
                    )  # fmt: skip
                else:
                    # Half of the columns at a time: the sum and the accumulator do not fit the registers together.
                    left, right = acc.reshape(BLOCK_M, 2, BLOCK_N // 2).permute(0, 2, 1).split()
                    _sum_in_rank_order(
                        ctx, left, received, slot_stride, bias_ptr, z_ptr, row, col, 0, M_shard, N,
                        BLOCK_M, BLOCK_N, BLOCK_N // 2, HAS_BIAS,
                    )  # fmt: skip
                    _sum_in_rank_order(
                        ctx, right, received, slot_stride, bias_ptr, z_ptr, row, col, BLOCK_N // 2, M_shard, N,
                        BLOCK_M, BLOCK_N, BLOCK_N // 2, HAS_BIAS,
                    )  # fmt: skip
    td.mark(trace_ptr, "finishes")
    td.finish(ctx)
    td.mark(trace_ptr, "ends")


def problem_fields(x, weight):
    """What must be the same on all ranks before a config is chosen."""
    return {"M": x.shape[0], "N": weight.shape[0], "K/W": x.shape[1], "dtype": str(x.dtype)}


def plan_fields(x, weight, config):
    """What must be the same on all ranks."""
    return {**problem_fields(x, weight), "config": text_of(config)}


def _arguments(ctx, x, weight, bias, z, stage, rows, lag, plan, config):
    """The kernel's arguments."""
    weight, stride_w, _ = _operands.weight_layout(weight)
    tiles = config.tiles
    n, k = weight.shape
    constants = _operands.product_constants(x, weight, bias, tiles)
    x_desc, w_desc = _operands.product_descriptors(x, weight, tiles, constants)
    args = (
        ctx, x, x_desc, weight, w_desc, bias, z, stage,
        rows, n, k, stride_w, lag, plan, config.item_tiles, tiles.group_m,
    )  # fmt: skip
    return args, {"COPY_WORDS": _COPY_WORDS, "SPLIT": 2 if tiles.block_n >= 128 else 1, **constants}


def compile(x, weight, bias, config):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    if x.device.type == "cpu":
        return  # interpreted
    x = _operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    stage = x.new_empty(1)
    args, constants = _arguments(ctx, x, weight, bias, x.new_empty(1), stage, x.shape[0], 0, 0, config)
    gemm_rs_kernel.warmup(*args, grid=(1,), **constants)


def launch(x, weight, bias, group, config):
    """Launch the fused operator on 2-D operands."""
    x = _operands.rows_contiguous(x)
    bias = None if bias is None else bias.contiguous()
    n = weight.shape[0]
    world_size = dist.get_world_size(group)
    rows = x.shape[0] // world_size
    tiles = config.tiles
    count = -(-rows // tiles.block_m) * -(-n // tiles.block_n)  # tiles of one shard
    items = -(-count // config.item_tiles)
    # Late enough that the tiles of an item are ready when its forwarding program starts, never later than a shard.
    lag = min(-(-_device.num_sms(x.device) // config.item_tiles), items)
    slots = items * config.item_tiles
    workspace = get_workspace(group, x.device, "gemm_rs")
    plan = workspace.prepare(
        "gemm_rs", plan_fields(x, weight, config),
        world_size * slots * tiles.block_m * tiles.block_n * x.element_size(), world_size * items,
        num_flags=(world_size - 1) * slots,
    )  # fmt: skip
    stage = x.new_empty((world_size - 1) * slots * tiles.block_m * tiles.block_n)
    z = x.new_empty(rows, n)
    workspace.before_launch()
    args, constants = _arguments(workspace.ctx, x, weight, bias, z, stage, rows, lag, plan, config)
    grid = world_size * items * (1 + config.item_tiles)
    gemm_rs_kernel[(grid,)](*args, **constants, trace_ptr=_trace.buffer(x.device, grid, world_size - 1))
    workspace.after_launch()
    return z
