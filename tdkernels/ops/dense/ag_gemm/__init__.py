"""ag_gemm: all-gather overlapped with a GEMM."""
