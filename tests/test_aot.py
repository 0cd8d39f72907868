"""Every kernel compiles for every GPU that we speak of, within its shared memory, on a machine without any."""

import contextlib
import functools
import inspect
import pkgutil
import re
from dataclasses import replace
from importlib import import_module
from types import SimpleNamespace

import pytest
import torch

import tdkernels.ops
from tdkernels.lang._jit import Kernel
from tdkernels.ops import (
    _device,
    _operands,
    _scatter_kernel,
    ag_attention_backward_kernel,
    ag_attention_config,
    ag_attention_dkv_kernel,
    ag_attention_kernel,
    ag_attention_merge,
    collective_launch,
    ep_direct,
    ep_dispatch_gemm_kernel,
    ep_gemm_combine_kernel,
    ep_launch,
    ep_order_kernel,
    ep_routing,
    flash_decode_backward_kernel,
    flash_decode_launch,
    group_gemm_kernel,
    moe_ag_gemm_kernel,
    moe_gemm_rs_kernel,
    moe_routing,
    ulysses_out_kernel,
    ulysses_qkv_kernel,
)
from tdkernels.ops import _gather_kernels as gather
from tdkernels.ops import _gather_nodes_kernels as gather_nodes
from tdkernels.ops import collective_kernels as collectives
from tdkernels.ops._operands import aligned
from tdkernels.ops._tiles import LARGE, Tiles
from tdkernels.ops.ag_gemm_kernel import ag_gemm_kernel
from tdkernels.ops.ag_gemm_nodes_kernel import ag_gemm_nodes_kernel
from tdkernels.ops.ag_gemm_one_shot import ag_gemm_one_shot_kernel
from tdkernels.ops.collective_config import EXCHANGES, CollectiveConfig
from tdkernels.ops.ep_config import EpConfig
from tdkernels.ops.ep_dispatch_kernel import BY_INSTRUCTION, BY_INTEGERS
from tdkernels.ops.flash_decode_kernel import flash_decode_kernel, flash_decode_nodes_kernel
from tdkernels.ops.gemm_ar_kernel import gemm_ar_kernel
from tdkernels.ops.gemm_ar_nodes_kernel import gemm_ar_nodes_kernel
from tdkernels.ops.gemm_ar_tiles import slice_columns
from tdkernels.ops.gemm_one_shot import gemm_one_shot_kernel
from tdkernels.ops.gemm_rs_direct import gemm_rs_direct_kernel
from tdkernels.ops.gemm_rs_kernel import gemm_rs_kernel
from tdkernels.ops.gemm_rs_nodes_kernel import gemm_rs_nodes_kernel
from tdkernels.ops.ulysses_config import UlyssesConfig
from tdkernels.trace import clocks
from tests.aot import (
    SHARED_MEMORY,
    TARGETS,
    assemble,
    compile_for,
    descriptor,
    pointer,
    product_loops,
    recorded_launches,
    unwritten,
)
from tests.ranks import DEVICE

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="needs no GPU and takes minutes: `make test` runs it")

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROWS, N, K = 2048, 8192, 7168
PLAN = 3
COPYING = [ag_gemm_kernel, gemm_ar_kernel, gemm_rs_kernel]  # whose programs copy to the peers
PRODUCTS = [*COPYING, gemm_rs_direct_kernel]
ACROSS_NODES = [ag_gemm_nodes_kernel, gemm_ar_nodes_kernel, gemm_rs_nodes_kernel]  # which speak to the network too


def tiles_for(arch, dtype):
    """The tiles that ``default_tiles`` gives large shapes; it cannot be asked about a device that is not there."""
    if dtype == FP32:
        return Tiles(64, 64, 32, num_warps=4, num_stages=2)
    if arch.startswith("gfx"):
        return Tiles(128, 128, 64, num_warps=8, num_stages=2)
    return Tiles() if arch in ("sm_90", "sm_100") else Tiles(128, 128, 64, num_warps=8, num_stages=3)


def uses_tma(arch, dtype):
    return arch in ("sm_90", "sm_100") and dtype != FP32


def compile_gemm(
    kernel, arch, dtype, *, w_is_kn=False, bias=False, shape=(ROWS, N, K), nodes=2, local=2, **constants
):  # fmt: skip
    """Compile one of the product kernels as its launcher would launch it, by default on a large shape."""
    rows, n, k = shape
    tiles = tiles_for(arch, dtype)
    tma = uses_tma(arch, dtype) and k % 8 == 0
    rows_desc = descriptor(dtype, (1, 256, 512), [1, tiles.block_m, tiles.block_k]) if tma else None
    weight_block = [tiles.block_k, tiles.block_n] if w_is_kn else [tiles.block_n, tiles.block_k]
    weight_desc = descriptor(dtype, (512, 512), weight_block) if tma else None
    stride = n if w_is_kn else k
    x = weight = output = pointer(dtype)
    bias = pointer(dtype) if bias else None
    ctx = pointer(torch.int64)
    if kernel in (ag_gemm_kernel, ag_gemm_nodes_kernel):
        args = [ctx, x, rows_desc, rows_desc, weight, weight_desc, bias, output]
        args += [rows, n, k, stride, rows, PLAN, 16, 1, 8]
        constants = {"FIXED_HALF": False, **constants}  # and as many nodes as there are
    elif kernel is gemm_ar_kernel:
        stage = pointer(dtype)
        args = [ctx, x, rows_desc, weight, weight_desc, bias, output, stage, rows, n, k, stride, 33, 6, 7, PLAN, 4, 8]
        constants = {"SLICE_N": slice_columns(tiles), "RANKS": 4, **constants}
    elif kernel is gemm_ar_nodes_kernel:
        stage = pointer(dtype)
        args = [ctx, x, rows_desc, weight, weight_desc, bias, output, stage]
        args += [rows, n, k, stride, 33, 6, 7, 8, 9, PLAN, 4, 8]
        across = {"NODES": nodes, "LOCAL": local, "ADDS_ONCE": nodes > 2}
        constants = {"SLICE_N": slice_columns(tiles), **across, **constants}
    elif kernel is gemm_rs_direct_kernel:
        tiles = replace(tiles, num_stages=min(tiles.num_stages, 3))
        sent = descriptor(dtype, (2, 256, tiles.block_n), [1, tiles.block_m, tiles.block_n]) if tma else None
        z_desc = descriptor(dtype, (1, 512, 512), [1, tiles.block_m, tiles.block_n]) if tma and n % 8 == 0 else None
        args = [ctx, x, rows_desc, weight, weight_desc, bias, output, z_desc, *[sent] * 3, *[None] * 4]
        args += [rows, n, k, stride, PLAN, 8]
        constants = {"RANKS": 4, **constants}
    else:
        stage = pointer(dtype)
        args = [ctx, x, rows_desc, weight, weight_desc, bias, output, stage, rows, n, k, stride, 33, PLAN, 4, 8]
        ranks = {"RANKS": 4} if kernel is gemm_rs_kernel else {"NODES": nodes, "LOCAL": local}
        constants = {**ranks, **constants}
    copying = kernel in (*COPYING, *ACROSS_NODES)
    kwargs = {
        **({"COPY_WORDS": 4096} if copying else {}), **constants, **tiles.constants(), **tiles.options(),
        "ELEM_BYTES": dtype.itemsize, "ALIGNED": aligned(n, k, stride), "HAS_BIAS": bias is not None, "USE_TMA": tma,
        "W_IS_KN": w_is_kn, "PRECISION": "ieee",
    }  # fmt: skip
    compiled = compile_for(kernel, args, kwargs, arch)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    return compiled


each_across_nodes = pytest.mark.parametrize("kernel", ACROSS_NODES, ids=lambda k: k.__name__)


ONE_SHOT = [ag_gemm_one_shot_kernel, gemm_one_shot_kernel]


def one_shot_tiles_for(arch, dtype, rows):
    """The tiles that _few_rows.default_tiles gives few rows, for the same reason."""
    if dtype == FP32:
        return Tiles(rows, 64, 32, num_warps=4, num_stages=2)
    if arch in ("sm_90", "sm_100"):
        return Tiles(rows, 64, 128, num_warps=4, num_stages=6)
    gfx = arch.startswith("gfx")
    return Tiles(rows, 64, 128 if gfx else 64, num_warps=4, num_stages=2 if gfx else 4)


def compile_one_shot(
    kernel, arch, dtype, *, split, scatters=False, w_is_kn=False, bias=False, shape=(16, N, K), tiles=None, **more
):  # fmt: skip
    rows, n, k = shape
    tiles = tiles or one_shot_tiles_for(arch, dtype, max(rows, 16))
    has_tma = uses_tma(arch, dtype) and k % 8 == 0
    tma = has_tma and tiles.block_m > 16
    rows_desc = descriptor(dtype, (2, 256, 512), [1, tiles.block_m, tiles.block_k]) if tma else None
    weight_block = [tiles.block_k, tiles.block_n] if w_is_kn else [tiles.block_n, tiles.block_k]
    weight_desc = descriptor(dtype, (512, 512), weight_block) if tma else None
    stride = n if w_is_kn else k
    bias = pointer(dtype) if bias else None
    args = [pointer(torch.int64), pointer(dtype), rows_desc, pointer(dtype), weight_desc, bias]
    args += [pointer(dtype), pointer(FP32)]
    if kernel is ag_gemm_one_shot_kernel:
        args += [rows, n, k, stride, rows, k, 4096, PLAN, 24, split]
        constants = {"COPY_BLOCK": 2048, "PREFETCH": 1024 if has_tma else 0}
    else:
        args += [rows, n, k, rows, stride, k, PLAN, split]
        constants = {"SCATTERS": scatters, "RANKS": 8}
    kwargs = {
        **constants, **more, **tiles.constants(), **tiles.options(), "ELEM_BYTES": dtype.itemsize,
        "ALIGNED": aligned(n, k, stride), "HAS_BIAS": bias is not None, "USE_TMA": tma, "W_IS_KN": w_is_kn,
        "PRECISION": "ieee", "SPLIT": split > 1,
    }  # fmt: skip
    compiled = compile_for(kernel, args, kwargs, arch)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    return compiled


each_one_shot = pytest.mark.parametrize("kernel", ONE_SHOT, ids=lambda k: k.__name__)


COLLECTIVES = {
    ("all_gather", "one_shot"): collectives.all_gather_kernel,
    ("reduce_scatter", "one_shot"): collectives.reduce_scatter_kernel,
    ("all_reduce", "one_shot"): collectives.all_reduce_one_shot_kernel,
    ("all_reduce", "two_shot"): collectives.all_reduce_two_shot_kernel,
}
each_collective = pytest.mark.parametrize("operator, exchange", COLLECTIVES, ids=str)
# (block_bytes, num_warps) of the defaults for few bytes, some, and many.
BLOCKS = [(4096, 4), (8192, 8), (16384, 16), (32768, 16)]


def compile_collective(operator, exchange, arch, dtype, *, block_bytes=8192, num_warps=8, nbytes=1 << 20):
    config = CollectiveConfig(exchange=exchange, block_bytes=block_bytes, num_warps=num_warps)
    x = torch.empty(64, dtype=dtype)
    args, kwargs = collective_launch.arguments(operator, pointer(torch.int64), x, x, nbytes, PLAN, config)
    compiled = compile_for(COLLECTIVES[operator, exchange], list(args), kwargs, arch)
    assert compiled.metadata.shared <= SHARED_MEMORY[arch]
    return compiled


MOVES = [
    "dispatch", "dispatch again, with scales", "dispatch, quantized", "gradient of a combine", "combine per rank",
    "gradient of a dispatch", "combine per expert",
]  # fmt: skip
DIRECT = ["direct dispatch", "direct dispatch, quantized"]  # in a group on one node
ROUTES = ["route", "route of many tokens", "route by source"]
# Between them they hold every function of the kernels; the others are for one target, to save time.
EVERYWHERE = ["route of many tokens", "dispatch, quantized", "combine per rank", "direct dispatch, quantized"]


@functools.cache
def expert_launches(tokens=128, k=8, experts=256, ranks=8, width=7168, dtype=BF16, local=None):
    """What dispatches, combines and their gradients launch, by name: lists of (kernel, args, kwargs).

    ``local``: ranks of a node, of several; None for one node.
    """
    group, capacity, found = SimpleNamespace(size=lambda: ranks), 2 * tokens, {}
    per_rank, per_expert = EpConfig(), EpConfig(combine="per_expert")
    with recorded_launches((ep_routing, ep_launch, ep_direct), ranks, ranks // (local or ranks)) as launches:

        def keep(name):
            found[name] = list(launches)
            launches.clear()

        def route(tokens, k, **options):
            ids = torch.zeros(tokens, k, dtype=torch.int64)
            return ep_routing.route("op", ids, experts, group, per_rank, max_tokens=capacity, **options)

        routing = route(tokens, k)
        keep("route")
        route(64 * tokens, k)
        keep("route of many tokens")
        route(tokens, 1, by_source=True, bad=torch.zeros((), dtype=torch.int32))
        keep("route by source")
        x, weights, of_rows = torch.zeros(tokens, width, dtype=dtype), torch.ones(tokens, k), torch.ones(capacity)
        rows, _, _ = ep_launch.dispatch(routing, x, weights=weights)
        keep("dispatch")
        ep_launch.dispatch(routing, x.to(torch.float8_e4m3fn), weights=weights, scales=torch.ones(tokens, 56))
        keep("dispatch again, with scales")
        ep_launch.dispatch(routing, x, weights=weights, quantize=True)
        keep("dispatch, quantized")
        ep_launch.dispatch_gradient(routing, x, rows, weights, True)
        keep("gradient of a combine")
        ep_launch.combine(routing, rows, weights=weights, row_weights=of_rows)
        keep("combine per rank")
        ep_launch.combine(routing, rows, row_numbers=of_rows)
        keep("gradient of a dispatch")
        ep_launch.combine(routing, rows, weights=weights, row_weights=of_rows, config=per_expert)
        keep("combine per expert")
        for name in DIRECT if local is None else []:
            ids, quantize = torch.zeros(tokens, k, dtype=torch.int64), name.endswith("quantized")
            routing = ep_direct.bounded_routing("op", ids, experts, group, per_rank, capacity, tokens)
            ep_direct.leave_uncounted(routing, ids)
            ep_launch.dispatch(routing, x, weights=weights, quantize=quantize)
            keep(name)
    assert list(found) == ROUTES + MOVES + (DIRECT if local is None else []) and all(found.values())
    return found


def compile_launches(launches, arch):
    """As that GPU would be launched on: here, launchers see one that does not quantize by an instruction."""
    by = (BY_INSTRUCTION if arch in ("sm_89", "sm_90", "sm_100") else BY_INTEGERS).value
    launches = [(k, a, {**kw, "QUANTIZE": by} if kw.get("QUANTIZE") else kw) for k, a, kw in launches]
    compiled = [compile_for(*launch, arch) for launch in launches]
    assert all(each.metadata.shared <= SHARED_MEMORY[arch] for each in compiled)
    return compiled


# What the launches of a training step of group_gemm are, in their order; without an activation there is no "swiglu".
GROUPED = ["product", "swiglu", "gradient of x", "gradient of w"]


@functools.cache
def grouped_launches(arch, dtype, activation, sizes=(256, 512, 512)):
    """{name: (kernel, args, kwargs)} of a step on ``arch``; the gradient of x has the weight the other way round."""
    rows, n, k = sizes
    x, w = torch.zeros(rows, k, dtype=dtype), torch.zeros(4, n, k, dtype=dtype)
    splits = torch.zeros(4, dtype=torch.int32)
    with recorded_launches(group_gemm_kernel) as launches, pytest.MonkeyPatch.context() as patch:
        patch.setattr(_device, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(group_gemm_kernel, "default_tiles", lambda *_: tiles_for(arch, dtype))
        y, pre = group_gemm_kernel.product(x, w, splits, activation, keep=True)
        dy = y if pre is None else group_gemm_kernel.swiglu_backward(y, pre, splits, activation)
        group_gemm_kernel.product(dy, w.transpose(1, 2), splits)
        group_gemm_kernel.weight_gradient(dy, x, splits, 4)
    names = [name for name in GROUPED if activation or name != "swiglu"]
    return dict(zip(names, launches, strict=True))


def compile_grouped(name, arch, dtype, activation=None, **options):
    (compiled,) = compile_launches([grouped_launches(arch, dtype, activation, **options)[name]], arch)
    return compiled


# What tp_moe and its backward launch: the routing, and products by expert. Those of one kernel differ in what is
# compiled of it: a weight either way round, SwiGLU, weights of choices.
SLICED_ROUTE = ["count", "place", "order"]
SLICED_ROWS = ["rows", "rows, swiglu", "rows, interleaved", "gradient of sums"]
SLICED_SUMS = ["sums", "gradient of rows"]


@functools.cache
def sliced_launches(arch, dtype, sizes=(256, 2, 4, 512, 256), ranks=4):
    """{name: (kernel, args, kwargs)}; sizes are those of a rank: M / W, k, E, H, I / W."""
    tokens, k, experts, width, hidden = sizes
    group = SimpleNamespace(size=lambda: ranks)
    config = moe_ag_gemm_kernel.MoeTpConfig(tiles=tiles_for(arch, dtype))
    x, weights = torch.zeros(tokens, width, dtype=dtype), torch.ones(ranks * tokens, k)
    gate_up, down = (torch.zeros(experts, *size, dtype=dtype) for size in ((2 * hidden, width), (width, hidden)))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(_device, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(moe_routing, "all_gather", lambda ids, group: ids.repeat(ranks, 1))
        of_route, of_rows, of_sums = (
            stack.enter_context(recorded_launches(module))
            for module in (moe_routing, moe_ag_gemm_kernel, moe_gemm_rs_kernel)
        )
        ids = torch.zeros(tokens, k, dtype=torch.int64)
        routing = moe_routing.route("op", ids, experts, group, config.chunk_rows, config.tiles.block_m, 3)
        rows = functools.partial(moe_ag_gemm_kernel.launch, routing=routing, config=config)
        rows(x, gate_up)
        h = rows(x, gate_up, activation="swiglu", keep=True).y
        dpre = rows(x, gate_up, activation="swiglu_interleaved", keep=True).pre
        rows(x, down.transpose(1, 2), gradients=moe_ag_gemm_kernel.Gradients(h, weights))
        moe_gemm_rs_kernel.launch(h, down, routing, weights, config)
        moe_gemm_rs_kernel.launch(dpre, gate_up.transpose(1, 2), routing, None, config)
    names = SLICED_ROUTE + SLICED_ROWS + SLICED_SUMS
    return dict(zip(names, of_route + of_rows + of_sums, strict=True))


def compile_sliced(name, arch, dtype=BF16, **options):
    (compiled,) = compile_launches([sliced_launches(arch, dtype, **options)[name]], arch)
    return compiled


# What an ep_moe that overlaps launches, with its gradients: the order of its rows, and the two kernels.
EXPERT_LAYER = ["order", "rows, swiglu", "rows, interleaved", "gradient of sums", "sums", "gradient of rows"]


@functools.cache
def expert_layer_launches(arch, dtype, sizes=(256, 2, 4, 512, 256), ranks=4):
    """{name: (kernel, args, kwargs)}; sizes are those of a rank: T, k, E / W, H, I."""
    tokens, k, each, width, hidden = sizes
    group, tiles = SimpleNamespace(size=lambda: ranks, rank=lambda: 0), tiles_for(arch, dtype)
    x, weights = torch.zeros(tokens, width, dtype=dtype), torch.ones(tokens, k)
    gate_up, down = (torch.zeros(each, *size, dtype=dtype) for size in ((2 * hidden, width), (width, hidden)))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(_device, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(ep_dispatch_gemm_kernel, "rows_of_buffer", lambda workspace, x: x[:1])
        stack.enter_context(recorded_launches(ep_routing, ranks))
        of_order, of_rows, of_sums = (
            stack.enter_context(recorded_launches(module, ranks))
            for module in (ep_order_kernel, ep_dispatch_gemm_kernel, ep_gemm_combine_kernel)
        )
        ids, most = torch.zeros(tokens, k, dtype=torch.int64), 2 * tokens
        routing = ep_routing.route("op", ids, each * ranks, group, EpConfig(), max_tokens=most, whole=True)
        order = ep_order_kernel.order_of(routing)
        rows, sums = ep_dispatch_gemm_kernel.launch, ep_gemm_combine_kernel.launch
        came = rows(routing, order, x, weights, gate_up, tiles, activation="swiglu", keep=True, keep_rows=True)
        rows(routing, order, x, weights, gate_up, tiles, activation="swiglu_interleaved")
        of_h = rows(
            routing, order, x, None, down.transpose(1, 2), tiles, gradient=(came.y, came.weights), keep_rows=True
        )  # fmt: skip
        sums(routing, came.y, down, came.origins, tiles, weights=weights)
        sums(routing, came.pre, gate_up.transpose(1, 2), came.origins, tiles, dots=of_h.dots)
    return dict(zip(EXPERT_LAYER, of_order + of_rows + of_sums, strict=True))


def compile_expert_layer(name, arch, dtype=BF16, **options):
    (compiled,) = compile_launches([expert_layer_launches(arch, dtype, **options)[name]], arch)
    return compiled


# The projections round an attention whose heads are divided, and their gradients, which have the weights the other way
# round; of the second one with and without what is kept for a gradient.
ULYSSES = ["qkv", "gradient of o", "out", "gradient of x"]


@functools.cache
def ulysses_launches(arch, dtype, sizes=(2, 256, 512, 256), bias=False, ranks=4, tiles=None):
    """{name: (kernel, args, kwargs)}; sizes are those of a rank: B, S / W, K, N / W."""
    batch, positions, k, width = sizes
    group = SimpleNamespace(size=lambda: ranks, rank=lambda: 1)
    tiles = tiles or tiles_for(arch, dtype)
    config = UlyssesConfig(tiles=tiles)
    x, o = torch.zeros(batch * positions, k, dtype=dtype), torch.zeros(ranks * batch * positions, width, dtype=dtype)
    weight = torch.zeros(ranks * width, k, dtype=dtype)
    of_qkv, of_out = (torch.zeros(n, dtype=dtype) if bias else None for n in weight.shape)
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(_operands, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(ulysses_out_kernel, "_push_bytes", lambda device: 32 << 10)
        gathered = descriptor(dtype, (2, 256, 512), [1, tiles.block_m, tiles.block_k])
        patch.setattr(ulysses_out_kernel, "_gathered_descriptor", lambda *_: gathered)
        qkv = stack.enter_context(recorded_launches(ulysses_qkv_kernel))
        out = stack.enter_context(recorded_launches(ulysses_out_kernel))
        ulysses_qkv_kernel.launch("op", x, weight, of_qkv, batch, group, config)
        ulysses_qkv_kernel.launch("op", x, weight.t().contiguous().t(), None, batch, group, config)
        ulysses_out_kernel.launch("op", o, weight.t().contiguous(), of_out, batch, group, config)
        ulysses_out_kernel.launch("op", o, weight.t(), None, batch, group, config, keep=True)
    return dict(zip(ULYSSES, qkv + out, strict=True))


def compile_ulysses(name, arch, dtype=BF16, **options):
    (compiled,) = compile_launches([ulysses_launches(arch, dtype, **options)[name]], arch)
    return compiled


# What flash_decode launches, by name: (q [B, Tq, Hq, D], Hkv, Dv, block_size or 0, fp8, (soft_cap, window)).
DECODES = {
    "one token": ((8, 1, 32, 128), 8, 128, 0, False, (None, None)),
    "tokens, paged, fp8": ((3, 2, 12, 96), 4, 80, 16, True, (30.0, 100)),
    "latent": ((4, 1, 128, 576), 1, 512, 64, False, (None, None)),
}


def decode_launch(name, arch, dtype=BF16, ranks=4, nodes=1):
    """(kernel, args, kwargs) of a decode, and of its gradients unless the cache is fp8."""
    sizes, heads, dv, page, fp8, (soft_cap, window) = DECODES[name]
    q, group = torch.zeros(sizes, dtype=dtype), SimpleNamespace(size=lambda: ranks)
    k = torch.zeros(sizes[0], page or 256, heads, sizes[3], dtype=torch.float8_e4m3fn if fp8 else dtype)
    v = k[..., :dv] if name == "latent" else k.new_zeros(*k.shape[:3], dv)
    lens, table = torch.zeros(sizes[0], dtype=torch.int32), torch.zeros(sizes[0], 16, dtype=torch.int32)
    table = table if page else None
    scales = (torch.ones(heads), torch.ones(heads)) if fp8 else None
    options = 1.0, soft_cap, window
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(_device, "shared_memory_bytes", lambda device: SHARED_MEMORY[arch])
        gpu, default = torch.device("cuda", 0), flash_decode_launch.default_config
        tile = flash_decode_backward_kernel._tile
        patch.setattr(flash_decode_launch, "default_config", lambda shape, _: default(shape, gpu))
        patch.setattr(flash_decode_backward_kernel, "_tile", lambda shape, size, _: tile(shape, size, gpu))
        kind = 0 if not fp8 else 1 if arch in ("sm_89", "sm_90", "sm_100") else 2
        patch.setattr(flash_decode_launch, "fp8_kind", lambda cache: kind)
        launches, gradients = (
            stack.enter_context(recorded_launches(module, ranks, nodes))
            for module in (flash_decode_launch, flash_decode_backward_kernel)
        )
        o, _, lse = flash_decode_launch.launch(q, k, v, lens, table, scales, options, group, None, keep=not fp8)
        if not fp8:
            shape = flash_decode_launch.shape_of(q, k, v, table)
            flash_decode_backward_kernel.launch(q, k, v, lens, lens, table, o, lse, lse, shape, options)
    return launches + gradients


# What ag_attention and its backward launch.
ATTENTION = ["attention", "statistics", "gradient of q", "gradients of k and v"]


@functools.cache
def attention_launches(
    arch, dtype, d=64, dv=64, rows=256, heads=4, kv_heads=2, ranks=2, sharding="zigzag", causal=True
):  # fmt: skip
    """{name: (kernel, args, kwargs)} of a training step with the default tiles of ``arch``."""
    device, of_forward, of_keys = SimpleNamespace(type="cuda"), ag_attention_kernel, ag_attention_dkv_kernel
    q, k, v = (torch.zeros(1, rows, *size, dtype=dtype) for size in ((heads, d), (kv_heads, d), (kv_heads, dv)))
    with contextlib.ExitStack() as stack:
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(_device, "has_tma", lambda device: arch in ("sm_90", "sm_100"))
        patch.setattr(_device, "capability", lambda device: (int(arch[3:-1]), int(arch[-1])))
        patch.setattr(torch.version, "hip", "7.0" if arch.startswith("gfx") else None)
        config = ag_attention_config.completed(None, rows, max(d, dv), dtype, device)
        # The memory that peers write to is none here, and its descriptor like that of any tensor.
        for module in (of_forward, of_keys):
            patch.setattr(module, "gathered_descriptor", lambda *args: of_forward.shard_descriptor(args[2], *args[4:]))
        forward, query, keys = [
            stack.enter_context(recorded_launches(module))
            for module in (of_forward, ag_attention_backward_kernel, of_keys)
        ]
        call = causal, sharding, d**-0.5, SimpleNamespace(size=lambda: ranks), config
        o, lse = of_forward.launch(q, k, v, *call)
        ag_attention_backward_kernel.launch(q, k, v, o, lse, o, lse, (True,) * 3, *call)
    return dict(zip(ATTENTION, (*forward, keys[0], *query, *keys[1:]), strict=True))


def compile_attention(name, arch, dtype=BF16, **options):
    (compiled,) = compile_launches([attention_launches(arch, dtype, **options)[name]], arch)
    return compiled


def small_launches():
    """Each small kernel with the arguments of two launches, one of them with as many arguments of 1 as can be."""
    ctx, x = pointer(torch.int64), pointer(BF16)
    push = {"COPY_WORDS": 4096, "num_warps": 16}
    add = {"BLOCK": 4096, "num_warps": 8}
    return {
        gather.begin_kernel: [([ctx, PLAN], {"num_warps": 1}), ([ctx, 1], {"num_warps": 1})],
        gather.push_kernel: [([ctx, x, 1 << 24, 1 << 20, 16, 1 << 24, PLAN], push), ([ctx, x, 2, 2, 1, 16, 1], push)],
        gather.notify_kernel: [
            ([ctx, 48, 2, PLAN], {"PASSES_ON": True, "num_warps": 1}), ([ctx, 1, 1, 1], {"PASSES_ON": False})
        ],
        gather.await_kernel: [
            ([ctx, 16, 0, 16, 1, 4, PLAN], {"num_warps": 1}), ([ctx, 1, 0, 1, 1, 2, 1], {"num_warps": 1})
        ],
        _scatter_kernel.add_parts_kernel: [
            ([ctx, x, x, 1 << 24, 8192, 1 << 25], {**add, "RANKS": 4, "ALIGNED": True, "HAS_BIAS": True}),
            ([ctx, pointer(FP32), None, 1, 1, 256], {**add, "RANKS": 2, "ALIGNED": False, "HAS_BIAS": False}),
        ],
        ag_attention_merge.merge_kernel: [_merge(BF16, 128, 1 << 20, 1 << 19, 1 << 18), _merge(FP32, 72, 1, 1, 1)],
    }


def _merge(dtype, d, *sizes):
    """Arguments of the kernel that merges attention to some keys with that to others, into a dtype."""
    stats, o = pointer(FP32), pointer(BF16)
    constants = {"D": d, "BLOCK_D": 128, "BLOCK": 32, "num_warps": 4}
    return [pointer(dtype), stats, o, stats, o, stats, *sizes], constants


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@pytest.mark.parametrize("kernel", PRODUCTS, ids=lambda k: k.__name__)
def test_products_compile(kernel, dtype, arch):
    compile_gemm(kernel, arch, dtype, bias=dtype == FP16, w_is_kn=dtype == BF16)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@pytest.mark.parametrize("kernel", PRODUCTS, ids=lambda k: k.__name__)
def test_a_size_of_one_compiles(kernel, arch):
    """The compiler turns an argument of 1 into a constant, which has not all the methods of a value."""
    for shape in ((1, 1, 1), (ROWS, 1, K), (1, N, 3)):
        compile_gemm(kernel, arch, BF16, shape=shape)


# Of NVIDIA's GPUs these two take all the ways there are.
@pytest.mark.parametrize("arch, dtype, local", [
    ("sm_80", FP32, 2), ("sm_90", FP16, 1), ("gfx942", BF16, 2), ("gfx950", FP16, 1),
], ids=str)  # fmt: skip
@each_across_nodes
def test_products_across_nodes_compile(kernel, arch, dtype, local):
    compile_gemm(kernel, arch, dtype, bias=dtype == FP16, w_is_kn=dtype == FP16, nodes=3, local=local)
    if arch == "sm_90":
        compile_gemm(kernel, arch, dtype, shape=(1, 1, 1), local=local)


@pytest.mark.parametrize("kernel, nodes", [
    *((kernel, 2) for kernel in ACROSS_NODES), (gemm_ar_nodes_kernel, 3),
], ids=lambda value: getattr(value, "__name__", str(value)))  # fmt: skip
def test_products_across_nodes_on_hopper(kernel, nodes):
    ptx = compile_gemm(kernel, "sm_90", BF16, nodes=nodes).asm["ptx"]
    assert "wgmma.mma_async" in ptx and "cp.async.bulk.tensor" in ptx and "mma.sync" not in ptx
    assert not narrow(ptx)
    assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx  # what is pushed
    # What the network reads has been stored by all threads.
    put = ptx.index("call.uni nvshmemx_putmem_signal_nbi_block")
    published = ptx.rindex("fence.acq_rel.sys", 0, put)
    assert re.search(r"st\.global\.v2\.b64|st\.global\.v4\.b32", ptx[:published]) and "bar.sync" in ptx[published:put]
    # What it has brought is read after the library's own wait; by TMA, after a fence that follows the wait.
    wait = ptx.rindex("call.uni nvshmem_signal_wait_until")
    if kernel is ag_gemm_nodes_kernel:
        fence = ptx.index("fence.proxy.async.global", wait)
        assert "cp.async.bulk.tensor" not in ptx[wait:fence] and "cp.async.bulk.tensor" in ptx[fence:]
    else:
        assert re.search(r"ld\.global\.v2\.b64|ld\.global\.v4\.b32", ptx[wait:])
    told, code = assemble(ptx)
    assert "serialized" not in told, "products would wait for each other"
    main_loop = min(product_loops(code), key=len)
    assert not any(re.search(r"\b(LDL|STL)\b", text) for text in main_loop), told


@each_one_shot
@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
def test_one_shot_compiles(dtype, arch, kernel):
    compile_one_shot(kernel, arch, dtype, split=2 if dtype == BF16 else 1, bias=dtype == FP16, w_is_kn=dtype == FP32)
    if arch in ("sm_90", "gfx942"):
        compile_one_shot(kernel, arch, dtype, split=2, scatters=True, shape=(1, 1, 1))
        compile_one_shot(kernel, arch, dtype, split=1, scatters=True, w_is_kn=dtype == BF16, shape=(64, N, K))


@pytest.mark.parametrize("arch", ["sm_90", "sm_100"])
def test_large_tiles_of_defaults(arch):
    """Those of one shot for many columns, and of a weight's gradient for long groups."""
    for kernel, w_is_kn in zip(ONE_SHOT, (False, True), strict=True):
        compile_one_shot(kernel, arch, BF16, split=1, scatters=True, w_is_kn=w_is_kn, shape=(256, N, K), tiles=LARGE)
    compiled = compile_grouped("gradient of w", arch, BF16, sizes=(4 * 4096, 512, 512))
    assert compiled.metadata.num_warps == 8 and compiled.metadata.shared <= SHARED_MEMORY[arch]


def narrow(ptx):
    """Loads and stores of less than 8 bytes a thread; words of 8 are what signals and tables are made of."""
    return re.findall(r"(?:ld|st)\.global\.[bu](?:8|16|32)\b.*", ptx)


@each_one_shot
@pytest.mark.parametrize("rows, split, scatters", [(16, 1, True), (64, 2, False)])
def test_one_shot_moves_sixteen_bytes_at_a_time(rows, split, scatters, kernel):
    ptx = compile_one_shot(kernel, "sm_90", BF16, split=split, scatters=scatters, shape=(rows, N, K)).asm["ptx"]
    assert not narrow(ptx)
    staged = re.findall(r"cp\.async\.\w+\.shared\.global.*", ptx)
    assert all(" 0x10" in line for line in staged)
    assert "wgmma" in ptx and bool(staged) == (rows == 16) and ("cp.async.bulk.tensor" in ptx) == (rows == 64)
    assert ("cp.async.bulk.prefetch.L2" in ptx) == (kernel is ag_gemm_one_shot_kernel)


@pytest.mark.parametrize("kernel", COPYING, ids=lambda k: k.__name__)
def test_products_move_sixteen_bytes_at_a_time(kernel):
    """An address that the compiler knows nothing of is read and written by single elements."""
    ptx = compile_gemm(kernel, "sm_90", BF16).asm["ptx"]
    assert not narrow(ptx)
    assert "ld.global.v2.b64" in ptx and "st.global.v2.b64" in ptx  # what is pushed
    # Signals and tables are read one by one; of what is copied, whole blocks of words are. finish stores four words.
    assert len(re.findall(r"st\.global\.b64", ptx)) <= 4, "a copy stores single words"


def test_rows_without_tma_are_read_in_wide_pieces():
    staged = re.findall(r"cp\.async\.\w+\.shared\.global.*", compile_gemm(ag_gemm_kernel, "sm_80", BF16).asm["ptx"])
    assert staged and all(" 0x10" in line for line in staged)


@pytest.mark.parametrize("arch", TARGETS)
@pytest.mark.parametrize("dtype", [BF16, FP16, FP32], ids=str)
@each_collective
def test_collectives_compile(operator, exchange, dtype, arch):
    compile_collective(operator, exchange, arch, dtype)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@each_collective
def test_collectives_of_odd_sizes_compile(operator, exchange, arch):
    """Of one element, and of bytes that are no multiple of 16, which are moved in words of 1, 2, 4 or 8 bytes."""
    for dtype, nbytes in ((torch.int8, 1), (torch.bool, 1 << 20 | 2), (BF16, 2), (FP32, 4 * 1001), (BF16, 8 * 1001)):
        if operator == "all_gather" or dtype.is_floating_point:
            compile_collective(operator, exchange, arch, dtype, nbytes=nbytes)


@pytest.mark.parametrize("block_bytes, num_warps", BLOCKS)
@each_collective
def test_collectives_move_sixteen_bytes_at_a_time(operator, exchange, block_bytes, num_warps):
    ptx = compile_collective(
        operator, exchange, "sm_90", BF16, block_bytes=block_bytes, num_warps=num_warps
    ).asm["ptx"]  # fmt: skip
    assert not narrow(ptx)
    assert re.search(r"ld\.global\.v2\.b64|ld\.global\.v4\.b32", ptx)
    assert re.search(r"st\.global\.v2\.b64|st\.global\.v4\.b32", ptx)
    assert len(re.findall(r"st\.global\.b64", ptx)) <= 4, "a copy stores single words"
    assert "ld.acquire.sys.global.b64" in ptx and "st.release.sys.global.b64" in ptx


@pytest.mark.parametrize("name, arch", [
    (name, arch) for name in ROUTES + MOVES + DIRECT for arch in TARGETS if name in EVERYWHERE or arch == "sm_90"
])  # fmt: skip
def test_expert_parallel_compiles(name, arch):
    compile_launches(expert_launches()[name], arch)


@pytest.mark.parametrize("arch, sizes", [
    ("sm_90", dict(tokens=1, k=1, experts=1, ranks=1, width=1, dtype=FP16)),
    ("gfx942", dict(tokens=3, k=5, experts=6, ranks=3, width=13, dtype=FP32)),
], ids=["one", "odd"])  # fmt: skip
def test_expert_parallel_of_odd_sizes_compiles(arch, sizes):
    launches = expert_launches(**sizes)
    for name in EVERYWHERE:
        compile_launches(launches[name], arch)


# Between them these hold every function of the kernels.
@pytest.mark.parametrize("name, arch", [
    ("route", "sm_90"), ("route of many tokens", "sm_80"), ("dispatch, quantized", "sm_90"),
    ("dispatch again, with scales", "sm_80"), ("gradient of a combine", "sm_90"), ("combine per rank", "sm_90"),
    ("gradient of a dispatch", "sm_80"), ("combine per expert", "sm_90"),
    ("route of many tokens", "gfx942"), ("dispatch, quantized", "gfx950"), ("combine per expert", "gfx942"),
])  # fmt: skip
def test_expert_parallel_across_nodes_compiles(name, arch):
    *_, moves = compile_launches(expert_launches(local=4)[name], arch)
    if name in MOVES and arch.startswith("sm"):
        ptx = moves.asm["ptx"]
        for move in ("ld", "st"):
            assert len(re.findall(rf"{move}\.global\.v2\.b64|{move}\.global\.v4\.b32", ptx)) >= 6
            assert not re.search(rf"{move}\.global\.[bu]16\b", ptx), "single elements"
        for word in ("nvshmemx_putmem_signal_nbi_block", "nvshmemx_signal_op", "nvshmem_signal_wait_until"):
            assert re.search(rf"call\.uni[^;]*\b{word}\b", ptx), word


def test_expert_parallel_of_one_rank_a_node_compiles():
    launches = expert_launches(tokens=1, k=1, experts=3, ranks=3, width=1, dtype=FP16, local=1)
    for name in set(EVERYWHERE) - set(DIRECT):
        compile_launches(launches[name], "sm_90")


@pytest.mark.parametrize("name", MOVES + DIRECT)
def test_tokens_are_moved_sixteen_bytes_at_a_time(name):
    """What is narrower are ids, places and weights, of which there are few."""
    (compiled,) = compile_launches(expert_launches()[name], "sm_90")
    ptx = compiled.asm["ptx"]
    # One that is direct has two places to store to, and notes to leave.
    least, words = (4, 10) if name in DIRECT else (6, 7)
    for move in ("ld", "st"):  # of a block each thread has four, or two of codes, wherever it is moved
        assert len(re.findall(rf"{move}\.global\.v2\.b64|{move}\.global\.v4\.b32", ptx)) >= least
        assert not re.search(rf"{move}\.global\.[bu]16\b", ptx), "single elements"
    assert len(re.findall(r"st\.global\.b64", ptx)) <= words, "single words"
    assert "ld.acquire.sys.global.b64" in ptx and "st.release.sys.global.b64" in ptx


# Another dtype is for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype, activation", [
    (arch, name, dtype, activation) for arch in TARGETS for name, dtype, activation in (
        ("product", BF16, None), ("product", BF16, "swiglu"), ("product", BF16, "swiglu_interleaved"),
        ("swiglu", BF16, "swiglu"), ("swiglu", FP16, "swiglu_interleaved"), ("gradient of x", BF16, None),
        ("gradient of w", BF16, None), ("product", FP32, "swiglu"), ("gradient of x", FP32, None),
        ("gradient of w", FP32, None), ("product", FP16, "swiglu_interleaved"),
    ) if name == "swiglu" or dtype == BF16 or arch in ("sm_80", "gfx942")
], ids=str)  # fmt: skip
def test_grouped_products_compile(arch, name, dtype, activation):
    compile_grouped(name, arch, dtype, activation)


@pytest.mark.parametrize("arch, sizes, activation", [
    ("sm_90", (1, 1, 1), None), ("sm_90", (3, 10, 5), "swiglu"), ("gfx942", (1, 2, 1), "swiglu_interleaved"),
])  # fmt: skip
def test_grouped_products_of_odd_sizes_compile(arch, sizes, activation):
    compile_launches(grouped_launches(arch, BF16, activation, sizes).values(), arch)


@pytest.mark.parametrize("arch", TARGETS)
def test_routing_of_sliced_experts_compiles(arch):
    for name in SLICED_ROUTE:
        compile_sliced(name, arch)


# Another dtype is for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in SLICED_ROWS + SLICED_SUMS for dtype in (BF16, FP16, FP32)
    if dtype == BF16 or arch in ("sm_80", "gfx942") and (name in ("rows, swiglu", "gradient of sums", "sums"))
], ids=str)  # fmt: skip
def test_products_of_sliced_experts_compile(arch, name, dtype):
    compile_sliced(name, arch, dtype)


@pytest.mark.parametrize("arch, sizes, ranks", [("sm_90", (1, 1, 1, 1, 1), 1), ("gfx942", (3, 5, 7, 13, 9), 3)])
def test_sliced_experts_of_odd_sizes_compile(arch, sizes, ranks):
    for name in (*SLICED_ROUTE, "rows, swiglu", "gradient of sums", "sums", "gradient of rows"):
        compile_sliced(name, arch, sizes=sizes, ranks=ranks)


@pytest.mark.parametrize("name", SLICED_ROWS + SLICED_SUMS)
def test_sliced_experts_on_hopper_use_wgmma_and_tma(name):
    ptx = compile_sliced(name, "sm_90").asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx
    assert not re.search(r"(?:ld|st)\.global\.[bu]16\b", ptx), "single elements"
    assert "st.release.sys.global.b64" in ptx and "ld.acquire.sys.global.b64" in ptx
    assert "atom.global.gpu.release.add.u64" in ptx  # pieces that are done, told to programs of this rank
    if name in SLICED_ROWS:
        # Rows that other programs have copied are read by TMA, whose proxy has to be fenced after the wait.
        fence = ptx.index("fence.proxy.async.global", ptx.index("ld.acquire.sys"))
        assert ptx.find("cp.async.bulk.tensor", fence) > fence


# The others are for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in EXPERT_LAYER for dtype in (BF16, FP32)
    if dtype == BF16 and (name in ("order", "rows, swiglu", "sums") or arch in ("sm_90", "gfx942"))
    or dtype == FP32 and name in ("gradient of sums", "gradient of rows") and arch == "sm_80"
], ids=str)  # fmt: skip
def test_overlapping_expert_layer_compiles(arch, name, dtype):
    compile_expert_layer(name, arch, dtype)


@pytest.mark.parametrize("arch, sizes, ranks", [("sm_90", (1, 1, 1, 1, 1), 1), ("gfx942", (3, 5, 7, 13, 9), 3)])
def test_overlapping_expert_layer_of_odd_sizes_compiles(arch, sizes, ranks):
    for name in ("order", "rows, swiglu", "gradient of sums", "sums", "gradient of rows"):
        compile_expert_layer(name, arch, sizes=sizes, ranks=ranks)


@pytest.mark.parametrize("name", EXPERT_LAYER[1:])
def test_overlapping_expert_layer_on_hopper_uses_wgmma_and_tma(name):
    ptx = compile_expert_layer(name, "sm_90").asm["ptx"]
    assert "wgmma.mma_async" in ptx and "mma.sync" not in ptx
    assert not re.search(r"(?:ld|st)\.global\.[bu]16\b", ptx), "single elements"
    assert "st.release.sys.global.b64" in ptx and "ld.acquire.sys.global.b64" in ptx
    if name in ("rows, swiglu", "rows, interleaved", "gradient of sums"):
        # Rows that other ranks have stored are read by TMA, whose proxy has to be fenced after the wait.
        fence = ptx.index("fence.proxy.async.global", ptx.index("ld.acquire.sys"))
        assert ptx.find("cp.async.bulk.tensor", fence) > fence


# Another dtype is for one target of each vendor, to save time.
@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in ULYSSES for dtype in (BF16, FP32)
    if dtype == BF16 and name in ("qkv", "gradient of x")
    or name in ("qkv", "out") and dtype == FP32 and arch in ("sm_80", "gfx942")
], ids=str)  # fmt: skip
def test_ulysses_compiles(arch, name, dtype):
    compile_ulysses(name, arch, dtype, bias=dtype == FP32)


@pytest.mark.parametrize("arch, sizes, ranks", [("sm_90", (1, 1, 1, 1), 2), ("gfx942", (3, 7, 13, 9), 3)])
def test_ulysses_of_odd_sizes_compiles(arch, sizes, ranks):
    for name in ("qkv", "gradient of x"):
        # Single elements of large tiles take the compiler long.
        compile_ulysses(name, arch, sizes=sizes, ranks=ranks, tiles=Tiles(64, 64, 64, num_warps=4, num_stages=2))


@pytest.mark.parametrize("name", ULYSSES)
def test_ulysses_on_hopper_uses_wgmma_and_tma(name):
    ptx = compile_ulysses(name, "sm_90").asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx
    assert not narrow(ptx)
    assert "ld.global.v4.b32" in ptx or "ld.global.v2.b64" in ptx  # what travels
    assert "st.release.sys.global.b64" in ptx and "ld.acquire.sys.global.b64" in ptx
    if name in ("out", "gradient of x"):
        # Rows that peers have pushed are read by TMA, whose proxy has to be fenced after the waits.
        for acquire in re.finditer("ld.acquire.sys", ptx):
            following = ptx.find("cp.async.bulk.tensor", acquire.end())
            assert following < 0 or "fence.proxy.async.global" in ptx[acquire.end() : following]


@pytest.mark.parametrize("arch, name, dtype", [
    *((arch, "one token", BF16) for arch in TARGETS),
    *((arch, "tokens, paged, fp8", FP16) for arch in ("sm_80", "sm_90", "gfx942")),
    ("sm_90", "latent", BF16), ("gfx942", "latent", BF16), ("sm_80", "one token", FP32),
])  # fmt: skip
def test_decodes_compile(arch, name, dtype):
    compile_launches(decode_launch(name, arch, dtype), arch)


@pytest.mark.parametrize("arch, name, ranks, nodes", [
    ("sm_90", "one token", 8, 2), ("sm_90", "latent", 6, 3), ("sm_80", "tokens, paged, fp8", 4, 4),
    ("gfx942", "one token", 8, 2),
])  # fmt: skip
def test_decodes_compile_for_several_nodes(arch, name, ranks, nodes):
    decode = decode_launch(name, arch, ranks=ranks, nodes=nodes)[0]
    assert decode[0] is flash_decode_nodes_kernel
    (compiled,) = compile_launches([decode], arch)
    if arch.startswith("gfx"):
        return
    ptx = compiled.asm["ptx"]
    puts = [call.start() for call in re.finditer(r"call\.uni [^;]*nvshmemx_putmem_signal_nbi_block", ptx)]
    # Of what a node has of a tile, and with several query tokens of the lengths; in loops, unrolled or not.
    assert len(puts) >= 1 + (name == "tokens, paged, fp8")
    assert all("fence.acq_rel.sys" in ptx[max(put - 4000, 0) : put] for put in puts)
    assert len(re.findall(r"call\.uni [^;]*nvshmem_signal_wait_until", ptx)) >= len(puts)


def test_a_decode_of_fp8_on_hopper_reads_no_single_bytes():
    (decode,) = compile_launches(decode_launch("tokens, paged, fp8", "sm_90"), "sm_90")
    ptx = decode.asm["ptx"]
    assert ".m8n8.x4.trans.shared.b16" in ptx and "cvt.rn.f16x2.e4m3x2" in ptx
    assert not re.search(r"ld\.shared\.[bsu]8\b", ptx)


def test_a_decode_on_hopper_copies_ahead_and_uses_tensor_cores():
    decode, gradients = compile_launches(decode_launch("one token", "sm_90"), "sm_90")
    ptx = decode.asm["ptx"]
    assert "mma.sync.aligned.m16n8k16" in ptx and "ldmatrix" in ptx
    loop = ptx[: ptx.rindex("mma.sync")]
    assert loop.count("cp.async.cg") >= 2 * 16  # keys and values of a block, before the loop and in it
    assert "st.release.sys.global.b64" in ptx and "ld.acquire.sys.global.b64" in ptx
    assert "mma.sync" in gradients.asm["ptx"]
# Another dtype is for one target of each vendor, sm_90 is asked more below, and of two targets that are compiled by
# the same ways each gets one of the gradients: to save time.
_ELSEWHERE = [("sm_80", ATTENTION[3]), ("sm_89", ATTENTION[2]), ("gfx942", ATTENTION[2]), ("gfx950", ATTENTION[3])]


@pytest.mark.parametrize("arch, name, dtype", [
    (arch, name, dtype) for arch in TARGETS for name in ATTENTION for dtype in (BF16, FP32)
    if dtype == BF16 and (arch != "sm_90" or name == "statistics") and (arch, name) not in _ELSEWHERE
    or dtype == FP32 and (arch, name) in (("sm_80", "gradients of k and v"), ("gfx942", "attention"))
], ids=str)  # fmt: skip
def test_attention_compiles(arch, name, dtype):
    compile_attention(name, arch, dtype)


ODD_ATTENTION = [
    ("sm_90", "attention", dict(d=17, dv=33, rows=1, heads=1, kv_heads=1, ranks=1)),
    ("sm_90", "gradients of k and v", dict(d=192, dv=128, dtype=FP16, rows=3, heads=3, kv_heads=1, ranks=3)),
    ("gfx942", "gradients of k and v", dict(d=17, dv=256, rows=3, heads=3, kv_heads=1, ranks=3, sharding="contiguous")),
]


@pytest.mark.parametrize("arch, name, sizes", ODD_ATTENTION, ids=str)
def test_attention_of_odd_sizes_compiles(arch, name, sizes):
    compile_attention(name, arch, **sizes)


@pytest.mark.parametrize("name", [name for name in ATTENTION if name != "statistics"])
def test_attention_on_hopper_uses_wgmma_and_tma(name):
    ptx = compile_attention(name, "sm_90", d=128, dv=128, rows=512).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx
    assert not re.search(r"(?:ld|st)\.global\.[bu]16\b", ptx), "single elements"
    assert "st.release.sys.global.b64" in ptx
    # Rows that peers have pushed are read by TMA, whose proxy has to be fenced after the wait.
    fence = ptx.index("fence.proxy.async.global", ptx.index("ld.acquire.sys"))
    assert ptx.find("cp.async.bulk.tensor", fence) > fence
    told, code = assemble(ptx)
    assert "serialized" not in told, "products would wait for each other"
    assert not unwritten(code)
    loops = product_loops(code)
    assert loops
    for loop in loops:
        # A tile that is too large shows here; how much is spilled elsewhere differs between compilers.
        spills = sum(re.search(r"\b(LDL|STL)\b", text) is not None for text in loop)
        assert spills < len(loop) / 8, f"{spills} of {len(loop)} instructions of a loop are spills\n{told}"


@pytest.mark.parametrize("d, dv", [(32, 16), (128, 32)])
def test_attention_on_hopper_knows_where_narrow_values_are(d, dv):
    """See ``widths_of`` in ag_attention_kernel.py. The product of two of 16 rows each had the second from elsewhere."""
    _, code = assemble(compile_attention("attention", "sm_90", d=d, dv=dv, rows=37).asm["ptx"])
    assert any("HGMMA" in text for _, text in code)
    assert not unwritten(code)


def test_registers_that_nothing_has_written_are_found():
    code = [
        (0x00, "@P0 BRA 0x30 "), (0x10, "UMOV UR5, URZ "), (0x20, "UIADD3 UR4, UP0, UR5, 0x20, URZ "),
        (0x30, "R2UR UR6, R7 "), (0x40, "HGMMA.64x16x16.F32 R8, R4, gdesc[UR4].tnspB, R8 "),
        (0x50, "HGMMA.64x16x16.F32 R8, gdesc[UR4], R8 "), (0x60, "@!P1 BRA 0x30 "), (0x70, "EXIT "),
        (0x80, "UIADD3 UR9, UR9, 0x1, URZ "),
    ]  # fmt: skip
    # Only one way to the products goes through what writes UR4; UR7 has no way at all, and 0x80 is never reached.
    assert [address for address, _ in unwritten(code)] == [0x40, 0x50]
    assert [address for address, _ in unwritten([(0x00, "R2UR UR7, R7 "), *code[1:]])] == []


def test_every_exchange_is_compiled_here():
    exchanges = {(operator, exchange) for operator, names in EXCHANGES.items() for exchange in names}
    assert set(COLLECTIVES) == exchanges - {("all_gather", "copy_engine")}  # whose kernels are those of the gather


@pytest.mark.parametrize("arch", TARGETS)
def test_small_kernels_compile(arch):
    for kernel, launches in small_launches().items():
        for args, kwargs in launches:
            assert compile_for(kernel, args, kwargs, arch).metadata.shared <= SHARED_MEMORY[arch]


def small_launches_across_nodes():
    ctx, x = pointer(torch.int64), pointer(BF16)
    narrow, wide = {"num_warps": 1}, {"COPY_WORDS": 4096, "num_warps": 16}
    return {
        gather_nodes.begin_nodes_kernel: ([ctx, PLAN], narrow),
        gather_nodes.push_nodes_kernel: ([ctx, x, 8, 1 << 24, 1 << 20, 16, 1 << 24, PLAN], wide),
        gather_nodes.await_nodes_kernel: ([ctx, 16, 0, 16, 1, 4, PLAN], narrow),
    }


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "gfx942", "gfx950"])
def test_small_kernels_across_nodes_compile(arch):
    for kernel, (args, kwargs) in small_launches_across_nodes().items():
        assert compile_for(kernel, args, kwargs, arch).metadata.shared <= 4096


@pytest.mark.parametrize("arch", TARGETS)
def test_ag_gemm_compiles_for_a_gather_that_stays(arch):
    compile_gemm(ag_gemm_kernel, arch, BF16, FIXED_HALF=True)


def test_ag_gemm_across_nodes_compiles_for_a_gather_that_stays():
    compile_gemm(ag_gemm_nodes_kernel, "sm_80", BF16, FIXED_HALF=True)


@pytest.mark.parametrize("kernel", PRODUCTS, ids=lambda k: k.__name__)
@pytest.mark.parametrize("w_is_kn", [False, True])
def test_main_loop_on_hopper_uses_wgmma_and_tma(kernel, w_is_kn):
    ptx = compile_gemm(kernel, "sm_90", BF16, w_is_kn=w_is_kn).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx
    # Operands that travel through registers would show this in the main loop; the epilogue may use it.
    assert ptx.find("ldmatrix", 0, ptx.rindex("wgmma.mma_async")) == -1


@pytest.mark.parametrize("name, activation", [
    ("product", None), ("product", "swiglu"), ("product", "swiglu_interleaved"), ("gradient of x", None),
    ("gradient of w", None),
])  # fmt: skip
def test_grouped_products_on_hopper_use_wgmma_and_tma(name, activation):
    ptx = compile_grouped(name, "sm_90", BF16, activation).asm["ptx"]
    assert "wgmma.mma_async" in ptx
    assert "cp.async.bulk.tensor" in ptx
    assert "mma.sync" not in ptx


def test_a_wait_before_tma_loads_fences_their_proxy():
    ptx = compile_gemm(ag_gemm_kernel, "sm_90", BF16).asm["ptx"]
    acquire = ptx.index("ld.acquire.sys")
    fence = ptx.index("fence.proxy.async.global", acquire)
    assert ptx.find("cp.async.bulk.tensor", fence) > fence


def test_signals_are_released_and_acquired_at_system_scope():
    for kernel in PRODUCTS:
        ptx = compile_gemm(kernel, "sm_90", BF16).asm["ptx"]
        release = ptx.index("@first st.release.sys.global.b64")
        assert "bar.sync" in ptx[max(release - 1500, 0) : release]  # all threads' stores come first
        assert "ld.acquire.sys.global.b64" in ptx


def test_threads_come_together_after_a_spin():
    """Else those of a warp may go on one by one, and wgmma, which the warp does as one, reads anywhere."""
    spinning = [compile_gemm(kernel, "sm_90", BF16) for kernel in PRODUCTS]
    spinning += [compile_one_shot(kernel, "sm_90", BF16, split=2) for kernel in ONE_SHOT]
    spinning += [compile_attention(name, arch, **sizes) for arch, name, sizes in ODD_ATTENTION if arch == "sm_90"]
    for compiled in spinning:
        ptx = compiled.asm["ptx"]
        assert len(re.findall(r"REACHED:\s*bar\.warp\.sync 0xffffffff", ptx)) == ptx.count("nanosleep") > 0
        assert "wgmma" in ptx


# ---- traces ----


def compile_any(kernel, arch, **constants):
    if kernel in ONE_SHOT:
        return compile_one_shot(kernel, arch, BF16, split=2, **constants)
    if kernel in TRACED_LAUNCHES:
        _, args, options = TRACED_LAUNCHES[kernel](arch)
        (compiled,) = compile_launches([(kernel, args, {**options, **constants})], arch)
        return compiled
    return compile_gemm(kernel, arch, BF16, **constants)


TRACED_LAUNCHES = {
    ag_attention_kernel.ag_attention_kernel: lambda arch: attention_launches(arch, BF16)["attention"],
    flash_decode_kernel: lambda arch: decode_launch("one token", arch)[0],
    moe_ag_gemm_kernel.moe_ag_gemm_kernel: lambda arch: sliced_launches(arch, BF16)["rows, swiglu"],
    moe_gemm_rs_kernel.moe_gemm_rs_kernel: lambda arch: sliced_launches(arch, BF16)["sums"],
    ulysses_out_kernel.ulysses_out_kernel: lambda arch: ulysses_launches(arch, BF16)["out"],
    ulysses_qkv_kernel.ulysses_qkv_kernel: lambda arch: ulysses_launches(arch, BF16)["qkv"],
}
every_traced_kernel = pytest.mark.parametrize(
    "kernel", [*PRODUCTS, *ONE_SHOT, *TRACED_LAUNCHES], ids=lambda k: k.__name__
)


@every_traced_kernel
@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"])
def test_traced_kernels_compile(kernel, arch):
    compile_any(kernel, arch, trace_ptr=pointer(torch.int64))


@every_traced_kernel
def test_without_a_trace_nothing_of_it_is_compiled(kernel):
    """The clock is read by waits alone, which look twice at it, and the multiprocessor by nobody."""
    ptx = compile_any(kernel, "sm_90").asm["ptx"]
    assert ptx.count("globaltimer") == 2 * ptx.count("nanosleep") > 0
    assert "%smid" not in ptx
    traced = compile_any(kernel, "sm_90", trace_ptr=pointer(torch.int64)).asm["ptx"]
    marks = traced.count("%smid")
    assert marks >= 6 and traced.count("globaltimer") == 2 * traced.count("nanosleep") + marks
    assert traced.count("nanosleep") == ptx.count("nanosleep")


@pytest.mark.parametrize("kernel", PRODUCTS, ids=lambda k: k.__name__)
def test_a_product_is_done_when_the_clock_is_read_after_it(kernel):
    ptx = compile_gemm(kernel, "sm_90", BF16, trace_ptr=pointer(torch.int64)).asm["ptx"]
    for done in re.finditer(r"wgmma\.wait_group\.sync\.aligned 0;", ptx):
        clock = ptx.index("globaltimer", done.end())
        assert "bar.sync" in ptx[done.end() : clock]


@pytest.mark.parametrize("arch", TARGETS)
def test_kernels_that_compare_clocks_compile(arch):
    ctx = pointer(torch.int64)
    compile_for(clocks.meet_kernel, [ctx, 3_000_000], {"num_warps": 1}, arch)
    compile_for(clocks.clocks_kernel, [ctx, pointer(torch.int64), 32], {"num_warps": 1}, arch)


def test_a_deeper_tile_than_the_chip_has_memory_is_refused():
    deep = replace(Tiles(), num_stages=5)
    assert deep.shared_memory_bytes(BF16) > SHARED_MEMORY["sm_90"]


def test_every_kernel_is_compiled_here():
    """Whoever adds a kernel adds it above. Device functions count through the kernels that call them."""
    of_experts = {
        kernel for local in (None, 4) for launches in expert_launches(local=local).values() for kernel, *_ in launches
    }
    of_groups = {kernel for kernel, *_ in grouped_launches("sm_90", BF16, "swiglu").values()}
    of_sliced = {kernel for kernel, *_ in sliced_launches("sm_90", BF16).values()}
    compiled = {*PRODUCTS, *ACROSS_NODES, *ONE_SHOT, *COLLECTIVES.values(), *small_launches()}
    compiled |= set(small_launches_across_nodes())
    of_ulysses = {kernel for kernel, *_ in ulysses_launches("sm_90", BF16).values()}
    of_layer = {kernel for kernel, *_ in expert_layer_launches("sm_90", BF16).values()}
    compiled |= of_experts | of_groups | of_sliced | of_ulysses | of_layer
    for nodes in (1, 2):
        compiled |= {kernel for kernel, *_ in decode_launch("one token", "sm_90", nodes=nodes)}
    compiled |= {kernel for kernel, *_ in attention_launches("sm_90", BF16).values()}
    found = set()
    for module in pkgutil.iter_modules(tdkernels.ops.__path__):
        members = inspect.getmembers(import_module(f"tdkernels.ops.{module.name}"))
        found |= {value for name, value in members if isinstance(value, Kernel) and name.endswith("_kernel")}
    assert found == compiled
