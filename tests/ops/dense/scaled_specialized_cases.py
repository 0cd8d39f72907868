"""Test bodies for the warp-specialized kernels with scaled fp8 operands; see test_scaled_specialized.py."""

import contextlib
import random
import time
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F

import tdkernels
from tdkernels import AgGemmConfig, GemmArConfig, GemmRsConfig, Tiles
from tdkernels.ops.common import small_m_gemm
from tdkernels.ops.common.scaling import dequantize, layout_of, quantize_ref
from tdkernels.ops.common.tile_config import scaled_tiles, with_wide_steps
from tdkernels.ops.dense.ag_gemm import launch_specialized as ag_gemm_specialized
from tdkernels.ops.dense.gemm_ar import launch_specialized as gemm_ar_specialized
from tdkernels.ops.dense.gemm_rs import launch_specialized as gemm_rs_specialized
from tdkernels.ops.dense.launch_direct import DIRECT_MEDIUM, DIRECT_SMALL
from tests.ops.dense import specialized_support
from tests.ops.dense.ag_gemm_specialized_cases import specialized as of_ag_gemm
from tests.ops.dense.specialized_cases import specialized as of_direct
from tests.support.ranks import device

LAUNCHERS = {"ag_gemm": ag_gemm_specialized, "gemm_rs": gemm_rs_specialized, "gemm_ar": gemm_ar_specialized}
CHECKS = {"ag_gemm": of_ag_gemm, "gemm_rs": of_direct, "gemm_ar": partial(of_direct, "gemm_ar")}
PLAIN = {
    "ag_gemm": AgGemmConfig(tiles=Tiles(128, 256, 128), num_comm_sms=6),
    "gemm_rs": GemmRsConfig(tiles=Tiles(128, 256, 128, num_stages=3), transport="direct"),
    "gemm_ar": GemmArConfig(tiles=Tiles(128, 256, 128, num_stages=3), transport="direct"),
}
# Rows of a rank's output, n, k. The last ones have whole tiles and halves: more tiles than programs.
SHAPES = [(384, 528, 320), (100, 272, 80), (8, 16, 16), (1024, 1040, 640), (1152, 4624, 144), (1096, 3088, 2128)]
# On two to eight ranks, tiles have rows of several shards (ag_gemm), or their halves have those of two (gemm_rs).
SHARED_TILES = [
    (40, 528, 320), (144, 272, 80), (8, 16, 1104), (48, 4624, 2128), (136, 1040, 2064), (272, 784, 208), (16, 272, 144),
]


def operands_of(operator, rows, n, k, scaling, dtype):
    """Return (x, weight, scale_x, scale_w) in one or two fp8 dtypes, with rows of different sizes. Outputs fit in fp16.
    """
    dtypes = dtype if isinstance(dtype, tuple) else (dtype, dtype)
    rows *= dist.get_world_size() if operator == "gemm_rs" else 1
    wide = [torch.randn(size, k, device=device()) * torch.randn(size, 1, device=device()).exp() for size in (rows, n)]
    wide[1] *= k**-0.5
    x, scale_x = quantize_ref(wide[0], scaling[0], dtypes[0])
    weight, scale_w = quantize_ref(wide[1], scaling[1], dtypes[1], weight=True)
    return x, weight, scale_x, scale_w


def call(operator, operands, bias, config, out_dtype=torch.bfloat16, fast=True):
    x, weight, scale_x, scale_w = operands
    return getattr(tdkernels, operator)(
        x, weight, bias, scale_x=scale_x, scale_w=scale_w, use_fast_accum=fast, out_dtype=out_dtype, config=config
    )


def is_close(operator, operands, bias, y, fast):
    """Check an output against dequantized operands.

    The partials of the ranks and the output are rounded to the dtype of the output. Tensor cores accumulate fp8 with 13
    fraction bits, without fast accumulation for 128 elements of K.
    """
    x, weight = dequantize(operands[0], operands[2]), dequantize(operands[1], operands[3])
    exact = getattr(tdkernels, f"{operator}_ref")(x, weight, None if bias is None else bias.float())
    rounding, accumulation = torch.finfo(y.dtype).eps / 2, 8e-3 if fast else 2**-10
    if operator == "ag_gemm":
        bound = (rounding + accumulation) * exact.abs()
    else:
        partials = F.linear(x, weight).abs()
        dist.all_reduce(partials)
        if operator == "gemm_rs":
            partials = partials.chunk(dist.get_world_size())[dist.get_rank()]
        bound = rounding * exact.abs() + (rounding + accumulation) * partials
    assert (y.float() - exact).norm() < bound.norm() + 1e-30


def splits_tiles_along_k(operator, scaling, dtype, repeats, fast):
    """Check calls with random operands whose tiles are split along K. The last shape has whole tiles, too."""
    large = (1152, 2320, 12800) if operator == "gemm_rs" else (2000, 2320, 12800)
    for number in range(repeats):
        rows, n, k = [(200, 528, 6400), (390, 272, 8192), large][number % 3]
        operands = operands_of(operator, rows, n, k, scaling, dtype)
        bias = torch.randn(n, device=device(), dtype=torch.bfloat16) if number % 3 else None
        if bias is not None:
            dist.broadcast(bias, 0)
        with specialized_support.chosen_splits() as found, CHECKS[operator]():
            y = call(operator, operands, bias, replace(PLAIN[operator], warp_specialize=True), fast=fast)
        assert len(found) == 1 and found[0].num_splits > 1, found
        is_close(operator, operands, bias, y, fast)
        assert torch.equal(y, call(operator, operands, bias, replace(PLAIN[operator], warp_specialize=True), fast=fast))
    tdkernels.synchronize()


def has_shared_tiles(operator, *rest, **options):
    """``has_the_bits_of_the_plain_kernel`` for tiles with rows of several shards, which all launches have."""
    launcher, name = LAUNCHERS[operator], "_is_across" if operator == "ag_gemm" else "_is_in_pairs"
    found, original = [], getattr(launcher, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, name, lambda *args: found.append(original(*args)) or found[-1])
        has_the_bits_of_the_plain_kernel(operator, *rest, shapes=SHARED_TILES, **options)
    assert found and all(found)


def has_the_bits_of_the_plain_kernel(
    operator, scaling, dtype, out_dtype, repeats, by_turns=False, fast=True, shapes=SHAPES, **changes
):
    """Check many calls with random operands and poisoned memory, compared with the plain kernel and in fp32.

    ``by_turns``: for each shape, one of the ranks runs the kernel that is not specialized.
    """
    ranks, me = dist.get_world_size(), dist.get_rank()
    delays, launcher = random.Random(me), LAUNCHERS[operator]
    for number in range(repeats):
        rows, n, k = shapes[number % len(shapes)]
        operands = operands_of(operator, rows, n, k, scaling, dtype)
        bias = torch.randn(n, device=device(), dtype=out_dtype) if number % 2 else None
        if bias is not None and operator != "ag_gemm":
            dist.broadcast(bias, 0)
        poison = [torch.full((ranks * rows, n), torch.nan, device=device(), dtype=out_dtype) for _ in range(2)]
        del poison
        plain = replace(PLAIN[operator], **changes)
        time.sleep(delays.uniform(0, 0.002))
        with pytest.MonkeyPatch.context() as patch:
            if by_turns and number % ranks == me:
                patch.setattr(launcher, "supports", lambda *_: False)
            first = number < len(shapes) and not by_turns
            with CHECKS[operator]() if first else contextlib.nullcontext():
                y = call(operator, operands, bias, replace(plain, warp_specialize=True), out_dtype, fast)
        assert torch.equal(y, call(operator, operands, bias, plain, out_dtype, fast)), (number, rows, n, k)
        is_close(operator, operands, bias, y, fast)
    tdkernels.synchronize()


def _configs_for_few_rows(operator, layout):
    """Return the default configs of kernels without warp specialization for few rows."""
    if operator == "ag_gemm":
        return [AgGemmConfig(tiles=one.tiles, transport="one_shot") for one in small_m_gemm._WAVES_IN_FP8[layout]]
    tiles = [one.tiles for one in small_m_gemm._WAVES_OF_EXCHANGE_IN_FP8[layout]]
    direct = [scaled_tiles(one, layout, device()) for one in (DIRECT_SMALL, DIRECT_MEDIUM)]
    direct = [with_wide_steps(one, layout, device()) for one in direct]
    if operator == "gemm_rs":
        return [
            *[GemmRsConfig(tiles=one, transport="one_shot") for one in tiles],
            *[GemmRsConfig(tiles=one, transport="direct") for one in direct],
        ]
    return [
        *[GemmArConfig(tiles=one, exchange="one_shot") for one in tiles],
        *[GemmArConfig(tiles=one, transport="direct") for one in direct],
    ]


def computes_with_configs_for_few_rows(operator, scaling, fast):
    """Check each of these configs, and the default one, with random operands."""
    configs = _configs_for_few_rows(operator, layout_of(scaling, fast))
    for rows, n, k in [(16, 1040, 2560), (40, 8192, 1040), (17, 528, 4112), (72, 2048, 640), (224, 1040, 1040)]:
        for config in (*configs, None):
            operands = operands_of(operator, rows, n, k, (scaling, scaling), torch.float8_e4m3fn)
            y = call(operator, operands, None, config, fast=fast)
            is_close(operator, operands, None, y, fast)
            assert torch.equal(y, call(operator, operands, None, config, fast=fast)), config
    tdkernels.synchronize()


def replays_in_a_graph(operator):
    """Check replays of a CUDA graph with new scales."""
    operands = operands_of(operator, 256, 528, 448, ("row", "row"), torch.float8_e4m3fn)
    plain, scale_x = PLAIN[operator], operands[2]
    run = lambda config: call(operator, operands, None, config)  # noqa: E731
    config = replace(plain, warp_specialize=True)
    with CHECKS[operator]():
        run(config)
    renew = lambda: scale_x.uniform_(0.5, 2.0)  # noqa: E731
    specialized_support.replays_in_a_graph(renew, lambda: run(config), lambda: run(plain))
