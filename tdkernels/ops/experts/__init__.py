"""Mixture-of-experts operators: expert parallelism, tensor-parallel experts and grouped GEMM."""
