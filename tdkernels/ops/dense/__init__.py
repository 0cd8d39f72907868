"""GEMMs overlapped with a collective: ag_gemm, gemm_rs, gemm_ar."""
