"""Warp-specialized kernel of ag_gemm, for Hopper, in Gluon."""
