"""The kernels behind group_gemm: a product for each group of rows, and the gradient of the groups' weights.

Both know the groups' sizes on the device only. The first keeps as many programs as fit the GPU, each of which takes
every so manieth tile of as many as there turn out to be. The second has a program for each tile of each weight, and a
group's rows for its main loop; the GPU starts the next program when one is done, so that long groups do not hold others
up.
"""

from dataclasses import dataclass

import torch
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels import lang as td
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.gemm_tile import add_product, as_aligned, store_rows, swizzle
from tdkernels.ops.common.tile_config import Tiles, default_tiles, next_power_of_2
from tdkernels.ops.experts.grouped_gemm.swiglu import HALVES, INTERLEAVED, NUMBERS, swiglu, swiglu_backward_kernel
from tdkernels.ops.experts.grouped_gemm.tile import (
    group_of,
    grouped_tile,
    rows_of_groups,
    tile_of_groups,
    tiles_of_groups,
)
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import Launch, alone_on, launch_kept, to_be_made

# Of a weight's gradient: rows that are masked at the end of a group, the fewest that tensor cores take; and how many
# make a group long.
_LAST_R = 16
_LONG_GROUP = 4096


@dataclass(frozen=True)
class GroupGemmConfig:
    """How ``group_gemm`` runs.

    method:  "fused": one kernel; or "torch": torch's grouped product where it has one (bf16 on NVIDIA's sm_90 and
             sm_100, which does not wait for the host), on CPU ranks a product for each group
    tiles:   the tile of the product, see ``Tiles``; None takes the default for the device and shape. Of a gradient dw
             (tuner's layout "dw") block_m and block_n are of N and K, block_k of rows
    """

    method: str = "fused"
    tiles: Tiles | None = None

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            known = device.type == "cpu" or dtype == torch.bfloat16 and gpu.has_tma(device)
            return None if known else f'method "torch" needs bfloat16 and sm_90 or sm_100, not {dtype} on {device}'
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def default_config(rows, n, dtype, device):
    """The config for a product [rows, n] a group of a shape that nobody has tuned."""
    return GroupGemmConfig(tiles=default_tiles(rows, n, dtype, device))


def planes_of(w, activation):
    """(planes, N of a plane) of a weight [E, N, K]: the kernel reads the halves of SwiGLU as two of them."""
    return (2 * w.shape[0], w.shape[1] // 2) if activation == "swiglu" else tuple(w.shape[:2])


def _lies_as_nk(w, halves=False):
    """Whether each plane has its rows one after the other; where its ``halves`` are planes, all of them have."""
    experts, n, k = w.shape
    return w.stride(2) == 1 and w.stride(1) >= k and (not halves or experts == 1 or w.stride(0) == n * w.stride(1))


def lies_as_kn(w):
    """Whether the planes of a weight [E, N, K] lie as [K, N], as those of a transposed one do."""
    return not _lies_as_nk(w) and w.stride(1) == 1 and w.stride(2) >= w.shape[1]


def weight_layout(w, activation=None):
    """(the weight, the stride of its planes, of its rows, whether its planes lie as [K, N]); copied only if as neither.

    Where SwiGLU's halves are planes of their own they have to lie one after the other.
    """
    halves = activation == "swiglu"
    if not halves and lies_as_kn(w):
        return w, w.stride(0), w.stride(2), True
    if not _lies_as_nk(w, halves):
        w = w.contiguous()
    return w, w.shape[1] // 2 * w.stride(1) if halves else w.stride(0), w.stride(1), False


def tma_fits(x_k, w, stride_plane, stride_w, is_kn, tiles):
    """Whether tensor descriptors can be made for rows of ``x_k`` elements and for the weight."""
    size = w.element_size()
    if not gpu.has_tma(w.device) or size != 2 or w.data_ptr() % 16:
        return False
    if is_kn and x_k % tiles.block_k:
        return False  # past the last row of a plane lies the next one, which may hold what is no number
    return all(width * size % 16 == 0 for width in (x_k, stride_plane, stride_w)) and min(w.shape[1:]) > 1


def weight_descriptor(w, planes, n, stride_plane, stride_w, is_kn, tiles):
    k = w.shape[2]
    shape, block = ([planes, k, n], [1, tiles.block_k]) if is_kn else ([planes, n, k], [1])
    block = [*block, tiles.block_n] if is_kn else [*block, tiles.block_n, tiles.block_k]
    return TensorDescriptor(w, shape, [stride_plane, stride_w, 1], block)


@td.jit
def store_product(
    acc, second, y_ptr, pre_ptr, offs_m, end, col, N, ACTIVATION: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Store a tile of rows ``offs_m`` before ``end``, or its SwiGLU, and if there is ``pre_ptr`` what that is made of.

    N: columns of a plane. y is [R, N], of INTERLEAVED [R, N / 2].
    """
    dtype: tl.constexpr = y_ptr.dtype.element_ty
    offs_n = col + tl.arange(0, BLOCK_N)
    if ACTIVATION == HALVES:
        if pre_ptr is not None:
            mask = (offs_m < end)[:, None] & (offs_n < N)[None, :]
            at = pre_ptr + offs_m[:, None].to(tl.int64) * (2 * N) + offs_n[None, :]
            tl.store(at, td.from_float32(acc, dtype), mask=mask)
            tl.store(at + N, td.from_float32(second, dtype), mask=mask)
        store_rows(y_ptr, td.from_float32(swiglu(acc, second), dtype), offs_m, offs_n, end, N)
    elif ACTIVATION == INTERLEAVED:
        if pre_ptr is not None:
            store_rows(pre_ptr, td.from_float32(acc, dtype), offs_m, offs_n, end, N)
        gate, up = acc.reshape(BLOCK_M, BLOCK_N // 2, 2).split()
        columns = col // 2 + tl.arange(0, BLOCK_N // 2)
        store_rows(y_ptr, td.from_float32(swiglu(gate, up), dtype), offs_m, columns, end, N // 2)
    else:
        store_rows(y_ptr, td.from_float32(acc, dtype), offs_m, offs_n, end, N)


# Compiled once for a tile and a number of experts up to the next power of two, whatever the shape.
@td.jit(do_not_specialize=["num_experts", "R", "N", "K", "stride_plane", "stride_w", "group_m"])
def group_gemm_kernel(
    x_ptr, x_desc, w_ptr, w_desc, splits_ptr, y_ptr, pre_ptr,
    num_experts, R, N, K, stride_plane, stride_w, group_m,
    EXPERTS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ALIGNED: tl.constexpr, USE_TMA: tl.constexpr, W_IS_KN: tl.constexpr, EVEN_K: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """y[rows of e] = act(x[rows of e] @ w[e].T); N is that of a plane, see ``planes_of``."""
    N = as_aligned(N, ALIGNED)
    K = as_aligned(K, ALIGNED)
    stride_plane = as_aligned(stride_plane, ALIGNED)
    stride_w = as_aligned(stride_w, ALIGNED)
    PAIR: tl.constexpr = ACTIVATION == HALVES
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    rows = rows_of_groups(splits_ptr, num_experts, R, EXPERTS)
    tiles = tiles_of_groups(rows, tiles_n, BLOCK_M)
    for tile in range(tl.program_id(0), td.sum_of(tiles, 0), tl.num_programs(0)):
        expert, begin, end, row, pid_n = tile_of_groups(tile, rows, tiles, tiles_n, group_m, EXPERTS, BLOCK_M)
        col = pid_n * BLOCK_N
        offs_m = row + tl.arange(0, BLOCK_M)
        inside = tl.minimum(offs_m, end - 1).to(tl.int64)
        x_at = x_ptr.to(tl.int64) + inside * K * (x_ptr.dtype.element_ty.primitive_bitwidth // 8)
        acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
        acc, second = grouped_tile(
            acc, acc, x_at, x_desc, 0, row, offs_m < end,
            w_ptr, w_desc, expert * (2 if PAIR else 1), col, stride_plane, stride_w, N, K, x_ptr.dtype.element_ty,
            BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, USE_TMA, USE_TMA, W_IS_KN, PAIR, PRECISION,
        )  # fmt: skip
        store_product(acc, second, y_ptr, pre_ptr, offs_m, end, col, N, ACTIVATION, BLOCK_M, BLOCK_N)


@td.jit(do_not_specialize=["num_experts", "R"])
def ends_kernel(splits_ptr, ends_ptr, num_experts, R, EXPERTS: tl.constexpr):
    """The row past the last of each group, int32."""
    experts = tl.arange(0, EXPERTS)
    ends = td.running_sum(rows_of_groups(splits_ptr, num_experts, R, EXPERTS), 0)
    tl.store(ends_ptr + experts, ends, mask=experts < num_experts)


@td.jit
def _block_of_rows(ptr, offs_r, end, offs, WIDTH):
    """Block of rows before ``end`` of [rows, WIDTH]; zeros outside."""
    mask = (offs_r < end)[:, None] & (offs < WIDTH)[None, :]
    return tl.load(ptr + offs_r[:, None].to(tl.int64) * WIDTH + offs[None, :], mask=mask, other=0.0)


@td.jit
def _rows_before(end, row, desc, col, BLOCK_R: tl.constexpr):
    """Block of a descriptor's rows before ``end``; zeros after it, where those of the next group are."""
    block = desc.load([row, col])
    offs_r = row + tl.arange(0, BLOCK_R)
    return tl.where((offs_r < end)[:, None], block, tl.full((), 0.0, block.dtype))


@td.jit
def _transposed_product_by_tma(
    acc, begin, end, a_desc, a_last_desc, a_col, b_desc, b_last_desc, b_col, BLOCK_R: tl.constexpr,
    LAST_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """As ``_transposed_product``. Of what is left of a group after whole blocks only the last LAST_R rows are masked:
    that takes a block through registers."""
    whole = begin + (end - begin) // BLOCK_R * BLOCK_R
    for row in range(begin, whole, BLOCK_R):
        acc = td.dot(a_desc.load([row, a_col]).T, b_desc.load([row, b_col]), acc, PRECISION)
    last = begin + (end - begin) // LAST_R * LAST_R
    for row in range(whole, last, LAST_R):
        acc = td.dot(a_last_desc.load([row, a_col]).T, b_last_desc.load([row, b_col]), acc, PRECISION)
    if last < end:
        a = _rows_before(end, last, a_last_desc, a_col, LAST_R)
        acc = td.dot(a.T, _rows_before(end, last, b_last_desc, b_col, LAST_R), acc, PRECISION)
    return acc


@td.jit
def _transposed_product(
    acc, begin, end, a_ptr, a_col, A_WIDTH, b_ptr, b_col, B_WIDTH,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_R: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc + A[begin : end, a_col : +BLOCK_M].T @ B[begin : end, b_col : +BLOCK_N], both row-major."""
    offs_a = a_col + tl.arange(0, BLOCK_M)
    offs_b = b_col + tl.arange(0, BLOCK_N)
    for row in range(begin, end, BLOCK_R):
        offs_r = row + tl.arange(0, BLOCK_R)
        a = _block_of_rows(a_ptr, offs_r, end, offs_a, A_WIDTH)
        b = _block_of_rows(b_ptr, offs_r, end, offs_b, B_WIDTH)
        acc = add_product(acc, a.T, b, PRECISION)
    return acc


# Each descriptor of rows has another of LAST_R rows beside it.
@td.jit(do_not_specialize=["num_experts", "R", "N", "K", "group_m"])
def group_gemm_weights_kernel(
    dy_ptr, dy_desc, dy_last_desc, x_ptr, x_desc, x_last_desc, splits_ptr, dw_ptr, dw_desc,
    num_experts, R, N, K, group_m,
    EXPERTS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, LAST_R: tl.constexpr,
    ALIGNED: tl.constexpr, USE_TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dw[e] = dy[rows of e].T @ x[rows of e], [E, N, K]; zeros for a group without rows."""
    N = as_aligned(N, ALIGNED)
    K = as_aligned(K, ALIGNED)
    tiles_m, tiles_n = (N + BLOCK_M - 1) // BLOCK_M, (K + BLOCK_N - 1) // BLOCK_N
    expert = tl.program_id(0) // (tiles_m * tiles_n)
    pid_m, pid_n = swizzle(tl.program_id(0) % (tiles_m * tiles_n), tiles_m, tiles_n, group_m)
    begin, end = group_of(expert, splits_ptr, num_experts, R, EXPERTS)
    row, col = pid_m * BLOCK_M, pid_n * BLOCK_N
    acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
    if USE_TMA:
        acc = _transposed_product_by_tma(
            acc, begin, end, dy_desc, dy_last_desc, row, x_desc, x_last_desc, col, BLOCK_K, LAST_R, PRECISION
        )  # fmt: skip
    else:
        acc = _transposed_product(
            acc, begin, end, dy_ptr, row, N, x_ptr, col, K, BLOCK_M, BLOCK_N, BLOCK_K, PRECISION
        )  # fmt: skip
    dw = td.from_float32(acc, dw_ptr.dtype.element_ty)
    if USE_TMA:
        dw_desc.store([expert, row, col], dw.reshape(1, BLOCK_M, BLOCK_N))
    else:
        offs_m, offs_n = row + tl.arange(0, BLOCK_M), col + tl.arange(0, BLOCK_N)
        store_rows(dw_ptr + expert.to(tl.int64) * N * K, dw, offs_m, offs_n, N, K)


# ---- launchers ----


def product_constants(rows_k, w, planes, n, strides, is_kn, activation, tiles):
    """(descriptor of the weight or None, the constexpr arguments that the kernels for experts share)"""
    stride_plane, stride_w = strides
    block_n = max(tiles.block_n // 2, 16) if activation == "swiglu" else tiles.block_n
    tma = tma_fits(rows_k, w, stride_plane, stride_w, is_kn, tiles)
    of_plane = Tiles(block_n=block_n, block_k=tiles.block_k)
    desc = weight_descriptor(w, planes, n, stride_plane, stride_w, is_kn, of_plane) if tma else None
    return desc, {
        **tiles.constants(), "BLOCK_N": block_n, "ALIGNED": gemm_operands.aligned(n, rows_k, stride_plane, stride_w),
        "EVEN_K": rows_k % tiles.block_k == 0, "USE_TMA": tma, "W_IS_KN": is_kn,
        "PRECISION": gemm_operands.dot_precision(w.dtype), **tiles.options(),
    }  # fmt: skip


def rows_descriptor(rows, constants, tiles):
    """The descriptor of rows [R, K], if the kernel takes one."""
    if not constants["USE_TMA"]:
        return None
    return gemm_operands.rows_descriptor(rows, 1, rows.shape[0], rows.numel(), tiles.block_m, tiles.block_k)


def _tiles_for(rows, n, x, config):
    tiles = None if config is None else config.tiles
    return tiles or default_tiles(rows, n, x.dtype, x.device)


def product(x, w, splits, activation=None, keep=False, config=None):
    """(y, what SwiGLU was made of if ``keep``, else None) of x [R, K], w [E, N, K] and splits [E]."""
    x = gemm_operands.rows_contiguous(x)
    keep = keep and activation is not None
    if not x.shape[0]:
        width = w.shape[1] // 2 if activation else w.shape[1]
        return x.new_empty(0, width), x.new_empty(0, w.shape[1]) if keep else None
    w = weight_layout(w, activation)[0]
    workspace = alone_on(x.device)
    made = launch_kept(
        workspace, ("group_gemm", activation, keep, config, gemm_operands.dot_precision(x.dtype)), (x, w, splits),
        lambda *of: _prepare(workspace, *of, activation, keep, config),
    )  # fmt: skip
    return made[0], made[1] if keep else None


def _prepare(workspace, x, w, splits, activation, keep, config):
    rows, experts, width = x.shape[0], *w.shape[:2]
    made = [to_be_made(x, rows, width // 2 if activation else width)]
    if keep:
        made.append(to_be_made(x, rows, width))
    args, constants, tiles = _arguments(x, w, splits, made[0], made[1] if keep else None, activation, config)
    upper = (rows // tiles.block_m + min(experts, rows)) * -(-planes_of(w, activation)[1] // constants["BLOCK_N"])
    grid = (min(upper, gpu.resident_programs(x.device, tiles, x.dtype)),)
    return Launch(workspace, group_gemm_kernel, grid, args, constants, (x, w, splits), made, [])


def compile(x, w, splits, activation, config):
    """Compile what ``product`` with the same operands would launch, into Triton's cache; launches nothing."""
    if x.device.type == "cpu":
        return  # interpreted
    x = gemm_operands.rows_contiguous(x)
    args, constants, _ = _arguments(x, w, splits, x.new_empty(1), None, activation, config)
    group_gemm_kernel.warmup(*args, grid=(1,), **constants)


def _arguments(x, w, splits, y, pre, activation, config):
    rows, k = x.shape
    experts = w.shape[0]
    tiles = _tiles_for(rows // experts, w.shape[1], x, config)
    w, *strides, is_kn = weight_layout(w, activation)
    planes, n = planes_of(w, activation)
    w_desc, constants = product_constants(k, w, planes, n, strides, is_kn, activation, tiles)
    x_desc = rows_descriptor(x, constants, tiles)
    args = x, x_desc, w, w_desc, splits, y, pre, experts, rows, n, k, *strides, tiles.group_m
    extra = {"EXPERTS": next_power_of_2(experts), "ACTIVATION": NUMBERS[activation]}
    return args, {**extra, **constants}, tiles


def ends_of_groups(splits, x):
    """The row past the last of each group, int32 [E], none past those of x: what torch's grouped product is told."""
    workspace = alone_on(x.device)
    return launch_kept(
        workspace, ("ends of groups", x.shape[0]), (splits,), lambda *of: _prepare_ends(workspace, *of, x.shape[0])
    )[0]  # fmt: skip


def _prepare_ends(workspace, splits, rows):
    experts = splits.shape[0]
    ends = to_be_made(splits, experts, dtype=torch.int32)
    constants = {"EXPERTS": next_power_of_2(experts), "num_warps": 1}
    args = splits, ends, experts, rows
    return Launch(workspace, ends_kernel, (1,), args, constants, (splits,), [ends], [])


def weight_tiles(rows, n, k, dtype, device):
    """The tile of a weight's gradient for so many rows of a group.

    Most groups are short: a tile is small enough for three on a multiprocessor, of which others compute while one
    begins or stores. Long ones load less with a larger tile.
    """
    if not gpu.has_tma(device) or dtype.itemsize != 2:
        return default_tiles(n, k, dtype, device)
    if rows >= _LONG_GROUP:
        return Tiles(128, 256, 64, num_warps=8, num_stages=4)
    return Tiles(128, 128, 32, num_warps=4, num_stages=3)


def weight_gradient(dy, x, splits, experts, config=None):
    """dw [E, N, K] of dy [R, N] and x [R, K]; of a config the tiles count, of N x K outputs by steps of rows."""
    dy, x = gemm_operands.rows_contiguous(dy), gemm_operands.rows_contiguous(x)
    if not x.shape[0]:
        return x.new_zeros(experts, dy.shape[1], x.shape[1])
    workspace = alone_on(x.device)
    return launch_kept(
        workspace, ("group_gemm weights", experts, config, gemm_operands.dot_precision(x.dtype)), (dy, x, splits),
        lambda *of: _prepare_gradient(workspace, *of, experts, config),
    )[0]  # fmt: skip


def compile_gradient(dy, x, splits, experts, config):
    """As ``compile``, of ``weight_gradient``."""
    if x.device.type == "cpu":
        return  # interpreted
    operands = gemm_operands.rows_contiguous(dy), gemm_operands.rows_contiguous(x), splits
    args, constants, _ = _gradient_arguments(*operands, x.new_empty(experts, dy.shape[1], x.shape[1]), config)
    group_gemm_weights_kernel.warmup(*args, grid=(1,), **constants)


def _prepare_gradient(workspace, dy, x, splits, experts, config):
    dw = to_be_made(x, experts, dy.shape[1], x.shape[1])
    args, constants, tiles = _gradient_arguments(dy, x, splits, dw, config)
    grid = (experts * tiles.count(dy.shape[1], x.shape[1]),)
    return Launch(workspace, group_gemm_weights_kernel, grid, args, constants, (dy, x, splits), [dw], [])


def _gradient_arguments(dy, x, splits, dw, config):
    rows, (experts, n, k) = dy.shape[0], dw.shape
    tiles = config.tiles if config is not None else None
    tiles = tiles or weight_tiles(rows // experts, n, k, x.dtype, x.device)
    use_tma = gpu.has_tma(x.device) and x.element_size() == 2 and n % 8 == 0 and k % 8 == 0
    of_dy = of_x = (None, None)
    dw_desc = None
    if use_tma:
        of_dy, of_x = _row_blocks(dy, tiles, tiles.block_m), _row_blocks(x, tiles, tiles.block_n)
        dw_desc = TensorDescriptor(dw, [experts, n, k], [n * k, k, 1], [1, tiles.block_m, tiles.block_n])
    args = dy, *of_dy, x, *of_x, splits, dw, dw_desc, experts, rows, n, k, tiles.group_m
    constants = {
        "EXPERTS": next_power_of_2(experts), **tiles.constants(), "LAST_R": _LAST_R,
        "ALIGNED": gemm_operands.aligned(n, k), "USE_TMA": use_tma, "PRECISION": gemm_operands.dot_precision(x.dtype),
        **tiles.options(),
    }  # fmt: skip
    return args, constants, tiles


def _row_blocks(rows, tiles, columns):
    """Descriptors of rows [R, width] for a gradient's main loop, and for the last rows of a group."""
    strides = [rows.shape[1], 1]
    return [TensorDescriptor(rows, list(rows.shape), strides, [block, columns]) for block in (tiles.block_k, _LAST_R)]


def swiglu_backward(dh, pre, splits, activation):
    """The gradient of ``pre`` [R, 2 * I] from that of its SwiGLU; rows that belong to no group are not written."""
    dh, pre = dh.contiguous(), pre.contiguous()
    if not dh.shape[0]:
        return torch.empty_like(pre)
    workspace = alone_on(dh.device)
    return launch_kept(
        workspace, ("swiglu backward", activation), (dh, pre, splits),
        lambda *of: _prepare_swiglu_backward(workspace, *of, activation),
    )[0]  # fmt: skip


def _prepare_swiglu_backward(workspace, dh, pre, splits, activation):
    rows, width = dh.shape
    dpre = to_be_made(pre, *pre.shape)
    grid = (min(rows, 8 * gpu.num_sms(dh.device)),)
    args = dh, pre, splits, dpre, rows, width, splits.shape[0]
    constants = {
        "EXPERTS": next_power_of_2(splits.shape[0]), "ACTIVATION": NUMBERS[activation],
        "BLOCK": min(next_power_of_2(width), 1024), "num_warps": 4,
    }  # fmt: skip
    return Launch(workspace, swiglu_backward_kernel, grid, args, constants, (dh, pre, splits), [dpre], [])
