"""Warp-specialized kernels of moe_ag_gemm and moe_gemm_rs, for Hopper, in Gluon."""
