"""Compile the kernels of the dense operators with the arguments of their launchers."""

from dataclasses import replace

import torch

from tdkernels.ops.common.gemm_operands import aligned
from tdkernels.ops.common.gemm_tile import Product
from tdkernels.ops.common.scaling import layout_of
from tdkernels.ops.common.tile_config import Tiles, scaled_tiles
from tdkernels.ops.dense.ag_gemm.kernel import ag_gemm_kernel
from tdkernels.ops.dense.ag_gemm.kernel_multinode import ag_gemm_nodes_kernel
from tdkernels.ops.dense.ag_gemm.kernel_one_shot import ag_gemm_one_shot_kernel
from tdkernels.ops.dense.ag_gemm.output import num_stores
from tdkernels.ops.dense.gemm_ar.kernel import gemm_ar_kernel
from tdkernels.ops.dense.gemm_ar.kernel_direct import gemm_ar_direct_kernel
from tdkernels.ops.dense.gemm_ar.kernel_multinode import gemm_ar_nodes_kernel
from tdkernels.ops.dense.gemm_ar.launch_direct import SPLIT as gemm_ar_split
from tdkernels.ops.dense.gemm_ar.tile import slice_columns
from tdkernels.ops.dense.gemm_rs.kernel import gemm_rs_kernel
from tdkernels.ops.dense.gemm_rs.kernel_direct import gemm_rs_direct_kernel
from tdkernels.ops.dense.gemm_rs.kernel_multinode import gemm_rs_nodes_kernel
from tdkernels.ops.dense.gemm_rs.launch_direct import SPLIT as gemm_rs_split
from tdkernels.ops.dense.kernel_one_shot import gemm_one_shot_kernel
from tdkernels.ops.dense.launch_direct import slice_elements
from tests.compiled.targets import FP32, tiles_for, uses_tma
from tests.support.aot import PLAN, SHARED_MEMORY, compile_for, descriptor, pointer

ROWS, N, K = 2048, 8192, 7168
COPYING_KERNELS = [ag_gemm_kernel, gemm_ar_kernel, gemm_rs_kernel]  # their programs copy tiles to the peers
DIRECT_KERNELS = [gemm_ar_direct_kernel, gemm_rs_direct_kernel]
GEMM_KERNELS = [*COPYING_KERNELS, *DIRECT_KERNELS]
MULTINODE_KERNELS = [ag_gemm_nodes_kernel, gemm_ar_nodes_kernel, gemm_rs_nodes_kernel]  # they also use the network
ONE_SHOT_KERNELS = [ag_gemm_one_shot_kernel, gemm_one_shot_kernel]


def _product(tiles, dtype, is_aligned, bias, tma, w_is_kn, layout):
    sizes = tiles.block_m, tiles.block_n, tiles.block_k, dtype.itemsize
    product = Product(*sizes, is_aligned, bias is not None, tma, w_is_kn, "ieee", _out(dtype, layout).itemsize)
    if layout is None:
        return product
    scaling = "block" if layout == layout_of("block", False) else "row"
    imprecise_k = tiles.block_k if layout == layout_of("row", False) else None
    return product._replace(scaling=scaling, x_scale_step=1, w_scale_step=1, imprecise_k=imprecise_k)


def _out(dtype, layout):
    return dtype if layout is None else torch.bfloat16


def compile_gemm(
    kernel, arch, dtype, *, w_is_kn=False, bias=False, shape=(ROWS, N, K), nodes=2, local=2, weights=1, layout=None,
    tiles=None, leaves=0, **constants
):
    """Compile a GEMM kernel with the arguments of its launcher, by default for a large shape and with its tiles.

    ``layout``: of scaled operands (``scaling.layout_of``). ``leaves``: of the reduction tree, see ``Product``.
    """
    rows, n, k = shape
    given, tiles = tiles, tiles or tiles_for(arch, dtype)
    if layout is not None:
        tiles = scaled_tiles(tiles, layout, torch.device("cuda"))
    out, scales = _out(dtype, layout), [pointer(FP32)] * 2 if layout else [None] * 2
    tma = uses_tma(arch, dtype) and k % 8 == 0
    rows_desc = descriptor(dtype, (1, 256, 512), [1, tiles.block_m, tiles.block_k]) if tma else None
    weight_block = [tiles.block_k, tiles.block_n] if w_is_kn else [tiles.block_n, tiles.block_k]
    weight_desc = descriptor(dtype, (512, 512), weight_block) if tma else None
    stride = n if w_is_kn else k
    x = weight = pointer(dtype)
    output = pointer(out)
    bias = pointer(out) if bias else None
    ctx = pointer(torch.int64)
    if kernel in (ag_gemm_kernel, ag_gemm_nodes_kernel):
        args = [ctx, x, rows_desc, rows_desc, weight, weight_desc, bias, output]
        constants = {"FIXED_HALF": False, **constants}
        if kernel is ag_gemm_kernel:
            constants["STORES"] = stores = num_stores(
                tiles, dtype, SHARED_MEMORY[arch], 1 + (arch == "sm_100"), out.itemsize
            )
            block = [1, tiles.block_m, tiles.block_n // stores]
            args.append(descriptor(out, (1, 512, 512), block) if tma and n % 8 == 0 else None)
            more = args[4:9] if weights > 1 else [None] * 5
            args += [*more, *(args[4:9] if weights > 2 else [None] * 5), *scales]
        args += [rows, n, k, stride, rows, PLAN, 16, 1, 8]
        args += [16, 2, rows, n, stride, n, stride] if kernel is ag_gemm_kernel else []
    elif kernel is gemm_ar_kernel:
        stage = pointer(out)
        args = [ctx, x, rows_desc, weight, weight_desc, bias, *scales, output, stage]
        args += [rows, n, k, stride, 33, 6, 7, PLAN, 4, 8]
        constants = {"SLICE_N": slice_columns(tiles), "RANKS": 4, **constants}
    elif kernel is gemm_ar_nodes_kernel:
        stage = pointer(dtype)
        args = [ctx, x, rows_desc, weight, weight_desc, bias, output, stage]
        args += [rows, n, k, stride, 33, 6, 7, 8, 9, PLAN, 4, 8]
        multinode = {"NODES": nodes, "LOCAL": local, "ADDS_ONCE": nodes > 2}
        constants = {"SLICE_N": slice_columns(tiles), **multinode, **constants}
    elif kernel in DIRECT_KERNELS:
        tiles = given or replace(tiles, num_stages=min(tiles.num_stages, 3))
        split = gemm_ar_split if kernel is gemm_ar_direct_kernel else gemm_rs_split
        sent = descriptor(out, (2, 256, tiles.block_n), [1, tiles.block_m, tiles.block_n]) if tma else None
        args = [ctx, x, rows_desc, weight, weight_desc, bias, *scales, output, *[sent] * 4, *[None] * 4]
        args += [rows, n, k, stride, PLAN, 8, 128, *([33, rows] if kernel is gemm_rs_direct_kernel else [])]
        constants = {"SLICE": slice_elements(tiles, dtype, 4, split, out), "SPLIT": split, "RANKS": 4, **constants}
    else:
        stage = pointer(out)
        scales = scales if kernel is gemm_rs_kernel else []
        args = [ctx, x, rows_desc, weight, weight_desc, bias, *scales, output, stage]
        args += [rows, n, k, stride, 33, PLAN, 4, 8]
        args += [rows] if kernel is gemm_rs_kernel else []
        ranks = {"RANKS": 4} if kernel is gemm_rs_kernel else {"NODES": nodes, "LOCAL": local}
        constants = {**ranks, **constants}
    copying = kernel in (*COPYING_KERNELS, *MULTINODE_KERNELS)
    kwargs = {
        **({"COPY_WORDS": 4096} if copying else {}), **constants, **tiles.options(),
        "PRODUCT": _product(tiles, dtype, aligned(n, k, stride), bias, tma, w_is_kn, layout)._replace(leaves=leaves),
    }
    compiled = compile_for(kernel, args, kwargs, arch)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    return compiled


def one_shot_tiles_for(arch, dtype, rows):
    """Return the default tiles for small M. They are copied here for the same reason as in ``tiles_for``."""
    if dtype == FP32:
        return Tiles(rows, 64, 32, num_warps=4, num_stages=2)
    if arch in ("sm_90", "sm_100"):
        return Tiles(rows, 64, 128, num_warps=4, num_stages=6)
    gfx = arch.startswith("gfx")
    return Tiles(rows, 64, 128 if gfx else 64, num_warps=4, num_stages=2 if gfx else 4)


def compile_one_shot(
    kernel, arch, dtype, *, split, scatters=False, w_is_kn=False, bias=False, shape=(16, N, K), tiles=None, layout=None,
    **more
):
    rows, n, k = shape
    tiles = tiles or one_shot_tiles_for(arch, dtype, max(rows, 16))
    if layout is not None:
        tiles = scaled_tiles(tiles, layout, torch.device("cuda"))
    out, scales = _out(dtype, layout), [pointer(FP32)] * 2 if layout else [None] * 2
    has_tma = uses_tma(arch, dtype) and k % 8 == 0
    tma = has_tma and tiles.block_m > 16
    rows_desc = descriptor(dtype, (2, 256, 512), [1, tiles.block_m, tiles.block_k]) if tma else None
    weight_block = [tiles.block_k, tiles.block_n] if w_is_kn else [tiles.block_n, tiles.block_k]
    weight_desc = descriptor(dtype, (512, 512), weight_block) if tma else None
    stride = n if w_is_kn else k
    bias = pointer(out) if bias else None
    args = [pointer(torch.int64), pointer(dtype), rows_desc, pointer(dtype), weight_desc, bias, *scales]
    args += [pointer(out), pointer(FP32)]
    if kernel is ag_gemm_one_shot_kernel:
        args += [rows, n, k, stride, rows, k, 4096, PLAN, 24, split]
        constants = {"COPY_BLOCK": 2048, "PREFETCH": 1024 if has_tma else 0}
    else:
        args += [rows, n, k, rows, stride, k, PLAN, split]
        constants = {"SCATTERS": scatters, "RANKS": 8}
    kwargs = {
        **constants, **more, **tiles.options(), "SPLIT": split > 1,
        "PRODUCT": _product(tiles, dtype, aligned(n, k, stride), bias, tma, w_is_kn, layout),
    }
    compiled = compile_for(kernel, args, kwargs, arch)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    return compiled
