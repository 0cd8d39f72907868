"""Launch the kernels of group_gemm and of its gradients, or compile them ahead."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.tile_config import Tiles, default_tiles
from tdkernels.ops.experts.grouped_gemm.kernel import ends_kernel, group_gemm_kernel, group_gemm_weights_kernel
from tdkernels.ops.experts.grouped_gemm.swiglu import NUMBERS, swiglu_backward_kernel
from tdkernels.ops.experts.grouped_gemm.tile import GroupedProduct
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import Launch, bind_uncopied, launch_cached, local_workspace_of, output_spec

# Of a weight's gradient: rows that are masked at the end of a group, the fewest that tensor cores take; and how many
# make a group long.
_LAST_R = 16
_LONG_GROUP = 4096


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


def product_constants(rows_k, w, planes, n, strides, is_kn, activation, tiles):
    """(descriptor of the weight or None, the constexpr argument and options that the kernels for experts share)"""
    stride_plane, stride_w = strides
    block_n = max(tiles.block_n // 2, 16) if activation == "swiglu" else tiles.block_n
    tma = tma_fits(rows_k, w, stride_plane, stride_w, is_kn, tiles)
    of_plane = Tiles(block_n=block_n, block_k=tiles.block_k)
    desc = weight_descriptor(w, planes, n, stride_plane, stride_w, is_kn, of_plane) if tma else None
    product = GroupedProduct(
        tiles.block_m, block_n, tiles.block_k, w.element_size(),
        gemm_operands.aligned(n, rows_k, stride_plane, stride_w), rows_k % tiles.block_k == 0, tma, is_kn,
        NUMBERS[activation], activation == "swiglu", gemm_operands.dot_precision(w.dtype),
    )
    return desc, {"PRODUCT": product, **tiles.options()}


def rows_descriptor(rows, constants, tiles):
    """The descriptor of rows [R, K], if the kernel takes one."""
    if not constants["PRODUCT"].use_tma:
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
    made = launch_cached(*_call(x, weight_layout(w, activation)[0], splits, activation, keep, config))
    return made[0], made[1] if keep else None


def bind_product(x, w, splits, activation, config):
    """The Launch of ``product`` with these operands; None without rows, or if an operand has to be copied first."""
    if not x.shape[0]:
        return None
    taken = gemm_operands.rows_contiguous(x), weight_layout(w, activation)[0], splits.contiguous()
    return bind_uncopied((x, w, splits), *_call(*taken, activation, False, config))


def _call(x, w, splits, activation, keep, config):
    """The arguments of ``launch_cached``."""
    workspace = local_workspace_of(x.device)
    key = "group_gemm", activation, keep, config, gemm_operands.dot_precision(x.dtype)
    return workspace, key, (x, w, splits), lambda *of: _prepare(workspace, *of, activation, keep, config)


def _prepare(workspace, x, w, splits, activation, keep, config):
    rows, (experts, width) = x.shape[0], w.shape[:2]
    made = [output_spec(x, rows, width // 2 if activation else width)]
    if keep:
        made.append(output_spec(x, rows, width))
    args, constants, tiles = _arguments(x, w, splits, made[0], made[1] if keep else None, activation, config)
    tiles_n = cdiv(planes_of(w, activation)[1], constants["PRODUCT"].block_n)
    upper = (rows // tiles.block_m + min(experts, rows)) * tiles_n
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
    return args, {"EXPERTS": next_power_of_2(experts), **constants}, tiles


def ends_of_groups(splits, x):
    """The row past the last of each group, int32 [E], none past those of x: what torch's grouped product is told."""
    workspace = local_workspace_of(x.device)
    return launch_cached(
        workspace, ("ends of groups", x.shape[0]), (splits,), lambda *of: _prepare_ends(workspace, *of, x.shape[0])
    )[0]


def _prepare_ends(workspace, splits, rows):
    experts = splits.shape[0]
    ends = output_spec(splits, experts, dtype=torch.int32)
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
    workspace = local_workspace_of(x.device)
    return launch_cached(
        workspace, ("group_gemm weights", experts, config, gemm_operands.dot_precision(x.dtype)), (dy, x, splits),
        lambda *of: _prepare_gradient(workspace, *of, experts, config),
    )[0]


def compile_gradient(dy, x, splits, experts, config):
    """As ``compile``, of ``weight_gradient``."""
    if x.device.type == "cpu":
        return  # interpreted
    operands = gemm_operands.rows_contiguous(dy), gemm_operands.rows_contiguous(x), splits
    args, constants, _ = _gradient_arguments(*operands, x.new_empty(experts, dy.shape[1], x.shape[1]), config)
    group_gemm_weights_kernel.warmup(*args, grid=(1,), **constants)


def _prepare_gradient(workspace, dy, x, splits, experts, config):
    dw = output_spec(x, experts, dy.shape[1], x.shape[1])
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
    }
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
    workspace = local_workspace_of(dh.device)
    return launch_cached(
        workspace, ("swiglu backward", activation), (dh, pre, splits),
        lambda *of: _prepare_swiglu_backward(workspace, *of, activation),
    )[0]


def _prepare_swiglu_backward(workspace, dh, pre, splits, activation):
    rows, width = dh.shape
    dpre = output_spec(pre, *pre.shape)
    grid = (min(rows, 8 * gpu.num_sms(dh.device)),)
    args = dh, pre, splits, dpre, rows, width, splits.shape[0]
    constants = {
        "EXPERTS": next_power_of_2(splits.shape[0]), "ACTIVATION": NUMBERS[activation],
        "BLOCK": min(next_power_of_2(width), 1024), "num_warps": 4,
    }
    return Launch(workspace, swiglu_backward_kernel, grid, args, constants, (dh, pre, splits), [dpre], [])
