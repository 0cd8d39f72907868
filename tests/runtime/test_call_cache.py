"""The call cache: which calls hit, which miss, and that results stay correct."""

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
from tests.autotune.selection_support import entry_of, store_entries, tables_in
from tests.support.ranks import a_group, device, on_ranks

K = 16
CONFIGS = {"ag_gemm": AgGemmConfig, "gemm_rs": GemmRsConfig, "gemm_ar": GemmArConfig}
COLLECTIVES = ["all_gather", "reduce_scatter", "all_reduce"]


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


def operands_of(operator, seed, rows=8):
    x = draw(seed + dist.get_rank(), rows, K)
    return (x,) if operator in COLLECTIVES else (x, draw(seed + 9, 12, K))


def check_call(operator, operands, group, **options):
    y = getattr(tdkernels, operator)(*operands, group=group, **options)
    expected = getattr(tdkernels, f"{operator}_ref")(*operands, group=group)
    tdkernels.synchronize()
    torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
    return y


@contextlib.contextmanager
def recorded_hits():
    """Yield a list that records for each ``lookup_run`` whether it was a hit."""
    hits = []
    with pytest.MonkeyPatch.context() as patch:
        for module in (ag_gemm_op, gemm_rs_op, gemm_ar_op, collectives_op):
            owner = getattr(module, "call_cache", module)
            patch.setattr(owner, "lookup_run", recording(owner.lookup_run, hits))
        yield hits


def recording(original, hits):
    def lookup(*args):
        entry, key = original(*args)
        hits.append(entry is not None)
        return entry, key

    return lookup


def hit_second_call():
    with a_group() as group, autotune.mode("off"), recorded_hits() as hits:
        for operator in (*CONFIGS, *COLLECTIVES):
            config = (CONFIGS.get(operator) or CollectiveConfig)(method="torch")
            for options in ({}, {"config": config}):
                for seed in (0, 1, 2):
                    check_call(operator, operands_of(operator, seed), group, **options)
                assert hits == [False, True, True], (operator, options)
                hits.clear()
            check_call(operator, operands_of(operator, 3, rows=6), group)
            assert hits == [False]
            hits.clear()
        for dtype in (torch.int32, torch.int8, torch.bool, torch.float8_e4m3fn):  # dtypes without tuned configs
            for value in (1, 0, 1, 1):
                x = torch.full((3,), value, device=device()).to(dtype)
                y = tdkernels.all_gather(x, group=group)
                assert y.dtype == dtype and y.tolist() == [value] * 6
            assert hits == [False, True, True, True]
            hits.clear()
        x, weight = operands_of("gemm_ar", 0)
        check_call("gemm_ar", (x.view(2, 4, K), weight), group)
        check_call("gemm_ar", (draw(5, 2, 4, K), weight), group)
        check_call("gemm_ar", (draw(5, K, 8).t(), weight), group)
        check_call("gemm_ar", (x, draw(6, K, 12).t()), group)
        check_call("gemm_ar", (x, weight, draw(7, 12)), group)
        check_call("gemm_ar", (x, weight, draw(8, 12)), group)
        assert hits == [False, True, False, False, False, True]
        del group


def test_second_call_hits():
    on_ranks(2, hit_second_call)


def cached_calls(group, operator):
    """Return the CachedCalls of an operator."""
    calls = group_state(group).calls.items()
    return [call for key, call in calls if key[0] == operator and isinstance(call, call_cache.CachedCall)]


def change_fp32_precision():
    """The fp32 matmul precision is a torch setting that may change between calls."""
    with a_group() as group, autotune.mode("off"), recorded_hits() as hits:
        exact, before = operands_of("gemm_ar", 0), torch.get_float32_matmul_precision()
        try:
            for precision, expected in (("highest", [False, True]), ("high", [False, True]), ("highest", [True])):
                torch.set_float32_matmul_precision(precision)
                for _ in expected:
                    y = tdkernels.gemm_ar(*exact, group=group)
                    expected_y = tdkernels.gemm_ar_ref(*exact, group=group)
                    torch.testing.assert_close(y, expected_y, rtol=2e-2, atol=2e-2)  # either may use TF32
                assert hits == expected, precision
                hits.clear()
        finally:
            torch.set_float32_matmul_precision(before)
        del group


def test_fp32_precision_is_part_of_the_key():
    on_ranks(2, change_fp32_precision)


class RecordingMode(TorchDispatchMode):
    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.seen.append(str(func))
        return func(*args, **(kwargs or {}))


def bypass_cache():
    with a_group() as group, autotune.mode("off"):
        x, weight = operands_of("gemm_ar", 0)
        for _ in range(2):
            check_call("gemm_ar", (x, weight), group)
        with recorded_hits() as hits:
            weight.requires_grad_()
            y = check_call("gemm_ar", (x, weight), group)
            assert y.requires_grad
            with torch.no_grad():
                assert not check_call("gemm_ar", (x, weight), group).requires_grad
            with torch.inference_mode():
                check_call("gemm_ar", (x, weight), group)
            assert hits == [False, True, True]
            weight = weight.detach()
            with torch.autocast(device().type, torch.bfloat16):
                assert tdkernels.gemm_ar(x, weight, group=group).dtype == torch.bfloat16
            with RecordingMode() as mode:
                mode.seen = []
                tdkernels.gemm_ar(x, weight, group=group)
            assert "tdkernels.gemm_ar.default" in mode.seen
            with torch.profiler.profile() as profile:
                tdkernels.gemm_ar(x, weight, group=group)
            assert any(event.key == "tdkernels::gemm_ar" for event in profile.key_averages())

            def function(x, group):
                return tdkernels.gemm_ar(x, weight, group=group) + 0.0

            compiled = torch.compile(function, backend="eager", fullgraph=True)
            torch.testing.assert_close(compiled(x, group), check_call("gemm_ar", (x, weight), group))
            assert hits[3:] == [False] * 4 + [True]
        torch._dynamo.reset()
        del group


def test_cache_is_bypassed_for_autograd_modes_profilers_and_compilers():
    on_ranks(2, bypass_cache)


def call_with_negated_views():
    """A view such as z.conj().imag is stored negated in memory."""
    negated = lambda *tensors: [torch._neg_view(-tensor) for tensor in tensors]  # noqa: E731
    with a_group() as group, autotune.mode("off"):
        for operator in (*CONFIGS, *COLLECTIVES):
            for seed in range(3):
                operands = operands_of(operator, seed)
                y = getattr(tdkernels, operator)(*negated(*operands), group=group)
                expected = getattr(tdkernels, f"{operator}_ref")(*operands, group=group)
                torch.testing.assert_close(y, expected, rtol=1e-5, atol=1e-5)
        for seed in range(3):  # all_gather moves bytes of any dtype, also of conjugated views
            z = torch.complex(draw(seed, 4), draw(seed + 9, 4))
            for view in (z, z.conj()):
                y = tdkernels.all_gather(view, group=group)
                assert torch.equal(y, torch.cat([view.resolve_conj()] * 2))
        del group
    (x,), (q,), w = negated(draw(0, 4, 16)), negated(draw(1, 1, 4, 2, 16)), draw(2, 2, 8, 16)
    splits = torch.tensor([2, 2], device=device())
    for operator, operands, described, options in (
        ("all_to_all", (x, splits), "x [4, 16]", {}),
        ("ep_dispatch", (x, splits.expand(4, 2)), "x [4, 16]", {"num_experts": 4}),
        ("group_gemm", (x, w, splits), "x [4, 16]", {}),
        ("ag_attention", (q, q, q), "q [1, 4, 2, 16]", {}),
        ("flash_decode", (q[0], q, q, splits), "q [4, 2, 16]", {}),
        ("flash_decode", (-q[0], q, q, splits), "k_cache [1, 4, 2, 16]", {}),
    ):
        with pytest.raises(TypeError, match=re.escape(f"{operator}: {described} is a view that negates its memory")):
            getattr(tdkernels, operator)(*operands, **options)


def test_negated_views():
    on_ranks(2, call_with_negated_views)


def reject_transforms():
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


def test_transforms_are_rejected():
    on_ranks(2, reject_transforms)


def reject_invalid_arguments():
    with a_group() as group, autotune.mode("off"):
        x, weight = operands_of("gemm_ar", 0)
        for _ in range(2):
            check_call("gemm_ar", (x, weight), group)
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


def test_invalid_arguments_are_rejected_after_a_hit():
    on_ranks(2, reject_invalid_arguments)


def use_new_tuned_config(folder):
    tiles = Tiles(32, 32, 32, num_warps=1, num_stages=1)
    with a_group() as group, tables_in(folder), recorded_hits() as hits:
        case = operands_of("ag_gemm", 0, rows=16)
        problem = (32, 24, K)
        for config in (AgGemmConfig(tiles=tiles, num_comm_sms=2), AgGemmConfig(method="torch")):
            store_entries(entry_of("ag_gemm", config, problem))
            group_state(group).choices.clear()
            check_call("ag_gemm", case, group)
            check_call("ag_gemm", case, group)
            assert hits == [False, True]
            hits.clear()
            (choice,) = group_state(group).choices.values()
            assert choice.config == config
        with autotune.mode("off"):
            check_call("ag_gemm", case, group)
        assert hits == [False], "entries of another mode must not be used"
        del group


def test_new_tuned_config_is_used(tmp_path):
    on_ranks(2, use_new_tuned_config, tmp_path)


def check_references():
    with a_group() as group, autotune.mode("off"):
        x, weight = operands_of("gemm_ar", 0)
        check_call("gemm_ar", (x, weight), group)
        state = weakref.ref(group_state(group))
        storages = [weakref.ref(tensor.untyped_storage()) for tensor in (x, weight)]
        assert cached_calls(group, "gemm_ar")
        del x, weight
        gc.collect()
        assert [storage() is None for storage in storages] == [True, True]
        group_state(group).calls.clear()
        group_state(group).calls.max_size = 4
        for rows in range(2, 8):
            check_call("gemm_ar", operands_of("gemm_ar", 0, rows), group)
            assert len(group_state(group).calls) <= 4
        del group
    gc.collect()
    assert state() is None, "the state must be freed with its group"


def test_groups_and_tensors_are_not_kept_alive():
    on_ranks(2, check_references)
