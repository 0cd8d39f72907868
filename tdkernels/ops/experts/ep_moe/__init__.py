"""Expert-parallel mixture of experts: every rank has some of the experts."""
