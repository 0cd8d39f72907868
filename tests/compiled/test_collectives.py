"""Compile the stand-alone collectives."""

import re

import pytest
import torch

from tdkernels.ops.collectives.config import EXCHANGES
from tests.compiled.collectives import COLLECTIVES, compile_collective
from tests.compiled.targets import BF16, FP16, FP32, needs_no_gpu
from tests.support.aot import TARGETS, narrow, without_machine_code
from tests.support.subset import THOROUGH, pairs

pytestmark = needs_no_gpu

each_collective = pytest.mark.parametrize("operator, exchange", COLLECTIVES, ids=str)
# (block_bytes, num_warps) of the default configs, from small to large messages.
BLOCKS = [(4096, 4), (8192, 8), (16384, 16), (32768, 16)]


@pytest.mark.parametrize(
    "collective, dtype, arch", pairs(list(COLLECTIVES), (BF16, FP16, FP32), list(TARGETS), everything=THOROUGH), ids=str
)
def test_collectives_compile(collective, dtype, arch):
    compile_collective(*collective, arch, dtype)


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
@each_collective
def test_collectives_with_odd_sizes_compile(operator, exchange, arch):
    """Compile for one element, and for sizes not divisible by 16 bytes, which are moved in words of 1, 2, 4 or 8."""
    for dtype, nbytes in ((torch.int8, 1), (torch.bool, 1 << 20 | 2), (BF16, 2), (FP32, 4 * 1001), (BF16, 8 * 1001)):
        if operator == "all_gather" or dtype.is_floating_point:
            with without_machine_code(nbytes != 4 * 1001):
                compile_collective(operator, exchange, arch, dtype, nbytes=nbytes)


@pytest.mark.parametrize("block_bytes, num_warps", BLOCKS)
@each_collective
def test_collectives_use_16_byte_accesses(operator, exchange, block_bytes, num_warps):
    ptx = compile_collective(
        operator, exchange, "sm_90", BF16, block_bytes=block_bytes, num_warps=num_warps
    ).asm["ptx"]
    assert not narrow(ptx)
    assert re.search(r"ld\.global\.v2\.b64|ld\.global\.v4\.b32", ptx)
    assert re.search(r"st\.global\.v2\.b64|st\.global\.v4\.b32", ptx)
    assert len(re.findall(r"st\.global\.b64", ptx)) <= 6, "a copy stores single words"  # `finish` stores six
    assert "ld.acquire.sys.global.b64" in ptx and "st.release.sys.global.b64" in ptx


def test_every_exchange_is_compiled():
    exchanges = {(operator, exchange) for operator, names in EXCHANGES.items() for exchange in names}
    assert set(COLLECTIVES) == exchanges - {("all_gather", "copy_engine")}  # uses the kernels of AsyncAllGather
