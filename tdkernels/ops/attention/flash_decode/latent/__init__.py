"""Attention over parts of a latent cache (MLA) on Hopper: a kernel in Gluon for method "split" of flash_decode."""
