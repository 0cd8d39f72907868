"""GEMM fused with an all-reduce, a residual addition and a norm."""
