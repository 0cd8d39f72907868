"""Warp-specialized kernel of group_gemm, for Hopper, in Gluon."""
