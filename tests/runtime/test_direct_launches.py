"""Direct launches: cached calls that are a single kernel launch; not used if an operand is copied first."""

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
from tdkernels.ops.collectives.norm import launch as norm_launch
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.experts.grouped_gemm import launch as grouped_launch
from tdkernels.runtime import gpu, kernel_launch
from tdkernels.runtime.recorder import Recorder, record
from tests.runtime.test_call_cache import CONFIGS, K, cached_calls, check_call, draw, operands_of
from tests.support.ranks import a_group, device, on_ranks


def is_direct(operator, tensors, group, **options):
    """Make and check a call; return whether it launched directly, without computing operand signatures."""
    lookups, original = [], kernel_launch.bind
    with pytest.MonkeyPatch.context() as patch:
        recording_bind = lambda *args, **options: lookups.append(args) or original(*args, **options)  # noqa: E731
        patch.setattr(decode_launch, "bind", recording_bind)
        modules = gemm_operands, collective_launch, norm_launch, launch_qkv, grouped_launch
        for module in (*modules, decode_launch, attention_launch):
            cached = module.launch_cached
            recording = lambda *args, cached=cached, **o: lookups.append(args) or cached(*args, **o)  # noqa: E731
            patch.setattr(module, "launch_cached", recording)
        patch.setattr(kernel_launch, "bind", recording_bind)
        options |= {} if group is None else {"group": group}
        y = getattr(tdkernels, operator)(*tensors, **options)
    options.pop("config", None)
    expected = getattr(tdkernels, f"{operator}_ref")(*tensors, **options)
    tdkernels.synchronize()
    torch.testing.assert_close(y, expected, rtol=2e-2, atol=2e-2)
    return not lookups


def launch_directly_from_the_third_call():
    half = lambda operator, seed, **rows: tuple(t.bfloat16() for t in operands_of(operator, seed, **rows))  # noqa: E731
    with a_group() as group, autotune.mode("off"):
        for operator in (*CONFIGS, "all_gather"):
            seen = [is_direct(operator, half(operator, seed), group) for seed in range(4)]
            assert seen == [False, False, True, True], operator
            # Another call makes the buffer of the workspace grow, which invalidates cached launches.
            check_call(operator, operands_of(operator, 0, rows=8 if operator in CONFIGS else 1024), group)
            seen = [is_direct(operator, half(operator, seed), group) for seed in range(2)]
            assert seen == [False, True], operator
            with record(Recorder()):
                assert not is_direct(operator, half(operator, 5), group)
            assert is_direct(operator, half(operator, 6), group)
        x, weight = half("gemm_ar", 7)
        misaligned = torch.empty(x.numel() + 1, dtype=x.dtype, device=device())[1:].view_as(x).copy_(x)
        assert misaligned.stride() == x.stride()
        assert [is_direct("gemm_ar", (misaligned, weight), group) for _ in range(3)] == [False] * 3, "x is copied"
        strided = torch.stack([x, x], 2)[:, :, 0]
        assert [is_direct("gemm_ar", (strided, weight), group) for _ in range(3)] == [False] * 3
        batch, biases = x.view(2, 4, K), [draw(seed, 12).bfloat16() for seed in range(3)]
        seen = [is_direct("gemm_ar", (batch + seed, weight, biases[seed]), group) for seed in range(3)]
        assert seen == [False, False, True]
        transposed = x.view(2, 4, K).transpose(0, 1)
        assert [is_direct("gemm_ar", (transposed, weight), group) for _ in range(3)] == [False] * 3, "x is copied"
        launch = next(call._launch() for call in cached_calls(group, "ag_gemm") if call._launch() is not None)
        workspace, cached = launch._workspace, weakref.ref(launch)
        del launch
        workspace._allocate(2 * workspace.half_bytes, workspace.half_signals, workspace.num_flags)  # on all ranks
        assert cached() is None, "a launch of a freed buffer is kept"
        assert not is_direct("ag_gemm", half("ag_gemm", 1), group)
        parts = [
            is_direct("gemm_rs", half("gemm_rs", 0), group, config=GemmRsConfig(method="parts")) for _ in range(6)
        ]
        assert set(parts) == {True}, "torch's GEMMs need no operand signatures"
        del group


def test_dense_and_collective_calls_launch_directly():
    on_ranks(2, launch_directly_from_the_third_call)


def ulysses_qkv(group):
    x, weight = (tensor.bfloat16() for tensor in operands_of("gemm_ar", 1))
    config = UlyssesConfig(num_comm_sms=1)
    for rows in (x, x.view(2, 4, K)):
        seen = [is_direct("ulysses_qkv", (rows + seed, weight), group, config=config) for seed in range(4)]
        assert seen == [False, False, True, True]
    transposed = x.view(2, 4, K).transpose(0, 1)
    seen = [is_direct("ulysses_qkv", (transposed, weight), group, config=config) for _ in range(3)]
    assert seen == [False] * 3, "x is copied"


def group_gemm(group):
    x, weight = (tensor.bfloat16() for tensor in operands_of("gemm_ar", 1))
    w, splits = torch.stack([weight, -weight]), torch.tensor([5, 3], device=device())
    for activation in (None, "swiglu"):
        rows = [(x + seed, w, splits) for seed in range(4)]
        seen = [is_direct("group_gemm", operands, None, activation=activation) for operands in rows]
        assert seen == [False, False, True, True]
    assert [is_direct("group_gemm", (x.t().contiguous().t(), w, splits), None) for _ in range(3)] == [False] * 3
    strided_splits = splits.repeat_interleave(2)[::2]
    assert [is_direct("group_gemm", (x, w, strided_splits), None) for _ in range(3)] == [False] * 3


def flash_decode(group):
    lens, table = torch.tensor([6, 3], device=device()), torch.tensor([[1, 0], [3, 2]], device=device())
    for q, options in (
        (draw(1, 2, 4, K), {}), (draw(2, 2, 3, 4, K), {"window": 3}), (draw(3, 2, 4, K), {"block_table": table}),
    ):
        cache_shape = (4, 4) if "block_table" in options else (2, 8)
        caches = [draw(dist.get_rank() + seed, *cache_shape, 2, K).bfloat16() for seed in (5, 6)]
        operands = q.bfloat16(), *caches
        seen = [is_direct("flash_decode", (*operands, lens), group, **options) for _ in range(4)]
        assert seen == [False, False, True, True], options
        transposed = operands[0].transpose(1, 2).contiguous().transpose(1, 2)
        seen = [is_direct("flash_decode", (transposed, *operands[1:], lens), group, **options) for _ in range(3)]
        assert seen == [False] * 3, "q is copied"
    assert tdkernels.flash_decode(*operands, lens, **options, return_lse=True, group=group)[1].shape == (2, 4)


def ag_attention(group):
    q, k, v = (draw(dist.get_rank() + seed, 2, 5, heads, K).bfloat16() for seed, heads in ((7, 4), (8, 2), (9, 2)))
    for options in ({}, {"causal": False}, {"sharding": "zigzag"}):
        seen = [is_direct("ag_attention", (q, k, v), group, **options) for _ in range(4)]
        assert seen == [False, False, True, True], options
    transposed = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert [is_direct("ag_attention", (transposed, k, v), group) for _ in range(3)] == [False] * 3, "q is copied"
    outputs = [tdkernels.ag_attention(q, k, v, return_lse=True, group=group) for _ in range(3)]
    assert all(torch.equal(one, other) for o in outputs for one, other in zip(o, outputs[0], strict=True))
    assert outputs[2][1].shape == q.shape[:3]


def all_reduce_rms_norm(group):
    residual, weight, bias = draw(1, 6, K).bfloat16(), draw(2, K).bfloat16(), draw(3, K).bfloat16()
    for residual_of_call, options in ((residual, {}), (None, {"bias": bias}), (residual.view(2, 3, K), {})):
        shape = (6, K) if residual_of_call is None else residual_of_call.shape
        xs = [draw(10 * seed + dist.get_rank(), *shape).bfloat16() for seed in range(4)]
        seen = [is_direct("all_reduce_rms_norm", (x, residual_of_call, weight), group, **options) for x in xs]
        assert seen == [False, False, True, True]
    strided = residual.t().contiguous().t()
    seen = [is_direct("all_reduce_rms_norm", (xs[0].view(6, K), strided, weight), group) for _ in range(3)]
    assert seen == [False] * 3, "the residual is copied"
    for _ in range(4):
        codes, _, scale = tdkernels.all_reduce_rms_norm(xs[0], None, weight, quantize="fp8", group=group)
        assert codes.shape == xs[0].shape and codes.dtype == gpu.e4m3_dtype(device())
        y, _ = tdkernels.all_reduce_rms_norm_ref(xs[0], None, weight, group=group)
        torch.testing.assert_close(codes.float() * scale, y.float(), rtol=0.07, atol=0.02)


def with_a_group(check):
    with a_group() as group, autotune.mode("off"):
        check(group)
        del group


@pytest.mark.parametrize(
    "check",
    [ulysses_qkv, group_gemm, flash_decode, ag_attention, all_reduce_rms_norm],
)
def test_other_operators_launch_directly(check):
    on_ranks(2, with_a_group, check)
