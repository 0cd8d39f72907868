"""Grouped GEMM: rows grouped by expert, each group multiplied by the weight of its expert."""
