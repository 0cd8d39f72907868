"""Operators without a multi-node kernel: they use the torch baseline there, and reject configs of other methods."""

import pytest
import torch

import tdkernels
from tests.support.ranks import device, on_ranks
from tests.support.simulated_nodes import a_group_on_nodes

HEADS, DIM = 4, 16


def _randn(seed, *shape, dtype=torch.float32):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator).to(device(), dtype)


def _collective(name):
    def operands(rank):
        return [_randn(rank, 4, 6)]

    return operands, getattr(tdkernels, name), getattr(tdkernels, f"{name}_ref"), tdkernels.CollectiveConfig()


def _attention():
    def operands(rank):
        return [_randn(10 * rank + i, 1, 8, HEADS, DIM, dtype=torch.float32) for i in range(3)]

    return operands, tdkernels.ag_attention, tdkernels.ag_attention_ref, tdkernels.AgAttentionConfig()


def _ulysses(name, *weight):
    def operands(rank):
        return [_randn(rank, 2, 8, 12), _randn(7, *weight)]

    return operands, getattr(tdkernels, name), getattr(tdkernels, f"{name}_ref"), tdkernels.UlyssesConfig()


def _experts():
    ids = torch.tensor([[0, 2], [1, -1], [2, 1]], device=device())

    def operands(rank):
        weights = _randn(rank + 5, 3, 2).softmax(-1)
        return [_randn(rank, 3, 8), weights, _randn(20 + rank, 3, 16, 8), _randn(30 + rank, 3, 8, 8)]

    def call(x, weights, gate_up, down, **options):
        return tdkernels.tp_moe(x, ids, weights, gate_up, down, **options)

    def reference(x, weights, gate_up, down, **options):
        return tdkernels.tp_moe_ref(x, ids, weights, gate_up, down, **options)

    return operands, call, reference, tdkernels.MoeTpConfig()


def _norm():
    def operands(rank):
        return [_randn(rank, 3, 16), _randn(10, 3, 16), _randn(11, 16)]

    def call(*own, **options):
        return torch.cat(tdkernels.all_reduce_rms_norm(*own, **options))

    def reference(*own, **options):
        return torch.cat(tdkernels.all_reduce_rms_norm_ref(*own, **options))

    return operands, call, reference, tdkernels.AllReduceNormConfig()


def _norm_of_product():
    def operands(rank):
        return [_randn(rank, 3, 8), _randn(20 + rank, 16, 8), _randn(10, 3, 16), _randn(11, 16)]

    def call(*own, **options):
        return torch.cat(tdkernels.gemm_ar_rms_norm(*own, **options))

    def reference(*own, **options):
        return torch.cat(tdkernels.gemm_ar_rms_norm_ref(*own, **options))

    return operands, call, reference, tdkernels.GemmArNormConfig()


def _pipelined_attention():
    operands, call, reference, _ = _attention()

    def call_in_bf16_with_config(*own, config=None, **options):
        """Cast to bf16 if a config is given: flash attention on GPUs does not support fp32."""
        return call(*(x.bfloat16() if config else x for x in own), config=config, **options)

    return operands, call_in_bf16_with_config, reference, tdkernels.AgAttentionConfig(method="flash")


CASES = {
    "all_gather": lambda: _collective("all_gather"),
    "reduce_scatter": lambda: _collective("reduce_scatter"),
    "all_reduce": lambda: _collective("all_reduce"),
    "all_reduce_rms_norm": _norm,
    "gemm_ar_rms_norm": _norm_of_product,
    "ag_attention": _attention,
    "ag_attention, pipelined": _pipelined_attention,
    "ulysses_qkv": lambda: _ulysses("ulysses_qkv", 16, 12),
    "ulysses_out": lambda: _ulysses("ulysses_out", 10, 24),
    "tp_moe": _experts,
}


def _check_fallback(name):
    """Check the output against the reference, that gradients exist, and that a config of fused kernels is rejected."""
    operands, call, reference, fused = CASES[name]()
    with a_group_on_nodes(1) as group:
        own = operands(group.rank())
        expected = reference(*own, group=group)
        for operand in own:
            operand.requires_grad_()
        y = call(*own, group=group)
        torch.testing.assert_close(y.detach(), expected, rtol=1e-4, atol=1e-4)
        grads = torch.autograd.grad(y, own, torch.ones_like(y))
        assert all(grad.isfinite().all() and grad.abs().sum() > 0 for grad in grads)
        with pytest.raises(NotImplementedError, match="on one node, and the group's 2 ranks are on 2 nodes of 1"):
            call(*own, group=group, config=fused)


@pytest.mark.parametrize("name", CASES)
def test_torch_fallback(name):
    on_ranks(2, _check_fallback, name)
