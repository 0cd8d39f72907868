"""Launches of all Gluon kernels. ``python -m tests.compiled.gluon_kernels 3.6`` compiles them with Triton 3.6.

This Triton must be the one that is imported. The program stops before machine code (``without_machine_code``), since
versions of Triton differ mostly in the front end. It takes 10 s; up to machine code it takes 35 s.
"""

import sys

import torch
import triton

from tests.compiled.flash_decode import split_launches
from tests.compiled.specialized import (
    E4M3,
    ag_gemm_launch,
    gemm_ar_launch,
    gemm_rs_launch,
    group_gemm_launch,
    group_gemm_weights_launch,
    moe_ag_gemm_launch,
    moe_gemm_rs_launch,
)
from tests.compiled.targets import BF16, FP16
from tests.support.aot import compile_for, without_machine_code


def gluon_launches():
    """Return [(kernel, args, kwargs), ...], which cover the constexpr arguments of each kernel."""
    latents = [
        split_launches("dense latent", "sm_90", portable=False),
        split_launches("latent", "sm_90", sizes=(300, 3, 100, 576), lens_dtype=torch.int64, portable=False),
        split_launches("latent, fp8, rope", "sm_90", portable=False, chunk_keys=1024),
    ]
    return [
        gemm_rs_launch(8, BF16), gemm_rs_launch(2, FP16, w_is_kn=True, bias=True),
        gemm_ar_launch(8, BF16), gemm_ar_launch(2, E4M3, bias=True, scaling="block"),
        ag_gemm_launch(1, BF16), ag_gemm_launch(1, FP16, w_is_kn=True, bias=True),
        ag_gemm_launch(3, BF16, bias=True), ag_gemm_launch(3, BF16, w_is_kn=True, bias=True, fixed_half=True),
        gemm_rs_launch(4, E4M3), gemm_rs_launch(8, E4M3, bias=True, per_row=False), ag_gemm_launch(1, E4M3),
        ag_gemm_launch(1, E4M3, bias=True),
        group_gemm_launch(128, BF16), group_gemm_launch(3, FP16, w_is_kn=True),
        group_gemm_launch(32, BF16, "swiglu", keep=True), group_gemm_weights_launch(64, BF16),
        moe_ag_gemm_launch(2, BF16, "swiglu", keep=True), moe_ag_gemm_launch(1, FP16, w_is_kn=True),
        moe_ag_gemm_launch(2, E4M3, scaling="block"), moe_gemm_rs_launch(8, 2, BF16),
        moe_gemm_rs_launch(2, 1, FP16, w_is_kn=True, weighted=False), moe_gemm_rs_launch(1, 2, E4M3, scaling="block"),
        *(parts for parts, _ in latents),
    ]


def main(version):
    """Compile the kernels if the imported Triton has this version, such as "3.6"."""
    if not f"{triton.__version__}.".startswith(f"{version}."):
        sys.exit(f"expected triton {version}, but {triton.__file__} is triton {triton.__version__}")
    with without_machine_code():
        for kernel, args, kwargs in gluon_launches():
            compile_for(kernel, args, kwargs, "sm_90")


if __name__ == "__main__":
    main(*sys.argv[1:])
