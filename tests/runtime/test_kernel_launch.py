"""Launches that are kept for the next call: what they may be used for, and that they keep nobody's tensors."""

import gc
import weakref

import pytest
import torch

import tdkernels
from tdkernels.runtime import kernel_launch, recorder
from tdkernels.symm import get_workspace, resolve_group
from tests.support.ranks import a_group, device, on_ranks

M, N, K = 6, 6, 16  # x and weight are alike, and may be each other


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


def right(x, weight, bias=None, *, group):
    z = tdkernels.gemm_ar(x, weight, bias, group=group)
    expected = tdkernels.gemm_ar_ref(x, weight, bias, group=group)
    tdkernels.synchronize()
    torch.testing.assert_close(z, expected, rtol=1e-5, atol=1e-5)
    return z


def kept(group):
    """The launches of the operator that is called here."""
    names = {name for name, _ in tdkernels.symm.group.group_state(group).workspaces if name.startswith("gemm_ar")}
    return [launch for name in names for launch in get_workspace(group, device(), name).launches.values()]


def takes_the_operands_of_the_call():
    with a_group() as group, tdkernels.autotune.mode("off"):
        group, x, weight, bias = resolve_group(group), draw(0, M, K), draw(1, N, K), draw(2, N)
        right(x, x, group=group)  # one tensor for two operands
        right(x, weight, group=group)
        right(weight, x, group=group)
        assert len(kept(group)) == 1
        right(x, weight, bias, group=group)
        right(x, weight, draw(3, N), group=group)
        assert len(kept(group)) == 2
        right(x, draw(4, K, N).t(), group=group)
        assert len(kept(group)) == 3, "a weight that lies otherwise is read otherwise"
        right(draw(5, K, M).t(), weight, group=group)  # copied first, and then as any other
        right(draw(6, M, 2 * K)[:, ::2], draw(7, N, 2 * K)[:, ::2], group=group)
        right(draw(8, 1 + M * K)[1:].view(M, K), weight, group=group)  # not at a multiple of 16 bytes
        assert len(kept(group)) == 3
        del group


def test_a_launch_takes_the_operands_of_the_call():
    on_ranks(2, takes_the_operands_of_the_call)


def outlives_nothing():
    with a_group() as group, tdkernels.autotune.mode("off"):
        operands = [draw(0, M, K), draw(1, N, K), draw(2, N)]
        z = right(*operands, group=group)
        assert kept(group)
        alive = [weakref.ref(tensor.untyped_storage()) for tensor in (*operands, z)]
        del operands, z
        gc.collect()
        assert [storage() is None for storage in alive] == [True] * 4
        del group


def test_a_launch_keeps_no_tensor_of_the_call():
    on_ranks(2, outlives_nothing)


def keeps_what_it_can_use():
    with a_group() as group, tdkernels.autotune.mode("off"):
        x, weight = draw(0, M, K), draw(1, N, K)
        with recorder.record(recorder.Recorder()):
            right(x, weight, group=group)
        assert not kept(group), "it has the memory of who records"
        right(x, weight, group=group)
        [small] = kept(group)
        right(x, draw(3, 64 * N, K), group=group)
        assert small not in kept(group), "it speaks of the buffer that was there before"
        right(x, weight, group=group)
        for workspace in tdkernels.symm.group.group_state(group).workspaces.values():
            workspace.launches.clear()
            workspace.launches.max_size = 2
        for rows in range(1, M):
            right(x[:rows].clone(), weight, group=group)
            assert len(kept(group)) <= 2
        del group


def test_launches_are_kept_as_long_as_they_can_be_used():
    on_ranks(2, keeps_what_it_can_use)


def test_a_tensor_that_is_nobodys_is_refused():
    """It would be read again by a later call, of other operands."""
    x, copy, ctx = torch.ones(4), torch.ones(4), torch.zeros(1, dtype=torch.int64)
    made = (kernel_launch.output_spec(x, 4),)
    kernel_launch.Launch(None, "kernel", (1,), (ctx, x, *made, 7, None), {}, (x,), made, [ctx])
    with pytest.raises(AssertionError, match="argument 1 of kernel is neither an operand, an output nor"):
        kernel_launch.Launch(None, "kernel", (1,), (ctx, copy, *made), {}, (x,), made, [ctx])


class _Tells:
    """In the place of a workspace: it counts how often it is asked whether there is something to tell."""

    ctx = None

    def __init__(self):
        self.asked = 0

    def check(self):
        self.asked += 1

    def before_launch(self):
        pass

    def after_launch(self, stream):
        pass


class _Nothing:
    def launch_bound(self, *_):
        pass


@pytest.mark.parametrize("checks_errors", [True, False])
def test_in_the_middle_of_an_operator_nobody_looks_for_what_went_wrong(checks_errors):
    tells, x = _Tells(), torch.zeros(1)
    launch = kernel_launch.Launch(tells, _Nothing(), (1,), (x,), {}, (x,), [], [], checks_errors=checks_errors)
    launch((x,))
    assert tells.asked == checks_errors
