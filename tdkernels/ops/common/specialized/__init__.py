"""Building blocks of the warp-specialized Gluon kernels for Hopper: shared memory, loads, products and stores."""
