"""Launch the kernels of group_gemm and of SwiGLU, or compile them ahead of time."""

from dataclasses import replace
from typing import Any

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.scaling import BLOCK, Scales, out_dtype_of
from tdkernels.ops.common.tile_config import Tiles, scaled_tiles, specialized_tiles
from tdkernels.ops.experts.grouped_gemm import launch_specialized
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig, completed
from tdkernels.ops.experts.grouped_gemm.kernel import ends_kernel, group_gemm_kernel
from tdkernels.ops.experts.grouped_gemm.layout import memory_layout, tma_fits, weight_layout
from tdkernels.ops.experts.grouped_gemm.swiglu import NUMBERS, swiglu_backward_kernel, swiglu_kernel
from tdkernels.ops.experts.grouped_gemm.tile import GroupedProduct
from tdkernels.rounding import cdiv, next_power_of_2, rounded_rows
from tdkernels.runtime import gpu
from tdkernels.runtime.kernel_launch import (
    Launch,
    bind_uncopied,
    launch_cached,
    local_workspace_of,
    output_spec,
    rows_signature,
)
from tdkernels.runtime.triton_launcher import Rows

_PROGRAMS_PER_SM = 8  # of kernels that process rows


def weight_descriptor(
    w: torch.Tensor, planes: int, n: int, stride_plane: int, stride_w: int, is_kn: bool, tiles: Tiles,
) -> TensorDescriptor:
    """Return the tensor descriptor of a weight with ``planes`` planes [n, K], or [K, n] if ``is_kn``."""
    k = w.shape[2]
    shape, block = ([planes, k, n], [1, tiles.block_k]) if is_kn else ([planes, n, k], [1])
    block = [*block, tiles.block_n] if is_kn else [*block, tiles.block_n, tiles.block_k]
    return TensorDescriptor(w, shape, [stride_plane, stride_w, 1], block)


def product_constants(
    rows_k: int, w: torch.Tensor, planes: int, n: int, strides: list[int], is_kn: bool, activation: str | None,
    tiles: Tiles, scales: Scales | None = None,
) -> tuple[TensorDescriptor | None, dict[str, Any]]:
    """Return (descriptor of the weight or None, the constexpr argument ``PRODUCT`` and the launch options).

    All kernels with grouped products use it. ``rows_k`` is the K of the rows; ``strides`` are the plane stride and the
    row stride of the weight.
    """
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
    if scales is not None:
        product = product._replace(**_scaling_constants(w, scales, product, n))
    return desc, {"PRODUCT": product, **tiles.options()}


def _scaling_constants(w, scales, product, n):
    """Return the fields of GroupedProduct for scaled operands. ``n`` is the N of a plane."""
    if scales.kind == "block":
        # Tiles of the second plane begin at row N of the expert's weight.
        return {"scaling": "block", "crosses_blocks": product.pair and n % min(product.block_n, BLOCK) > 0}
    step, expert_step = launch_specialized.weight_scale_steps(scales, w.shape[0])
    return {
        "scaling": "row", "x_scale_step": int(scales.x.numel() > 1), "w_scale_step": step,
        "expert_scale_step": expert_step,
        "imprecise_k": None if scales.use_fast_accum else product.block_k,
    }


def rows_descriptor(
    rows: torch.Tensor, constants: dict[str, Any], tiles: Tiles, count: int | None = None
) -> TensorDescriptor | None:
    """Return the tensor descriptor of rows [R, K], or None if the kernel does not use TMA.

    ``count``: R, which may be a ``Rows``; None: the R of the tensor
    """
    if not constants["PRODUCT"].use_tma:
        return None
    count = rows.shape[0] if count is None else count
    return gemm_operands.rows_descriptor(rows, 1, count, rows.numel(), tiles.block_m, tiles.block_k)


def config_for(
    x: torch.Tensor, w: torch.Tensor, config: "GroupGemmConfig | None", activation: str | None = None,
    scales: Scales | None = None,
) -> GroupGemmConfig:
    """Return the config with a tile. If it has none, the heuristic one is selected, for the rounded number of rows.

    The weight is in a layout that needs no copy, see ``weight_layout``.
    """
    if config is not None and config.tiles is not None:
        return config
    rows, (experts, n, k) = rounded_rows(x.shape[0]), w.shape
    sizes = rows, n, k, experts, x.dtype, x.device, None if scales is None else scales.layout
    config = completed(config, *sizes)
    if config.warp_specialize:
        found = replace(config, tiles=specialized_tiles(config.tiles, x.dtype))  # type: ignore[arg-type]  # it has tiles
        if _specializes(x, w, memory_layout(w, activation), activation, found, scales):
            return found
        # The other kernel needs smaller tiles for few rows, and has no registers for large tiles of some fp8 operands.
        config = completed(GroupGemmConfig(), *sizes)
    if scales is None:
        return config
    return replace(config, tiles=scaled_tiles(config.tiles, scales.layout, x.device))  # type: ignore[arg-type]


def product(
    x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, activation: str | None = None, keep: bool = False,
    config: "GroupGemmConfig | None" = None, scales: Scales | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the grouped product of x [R, K], w [E, N, K] and splits [E], and return (y, pre).

    ``pre`` is the input of SwiGLU if there is an activation and ``keep`` is true, else None. ``scales`` are those of
    fp8 operands.
    """
    x = gemm_operands.rows_contiguous(x)
    keep = keep and activation is not None
    if not x.shape[0]:
        width, dtype = w.shape[1] // 2 if activation else w.shape[1], out_dtype_of(x, scales)
        return x.new_empty(0, width, dtype=dtype), x.new_empty(0, w.shape[1], dtype=dtype) if keep else None
    made = launch_cached(*_call(x, weight_layout(w, activation)[0], splits, activation, keep, config, scales))
    return made[0], made[1] if keep else None


def linear_by_tree(
    x: torch.Tensor, weight: torch.Tensor, leaves: int, config: "GroupGemmConfig", out_dtype: torch.dtype
) -> torch.Tensor:
    """Return x @ weight.T for x [M, K] and weight [N, K], where K is summed by a tree with ``leaves`` leaves.

    See ``tile.grouped_tile``. There is one expert, which has all rows.
    """
    x, w = gemm_operands.rows_contiguous(x), weight_layout(weight.unsqueeze(0))[0]
    splits = torch.full((1,), x.shape[0], dtype=torch.int32, device=x.device)
    workspace, tiles = local_workspace_of(x.device), config_for(x, w, config).tiles
    key = "linear by tree", leaves, config, out_dtype, gemm_operands.dot_precision(x.dtype)

    def prepare(x, w, splits):
        y = output_spec(x, x.shape[0], w.shape[1], dtype=out_dtype)
        args, constants = _arguments(x, x.shape[0], w, memory_layout(w, None), splits, y, None, None, tiles, None)
        constants["PRODUCT"] = constants["PRODUCT"]._replace(leaves=leaves)
        grid = (min(tiles.count(x.shape[0], w.shape[1]), gpu.resident_programs(x.device, tiles, x.dtype)),)
        return Launch(workspace, group_gemm_kernel, grid, args, constants, (x, w, splits), [y], [])

    return launch_cached(workspace, key, (x, w, splits), prepare)[0]


def bind_product(
    x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, activation: str | None, config: "GroupGemmConfig | None",
    scales: Scales | None = None,
) -> Launch | None:
    """Return the bound Launch of ``product`` for these operands.

    Return None if there are no rows, or if an operand has to be copied before the launch.
    """
    if not x.shape[0]:
        return None
    taken = gemm_operands.rows_contiguous(x), weight_layout(w, activation)[0], splits.contiguous()
    given = x, w, splits, *gemm_operands.scale_operands(scales)
    return bind_uncopied(given, *_call(*taken, activation, False, config, scales))


def _call(x, w, splits, activation, keep, config, scales):
    """Return the arguments of ``launch_cached`` for ``product``. A launch is cached for several numbers of rows."""
    workspace = local_workspace_of(x.device)
    key = "group_gemm", activation, keep, config, gemm_operands.dot_precision(x.dtype)
    if scales is None:
        prepare = lambda *of: _prepare(workspace, *of, activation, keep, config, None)  # noqa: E731
        return workspace, key, (x, w, splits), prepare, None, rows_signature(0)
    key = *key, scales.key
    operands = x, w, splits, *map(gemm_operands.rows_contiguous, gemm_operands.scale_operands(scales))

    def prepare_scaled(x, w, splits, scale_x, scale_w):
        given = scales._replace(x=scale_x, weight=scale_w)
        return _prepare(workspace, x, w, splits, activation, keep, config, given)

    return workspace, key, operands, prepare_scaled, None, rows_signature(0, 3)


def _prepare(workspace, x, w, splits, activation, keep, config, scales):
    rows, (experts, width) = Rows(x.shape[0]), w.shape[:2]
    most = rounded_rows(rows)
    dtype = out_dtype_of(x, scales)
    made = [output_spec(x, rows, width // 2 if activation else width, dtype=dtype)]
    if keep:
        made.append(output_spec(x, rows, width, dtype=dtype))
    y, pre = made[0], made[1] if keep else None
    operands = x, w, splits, *gemm_operands.scale_operands(scales)
    layout, config = memory_layout(w, activation), config_for(x, w, config, activation, scales)
    if _specializes(x, w, layout, activation, config, scales):
        counter = launch_specialized.work_counter(x.device)
        args, constants = launch_specialized.arguments(x, rows, w, layout, splits, counter, y, pre, config, scales)
        grid = (launch_specialized.num_programs(most, experts, layout, x.device),)
        return Launch(workspace, launch_specialized.kernel(), grid, args, constants, operands, made, [counter])
    tiles = config.tiles
    args, constants = _arguments(x, rows, w, layout, splits, y, pre, activation, tiles, scales)
    upper = (most // tiles.block_m + min(experts, most)) * cdiv(layout[1], constants["PRODUCT"].block_n)
    grid = (min(upper, gpu.resident_programs(x.device, tiles, x.dtype)),)
    return Launch(workspace, group_gemm_kernel, grid, args, constants, operands, made, [])


def _specializes(x, w, layout, activation, config, scales=None):
    """Return whether the warp-specialized kernel of group_gemm runs these operands."""
    has_registers = launch_specialized.has_registers(w.shape[0], scales)
    return has_registers and launch_specialized.supports(x, w, layout, activation, config, scales)


def compile(
    x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, activation: str | None, config: "GroupGemmConfig | None",
) -> None:
    """Compile the kernel that ``product`` would launch for the same operands into Triton's cache."""
    if x.device.type == "cpu":
        return  # interpreted
    x, w = gemm_operands.rows_contiguous(x), weight_layout(w, activation)[0]
    layout, config = memory_layout(w, activation), config_for(x, w, config, activation)
    if _specializes(x, w, layout, activation, config):
        counter, y = splits.new_empty(1, dtype=torch.int32), x.new_empty(1, layout[1])
        args, constants = launch_specialized.arguments(x, x.shape[0], w, layout, splits, counter, y, None, config)
        launch_specialized.kernel().warmup(*args, grid=(1,), **constants)
        return
    args, constants = _arguments(x, x.shape[0], w, layout, splits, x.new_empty(1), None, activation, config.tiles, None)
    group_gemm_kernel.warmup(*args, grid=(1,), **constants)


def _arguments(x, rows, w, layout, splits, y, pre, activation, tiles, scales):
    (planes, n, strides, is_kn), k, experts = layout, x.shape[1], w.shape[0]
    w_desc, constants = product_constants(k, w, planes, n, strides, is_kn, activation, tiles, scales)
    x_desc = rows_descriptor(x, constants, tiles, rows)
    args = x, x_desc, w, w_desc, *gemm_operands.scale_pointers(scales), splits, y, pre
    args = *args, experts, rows, n, k, *strides, tiles.group_m
    return args, {"EXPERTS": next_power_of_2(experts), **constants}


def ends_of_groups(splits: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """Return the end (exclusive) of each group's rows, int32 [E], clamped to the rows of x: ``offs`` of _grouped_mm."""
    workspace = local_workspace_of(x.device)
    return launch_cached(
        workspace, ("ends of groups",), (x, splits), lambda *of: _prepare_ends(workspace, *of),
        signature=rows_signature(0),
    )[0]


def _prepare_ends(workspace, x, splits):
    experts = splits.shape[0]
    ends = output_spec(splits, experts, dtype=torch.int32)
    constants = {"EXPERTS": next_power_of_2(experts), "num_warps": 1}
    args = splits, ends, experts, Rows(x.shape[0])
    return Launch(workspace, ends_kernel, (1,), args, constants, (x, splits), [ends], [])


def swiglu(pre: torch.Tensor, splits: torch.Tensor, activation: str) -> torch.Tensor:
    """Return silu(gate) * up, [R, I], for pre [R, 2 * I]. Rows that belong to no group are not written."""
    if not pre.shape[0]:
        return pre.new_empty(0, pre.shape[1] // 2)
    workspace = local_workspace_of(pre.device)
    return launch_cached(
        workspace, ("swiglu", activation), (pre.contiguous(), splits),
        lambda *of: _prepare_swiglu(workspace, *of, activation),  # type: ignore[call-arg]
        signature=rows_signature(0),
    )[0]


def _prepare_swiglu(workspace, pre, splits, activation):
    h = output_spec(pre, Rows(pre.shape[0]), pre.shape[1] // 2)
    grid, sizes, constants = _swiglu_launch(h, splits, activation)
    return Launch(workspace, swiglu_kernel, grid, (pre, splits, h, *sizes), constants, (pre, splits), [h], [])


def swiglu_backward(dh: torch.Tensor, pre: torch.Tensor, splits: torch.Tensor, activation: str) -> torch.Tensor:
    """Return the gradient of ``pre`` [R, 2 * I] for the gradient dh [R, I] of SwiGLU's output.

    Rows that belong to no group are not written.
    """
    dh, pre = dh.contiguous(), pre.contiguous()
    if not dh.shape[0]:
        return torch.empty_like(pre)
    workspace = local_workspace_of(dh.device)
    return launch_cached(
        workspace, ("swiglu backward", activation), (dh, pre, splits),
        lambda *of: _prepare_swiglu_backward(workspace, *of, activation),  # type: ignore[call-arg]
        signature=rows_signature(0, 1),
    )[0]


def _prepare_swiglu_backward(workspace, dh, pre, splits, activation):
    dpre = output_spec(pre, Rows(pre.shape[0]), pre.shape[1])
    grid, sizes, constants = _swiglu_launch(dh, splits, activation)
    args, operands = (dh, pre, splits, dpre, *sizes), (dh, pre, splits)
    return Launch(workspace, swiglu_backward_kernel, grid, args, constants, operands, [dpre], [])


def _swiglu_launch(h, splits, activation):
    """Return (grid, sizes, constants) of the kernel of SwiGLU with output h [R, I], or of its gradient."""
    (rows, width), experts = h.shape, splits.shape[0]
    grid, constants = launch_by_rows(rounded_rows(rows), width, splits)
    return grid, (Rows(rows), width, experts), {**constants, "ACTIVATION": NUMBERS[activation], "num_warps": 4}


def launch_by_rows(
    rows: int, width: int, splits: torch.Tensor, most_columns: int = 1024,
) -> tuple[tuple[int], dict[str, Any]]:
    """Return (grid, constants) of a kernel in which each of n programs takes every n-th row.

    A program processes a row in blocks of at most ``most_columns`` columns. It has one warp for 256 columns of a block,
    at most four.
    """
    block = min(next_power_of_2(width), most_columns)
    constants = {
        "EXPERTS": next_power_of_2(splits.shape[0]), "BLOCK": block, "num_warps": min(max(block // 256, 1), 4),
    }
    return (min(rows, _PROGRAMS_PER_SM * gpu.num_sms(splits.device)),), constants
