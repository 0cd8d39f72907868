"""Compile the warp-specialized kernels for Hopper."""

import re

import pytest
import torch
import triton

from tdkernels.ops.dense.ag_gemm.kernel import ag_gemm_kernel
from tests.compiled.dense import compile_gemm
from tests.compiled.specialized import (
    E4M3,
    E5M2,
    ag_gemm_launch,
    gemm_ar_launch,
    gemm_rs_launch,
    group_gemm_launch,
    group_gemm_weights_launch,
    moe_ag_gemm_launch,
    moe_gemm_rs_launch,
)
from tests.compiled.targets import BF16, FP16, needs_no_gpu
from tests.support.aot import SHARED_MEMORY, compile_for, machine_code, pointer, product_loops, unwritten
from tests.support.simulated_nodes import thorough

pytestmark = needs_no_gpu
FP8_PRODUCT = "QGMMA.64x{}x32"
WAIT, PUSH = "WARPGROUP.DEPBAR.LE gsb0, 0x1", r"STG\.E\.128"
# Bytes that moe_gemm_rs may spill, of values that are needed once per work item, and instructions of a main loop with
# two accumulators that may spill. Triton 3.6 and 3.7 spill up to 112 bytes and 8 instructions, 3.8 272 and 36, 3.9 328
# and none.
_IS_38, _IS_39 = (triton.__version__.startswith(version) for version in ("3.8", "3.9"))
SUMS_STACK, SUMS_SPILLS = (280, 40) if _IS_38 else (336, 24) if _IS_39 else (128, 24)
# Bytes that kernels of SwiGLU may spill if they also store gate and up, outside of the main loops. Triton 3.9 spills up
# to 392, 3.8 up to 8.
KEEP_STACK = 400 if _IS_39 else 16
# The same of moe_ag_gemm without them, and instructions of the loop that gathers rows.
GATHER_STACK, GATHER_SPILLS = (96, 4) if _IS_39 else (64 if _IS_38 else 32, 0)


def check(compiled, loops, most_stack, product="HGMMA.64x{}x16", most_spills=0):
    """Check the machine code of a kernel whose two partitions have a main loop for each number of columns. Return it.

    most_stack: bytes that a thread may spill, of values that are needed once per tile
    most_spills: instructions of a main loop that may spill
    """
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    ptx = compiled.asm["ptx"]
    stack, code = machine_code(compiled)
    assert not unwritten(code)
    text = "\n".join(instruction for _, instruction in code)
    # The first step, the other early ones, and the main loop have, for each partition, four products of 32 bytes of K,
    # and one wait, which leaves the last step in flight. One further wait ends the tile.
    for width in loops:
        assert text.count(product.format(width)) == 3 * 8
    assert text.count(WAIT) == 3 * 2 * len(loops) and text.count("GMMA.64x") == 3 * 8 * len(loops)
    assert text.count("WARPGROUP.DEPBAR") == 4 * 2 * len(loops)  # otherwise ptxas serializes the products
    assert "ldmatrix" not in ptx and "mma.sync" not in ptx
    assert stack <= most_stack
    check_loops(code, "GMMA", most_spills)
    return code


def check_promoted(compiled, loops, most_stack):
    """Check the machine code of a kernel with two accumulators. Return it.

    loops: whole tiles, and whether there are items of HALF_N columns
    """
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    stack, code = machine_code(compiled)
    assert not unwritten(code) and stack <= most_stack
    text = "\n".join(instruction for _, instruction in code)
    # For each partition, the first step and the main loop have a product of 128 columns and 128 bytes of K for each
    # half of the columns, and wait for it.
    assert text.count("QGMMA.64x128x32") == text.count("GMMA.64x") == 2 * 2 * 4 * loops
    assert text.count("WARPGROUP.DEPBAR") == text.count("WARPGROUP.DEPBAR.LE gsb0, 0x0") == 2 * 2 * loops
    assert len(re.findall(r"WARPGROUP\.ARRIVE", text)) == 2 * 2 * loops  # otherwise ptxas serializes the products
    return code


def check_loops(code, part, most=0):
    """Check how many instructions spill within the innermost loops that contain these instructions."""
    loops = product_loops(code, part)
    assert loops
    for loop in loops:
        assert len(re.findall(r"\b(?:LDL|STL)", "\n".join(loop))) <= most


def check_gather(code, most_spills=0):
    """Check the loops that copy 128 bytes of each of 128 rows to shared memory, in a partition of two warps."""
    copies = r"LDGSTS\.E\.BYPASS\.128"
    check_loops(code, copies, most_spills)
    loops = product_loops(code, copies)
    assert {len(re.findall(copies, "\n".join(loop))) for loop in loops} == {128 * 128 // 16 // 64}


def check_barriers(compiled):
    """Check the barriers of partitions. A barrier of all threads would wait for warps that never reach it."""
    ptx = compiled.asm["ptx"]
    first, last = ptx.index("setmaxnreg"), ptx.rindex("setmaxnreg")
    barriers = re.findall(r"bar\.sync\s+([^;]*);", ptx[first:last])
    assert barriers and all("," in barrier or barrier.strip() == "1" for barrier in barriers)


@pytest.mark.parametrize("ranks, dtype, w_is_kn, bias, pairs", [
    (8, BF16, False, False, False), (2, FP16, True, True, False), (8, BF16, False, False, True),
    pytest.param(4, BF16, False, True, False, marks=thorough),
    pytest.param(3, FP16, False, False, False, marks=thorough),
    pytest.param(8, BF16, True, True, False, marks=thorough), pytest.param(3, FP16, True, True, True, marks=thorough),
], ids=str)
def test_gemm_rs(ranks, dtype, w_is_kn, bias, pairs):
    compiled = compile_for(*gemm_rs_launch(ranks, dtype, w_is_kn, bias, pairs=pairs), "sm_90")
    check(compiled, [256], 40 if _IS_39 else 32)


@pytest.mark.parametrize("ranks, dtype, w_is_kn, bias", [
    (8, BF16, False, False), pytest.param(2, FP16, True, True, marks=thorough),
    pytest.param(4, BF16, False, True, marks=thorough),
], ids=str)
def test_gemm_ar(ranks, dtype, w_is_kn, bias):
    code = check(compile_for(*gemm_ar_launch(ranks, dtype, w_is_kn, bias), "sm_90"), [256], 64)
    # Sums are stored at the peers and in z, in the partition that only exchanges and in those that multiply.
    check_loops(code, r"STG\.E\.128", 4)


@pytest.mark.parametrize("launch, ranks, dtype, w_is_kn, bias", [
    (gemm_rs_launch, 8, BF16, False, False), (gemm_ar_launch, 2, FP16, True, True),
    pytest.param(gemm_rs_launch, 4, BF16, True, True, marks=thorough),
    pytest.param(gemm_ar_launch, 8, BF16, False, False, marks=thorough),
])
def test_split_k(launch, ranks, dtype, w_is_kn, bias):
    """The sums of splits are stored and added without spills in the main loop."""
    code = check(compile_for(*launch(ranks, dtype, w_is_kn, bias, split_k=True), "sm_90"), [256], 64)
    text = "\n".join(instruction for _, instruction in code)
    plain = "\n".join(text for _, text in machine_code(compile_for(*launch(ranks, dtype, w_is_kn, bias), "sm_90"))[1])
    for instruction in (r"STG\.E\.64 ", r"LDG\.E\.64 "):  # 64 pairs of sums of a thread, in both partitions
        assert len(re.findall(instruction, text)) - len(re.findall(instruction, plain)) >= 2 * 64


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=str)
def test_gemm_ar_in_fp8(dtype):
    check(compile_for(*gemm_ar_launch(4, dtype, bias=True), "sm_90"), [256], 64, FP8_PRODUCT)


@pytest.mark.parametrize("ranks, scaling", [(8, "block"), pytest.param(4, "row", marks=thorough)])
def test_gemm_ar_with_two_accumulators(ranks, scaling):
    # Triton 3.6 spills most in the warps that only exchange, which have 72 registers.
    code = check_promoted(compile_for(*gemm_ar_launch(ranks, E4M3, scaling=scaling), "sm_90"), 2, 288)
    check_loops(code, "GMMA", 24 if scaling == "block" else 2)


@pytest.mark.parametrize("weights, dtype, w_is_kn, bias, variant", [
    (1, BF16, False, False, ""), (1, FP16, True, True, ""), (3, BF16, False, True, ""),
    (1, BF16, True, False, "fixed_half"), (1, BF16, False, False, "across"),
    pytest.param(2, FP16, True, False, "fixed_half", marks=thorough),
    pytest.param(3, BF16, True, True, "fixed_half", marks=thorough),
    pytest.param(3, FP16, True, True, "across", marks=thorough),
], ids=str)
def test_ag_gemm(weights, dtype, w_is_kn, bias, variant):
    options = {variant: True} if variant else {}
    compiled = compile_for(*ag_gemm_launch(weights, dtype, w_is_kn, bias, **options), "sm_90")
    code = check(compiled, [256, 128], 128)
    loads = [text for _, text in code if re.search(r"LDG\.E\.128", text)]
    assert len(loads) == 8  # words of 16 bytes per thread, each loaded once for all peers
    loops = product_loops(code, PUSH)
    assert loops and not {len(re.findall(PUSH, "\n".join(loop))) % 8 for loop in loops} - {0}
    # With one weight 3 addresses spill in the loop that copies rows also to this rank, with three weights 10.
    check_loops(code, PUSH, 0 if variant != "across" else 3 if weights == 1 else 10)


@pytest.mark.parametrize("dtype, per_row, bias, pairs", [
    (E4M3, True, False, False), (E4M3, True, False, True), pytest.param(E5M2, False, True, False, marks=thorough),
], ids=str)
def test_gemm_rs_in_fp8(dtype, per_row, bias, pairs):
    """Products of fp8 stay in the accumulator, without a second one."""
    check(compile_for(*gemm_rs_launch(4, dtype, False, bias, per_row, pairs=pairs), "sm_90"), [256], 0, FP8_PRODUCT)


@pytest.mark.parametrize("dtype, bias, across", [
    (E4M3, False, False), (E4M3, False, True), pytest.param(E5M2, True, False, marks=thorough),
    pytest.param(E5M2, True, True, marks=thorough),
], ids=str)
def test_ag_gemm_in_fp8(dtype, bias, across):
    check(compile_for(*ag_gemm_launch(1, dtype, bias=bias, across=across), "sm_90"), [256, 128], 128, FP8_PRODUCT)


@pytest.mark.parametrize("ranks, scaling, bias, w_dtype, pairs", [
    (8, "row", False, E4M3, False), (2, "block", True, E5M2, False), (8, "block", False, E4M3, True),
    pytest.param(8, "block", False, E4M3, False, marks=thorough),
    pytest.param(4, "row", False, E5M2, False, marks=thorough),
    pytest.param(4, "row", False, E4M3, True, marks=thorough),
])
def test_gemm_rs_with_two_accumulators(ranks, scaling, bias, w_dtype, pairs):
    options = {"scaling": scaling, "w_dtype": w_dtype, "pairs": pairs}
    compiled = compile_for(*gemm_rs_launch(ranks, E4M3, False, bias, **options), "sm_90")
    code = check_promoted(compiled, 2, 96 if _IS_39 else 80 if _IS_38 else 64)
    check_loops(code, "GMMA", 8 if scaling == "block" else 2)


@pytest.mark.parametrize("scaling", [pytest.param("row", marks=thorough), "block"])
def test_split_k_with_two_accumulators(scaling):
    code = check_promoted(compile_for(*gemm_rs_launch(8, E4M3, scaling=scaling, split_k=True), "sm_90"), 2, 256)
    check_loops(code, "GMMA", 16 if scaling == "block" else 2)


@pytest.mark.parametrize("scaling, bias, across", [
    ("block", True, False), ("block", False, True), pytest.param("row", False, False, marks=thorough),
    pytest.param("block", False, False, marks=thorough), pytest.param("row", True, False, marks=thorough),
    pytest.param("row", True, True, marks=thorough), pytest.param("block", True, True, marks=thorough),
])
def test_ag_gemm_with_two_accumulators(scaling, bias, across):
    launch = ag_gemm_launch(1, E4M3, bias=bias, scaling=scaling, across=across)
    code = check_promoted(compile_for(*launch, "sm_90"), 3, 256)
    # Triton 3.7 spills more than 3.6 here, in one of the partitions.
    check_loops(code, "GMMA", 32 if scaling == "block" else 4)


@pytest.mark.parametrize("experts, activation, scaling", [
    (256, "swiglu", "block"), (32, None, "row"), pytest.param(8, "swiglu", "row", marks=thorough),
    pytest.param(512, None, "block", marks=thorough),
    pytest.param(128, None, "block", marks=thorough),
])
def test_group_gemm_with_two_accumulators(experts, activation, scaling):
    code = check_promoted(compile_for(*group_gemm_launch(experts, E4M3, activation, scaling=scaling), "sm_90"), 2, 64)
    check_loops(code, "GMMA", 4 if scaling == "block" else 0)


@pytest.mark.parametrize("activation", [None, pytest.param("swiglu", marks=thorough)])
def test_group_gemm_in_fp8(activation):
    check(compile_for(*group_gemm_launch(64, E4M3, activation), "sm_90"), [256], 32 if _IS_39 else 16, FP8_PRODUCT)


@pytest.mark.parametrize("experts, dtype, activation, w_is_kn, keep", [
    (128, BF16, None, False, False), (3, FP16, None, True, False), (32, BF16, "swiglu", False, True),
    pytest.param(8, FP16, "swiglu", False, False, marks=thorough),
    pytest.param(512, BF16, "swiglu", False, True, marks=thorough),
], ids=str)
def test_group_gemm(experts, dtype, activation, w_is_kn, keep):
    launch = group_gemm_launch(experts, dtype, activation, w_is_kn, keep)
    check(compile_for(*launch, "sm_90"), [256], KEEP_STACK if keep else 16)


@pytest.mark.parametrize("choices, dtype, activation, w_is_kn, keep", [
    (2, BF16, "swiglu", False, True), pytest.param(1, FP16, None, True, False, marks=thorough),
    pytest.param(8, BF16, "swiglu", False, False, marks=thorough),
], ids=str)
def test_moe_ag_gemm(choices, dtype, activation, w_is_kn, keep):
    launch = moe_ag_gemm_launch(choices, dtype, activation, w_is_kn, keep)
    code = check(compile_for(*launch, "sm_90"), [256], max(GATHER_STACK, KEEP_STACK if keep else 0))
    check_gather(code, GATHER_SPILLS)


@pytest.mark.parametrize("ranks, choices, dtype, w_is_kn, weighted, narrow", [
    (8, 2, BF16, False, True, False), pytest.param(2, 1, FP16, True, False, False, marks=thorough),
    pytest.param(4, 8, BF16, False, True, False, marks=thorough),
    pytest.param(8, 2, BF16, False, True, True, marks=thorough),
    pytest.param(4, 12, BF16, False, True, True, marks=thorough),
], ids=str)
def test_moe_gemm_rs(ranks, choices, dtype, w_is_kn, weighted, narrow):
    launch = moe_gemm_rs_launch(ranks, choices, dtype, w_is_kn, weighted, narrow=narrow)
    check(compile_for(*launch, "sm_90"), [256], max(SUMS_STACK, 160 if narrow else 0), most_spills=4)


@pytest.mark.parametrize("launch, loops, most_spills, gathers", [
    pytest.param(lambda: moe_ag_gemm_launch(2, E4M3, "swiglu", scaling="block"), 2, 4, True, marks=thorough),
    (lambda: moe_gemm_rs_launch(4, 2, E4M3, scaling="block"), 2, SUMS_SPILLS, False),
    (lambda: moe_ag_gemm_launch(2, E4M3, "swiglu", scaling="row"), 2, 4, True),
    pytest.param(lambda: moe_gemm_rs_launch(4, 2, E4M3, scaling="row"), 2, SUMS_SPILLS, False, marks=thorough),
    pytest.param(
        lambda: moe_gemm_rs_launch(4, 2, E4M3, scaling="row", narrow=True), 2, SUMS_SPILLS, False, marks=thorough
    ),
], ids=["moe_ag_gemm", "moe_gemm_rs", "moe_ag_gemm, row", "moe_gemm_rs, row", "moe_gemm_rs, row, narrow"])
def test_tp_moe_with_two_accumulators(launch, loops, most_spills, gathers):
    code = check_promoted(compile_for(*launch(), "sm_90"), loops, max(192, SUMS_STACK))
    check_loops(code, "GMMA", most_spills)
    if gathers:
        check_gather(code, most_spills)


def test_tp_moe_in_fp8():
    code = check(compile_for(*moe_ag_gemm_launch(2, E4M3, "swiglu"), "sm_90"), [256], GATHER_STACK, FP8_PRODUCT)
    check_gather(code, GATHER_SPILLS)


@thorough
def test_sums_of_tp_moe_in_fp8():
    check(compile_for(*moe_gemm_rs_launch(4, 2, E4M3), "sm_90"), [256], SUMS_STACK, FP8_PRODUCT, most_spills=4)


def test_sums_follow_their_tiles():
    """A tile is counted after the wait for all TMA stores of the same warp, and a barrier of the warp."""
    ptx = compile_for(*moe_gemm_rs_launch(8, 2, BF16), "sm_90").asm["ptx"]
    (wait,) = re.finditer(r"cp\.async\.bulk\.wait_group 0; fence\.proxy\.async\.global;", ptx)
    (count,) = re.finditer(r"@first red\.release\.gpu\.global\.add\.u64", ptx)
    barrier = ptx.rindex("bar.warp.sync", 0, count.start())
    assert wait.end() < barrier < count.start() and not re.search("bra|BB", ptx[barrier : count.start()])


def test_tokens_are_acquired_before_they_are_gathered():
    """The copies of a tile follow the acquire of its signals, each by one thread, and a barrier."""
    ptx = compile_for(*moe_ag_gemm_launch(2, BF16, "swiglu", keep=True), "sm_90").asm["ptx"]
    load = ptx.index("cp.async.cg.shared.global")
    wait = ptx.rindex("SPIN:", 0, load)
    assert "bar.sync" in ptx[wait:load]


@pytest.mark.parametrize("launch", [
    lambda: moe_ag_gemm_launch(2, BF16, "swiglu", keep=True),
    pytest.param(lambda: moe_ag_gemm_launch(2, E4M3, scaling="block"), marks=thorough),
])
def test_gathered_rows_are_fenced_before_they_are_multiplied(launch):
    """Threads write them, and tensor cores read them through the async proxy."""
    ptx = compile_for(*launch(), "sm_90").asm["ptx"]
    products = [found.start() for found in re.finditer(r"wgmma\.mma_async", ptx)]
    waits = [ptx.rfind("mbarrier.try_wait", 0, product) for product in products]
    assert len({*waits}) >= 4 and min(waits) > 0
    for wait, product in zip(waits, products):
        assert "fence.proxy.async.shared::cta" in ptx[wait:product]


def test_signals_follow_their_tiles():
    """A signal is released after the wait for all TMA stores of the same warp, and a fence of the async proxy."""
    ptx = compile_for(*gemm_rs_launch(2, BF16), "sm_90").asm["ptx"]
    stores = re.findall(r"cp\.async\.bulk\.tensor\.3d\.global\.shared", ptx)
    assert len(stores) == 2 * 8  # eighths of a tile, for each rank
    (wait,) = re.finditer(r"cp\.async\.bulk\.wait_group 0; fence\.proxy\.async\.global;", ptx)
    (signal,) = re.finditer(r"bar\.warp\.sync 0xffffffff;[^{}]*@first st\.release\.sys\.global\.b64", ptx)
    assert wait.end() < signal.start() and not re.search("bra|BB", ptx[wait.end() : signal.start()])


def test_signals_of_sums_follow_the_sums():
    """A thread acquires what other partitions have stored. After a barrier, each thread releases a peer's signal."""
    ptx = compile_for(*gemm_ar_launch(8, BF16), "sm_90").asm["ptx"]
    arrivals = list(re.finditer(r"atom\.acq_rel\.gpu\.global\.add\.u64", ptx))
    signals = list(re.finditer(r"@goes st\.release\.sys\.global\.b64", ptx))
    assert len(arrivals) == len(signals) == 3  # of two partitions that multiply, and of the one that only exchanges
    for arrival, signal in zip(arrivals, signals, strict=True):
        before = ptx.rindex("bar", 0, arrival.start())
        assert re.match(r"bar(rier)?\.sync", ptx[before:]) and not re.search("bra|BB", ptx[before : arrival.start()])
        assert arrival.start() < signal.start()
        assert re.search(r"bar(rier)?\.sync", ptx[arrival.end() : signal.start()])


def test_signals_follow_pushed_data():
    """After a barrier of the partition one thread acquires what the others have stored. After another barrier, each
    thread releases a peer's signal."""
    ptx = compile_for(*ag_gemm_launch(1, BF16), "sm_90").asm["ptx"]
    (arrival,) = re.finditer(r"atom\.acq_rel\.gpu\.global\.add\.u64", ptx)
    (signal,) = re.finditer(r"@goes st\.release\.sys\.global\.b64", ptx)
    before, between = ptx.rindex("bar.sync", 0, arrival.start()), ptx[arrival.end() : signal.start()]
    assert not re.search("bra|BB", ptx[before : arrival.start()])
    barrier = between.rindex("bar.sync")
    assert not re.search("bra|BB", between[barrier:])


def test_rows_are_acquired_before_they_are_loaded():
    """The loads of a slice follow the acquire of its signal, and a fence of the async proxy."""
    ptx = compile_for(*ag_gemm_launch(1, BF16), "sm_90").asm["ptx"]
    loads = [found.start() for found in re.finditer(r"cp\.async\.bulk\.tensor\.3d\.shared", ptx)]
    waits = [found.start() for found in re.finditer("SPIN:", ptx)]
    fences = [found.start() for found in re.finditer(r"fence\.proxy\.async\.global;", ptx)]
    assert len(waits) == 2  # of all slices but the last one, and of the last one
    # Each lane may acquire another signal, so the warp synchronizes before the fence.
    counts = [found.end() for found in re.finditer(r"@there ld\.acquire\.sys\.[^}]*bar\.warp\.sync 0xffffffff;", ptx)]
    assert len(counts) == 2  # of the first item, and of the next ones
    for wait in waits + counts:
        load = min(at for at in loads if at > wait)
        assert any(wait < fence < load for fence in fences)


@pytest.mark.parametrize("launch, kinds", [
    # starts, multiplies, stores, pushes, ends; starts, waits, sums, ends
    (lambda: gemm_rs_launch(2, BF16), 5 + 4),
    # The partitions that multiply and the one that only exchanges: starts, waits twice, sums, receives, ends
    (lambda: gemm_ar_launch(8, BF16), 5 + 3 * 6),
    # starts, waits, multiplies, stores, ends; starts, pushes, ends
    (lambda: ag_gemm_launch(1, BF16), 5 + 3), (lambda: ag_gemm_launch(1, BF16, fixed_half=True), 5 + 3),
    (lambda: moe_ag_gemm_launch(2, BF16, "swiglu", keep=True), 5 + 3),
    # starts, multiplies, stores, ends; in three partitions starts, waits, joins, pushes, sums, ends
    (lambda: moe_gemm_rs_launch(8, 2, BF16), 4 + 3 * 6),
], ids=["gemm_rs", "gemm_ar", "ag_gemm", "ag_gemm, fixed half", "moe_ag_gemm", "moe_gemm_rs"])
def test_traces(launch, kinds):
    """Without a trace only waits read the clock, twice each. With one, each partition synchronizes before it does."""
    kernel, args, options = launch()
    untraced = compile_for(kernel, args, options, "sm_90").asm["ptx"]
    assert untraced.count("globaltimer") == 2 * untraced.count("nanosleep") and "%smid" not in untraced
    traced = compile_for(kernel, args, {**options, "trace_ptr": pointer(torch.int64)}, "sm_90")
    check_barriers(traced)
    ptx = traced.asm["ptx"]
    marks = [found.start() for found in re.finditer(r"mov\.u64 now, %globaltimer; setp", ptx)]
    assert len(marks) == ptx.count("%smid") == kinds
    for mark in marks:
        before = ptx[:mark].rindex("bar")
        assert re.match(r"bar(rier)?\.(warp\.)?sync", ptx[before:])
        assert not re.search(r"bra|BB|cp\.async|st\.", ptx[before:mark])


@pytest.mark.parametrize("launch", [
    lambda: gemm_rs_launch(2, BF16), lambda: gemm_ar_launch(8, BF16), lambda: ag_gemm_launch(1, BF16),
    lambda: group_gemm_launch(128, BF16),
    lambda: moe_ag_gemm_launch(2, BF16, "swiglu", keep=True), lambda: moe_gemm_rs_launch(8, 2, BF16),
])
def test_barriers_are_those_of_a_partition(launch):
    check_barriers(compile_for(*launch(), "sm_90"))


@pytest.mark.parametrize("arch", ["sm_90", "sm_80"])
def test_portable_kernel_with_slices(arch):
    """It has the same flattened main loop if it waits for several signals of a chunk."""
    one, several = (compile_gemm(ag_gemm_kernel, arch, BF16, SLICES=slices) for slices in (1, 3))
    product = {"sm_90": "wgmma.mma_async", "sm_80": "mma.sync"}[arch]
    counts = [compiled.asm["ptx"].count(product) for compiled in (one, several)]
    assert counts[0] == counts[1] > 0 and one.metadata.shared == several.metadata.shared
    waits = [compiled.asm["ptx"].count("SPIN:") for compiled in (one, several)]
    assert waits[1] == 3 * waits[0]  # the compiler peels iterations, so there are several copies of the loop


@pytest.mark.parametrize("experts, dtype", [
    (64, BF16), pytest.param(8, BF16, marks=thorough), pytest.param(256, FP16, marks=thorough),
    pytest.param(1024, FP16, marks=thorough),
], ids=str)
def test_group_gemm_weights(experts, dtype):
    compiled = compile_for(*group_gemm_weights_launch(experts, dtype), "sm_90")
    assert compiled.metadata.shared <= SHARED_MEMORY["sm_90"]
    stack, code = machine_code(compiled)
    assert not unwritten(code) and stack <= 32
    text = "\n".join(instruction for _, instruction in code)
    # For each partition, the first step, the other early ones, the main loop, and the last step, of which 64, 16 or 32
    # rows are multiplied.
    assert text.count("HGMMA.64x256x16") == text.count("GMMA.64x") == 2 * (3 * 4 + 4 + 1 + 2)
    assert text.count(WAIT) == len(re.findall(r"WARPGROUP\.ARRIVE", text)) == 2 * 6
    assert text.count("WARPGROUP.DEPBAR") == 2 * (6 + 4)  # otherwise ptxas serializes the products
    check_loops(code, "GMMA")
    check_barriers(compiled)
