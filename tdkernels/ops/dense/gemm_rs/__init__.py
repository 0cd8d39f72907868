"""gemm_rs: GEMM overlapped with a reduce-scatter."""
