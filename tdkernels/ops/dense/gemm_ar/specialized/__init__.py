"""Warp-specialized kernel of gemm_ar with transport "direct", for Hopper, in Gluon."""
