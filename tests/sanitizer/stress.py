"""Stress test of one mutant on one rank: calls that run ahead of the host, with ranks that are late at random.

on_gpus.py calls ``prepare``, ``begin``, ``play`` for each further batch of calls, and ``end`` on every rank. The
expected results are those of the unchanged kernel, called one at a time and checked with the oracle of the operator's
own tests. The results of all later calls must have the same bits.
"""

import contextlib
import random
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass

import torch

import tdkernels
from tdkernels import PeerTimeoutError
from tdkernels.symm import resolve_group
from tdkernels.symm.group import scratch_state
from tdkernels.symm.topology import Topology
from tests.ops.attention.flash_decode import cases as decoding
from tests.ops.attention.flash_decode.oracle import Decode
from tests.ops.collectives import norm_cases
from tests.ops.dense import gemm_ar_norm_cases
from tests.ops.dense.cases import config_for
from tests.ops.dense.gemm_ar_norm_oracle import NormCase
from tests.ops.dense.scaled_cases import ScaledCase
from tests.sanitizer.compiled_mutants import machine_code, planted
from tests.sanitizer.mutants import MUTANTS
from tests.support.dense_oracle import Case
from tests.support.ranks import device
from tests.support.variants import SCALED_SHAPE, VARIANTS, scaled

BF16, FP32 = torch.bfloat16, torch.float32
# Shapes on GPUs, as those of the variants. Integers from -1 to 1 give exact sums in bf16 up to K = 255 in total.
LARGER = {
    "ag_gemm push": (512, 256, 128),
    "ag_gemm copy_engine": (512, 256, 128),
    "ag_gemm push scaled by block": (128, 256, 256),
    "ag_gemm across nodes of 1": (256, 256, 128),
    "gemm_rs forward": (512, 256, 80),
    "gemm_ar one_shot": (16, 1024, 80),
    "gemm_ar one_shot split K": (16, 1024, 80),
    "all_reduce_rms_norm one_shot": (32, 2048),
    "all_reduce_layer_norm two_shot": (128, 2048),
    "gemm_ar_rms_norm fused": (64, 256, 64),
    "gemm_ar_layer_norm fused, split K": (32, 256, 192),
    "gemm_ar_layer_norm fused, shared rows": (4, 256, 64),
    "gemm_ar_rms_norm fused, wide": (8, 2048, 64),
    "flash_decode split, 2 ranks": dict(dim=64, keys=256),
    "flash_decode split, 3 ranks": dict(dim=64, keys=256),
}
NUM_INPUTS = {"cuda": 16, "cpu": 2}  # different inputs of a mutant; consecutive calls use different ones
FIRST_TIMEOUT_S = 120.0  # of calls that compile
TIMEOUT_S = {"cuda": 5.0, "cpu": 60.0}
MAX_DELAY_S = {"cuda": 200e-6, "cpu": 5e-3}
CYCLES_PER_S = 1.7e9  # of an H100, about
FIRST_CALLS = 3  # the second call is still prepared in part


@dataclass(frozen=True)
class Problem:
    """Operands of a call. Attributes: call, returns the outputs; check, raises AssertionError for wrong outputs."""

    call: Callable[[], tuple]
    check: Callable[..., object]


def make_problem(variant_name, seed):
    """Return a Problem for a variant in ``tests.support.variants``, with larger operands on GPUs. Collective."""
    variant, on_gpu = VARIANTS[variant_name], device().type == "cuda"
    shape_of = (lambda shape: LARGER[variant_name]) if on_gpu else (lambda shape: shape)
    dtype = BF16 if on_gpu else FP32
    if variant.function is norm_cases.computes:
        operator, _, (shape,), changes = variant.args
        case = norm_cases.NormCase(operator, shape_of(shape), dtype, seed=seed)
        operands = case.operands()
        return Problem(lambda: case.call(changes, operands=operands), lambda *outputs: case.check(outputs))
    if variant.function is gemm_ar_norm_cases.computes:
        operator, _, (shape,), config = variant.args
        case, config = NormCase(operator, dtype, *shape_of(shape), seed=seed), gemm_ar_norm_cases.CONFIGS[config]
        return Problem(lambda: case.call(config=config), lambda y, r: case.check(y, r, in_rank_order=True))
    if variant.function is decoding.computes:
        spec, config = variant.args
        larger = LARGER[variant_name] if on_gpu else {}
        case, config = Decode(**{**spec, **larger, "dtype": dtype, "seed": seed}), decoding.config_of(config)
        return Problem(
            lambda: case.call(return_lse=True, config=config), lambda o, lse: case.check({"o": o, "lse": lse})
        )
    operator, shape, changes = variant.args
    if variant.function is scaled:
        case = ScaledCase(operator, *shape_of(SCALED_SHAPE), (shape, shape), seed=seed)
        config = case.config_for("scaled by block" if shape == "block" else "scaled", **changes)
        return Problem(lambda: (case.run(config),), case.check)
    case = Case(operator, dtype, *shape_of(shape), exact=True, seed=seed)
    config = config_for(case, **changes)
    return Problem(lambda: (case.call(config=config),), lambda output: case.check({"output": output}))


@contextlib.contextmanager
def fresh_world(local):
    """Give the world new workspaces until exit, on simulated nodes of ``local`` ranks unless it is None. Collective."""
    world = resolve_group()
    with scratch_state(world) as state:
        if local is not None:
            state._topology = Topology(state.rank, state.world_size, local)
        yield
        _wait_for_device()


class Player:
    """The calls of one mutant on this rank. Attributes: problems, expected: in the order of calls."""

    def __init__(self, name):
        self.name, self.mutant = name, MUTANTS[name]
        self.variant = VARIANTS[self.mutant.variant]
        self.kind = device().type
        self._stack = contextlib.ExitStack()
        self._unchanged, self._changed, self._is_planted = set(), set(), False  # (kernel, digest of its machine code)
        self.problems, self.expected = [], []
        tdkernels.set_timeout(FIRST_TIMEOUT_S)
        with fresh_world(self.variant.local):
            for number in range(NUM_INPUTS[self.kind]):
                problem = make_problem(self.mutant.variant, zlib.crc32(f"{name} {number}".encode()))
                with torch.no_grad():
                    outputs = tuple(problem.call())
                problem.check(*outputs)
                self.problems.append(problem)
                self.expected.append([output.clone() for output in outputs])

    def begin(self, is_planted, count):
        """Begin to call the unchanged kernels or the mutant, in new workspaces; make ``count`` calls, as ``play``."""
        self.end()
        self._is_planted = is_planted
        self._stack.enter_context(torch.no_grad())
        if is_planted:
            self._stack.enter_context(self.mutant.planted() if self.kind == "cpu" else planted(self.mutant))
        self._stack.enter_context(fresh_world(self.variant.local))
        tdkernels.set_timeout(FIRST_TIMEOUT_S)
        wrong, error = self.play(0, count, delays=False)
        tdkernels.set_timeout(TIMEOUT_S[self.kind])
        return wrong, error

    def end(self):
        """Remove the bug and free the workspaces; return the kernels that the bug has changed, by name."""
        if self._is_planted:
            self._changed |= machine_code() - self._unchanged
        else:
            self._unchanged |= machine_code()
        self._is_planted = False
        self._stack.close()
        tdkernels.set_timeout(None)
        return sorted({name for name, _ in self._changed})

    def play(self, first, count, delays=True):
        """Make calls without waiting for the device; return (numbers of calls with wrong results, error or None).

        An error is (whether a wait has timed out, text). After it no result is compared, because later calls of the
        group have no defined result.
        """
        outputs = []
        try:
            for number in range(first, first + count):
                if delays:
                    self._delay_one_rank(number)
                outputs.append(self.problems[number % len(self.problems)].call())
            tdkernels.synchronize()
        except Exception as raised:
            error = isinstance(raised, PeerTimeoutError), f"{type(raised).__name__}: {raised}"[:300]
            with contextlib.suppress(Exception):
                _wait_for_device()
            return [], error
        return [first + at for at, got in enumerate(outputs) if not self._is_expected(first + at, got)], None

    def _is_expected(self, number, outputs):
        expected = self.expected[number % len(self.problems)]
        return all(
            torch.equal(got.contiguous().view(torch.uint8), want.contiguous().view(torch.uint8))
            for got, want in zip(outputs, expected, strict=True)
        )

    def _delay_one_rank(self, number):
        """Before every other call, keep the device of a random rank busy. All ranks draw the same rank and time."""
        drawn = random.Random(f"{self.name} {number}")
        late, seconds = drawn.randrange(2 * self.variant.world_size), drawn.random() ** 2 * MAX_DELAY_S[self.kind]
        if late != resolve_group().rank():
            return
        if self.kind == "cuda":
            torch.cuda._sleep(int(seconds * CYCLES_PER_S))
        else:
            time.sleep(seconds)


def _wait_for_device():
    if device().type == "cuda":
        torch.cuda.synchronize()


_player = None


def prepare(name):
    """In a rank: compute the expected results of a mutant, unless this process has done so. Collective."""
    global _player
    if _player is None or _player.name != name:
        if _player is not None:
            _player.end()
        _player = None
        _player = Player(name)


def begin(is_planted, count):
    """In a rank: begin with the first calls of the unchanged kernels or of the mutant; as ``play``. Collective."""
    return _player.begin(is_planted, count)


def play(first, count):
    """In a rank: make a batch of calls; return (numbers of calls with wrong results, error or None). Collective."""
    return _player.play(first, count)


def end():
    """In a rank: remove the bug; return the names of the kernels that it has changed. Collective."""
    return [] if _player is None else _player.end()
