"""Calls that have been made before: when they are known, when they are not, and that they stay right."""

import contextlib
import gc
import re
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode

import tdkernels
from tdkernels import AgGemmConfig, CollectiveConfig, GemmArConfig, GemmRsConfig, Tiles, autotune
from tdkernels.ops.collectives import op as collectives_op
from tdkernels.ops.dense.ag_gemm import op as ag_gemm_op
from tdkernels.ops.dense.gemm_ar import op as gemm_ar_op
from tdkernels.ops.dense.gemm_rs import op as gemm_rs_op
from tdkernels.runtime import call_cache
from tdkernels.symm.group import group_state
from tests.autotune.test_selection import entry_of, tables_in, tune_by_hand
from tests.support.ranks import a_group, device, on_ranks

K = 16
CONFIGS = {"ag_gemm": AgGemmConfig, "gemm_rs": GemmRsConfig, "gemm_ar": GemmArConfig}
COLLECTIVES = ["all_gather", "reduce_scatter", "all_reduce"]


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


def operands_of(operator, seed, rows=8):
    x = draw(seed + dist.get_rank(), rows, K)
    return (x,) if operator in COLLECTIVES else (x, draw(seed + 9, 12, K))


def is_right(operator, operands, group, **options):
    y = getattr(tdkernels, operator)(*operands, group=group, **options)
    expected = getattr(tdkernels, f"{operator}_ref")(*operands, group=group)
    tdkernels.synchronize()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    return y


@contextlib.contextmanager
def found():
    """What ``lookup_run`` answers within: True for a call that is known."""
    answers = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (ag_gemm_op, gemm_rs_op, gemm_ar_op, collectives_op):
            owner = getattr(module, "call_cache", module)
            patch.setattr(owner, "lookup_run", noting(owner.lookup_run, answers))
        yield answers


def noting(find, answers):
    def noted(*args):
        known, key = find(*args)
        answers.append(known is not None)
        return known, key

    return noted


def is_known_the_second_time():
    with a_group() as group, autotune.mode("off"), found() as answers:
        for operator in (*CONFIGS, *COLLECTIVES):
            config = (CONFIGS.get(operator) or CollectiveConfig)(method="torch")
            for options in ({}, {"config": config}):
                for seed in (0, 1, 2):
                    is_right(operator, operands_of(operator, seed), group, **options)
                assert answers == [False, True, True], (operator, options)
                answers.clear()
            is_right(operator, operands_of(operator, 3, rows=6), group)
            assert answers == [False]
            answers.clear()
        for dtype in (torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn):  # for which nothing is tuned
            for value in (1, 0, 1, 1):
                x = torch.full((3,), value, device=device()).to(dtype)
                y = tdkernels.all_gather(x, group=group)
                assert y.dtype == dtype and y.tolist() == [value] * 6
            assert answers == [False, True, True, True]
            answers.clear()
        x, weight = operands_of("gemm_ar", 0)
        is_right("gemm_ar", (x.view(2, 4, K), weight), group)
        is_right("gemm_ar", (draw(5, 2, 4, K), weight), group)
        is_right("gemm_ar", (draw(5, K, 8).t(), weight), group)
        is_right("gemm_ar", (x, draw(6, K, 12).t()), group)
        is_right("gemm_ar", (x, weight, draw(7, 12)), group)
        is_right("gemm_ar", (x, weight, draw(8, 12)), group)
        assert answers == [False, True, False, False, False, True]
        del group


def test_a_call_is_known_the_second_time():
    on_ranks(2, is_known_the_second_time)


def known_calls(group, operator):
    """The KnownCalls of an operator."""
    calls = group_state(group).calls.items()
    return [call for key, call in calls if key[0] == operator and isinstance(call, call_cache.CachedCall)]


def follows_the_precision_of_fp32():
    """How fp32 is multiplied is a setting of torch's, which may change between calls."""
    with a_group() as group, autotune.mode("off"), found() as answers:
        exact, before = operands_of("gemm_ar", 0), torch.get_float32_matmul_precision()
        try:
            for precision, expected in (("highest", [False, True]), ("high", [False, True]), ("highest", [True])):
                torch.set_float32_matmul_precision(precision)
                for _ in expected:
                    y = tdkernels.gemm_ar(*exact, group=group)
                    expected_y = tdkernels.gemm_ar_ref(*exact, group=group)
                    torch.testing.assert_close(y, expected_y, rtol=2e-2, atol=2e-2)  # TF32 may be in either
                assert answers == expected, precision
                answers.clear()
        finally:
            torch.set_float32_matmul_precision(before)
        del group


def test_the_precision_of_fp32_is_part_of_a_call():
    on_ranks(2, follows_the_precision_of_fp32)


class Sees(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def is_not_known_to_others():
    with a_group() as group, autotune.mode("off"):
        x, weight = operands_of("gemm_ar", 0)
        for _ in range(2):
            is_right("gemm_ar", (x, weight), group)
        with found() as answers:
            weight.requires_grad_()
            y = is_right("gemm_ar", (x, weight), group)
            assert y.requires_grad
            with torch.no_grad():
                assert not is_right("gemm_ar", (x, weight), group).requires_grad
            with torch.inference_mode():
                is_right("gemm_ar", (x, weight), group)
            assert answers == [False, True, True]
            weight = weight.detach()
            with torch.autocast(device().type, torch.bfloat16):
                assert tdkernels.gemm_ar(x, weight, group=group).dtype == torch.bfloat16
            with Sees() as mode:
                mode.seen = []
                tdkernels.gemm_ar(x, weight, group=group)
            assert "tdkernels.gemm_ar.default" in mode.seen
            with torch.profiler.profile() as profile:
                tdkernels.gemm_ar(x, weight, group=group)
            assert any(event.key == "tdkernels::gemm_ar" for event in profile.key_averages())

            def function(x, group):
                return tdkernels.gemm_ar(x, weight, group=group) + 0.0

            compiled = torch.compile(function, backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(x, group), is_right("gemm_ar", (x, weight), group))
            assert answers[3:] == [False] * 4 + [True]
        torch._dynamo.reset()
        del group


def test_who_would_see_the_operator_does():
    on_ranks(2, is_not_known_to_others)


def reads_no_negated_memory():
    """A view such as z.conj().imag, in whose memory its values stand negated."""
    negated = lambda *tensors: [torch._neg_view(-tensor) for tensor in tensors]  # noqa: E731
    with a_group() as group, autotune.mode("off"):
        for operator in (*CONFIGS, *COLLECTIVES):
            for seed in range(3):
                operands = operands_of(operator, seed)
                y = getattr(tdkernels, operator)(*negated(*operands), group=group)
                expected = getattr(tdkernels, f"{operator}_ref")(*operands, group=group)
                torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        for seed in range(3):  # all_gather moves bytes of any type, also of one that is conjugated in memory
            z = torch.complex(draw(seed, 4), draw(seed + 9, 4))
            for view in (z, z.conj()):
                y = tdkernels.all_gather(view, group=group)
                assert torch.equal(y, torch.cat([view.resolve_conj()] * 2))
        del group
    (x,), (q,), w = negated(draw(0, 4, 16)), negated(draw(1, 1, 4, 2, 16)), draw(2, 2, 8, 16)
    splits = torch.tensor([2, 2], device=device())
    for operator, operands, words, options in (
        ("all_to_all", (x, splits), "x [4, 16]", {}),
        ("ep_dispatch", (x, splits.expand(4, 2)), "x [4, 16]", {"num_experts": 4}),
        ("group_gemm", (x, w, splits), "x [4, 16]", {}),
        ("ag_attention", (q, q, q), "q [1, 4, 2, 16]", {}),
        ("flash_decode", (q[0], q, q, splits), "q [4, 2, 16]", {}),
        ("flash_decode", (-q[0], q, q, splits), "k_cache [1, 4, 2, 16]", {}),
    ):
        with pytest.raises(TypeError, match=re.escape(f"{operator}: {words} is a view that negates its memory")):
            getattr(tdkernels, operator)(*operands, **options)


def test_memory_that_is_negated():
    on_ranks(2, reads_no_negated_memory)


def refuses_transforms():
    x, q, w = draw(0, 4, 16), draw(1, 1, 4, 2, 16), draw(2, 2, 8, 16)
    splits = torch.tensor([2, 2], device=device())
    for operator, first, others, options in (
        ("all_to_all", x, (splits,), {}),
        ("ep_dispatch", x, (splits.expand(4, 2),), {"num_experts": 4}),
        ("group_gemm", x, (w, splits), {}),
        ("ag_attention", q, (q, q), {}),
        ("flash_decode", q[0], (q, q, splits[:1]), {}),
    ):
        for transform in (torch.func.grad, torch.func.vmap):
            call = transform(lambda one: getattr(tdkernels, operator)(one, *others, **options)[0].sum())  # noqa: B023
            operand = first if transform is torch.func.grad else first[None]
            with pytest.raises(RuntimeError, match=f"{operator}: transforms of torch.func .functorch. are not"):
                call(operand)


def test_transforms_are_refused():
    on_ranks(2, refuses_transforms)


def still_refuses_what_makes_no_sense():
    with a_group() as group, autotune.mode("off"):
        x, weight = operands_of("gemm_ar", 0)
        for _ in range(2):
            is_right("gemm_ar", (x, weight), group)
        with pytest.raises(TypeError, match="config must be a GemmArConfig or None, not dict"):
            tdkernels.gemm_ar(x, weight, group=group, config={"method": "torch"})
        with pytest.raises(TypeError, match="config must be a GemmArConfig or None, not GemmRsConfig"):
            tdkernels.gemm_ar(x, weight, group=group, config=GemmRsConfig())
        with pytest.raises(TypeError, match="x must be a torch.Tensor, not NoneType"):
            tdkernels.gemm_ar(None, weight, group=group)
        with pytest.raises(TypeError, match="weight is torch.bfloat16"):
            tdkernels.gemm_ar(x, weight.bfloat16(), group=group)
        with pytest.raises(ValueError, match="must be the same K"):
            tdkernels.gemm_ar(x, weight[:, 1:], group=group)
        del group


def test_what_makes_no_sense_is_refused_as_before():
    on_ranks(2, still_refuses_what_makes_no_sense)


def takes_what_was_tuned_since(folder):
    tiles = Tiles(32, 32, 32, num_warps=1, num_stages=1)
    with a_group() as group, tables_in(folder), found() as answers:
        case = operands_of("ag_gemm", 0, rows=16)
        problem = (32, 24, K)
        for config in (AgGemmConfig(tiles=tiles, num_comm_sms=2), AgGemmConfig(method="torch")):
            tune_by_hand(entry_of("ag_gemm", config, problem))
            group_state(group).choices.clear()
            is_right("ag_gemm", case, group)
            is_right("ag_gemm", case, group)
            assert answers == [False, True]
            answers.clear()
            (choice,) = group_state(group).choices.values()
            assert choice.config == config
        with autotune.mode("off"):
            is_right("ag_gemm", case, group)
        assert answers == [False], "nothing that was found in another mode"
        del group


def test_what_was_tuned_since_is_taken(tmp_path):
    on_ranks(2, takes_what_was_tuned_since, tmp_path)


def keeps_no_group_and_no_tensor():
    with a_group() as group, autotune.mode("off"):
        x, weight = operands_of("gemm_ar", 0)
        is_right("gemm_ar", (x, weight), group)
        state = weakref.ref(group_state(group))
        storages = [weakref.ref(tensor.untyped_storage()) for tensor in (x, weight)]
        assert known_calls(group, "gemm_ar")
        del x, weight
        gc.collect()
        assert [storage() is None for storage in storages] == [True, True]
        group_state(group).calls.clear()
        group_state(group).calls.max_size = 4
        for rows in range(2, 8):
            is_right("gemm_ar", operands_of("gemm_ar", 0, rows), group)
            assert len(group_state(group).calls) <= 4
        del group
    gc.collect()
    assert state() is None, "it went with its group"


def test_neither_groups_nor_tensors_are_kept():
    on_ranks(2, keeps_no_group_and_no_tensor)
