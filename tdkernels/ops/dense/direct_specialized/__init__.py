"""Partitions that the warp-specialized kernels with transport "direct" share, for Hopper, in Gluon."""
