"""Properties of tuning problems of flash_decode."""

import functools
from typing import TYPE_CHECKING

import torch

from tdkernels.ops.attention.flash_decode import torch_attention
from tdkernels.ops.attention.flash_decode.config import DecodeShape
from tdkernels.ops.attention.flash_decode.validation import FP8

if TYPE_CHECKING:
    from tdkernels.autotune.problem import Problem

_PAGE, _LATENT_PAGE = 16, 64  # keys per block of the paged caches used for tuning


@functools.lru_cache(1024)
def shape_of_problem(problem: "Problem") -> DecodeShape:
    """Return the DecodeShape of a problem."""
    batch, queries, heads, kv_heads, d, dv, _ = problem.shape
    size = 1 if "fp8" in problem.layout else problem.torch_dtype.itemsize
    latent, paged = "latent" in problem.layout, "paged" in problem.layout
    rope = problem.torch_dtype.itemsize if "rope" in problem.layout else 0
    return DecodeShape(batch, queries, kv_heads, heads // kv_heads, d, dv, size, latent, paged, rope)


def page_of_problem(problem: "Problem") -> int:
    """Return the keys per block of a paged cache; ``latent_kernel`` needs a multiple of 32."""
    return _LATENT_PAGE if "latent" in problem.layout else _PAGE


def path_of_problem(problem: "Problem") -> str:
    """Return the path of method "torch" for a problem. GPUs are assumed to be NVIDIA's, of sm_80 or later."""
    _, _, _, _, d, dv, _ = problem.shape
    shape, dtype = shape_of_problem(problem), problem.torch_dtype
    return torch_attention.select_path(
        dtype, FP8 if "fp8" in problem.layout else dtype, d, dv, on_gpu=problem.gpu != "cpu",
        has_flash=not torch.version.hip, page=page_of_problem(problem) if shape.paged else None,
    )
