"""Mixture-of-experts operators: expert parallelism and tensor-parallel experts."""
