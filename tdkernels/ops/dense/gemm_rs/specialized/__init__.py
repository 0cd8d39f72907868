"""Warp-specialized kernel of gemm_rs with transport "direct", for Hopper, in Gluon."""
