"""Known calls that are one launch go straight to it; a call whose operand is copied first does not."""

import weakref

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels import GemmRsConfig, UlyssesConfig, autotune
from tdkernels.ops.attention.ag_attention import launch as attention_launch
from tdkernels.ops.attention.flash_decode import launch as decode_launch
from tdkernels.ops.attention.ulysses import launch_qkv
from tdkernels.ops.collectives import launch as collective_launch
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.experts.grouped_gemm import launch as grouped_launch
from tdkernels.runtime import kernel_launch
from tdkernels.runtime.recorder import Recorder, record
from tests.runtime.test_call_cache import CONFIGS, K, draw, is_right, known_calls, operands_of
from tests.support.ranks import a_group, device, on_ranks


def as_one_launch(operator, tensors, group, **options):
    """Whether a call, which is checked, went to its launch without asking how tensors lie."""
    asked, found = [], kernel_launch.bind
    with pytest.MonkeyPatch.context() as patch:
        asks = lambda *args, **options: asked.append(args) or found(*args, **options)  # noqa: E731
        patch.setattr(decode_launch, "bind", asks)
        for module in (gemm_operands, collective_launch, launch_qkv, grouped_launch, decode_launch, attention_launch):
            kept = module.launch_cached
            patch.setattr(module, "launch_cached", lambda *args, kept=kept, **o: asked.append(args) or kept(*args, **o))
        patch.setattr(kernel_launch, "bind", asks)
        options |= {} if group is None else {"group": group}
        y = getattr(tdkernels, operator)(*tensors, **options)
    options.pop("config", None)
    expected = getattr(tdkernels, f"{operator}_ref")(*tensors, **options)
    tdkernels.synchronize()
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    return not asked


def is_one_launch_from_the_third_time():
    half = lambda operator, seed, **rows: tuple(t.bfloat16() for t in operands_of(operator, seed, **rows))  # noqa: E731
    with a_group() as group, autotune.mode("off"):
        for operator in (*CONFIGS, "all_gather"):
            seen = [as_one_launch(operator, half(operator, seed), group) for seed in range(4)]
            assert seen == [False, False, True, True], operator
            # Another call in the same workspace, for which its buffer grows: what was kept is of the old one.
            is_right(operator, operands_of(operator, 0, rows=8 if operator in CONFIGS else 1024), group)
            seen = [as_one_launch(operator, half(operator, seed), group) for seed in range(2)]
            assert seen == [False, True], operator
            with record(Recorder()):
                assert not as_one_launch(operator, half(operator, 5), group)
            assert as_one_launch(operator, half(operator, 6), group)
        x, weight = half("gemm_ar", 7)
        moved = torch.empty(x.numel() + 1, dtype=x.dtype, device=device())[1:].view_as(x).copy_(x)
        assert moved.stride() == x.stride()
        assert [as_one_launch("gemm_ar", (moved, weight), group) for _ in range(3)] == [False] * 3, "it is copied"
        strided = torch.stack([x, x], 2)[:, :, 0]
        assert [as_one_launch("gemm_ar", (strided, weight), group) for _ in range(3)] == [False] * 3
        batch, biases = x.view(2, 4, K), [draw(seed, 12).bfloat16() for seed in range(3)]
        seen = [as_one_launch("gemm_ar", (batch + seed, weight, biases[seed]), group) for seed in range(3)]
        assert seen == [False, False, True]
        turned = x.view(2, 4, K).transpose(0, 1)
        assert [as_one_launch("gemm_ar", (turned, weight), group) for _ in range(3)] == [False] * 3, "it is copied"
        launch = next(call._launch() for call in known_calls(group, "ag_gemm") if call._launch() is not None)
        space, kept = launch._workspace, weakref.ref(launch)
        del launch
        space._allocate(2 * space.half_bytes, space.half_signals, space.num_flags)  # on all ranks
        assert kept() is None, "a launch of a buffer that is gone"
        assert not as_one_launch("ag_gemm", half("ag_gemm", 1), group)
        parts = [
            as_one_launch("gemm_rs", half("gemm_rs", 0), group, config=GemmRsConfig(method="parts")) for _ in range(6)
        ]
        assert set(parts) == {True}, "by torch's products, which never ask"
        del group


def test_a_call_that_is_one_launch_goes_straight_to_it():
    on_ranks(2, is_one_launch_from_the_third_time)


def ulysses_qkv_is_one_launch(group):
    x, weight = (tensor.bfloat16() for tensor in operands_of("gemm_ar", 1))
    config = UlyssesConfig(num_comm_sms=1)
    for rows in (x, x.view(2, 4, K)):
        seen = [as_one_launch("ulysses_qkv", (rows + seed, weight), group, config=config) for seed in range(4)]
        assert seen == [False, False, True, True]
    turned = x.view(2, 4, K).transpose(0, 1)
    seen = [as_one_launch("ulysses_qkv", (turned, weight), group, config=config) for _ in range(3)]
    assert seen == [False] * 3, "it is copied"


def group_gemm_is_one_launch(group):
    x, weight = (tensor.bfloat16() for tensor in operands_of("gemm_ar", 1))
    w, splits = torch.stack([weight, -weight]), torch.tensor([5, 3], device=device())
    for activation in (None, "swiglu"):
        rows = [(x + seed, w, splits) for seed in range(4)]
        seen = [as_one_launch("group_gemm", operands, None, activation=activation) for operands in rows]
        assert seen == [False, False, True, True]
    assert [as_one_launch("group_gemm", (x.t().contiguous().t(), w, splits), None) for _ in range(3)] == [False] * 3
    twice = splits.repeat_interleave(2)[::2]
    assert [as_one_launch("group_gemm", (x, w, twice), None) for _ in range(3)] == [False] * 3


def flash_decode_is_one_launch(group):
    lens, table = torch.tensor([6, 3], device=device()), torch.tensor([[1, 0], [3, 2]], device=device())
    for q, options in (
        (draw(1, 2, 4, K), {}), (draw(2, 2, 3, 4, K), {"window": 3}), (draw(3, 2, 4, K), {"block_table": table}),
    ):
        room = (4, 4) if "block_table" in options else (2, 8)
        caches = [draw(dist.get_rank() + seed, *room, 2, K).bfloat16() for seed in (5, 6)]
        operands = q.bfloat16(), *caches
        seen = [as_one_launch("flash_decode", (*operands, lens), group, **options) for _ in range(4)]
        assert seen == [False, False, True, True], options
        turned = operands[0].transpose(1, 2).contiguous().transpose(1, 2)
        seen = [as_one_launch("flash_decode", (turned, *operands[1:], lens), group, **options) for _ in range(3)]
        assert seen == [False] * 3, "it is copied"
    assert tdkernels.flash_decode(*operands, lens, **options, return_lse=True, group=group)[1].shape == (2, 4)


def ag_attention_is_one_launch(group):
    q, k, v = (draw(dist.get_rank() + seed, 2, 5, heads, K).bfloat16() for seed, heads in ((7, 4), (8, 2), (9, 2)))
    for options in ({}, {"causal": False}, {"sharding": "zigzag"}):
        seen = [as_one_launch("ag_attention", (q, k, v), group, **options) for _ in range(4)]
        assert seen == [False, False, True, True], options
    turned = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert [as_one_launch("ag_attention", (turned, k, v), group) for _ in range(3)] == [False] * 3, "it is copied"
    outputs = [tdkernels.ag_attention(q, k, v, return_lse=True, group=group) for _ in range(3)]
    assert all(torch.equal(one, other) for o in outputs for one, other in zip(o, outputs[0], strict=True))
    assert outputs[2][1].shape == q.shape[:3]


def with_a_group(check):
    with a_group() as group, autotune.mode("off"):
        check(group)
        del group


@pytest.mark.parametrize(
    "check",
    [ulysses_qkv_is_one_launch, group_gemm_is_one_launch, flash_decode_is_one_launch, ag_attention_is_one_launch],
)
def test_other_operators_go_straight_to_their_launch_too(check):
    on_ranks(2, with_a_group, check)
