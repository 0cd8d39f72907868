"""Cached launches: which calls may reuse them, and that they keep no tensors alive."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

import tdkernels
from tdkernels.rounding import next_power_of_2, rounded_rows
from tdkernels.runtime import kernel_launch, recorder
from tdkernels.runtime.triton_launcher import Rows
from tdkernels.symm import get_workspace, resolve_group
from tests.support.ranks import a_group, device, on_ranks

M, N, K = 6, 6, 16  # x and weight have the same shape and may be the same tensor


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


def check_gemm_ar(x, weight, bias=None, *, group):
    z = tdkernels.gemm_ar(x, weight, bias, group=group)
    expected = tdkernels.gemm_ar_ref(x, weight, bias, group=group)
    tdkernels.synchronize()
    torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-5)
    return z


def cached_launches(group):
    """Return the cached launches of the operator under test."""
    names = {name for name, _ in tdkernels.symm.group.group_state(group).workspaces if name.startswith("gemm_ar")}
    return [launch for name in names for launch in get_workspace(group, device(), name).launches.values()]


def reuse_launches():
    with a_group() as group, tdkernels.autotune.mode("off"):
        group, x, weight, bias = resolve_group(group), draw(0, M, K), draw(1, N, K), draw(2, N)
        check_gemm_ar(x, x, group=group)  # one tensor for two operands
        check_gemm_ar(x, weight, group=group)
        check_gemm_ar(weight, x, group=group)
        assert len(cached_launches(group)) == 1
        check_gemm_ar(x, weight, bias, group=group)
        check_gemm_ar(x, weight, draw(3, N), group=group)
        assert len(cached_launches(group)) == 2
        check_gemm_ar(x, draw(4, K, N).t(), group=group)
        assert len(cached_launches(group)) == 3, "a weight with another layout needs another launch"
        check_gemm_ar(draw(5, K, M).t(), weight, group=group)  # copied first, so no new launch
        check_gemm_ar(draw(6, M, 2 * K)[:, ::2], draw(7, N, 2 * K)[:, ::2], group=group)
        check_gemm_ar(draw(8, 1 + M * K)[1:].view(M, K), weight, group=group)  # not aligned to 16 bytes
        assert len(cached_launches(group)) == 3
        del group


def test_launch_uses_the_operands_of_the_call():
    on_ranks(2, reuse_launches)


def check_tensors_are_freed():
    with a_group() as group, tdkernels.autotune.mode("off"):
        operands = [draw(0, M, K), draw(1, N, K), draw(2, N)]
        z = check_gemm_ar(*operands, group=group)
        assert cached_launches(group)
        alive = [weakref.ref(tensor.untyped_storage()) for tensor in (*operands, z)]
        del operands, z
        gc.collect()
        assert [storage() is None for storage in alive] == [True] * 4
        del group


def test_launch_keeps_no_tensor_alive():
    on_ranks(2, check_tensors_are_freed)


def invalidate_launches():
    with a_group() as group, tdkernels.autotune.mode("off"):
        x, weight = draw(0, M, K), draw(1, N, K)
        with recorder.record(recorder.Recorder()):
            check_gemm_ar(x, weight, group=group)
        assert not cached_launches(group), "a launch with a trace buffer must not be cached"
        check_gemm_ar(x, weight, group=group)
        [small] = cached_launches(group)
        check_gemm_ar(x, draw(3, 64 * N, K), group=group)
        assert small not in cached_launches(group), "the launch refers to a freed buffer"
        check_gemm_ar(x, weight, group=group)
        for workspace in tdkernels.symm.group.group_state(group).workspaces.values():
            workspace.launches.clear()
            workspace.launches.max_size = 2
        for rows in range(1, M):
            check_gemm_ar(x[:rows].clone(), weight, group=group)
            assert len(cached_launches(group)) <= 2
        del group


def test_invalid_launches_are_dropped():
    on_ranks(2, invalidate_launches)


def test_tensor_that_is_no_operand_is_rejected():
    """A cached launch would pass such a tensor to later calls with other operands."""
    x, copy, ctx = torch.ones(4), torch.ones(4), torch.zeros(1, dtype=torch.int64)
    outputs = (kernel_launch.output_spec(x, 4),)
    kernel_launch.Launch(None, "kernel", (1,), (ctx, x, *outputs, 7, None), {}, (x,), outputs, [ctx])
    with pytest.raises(AssertionError, match="argument 1 of kernel is neither an operand, an output nor"):
        kernel_launch.Launch(None, "kernel", (1,), (ctx, copy, *outputs), {}, (x,), outputs, [ctx])


class _RowsKernel:
    """Stand-in for a kernel (x, y, rows, columns); records its arguments."""

    def __init__(self, *specialized):
        self.params = [SimpleNamespace(do_not_specialize=at not in specialized) for at in range(4)]
        self.given = []

    def launch_bound(self, bound_launch, values, stream):
        self.given.append(bound_launch.filled(values))


def _launch_by_rows(workspace, kernel, x, prepared=None):
    def prepare(x):
        rows = Rows(x.shape[0])
        if prepared is not None:
            prepared.append(int(rows))
        outputs = [kernel_launch.output_spec(x, rows, 3)]
        return kernel_launch.Launch(workspace, kernel, (1,), (x, *outputs, rows, 5), {}, (x,), outputs, [])

    signature = kernel_launch.rows_signature(0)
    return kernel_launch.launch_cached(workspace, ("by rows",), (x,), prepare, signature=signature)


def test_launches_for_any_number_of_rows():
    workspace, kernel, prepared = kernel_launch._LocalWorkspace(), _RowsKernel(), []
    for rows in (33, 48, 40, 49, 64, 1, 2, 16, 1, 2000, 2047):
        x = torch.zeros(rows, 2)
        (y,) = _launch_by_rows(workspace, kernel, x, prepared)
        assert y.shape == (rows, 3)
        given = kernel.given.pop()
        assert given[0] is x and given[1] is y and given[2:] == [rows, 5]
    # Rows are rounded up to 1, 2, 16, 48, 64, 2016 and 2048.
    assert prepared == [33, 49, 1, 2, 16, 2000, 2047]


def test_kernels_must_not_be_compiled_for_the_number_of_rows():
    with pytest.raises(AssertionError, match="is compiled for the number of rows, argument 2"):
        _launch_by_rows(kernel_launch._LocalWorkspace(), _RowsKernel(2), torch.zeros(33, 2))


def test_rounded_rows():
    """Tuned configs are selected by the next power of two, so all numbers that share a launch must share it."""
    for rows in (*range(1, 3000), 32768, 32769, 65535):
        rounded = rounded_rows(rows)
        assert rows <= rounded <= rows + max(rows // 32, 15) and rounded_rows(rounded) == rounded
        assert next_power_of_2(rounded) == next_power_of_2(rows)
    assert [rounded_rows(rows) for rows in (0, 1, 3, 9, 17, 1030, 32769)] == [0, 1, 4, 16, 32, 1056, 33792]
    assert len({rounded_rows(rows) for rows in range(32769, 65537)}) == 32


def test_launches_depend_on_the_number_of_rows_on_amd(monkeypatch):
    monkeypatch.setattr(kernel_launch, "_ON_AMD", True)
    assert kernel_launch.rows_signature.__wrapped__(0) is kernel_launch.operand_signature


def test_signature_by_rows():
    signature = kernel_launch.rows_signature(0, 2)
    x, w = torch.zeros(40, 2), torch.zeros(40, 3)
    found = signature((x, w, x))
    assert found == signature((x[:33], w, x[:33])) and found != signature((x[:32], w, x[:32]))
    assert found != signature((x[:33], w[:33], x[:33])), "the second operand has no rows"
    assert found != signature((x, w, x[:1])), "one scale for all rows"
    assert found != signature((x, w, None)) != signature((x.half(), w, None))
    assert signature((x[:1], w, x[:1])) != signature((x[:2], w, x[:2]))


class _CheckCounter:
    """Stand-in for a workspace that counts the checks for recorded errors."""

    ctx = None

    def __init__(self):
        self.checks = 0

    def check(self):
        self.checks += 1

    def before_launch(self):
        pass

    def after_launch(self, stream):
        pass


class _NoKernel:
    def launch_bound(self, *_):
        pass


def test_private_words_belong_to_a_stream(monkeypatch):
    here, elsewhere = kernel_launch._LocalWorkspace(), kernel_launch._LocalWorkspace()
    words, x = torch.zeros(1), torch.zeros(1)
    with_words = kernel_launch.Launch(here, _NoKernel(), (1,), (x, words), {}, (x,), [], [None, words])
    without = kernel_launch.Launch(here, _NoKernel(), (1,), (x,), {}, (x,), [], [None])
    for workspace in (here, elsewhere):
        monkeypatch.setattr(kernel_launch, "local_workspace_of", lambda device, workspace=workspace: workspace)
        assert with_words.is_current() == (workspace is here) and without.is_current()


@pytest.mark.parametrize("checks_errors", [True, False])
def test_errors_are_checked_only_if_requested(checks_errors):
    counter, x = _CheckCounter(), torch.zeros(1)
    launch = kernel_launch.Launch(counter, _NoKernel(), (1,), (x,), {}, (x,), [], [], checks_errors=checks_errors)
    launch((x,))
    assert counter.checks == checks_errors
