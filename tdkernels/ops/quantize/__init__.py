"""Quantization of matrices to fp8."""
