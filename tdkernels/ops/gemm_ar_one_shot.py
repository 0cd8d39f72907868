"""The kernel behind GEMM-AR for few rows: every rank sends its partial tiles to all and sums everything itself.

One program, or ``split_k`` of them that share the K of a tile, computes our partial; the last of them to come adds the
others', rounds the partial to what travels, stores it in every peer's buffer with one signal, and then waits for the
peers' partials of the same tile and adds them in rank order. Everybody adds the same numbers in the same order, so z
has the same bits on all ranks. There is no barrier, and nothing waits before it has sent.

The programs of a tile wait only for the programs of the same tile on the peers, all of which have sent before they
wait themselves, and which wait for nothing else: so what runs in order of the program ids gets through (law 1).
"""

import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.lang._trace import ALL_PEERS
from tdkernels.ops import _device, _operands, _trace
from tdkernels.ops._gemm import as_aligned, gemm_tile, store_rows, swizzle, with_bias
from tdkernels.ops._launch import Launch, to_be_made
from tdkernels.ops._rank_sum import sum_in_rank_order
from tdkernels.ops._tiles import Tiles

_MAX_SPLIT = 8
_MIN_STEPS = 4  # steps of block_k that a program should have, to be worth starting


def default_tiles(rows, n, k, dtype, device):
    """(tiles, split_k) that read the weight by about as many programs as there are multiprocessors."""
    block_m = 16
    while block_m < min(rows, 64):
        block_m *= 2
    if device.type == "cpu":
        tiles = Tiles(block_m, 64, 64, num_warps=1, num_stages=1)
    elif dtype == torch.float32:
        tiles = Tiles(block_m, 64, 32, num_warps=4, num_stages=2)
    else:
        # gfx942 has 64 KiB for all stages.
        tiles = Tiles(block_m, 64, 128, num_warps=4, num_stages=2 if torch.version.hip else 5)
    programs = max(-(-rows // block_m) * -(-n // tiles.block_n), 1)
    split_k = min(_device.num_sms(device) // programs, k // (_MIN_STEPS * tiles.block_k), _MAX_SPLIT)
    return tiles, max(split_k, 1)


@td.jit
def _sum_of_splits(ctx, acc, scratch_ptr, tile, part, split_k, TILE: tl.constexpr, offs):
    """(the sum of all splits' ``acc`` in their order, whether we are the last to come): only the last may use it."""
    own_ptr = scratch_ptr + (tile.to(tl.int64) * split_k + part) * TILE
    tl.store(own_ptr + offs, acc)
    is_last = td.arrive(td.flag_at(ctx, tile), split_k)
    if is_last:
        first_ptr = scratch_ptr + tile.to(tl.int64) * split_k * TILE
        acc = tl.load(first_ptr + offs)
        for other in range(1, split_k):
            acc += tl.load(first_ptr + other * TILE + offs)
    return acc, is_last


@td.jit(do_not_specialize=["M", "N", "K", "stride_w", "k_of_part", "plan", "split_k", "group_m"])
def gemm_ar_one_shot_kernel(
    ctx, x_ptr, w_ptr, bias_ptr, z_ptr, scratch_ptr,
    M, N, K, stride_w, k_of_part, plan, split_k, group_m,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ELEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, USE_TMA: tl.constexpr,
    W_IS_KN: tl.constexpr, PRECISION: tl.constexpr, SPLIT: tl.constexpr,
    RANKS: tl.constexpr, trace_ptr=None,
):  # fmt: skip
    """z = the sum over ranks of x @ w.T, on every rank; x is [M, K], z is [M, N].

    Signal number ``source * tiles + tile`` of a half says that the source's partial of a tile is in our buffer, which
    is [ranks, tiles, BLOCK_M, BLOCK_N]; of a tile only the rows and columns that z has.
    """
    trace = (trace_ptr, tl.program_id(0))
    td.mark(trace, "starts")
    N = as_aligned(N, ALIGNED)
    K = as_aligned(K, ALIGNED)
    stride_w = as_aligned(stride_w, ALIGNED)
    TILE: tl.constexpr = BLOCK_M * BLOCK_N
    me = td.rank(ctx)
    epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    tiles = tiles_m * tiles_n
    tile = tl.program_id(0) // split_k
    part = tl.program_id(0) % split_k
    pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
    row = pid_m * BLOCK_M
    col = pid_n * BLOCK_N
    offs_m = row + tl.arange(0, BLOCK_M)
    offs_n = col + tl.arange(0, BLOCK_N)
    mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
    offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]

    first_k = tl.cast(part, tl.int64) * (k_of_part // BLOCK_K * BLOCK_K)
    own_k = as_aligned(tl.minimum(K - first_k, k_of_part).to(tl.int32), ALIGNED)
    td.mark(trace, "multiplies")
    acc = gemm_tile(
        tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32), x_ptr + first_k, None, 0, row, M,
        w_ptr + first_k * (stride_w if W_IS_KN else 1), None, col, stride_w, N, own_k, K,
        BLOCK_M, BLOCK_N, BLOCK_K, False, W_IS_KN, PRECISION,
    )  # fmt: skip
    sends = True
    if SPLIT:
        td.mark(trace, "joins")
        acc, sends = _sum_of_splits(ctx, acc, scratch_ptr, tile, part, split_k, TILE, offs)
    if sends:
        td.mark(trace, "pushes", ALL_PEERS)
        own = td.from_float32(acc, z_ptr.dtype.element_ty)
        slot = (tl.cast(me, tl.int64) * tiles + tile) * (TILE * ELEM_BYTES)
        for step in tl.static_range(1, RANKS):
            dst = td.data_at(ctx, half, (me + step) % RANKS) + slot
            tl.store(td.pointer_to(dst, z_ptr.dtype.element_ty) + offs, own, mask=mask)
        # waiter: every peer's last program of the same tile
        td.notify_all(ctx, td.signal_at(ctx, half, me * tiles + tile), signal)
        td.mark(trace, "waits", ALL_PEERS)
        # producer: every peer's last program of the same tile
        td.wait_plan_all(ctx, td.signal_at(ctx, half, tile), tiles, signal)
        td.mark(trace, "sums")
        parts = td.data_at(ctx, half, me) + tl.cast(tile, tl.int64) * (TILE * ELEM_BYTES)
        total = sum_in_rank_order(
            parts, tl.cast(tiles, tl.int64) * (TILE * ELEM_BYTES), offs, mask, td.to_float32(own), me, RANKS,
            z_ptr.dtype.element_ty,
        )
        total = with_bias(total, bias_ptr, offs_n, N, HAS_BIAS)
        z = td.from_float32(total, z_ptr.dtype.element_ty)
        store_rows(z_ptr, z, offs_m, offs_n, M, N)
    td.mark(trace, "finishes")
    td.finish(ctx)
    td.mark(trace, "ends")


def _arguments(ctx, x, weight, bias, z, scratch, plan, world_size, config):
    """The kernel's arguments."""
    weight, stride_w, _ = _operands.weight_layout(weight)
    tiles = config.tiles
    m, k = x.shape
    constants = {**_operands.product_constants(x, weight, bias, tiles), "USE_TMA": False}
    constants |= {"SPLIT": config.split_k > 1, "RANKS": world_size}
    args = (
        ctx, x, weight, bias, z, scratch,
        m, weight.shape[0], k, stride_w, k_of_part(k, config), plan, config.split_k, tiles.group_m,
    )  # fmt: skip
    return args, constants


def k_of_part(k, config):
    """How much of K one of split_k programs takes, in whole steps; for the last ones less, or nothing, may be left."""
    steps = -(-k // config.tiles.block_k)
    return -(-steps // config.split_k) * config.tiles.block_k


def compile(x, weight, bias, world_size, config):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    if x.device.type == "cpu":
        return  # interpreted
    x = _operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    scratch = torch.empty(1, dtype=torch.float32, device=x.device)
    args, constants = _arguments(ctx, x, weight, bias, x.new_empty(1), scratch, 0, world_size, config)
    gemm_ar_one_shot_kernel.warmup(*args, grid=(1,), **constants)


def prepare(workspace, x, weight, bias, config, fields):
    """The Launch on 2-D operands, as gemm_ar_kernel.launch makes them."""
    m, n = x.shape[0], weight.shape[0]
    tiles = config.tiles
    count = -(-m // tiles.block_m) * -(-n // tiles.block_n)
    tile = tiles.block_m * tiles.block_n
    ranks = workspace.world_size
    plan = workspace.prepare(
        "gemm_ar", fields, ranks * count * tile * x.element_size(), ranks * count, num_flags=count
    )
    scratch = to_be_made(x, count * config.split_k * tile if config.split_k > 1 else 1, dtype=torch.float32)
    z = to_be_made(x, m, n)
    args, constants = _arguments(workspace.ctx, x, weight, bias, z, scratch, plan, ranks, config)
    programs = count * config.split_k
    constants["trace_ptr"] = _trace.buffer(x.device, programs)
    operands, made = (x, weight, bias), (z, scratch)
    return Launch(workspace, gemm_ar_one_shot_kernel, (programs,), args, constants, operands, made, [workspace.ctx])
