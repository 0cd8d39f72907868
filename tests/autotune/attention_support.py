"""Helpers of the autotune tests for attention operators: small calls, and records of the configs that run."""

import contextlib
import functools
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

import tdkernels
from tdkernels.autotune import tuner
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.table import Entry
from tdkernels.autotune.tunable import tunable, versions
from tdkernels.ops.attention.ag_attention import launch as ag_attention_launch
from tdkernels.ops.attention.flash_decode import launch as flash_decode_launch
from tdkernels.ops.attention.ulysses import launch_out as ulysses_launch_out
from tdkernels.ops.attention.ulysses import launch_qkv as ulysses_launch_qkv
from tests.autotune.support import replace_in
from tests.support.ranks import device

FP32 = torch.float32
LAUNCHERS = {
    "ag_attention": ag_attention_launch, "flash_decode": flash_decode_launch, "ulysses_out": ulysses_launch_out,
    "ulysses_qkv": ulysses_launch_qkv,
}
OPERATORS = list(LAUNCHERS)
# Sizes of the whole problem on two ranks, as created by ``Call``.
SIZES = {
    "ag_attention": (1, 32, 2, 1, 16, 16), "flash_decode": (2, 1, 4, 2, 16, 16, 24), "ulysses_out": (32, 16, 32),
    "ulysses_qkv": (32, 32, 16),
}
# ``config_of`` makes distinct legal configs by setting this field.
FIELD = {
    "ag_attention": "num_comm_sms", "flash_decode": "num_programs", "ulysses_out": "num_comm_sms",
    "ulysses_qkv": "lag_tiles",
}


def draw(seed, *shape):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device())


def problem_of(operator, layout=None, sizes=None, ranks=2, local=None, on=None):
    layout, sizes = layout or tunable(operator).layouts[0], sizes or SIZES[operator]
    return Problem.on(on or device(), operator, sizes, FP32, layout, ranks, local or ranks)


def config_of(operator, number, on=None):
    on = on or device()
    return replace(tunable(operator).default(problem_of(operator, on=on), on), **{FIELD[operator]: number})


def entry_of(problem, config, ms=2.0):
    op = tunable(problem.operator)
    return Entry(problem, versions(op), op.config_to_dict(config), ms, plain_ms=3.0, local_ms=1.0, when="2026-01-02")


class Call:
    """A call of an operator on one of two ranks. ``capacity`` is the number of keys that a rank's KV cache can hold."""

    def __init__(self, operator, capacity=24):
        rank = dist.get_rank()
        self.operator = operator
        if operator == "ulysses_qkv":
            self.operands = draw(rank, 16, 16), draw(9, 32, 16)
        elif operator == "ulysses_out":
            self.operands = draw(rank, 32, 16), draw(9, 16, 32)
        elif operator == "ag_attention":
            self.operands = tuple(draw(3 * rank + i, 1, 16, heads, 16) for i, heads in enumerate((2, 1, 1)))
        else:
            lens = torch.full((2,), min(capacity, 24), dtype=torch.int32, device=device())
            self.operands = draw(9, 2, 4, 16), *(draw(2 * rank + i, 2, capacity, 2, 16) for i in (0, 1)), lens

    def run(self, group, **options):
        """Call the operator and compare the result with the reference."""
        got = getattr(tdkernels, self.operator)(*self.operands, group=group, **options)
        expected = getattr(tdkernels, f"{self.operator}_ref")(*self.operands, group=group)
        tdkernels.synchronize()
        torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


@contextlib.contextmanager
def launched_configs():
    """Record the configs that the kernels run with, by operator."""
    ran = {operator: [] for operator in OPERATORS}
    with pytest.MonkeyPatch.context() as patch:
        for operator, module in LAUNCHERS.items():
            kind = tunable(operator).config_class

            def launch(*args, ran=ran[operator], launch, kind=kind, **options):
                result = launch(*args, **options)
                if result is not None:  # ``bind_call`` returns None for a call that is not one launch
                    ran.extend(arg for arg in args if isinstance(arg, kind))
                return result

            # A repeated call uses ``bind_call`` once and neither function afterwards.
            for name in ("launch", "bind_call"):
                if hasattr(module, name):
                    patch.setattr(module, name, functools.partial(launch, launch=getattr(module, name)))
        yield ran


@contextlib.contextmanager
def fake_winner(operator, config):
    """Replace the tuner's timing: ``config`` is the fastest and torch the slowest. All candidates are still checked."""
    op = tunable(operator)
    space, estimate_ms = op.space, op.estimate_ms

    def estimate(candidate, problem, hardware):
        """Give ``config`` the best estimate of the space, so that the model never prunes it."""
        candidates = space(problem, device()) if candidate == config else [candidate]
        return min(estimate_ms(each, problem, hardware) for each in candidates)

    def burst(self, trial, calls):
        return [1.0 if trial.config == config else 9.0 if trial.config.method == "torch" else 4.0, 0.0, 0.0]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner._Tuner, "_burst", burst)
        replace_in(patch, op, "space", lambda problem, device: [config, *space(problem, device)])
        replace_in(patch, op, "estimate_ms", estimate)
        yield
