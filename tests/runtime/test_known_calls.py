"""Cached calls of every operator: an equal call skips validation, and any other call is validated."""

import contextlib

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import EpConfig, autotune
from tdkernels.ops.attention.ag_attention import op as attention_op
from tdkernels.ops.attention.flash_decode import op as decode_op
from tdkernels.ops.attention.ulysses import op as ulysses_op
from tdkernels.ops.experts.dispatch import all_to_all as all_to_all_op
from tdkernels.ops.experts.dispatch import op as dispatch_op
from tdkernels.ops.experts.ep_moe import op as ep_moe_op
from tdkernels.ops.experts.grouped_gemm import op as group_gemm_op
from tdkernels.ops.experts.tp_moe import op as tp_moe_op
from tests.support.ranks import a_group, device, on_ranks

BF16 = torch.bfloat16


def draw(*shape, dtype=BF16):
    return torch.randn(shape).to(device(), dtype)


def ints(*values):
    return torch.tensor(values, dtype=torch.int32, device=device())


def dispatch(group, **options):
    received, handle = tdkernels.ep_dispatch(
        draw(3, 16), ints([0, 1], [1, 2], [2, 3]), draw(3, 2), num_experts=4, group=group, **options
    )
    return received.x, handle


def combine(group, **options):
    x, handle = dispatch(group)
    return tdkernels.ep_combine(x, handle, group=group, **options)


def tp_moe(group, **options):
    operands = draw(2, 16), ints([0, 1], [1, 0]), draw(2, 2), draw(2, 16, 16), draw(2, 16, 8)
    return tdkernels.tp_moe(*operands, group=group, **options)


def ep_moe(group, **options):
    operands = draw(2, 16), ints([0, 1], [3, 2]), draw(2, 2), draw(2, 16, 16), draw(2, 16, 8)
    return tdkernels.ep_moe(*operands, num_experts=4, group=group, **options)


# {name: (module, its validation function, the call, options that need another validation)}
CALLS = {
    "ep_dispatch": (dispatch_op, "check_dispatch", dispatch, {"max_tokens": 12}),
    "ep_dispatch bounded": (
        dispatch_op, "check_dispatch", lambda group, **options: dispatch(group, max_tokens_per_rank=4, **options),
        {"max_tokens": 40},
    ),
    "ep_combine": (dispatch_op, "check_combine", combine, {"topk_weights": torch.ones(3, 2)}),
    "all_to_all": (
        all_to_all_op, "_check",
        lambda group, **options: tdkernels.all_to_all(draw(3, 16), ints(1, 2), group=group, **options),
        {"max_tokens": 8},
    ),
    "tp_moe": (tp_moe_op, "check_tp_moe", tp_moe, {"activation": "swiglu_interleaved"}),
    "moe_ag_gemm": (
        tp_moe_op, "check_ag_gemm",
        lambda group, **o: tdkernels.moe_ag_gemm(draw(2, 16), ints([0, 1], [1, 0]), draw(2, 8, 16), group=group, **o),
        {"activation": "swiglu"},
    ),
    "ep_moe": (ep_moe_op, "_check", ep_moe, {"max_tokens": 16}),
    "ep_moe bounded": (
        ep_moe_op, "_check", lambda group, **options: ep_moe(group, max_tokens_per_rank=2, **options),
        {"activation": "swiglu_interleaved"},
    ),
    "group_gemm": (
        group_gemm_op, "check_experts",
        lambda _, **options: tdkernels.group_gemm(draw(5, 16), draw(2, 8, 16), ints(2, 3), **options),
        {"activation": "swiglu"},
    ),
    "ag_attention": (
        attention_op, "check_attention",
        lambda group, **options: tdkernels.ag_attention(*[draw(1, 8, 2, 16)] * 3, group=group, **options),
        {"causal": False},
    ),
    "flash_decode": (
        decode_op, "check",
        lambda group, **options: tdkernels.flash_decode(
            draw(2, 4, 16), draw(2, 8, 2, 16), draw(2, 8, 2, 16), ints(8, 3), group=group, **options
        ),
        {"window": 3},
    ),
    "ulysses_qkv": (
        ulysses_op, "check_product",
        lambda group, **options: tdkernels.ulysses_qkv(draw(4, 16), draw(8, 16), group=group, **options),
        {"bias": torch.ones(8, dtype=BF16)},
    ),
    "ulysses_out": (
        ulysses_op, "check_product",
        lambda group, **options: tdkernels.ulysses_out(draw(4, 8), draw(8, 16), group=group, **options),
        {"bias": torch.ones(8, dtype=BF16)},
    ),
}


@contextlib.contextmanager
def recorded_checks(module, name):
    """Yield a list that grows with each call of a validation function."""
    seen, check = [], getattr(module, name)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, name, lambda *args, **options: seen.append(name) or check(*args, **options))
        yield seen


def check_once(name):
    module, check, call, other = CALLS[name]
    other = {key: value.to(device()) if isinstance(value, torch.Tensor) else value for key, value in other.items()}
    with a_group() as group, autotune.mode("off"), torch.no_grad():
        torch.manual_seed(dist.get_rank())
        for options, counts in (({}, [1, 0, 0]), (other, [1, 0]), ({}, [0])):
            for count in counts:
                with recorded_checks(module, check) as seen:
                    call(group, **options)
                assert len(seen) == count, (options, counts)
        with autotune.mode("cached"), recorded_checks(module, check) as seen:
            call(group)
        # The validation of ep_moe depends on no config, and its inner operators select theirs.
        assert len(seen) == (not name.startswith("ep_moe")), "entries of another mode must not be used"
        tdkernels.synchronize()
        del group


@pytest.mark.parametrize("name", CALLS)
def test_call_is_validated_once(name):
    on_ranks(2, check_once, name)


def reject_similar_calls():
    """Reject arguments that equal those of a cached call but differ in type, or that are not part of the key."""
    with a_group() as group, autotune.mode("off"):
        x, ids, weights = draw(3, 16), ints([0, 1], [1, 2], [2, 3]), draw(3, 2)
        for _ in range(2):
            tdkernels.ep_dispatch(x, ids, weights, num_experts=4, max_tokens=16, quantize="fp8", group=group)
        for options in ({"num_experts": 4.0}, {"num_experts": 4, "max_tokens": 16.0}):
            with pytest.raises(ValueError, match="must be a positive integer"):
                tdkernels.ep_dispatch(x, ids, weights, **{"max_tokens": 16, **options}, quantize="fp8", group=group)
        with pytest.raises(ValueError, match="has no gradient, and x requires one"):
            tdkernels.ep_dispatch(
                x.requires_grad_(), ids, weights, num_experts=4, max_tokens=16, quantize="fp8", group=group
            )
        x = x.detach()
        for tokens in (4, 4, 3):
            bounded = {"num_experts": 4, "max_tokens_per_rank": 3, "group": group}
            if tokens > 3:  # too many, on both ranks
                with pytest.raises(ValueError, match="more .*than max_tokens_per_rank|more tokens than"):
                    tdkernels.ep_dispatch(draw(4, 16), ints(*[[0, 1]] * 4), **bounded)
                with contextlib.suppress(ValueError):  # the error reported by the peer
                    tdkernels.synchronize()
            else:
                tdkernels.ep_dispatch(x, ids, **bounded)
        with pytest.raises(TypeError, match="config must be an EpConfig or None, not dict"):
            tdkernels.ep_dispatch(x, ids, num_experts=4, config={"method": "fused"}, group=group)
        tdkernels.ep_dispatch(x, ids, num_experts=4, config=EpConfig(num_senders=2, num_receivers=2), group=group)
        tdkernels.synchronize()
        del group


def test_similar_calls_are_validated():
    on_ranks(2, reject_similar_calls)


def train_after_call_without_gradients():
    """A cached decision of a call without gradients is valid for one with gradients, and vice versa."""
    with a_group() as group, autotune.mode("off"):
        torch.manual_seed(7 + dist.get_rank())
        operands = [draw(2, 16, dtype=torch.float32), draw(2, 2, dtype=torch.float32)]
        ids, gate_up, down = ints([0, 1], [1, 0]), draw(2, 16, 16, dtype=torch.float32), draw(2, 16, 8).float()
        leaves = [operand.requires_grad_() for operand in (*operands, gate_up, down)]
        x, weights, *experts = leaves

        def call(group):
            return tdkernels.tp_moe(x, ids, weights, *experts, group=group)

        with torch.no_grad():
            without = call(group)
        for _ in range(2):
            y = call(group)
            torch.testing.assert_close(y.detach(), without, rtol=0, atol=0)
            gradients = torch.autograd.grad(y.sum(), leaves)
            assert all(gradient.isfinite().all() and gradient.abs().sum() > 0 for gradient in gradients)
        with torch.no_grad():
            assert not call(group).requires_grad
        del group


def test_cached_decision_serves_calls_with_and_without_gradients():
    on_ranks(2, train_after_call_without_gradients)


def attend_with_and_without_gradients():
    with a_group() as group, autotune.mode("off"):
        torch.manual_seed(3 + dist.get_rank())
        q, k, v = (draw(1, 8, 2, 16) for _ in range(3))
        with torch.no_grad():
            tdkernels.ag_attention(q, k, v, group=group)
        q.requires_grad_()
        with recorded_checks(attention_op, "check_attention") as seen:
            for _ in range(2):
                tdkernels.ag_attention(q, k, v, group=group).float().sum().backward()
        assert not seen, "the call without gradients was checked"
        assert q.grad.isfinite().all() and q.grad.abs().sum() > 0
        tdkernels.synchronize()
        del group


def test_attention_with_gradients_hits_after_a_call_without():
    on_ranks(2, attend_with_and_without_gradients)
