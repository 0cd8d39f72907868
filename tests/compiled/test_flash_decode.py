"""Compile flash_decode, single-node and multi-node, and its gradients."""

import re

import pytest
import torch

from tdkernels import FlashDecodeConfig
from tdkernels.ops.attention.flash_decode.kernel import flash_decode_nodes_kernel
from tdkernels.ops.attention.flash_decode.kernel_split import flash_decode_join_kernel, flash_decode_parts_kernel
from tdkernels.ops.attention.flash_decode.latent.kernel import latent_kernel
from tests.compiled.flash_decode import decode_launch, split_launches
from tests.compiled.targets import BF16, FP16, FP32, compile_launches, needs_no_gpu
from tests.support.aot import SHARED_MEMORY, TARGETS, machine_code
from tests.support.simulated_nodes import thorough

pytestmark = needs_no_gpu


@pytest.mark.parametrize("arch, name, dtype", [
    *((arch, "one token", BF16) for arch in TARGETS),
    *((arch, "tokens, paged, fp8", FP16) for arch in ("sm_80", "sm_90", "gfx942")),
    ("sm_90", "latent", BF16), ("gfx942", "latent", BF16), ("sm_80", "one token", FP32),
])
def test_flash_decode_compiles(arch, name, dtype):
    compile_launches(decode_launch(name, arch, dtype), arch)


@pytest.mark.parametrize("arch, name, dtype, ranks", [
    ("sm_90", "one token", BF16, 4), ("sm_90", "latent", BF16, 1), ("sm_80", "tokens, paged, fp8", FP16, 4),
    ("gfx942", "one token", BF16, 4),
])
def test_flash_decode_in_chunks_compiles(arch, name, dtype, ranks):
    decode = decode_launch(name, arch, dtype, ranks, chunk_keys=1024)[0]
    compile_launches([decode], arch)


@pytest.mark.parametrize("arch, name, ranks, nodes", [
    ("sm_90", "one token", 8, 2), ("sm_90", "latent", 6, 3), ("sm_80", "tokens, paged, fp8", 4, 4),
    ("gfx942", "one token", 8, 2),
])
def test_multinode_flash_decode_compiles(arch, name, ranks, nodes):
    decode = decode_launch(name, arch, ranks=ranks, nodes=nodes)[0]
    assert decode[0] is flash_decode_nodes_kernel
    (compiled,) = compile_launches([decode], arch)
    if arch.startswith("gfx"):
        return
    ptx = compiled.asm["ptx"]
    puts = [call.start() for call in re.finditer(r"call\.uni [^;]*nvshmemx_putmem_signal_nbi_block", ptx)]
    # Puts of a node's partial result, and of the lengths if there are several query tokens. Loops may be unrolled.
    assert len(puts) >= 1 + (name == "tokens, paged, fp8")
    assert all("fence.acq_rel.sys" in ptx[max(put - 4000, 0) : put] for put in puts)
    waits = re.findall(r"call\.uni [^;]*nvshmem_signal_wait_until", ptx)
    assert len(waits) >= 1 + (name == "tokens, paged, fp8")


# ---- method "split" ----


@pytest.mark.parametrize("arch, name, dtype, ranks", [
    ("sm_80", "one token", BF16, 1), ("sm_89", "latent", BF16, 1), ("sm_90", "tokens, paged, fp8", BF16, 1),
    ("sm_90", "one token", BF16, 2), ("sm_90", "latent", FP16, 2), ("sm_100", "dense latent", BF16, 2),
    ("gfx942", "one token", BF16, 2), ("gfx950", "latent", BF16, 1), ("sm_89", "latent, fp8, rope", BF16, 1),
    ("gfx942", "dense latent, fp8, rope", FP16, 1),
])
def test_split_flash_decode_compiles(arch, name, dtype, ranks):
    launches = split_launches(name, arch, dtype, ranks, chunk_keys=1024 if ranks == 2 else 0)
    assert [kernel for kernel, *_ in launches] == [flash_decode_parts_kernel, flash_decode_join_kernel]
    parts, join = compile_launches(launches, arch)
    if arch.startswith("sm"):
        overlaps = arch in ("sm_90", "sm_100")
        assert join.metadata.launch_pdl == overlaps and not parts.metadata.launch_pdl
        assert ("griddepcontrol.launch_dependents" in parts.asm["ptx"]) == overlaps
        # Scratch memory is read after the wait, lengths before.
        lengths, *scratch = join.asm["ptx"].split("griddepcontrol.wait")
        assert bool(scratch) == overlaps and "ld.global" in lengths


@pytest.mark.parametrize("batch, rows, ranks", [(16, 2, 1), (32, 4, 1), (32, 4, 2)])
def test_join_of_large_batches_compiles(batch, rows, ranks):
    """With many query rows a program merges several of them at a time."""
    _, join = split_launches("dense latent", "sm_90", BF16, ranks, sizes=(batch, 1, 128, 576))
    assert (join[0], join[2]["TILE"].rows) == (flash_decode_join_kernel, rows)
    compile_launches([join], "sm_90")


@pytest.mark.parametrize("name, sizes, dtype, lens_dtype, chunk_keys", [
    ("dense latent", (32, 1, 128, 576), BF16, torch.int32, 0),
    ("latent", (300, 3, 100, 576), BF16, torch.int64, 0),
    ("latent, fp8, rope", (4, 2, 128, 576), BF16, torch.int32, 1024),
    pytest.param("dense latent", (1, 1, 16, 576), FP16, torch.int64, 1024, marks=thorough),
    pytest.param("dense latent, fp8, rope", (32, 1, 128, 576), FP16, torch.int32, 0, marks=thorough),
    pytest.param("latent", (4, 1, 128, 576), FP16, torch.int32, 1024, marks=thorough),
    pytest.param("dense latent", (300, 3, 100, 576), FP16, torch.int64, 0, marks=thorough),
], ids=str)
def test_latent_kernel_on_hopper(name, sizes, dtype, lens_dtype, chunk_keys):
    """ptxas does not serialize the products: then it would wait before each of them."""
    launches = split_launches(
        name, "sm_90", dtype, sizes=sizes, lens_dtype=lens_dtype, portable=False, chunk_keys=chunk_keys
    )
    parts = launches[0]
    assert parts[0] is latent_kernel and parts[2]["CHUNK"] == chunk_keys // 64
    (compiled,) = compile_launches([parts], "sm_90")
    if "fp8" in name:
        check_conversion_in_place(compiled.asm["ptx"])
    text = "\n".join(instruction for _, instruction in machine_code(compiled)[1])
    products, waits = text.count("HGMMA"), text.count("WARPGROUP.DEPBAR")
    assert products >= 100 and 4 * waits <= products  # 160 products and 12 waits with Triton 3.6 and 3.7


def check_conversion_in_place(ptx):
    """Check that all threads read a piece of keys before one of them overwrites it, and fence before they arrive."""
    found = re.findall(
        r"ld\.shared|cvt\.rn\.f16x2\.e4m3x2|bar\.sync|st\.shared|fence\.proxy\.async|mbarrier\.arrive\.shared", ptx
    )
    text = " ".join(name.split(".")[0] for name in found)
    pieces = re.findall(r"(?:ld )+(?:cvt )+(?:bar )+(?:st )+fence (?:bar )+mbarrier", text)
    assert len(pieces) == 4 and text.count("cvt") == sum(piece.count("cvt") for piece in pieces)


def test_fp8_decode_on_hopper_reads_no_single_bytes():
    (decode,) = compile_launches(decode_launch("tokens, paged, fp8", "sm_90"), "sm_90")
    ptx = decode.asm["ptx"]
    assert ".m8n8.x4.trans.shared.b16" in ptx and "cvt.rn.f16x2.e4m3x2" in ptx
    assert not re.search(r"ld\.shared\.[bsu]8\b", ptx)


@pytest.mark.parametrize("name, dtype", [("paged", BF16), ("tokens, paged, fp8", FP16), ("latent", BF16)])
def test_two_paged_decode_programs_fit_on_a_hopper_sm(name, dtype):
    """The default config assumes two programs per SM; masking by pages must not change the number of stages."""
    decode = compile_launches(decode_launch(name, "sm_90", dtype), "sm_90")[0]
    assert 2 * (decode.metadata.shared + 1024) <= 228 << 10  # the driver reserves 1 KiB for each program


@pytest.mark.parametrize("arch, name, widths", [
    ("sm_90", "dense latent", [128] * 4 + [64]), ("sm_90", "one token", [128]), ("sm_89", "heads of 512", [128] * 4),
])
def test_scores_of_fp32_are_added_in_short_chains(arch, name, widths):
    """A longer chain of additions has a larger rounding error; see ``_add_scores_in_chains``.

    Wide heads also have to fit in the shared memory of sm_89.
    """
    launch = split_launches(name, arch, FP32)[0]
    (compiled,) = compile_launches([launch], arch)
    lengths = map(int, re.findall(r"tt\.dot .*tensor<\d+x(\d+)xf32> \* tensor<", compiled.asm["ttir"]))
    assert sorted(lengths) == sorted([*widths, launch[2]["TILE"].block_n])  # the last one multiplies the values


def test_high_tiles_of_a_latent_cache_use_wgmma():
    """Tiles of 64 rows: each of two warp groups multiplies half of the columns of the values."""
    config = FlashDecodeConfig(block_n=64, num_warps=8, num_stages=2, tile_rows=64)
    (decode,) = compile_launches(decode_launch("latent", "sm_90", config=config)[:1], "sm_90")
    ptx = decode.asm["ptx"]
    assert "mma.sync" not in ptx and re.search(r"wgmma\.mma_async\S*\.m64n256k16", ptx)
    assert decode.metadata.shared <= SHARED_MEMORY["sm_90"]


def test_decode_on_hopper_is_pipelined_and_uses_tensor_cores():
    decode, gradients = compile_launches(decode_launch("one token", "sm_90"), "sm_90")
    ptx = decode.asm["ptx"]
    assert "mma.sync.aligned.m16n8k16" in ptx and "ldmatrix" in ptx
    loop = ptx[: ptx.rindex("mma.sync")]
    assert loop.count("cp.async.cg") >= 2 * 16  # keys and values of a block, in the prologue and in the loop
    assert "st.release.sys.global.b64" in ptx and "ld.acquire.sys.global.b64" in ptx
    assert "mma.sync" in gradients.asm["ptx"]
