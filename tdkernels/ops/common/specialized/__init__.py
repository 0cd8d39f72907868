"""What the warp-specialized kernels for Hopper, in Gluon, share: shared memory, loads, products and stores."""
