"""Tensor-parallel mixture of experts: every rank has a slice of the weights of every expert."""
