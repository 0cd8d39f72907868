"""GEMM on one rank whose sum over K is the reduction tree of the batch-invariant mode with ``max_ranks``.

It is the kernel of ``group_gemm`` with one expert. The bias is added to the unrounded product, as the kernels of
several ranks do. With a bias the kernel stores fp32, and torch adds and rounds.
"""

import torch

from tdkernels.ops.common.config import from_text
from tdkernels.ops.experts.grouped_gemm import launch
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig
from tdkernels.runtime.torch_op import register


def _linear(x, weight, bias, leaves, config):
    """Return x @ weight.T + bias for x [M, K] and weight [N, K]: the body of the torch.library op."""
    if not x.shape[0]:
        return x.new_empty(0, weight.shape[0])
    out_dtype = x.dtype if bias is None else torch.float32
    y = launch.linear_by_tree(x, weight, leaves, from_text(GroupGemmConfig, config), out_dtype)
    return y if bias is None else (y + bias.float()).to(x.dtype)


def _fake_linear(x, weight, bias, leaves, config):
    return x.new_empty(x.shape[0], weight.shape[0])


register(
    "linear_by_tree(Tensor x, Tensor weight, Tensor? bias, int leaves, str config) -> Tensor", _linear, _fake_linear
)
