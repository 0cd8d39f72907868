"""Communication that hides behind computation: ready-made overlapping operators on stock Triton and PyTorch."""

from tdkernels.errors import PeerTimeoutError, PlanMismatchError
from tdkernels.ops._tiles import Tiles
from tdkernels.ops.ag_gemm import AgGemmConfig, ag_gemm, ag_gemm_ref
from tdkernels.ops.gemm_rs import GemmRsConfig, gemm_rs, gemm_rs_ref
from tdkernels.symm import set_timeout, synchronize

__version__ = "0.1.0"

__all__ = [
    "AgGemmConfig", "GemmRsConfig", "PeerTimeoutError", "PlanMismatchError", "Tiles", "ag_gemm", "ag_gemm_ref",
    "gemm_rs", "gemm_rs_ref", "set_timeout", "synchronize",
]  # fmt: skip
