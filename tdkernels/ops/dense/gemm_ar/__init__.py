"""gemm_ar: GEMM overlapped with an all-reduce."""
