"""Launches of ``td.jit`` kernels: an equal launch calls the compiled kernel directly, any other goes through Triton.

Caches of the interpreter must return the same values as without a cache.
"""

import contextlib
import sys
import threading
import time
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import interpreter
from triton.runtime.errors import InterpreterError
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels import lang as td
from tdkernels.caches import RecentCache
from tdkernels.lang import interpreter as our_interpreter
from tdkernels.lang.targets import interpreter_yield
from tests.lang.gpu_tensor import gpu_tensor
from tests.support.aot import compile_for, pointer


@td.jit(do_not_specialize=["n"])
def _kernel(x_ptr, y_ptr, desc, n, m, SIZE: "tl.constexpr", FLAG: "tl.constexpr", extra=None):  # noqa: F821
    pass


class _Compiled(CompiledKernel):
    module = None  # nothing to unload, see CompiledKernel.__del__ from triton 3.8 on

    def __init__(self):
        self.launches = []

    def __getitem__(self, grid):
        return lambda *args: self.launches.append((grid, args))


@pytest.fixture
def searches(monkeypatch):
    """The kernels that Triton compiled or found, one for each launch that went through it."""
    found = []

    def run(self, *args, grid, warmup, **kwargs):
        found.append(_Compiled())
        return found[-1]

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_kernel, "_known", RecentCache(64))
    return found


def _descriptor(block):
    return TensorDescriptor(torch.empty(64, 64), [64, 64], [64, 1], [block, block])


def _launch(x=None, y=None, desc=None, n=5, m=7, grid=(3,), **constants):
    args = x if x is not None else gpu_tensor(), y if y is not None else gpu_tensor(), desc, n, m
    _kernel[grid](*args, **{"SIZE": 16, "FLAG": True, **constants})
    return args


def test_second_launch_bypasses_triton(searches):
    _launch()
    args = _launch(x=gpu_tensor(8192), y=gpu_tensor(32), n=6, grid=(9,))
    assert len(searches) == 1
    assert searches[0].launches == [((9, 1, 1), (*args, 16, True, None))]


def test_constants_are_ordered_by_the_signature(searches):
    for _ in range(2):
        _kernel[(1, 2)](gpu_tensor(), gpu_tensor(), None, 1, 1, FLAG=False, SIZE=32, num_warps=8)
    assert len(searches) == 1
    assert [(grid, args[5:]) for grid, args in searches[0].launches] == [((1, 2, 1), (32, False, None))]


@pytest.mark.parametrize(
    "other",
    [
        {"x": gpu_tensor(4098)}, {"y": gpu_tensor(dtype=torch.float32)}, {"n": 1 << 31}, {"m": 8}, {"SIZE": 32},
        {"FLAG": False}, {"num_warps": 8}, {"desc": _descriptor(16)},
    ],
    ids=lambda other: next(iter(other)),
)
def test_launches_that_may_need_another_kernel_go_through_triton(searches, other):
    _launch()
    _launch(**other)
    _launch(**other)
    assert [len(found.launches) for found in searches] == [0, 1]


def test_descriptors_with_other_blocks_are_other_kernels(searches):
    for block in (16, 32, 16):
        _launch(desc=_descriptor(block))
    assert [len(found.launches) for found in searches] == [1, 0]


def test_another_device_is_another_kernel(searches, monkeypatch):
    _launch()
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    _launch()
    assert len(searches) == 2


class Sizes(NamedTuple):
    rows: int
    flag: bool


@pytest.mark.parametrize("one, other, cached", [
    (Sizes(16, True), Sizes(16, True), True), (Sizes(16, True), Sizes(32, True), False),
    (Sizes(16, True), Sizes(16, 1), False), (Sizes(16, True), (16, True), False),
], ids=str)
def test_constants_may_be_a_named_tuple(searches, one, other, cached):
    _launch(SIZE=one)
    _launch(SIZE=other)
    assert [len(found.launches) for found in searches] == ([1] if cached else [0, 0])


@td.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@td.jit
def _constexpr_fields_kernel(y_ptr, PRODUCT: tl.constexpr):
    rows = tl.arange(0, PRODUCT.rows)
    ones = tl.full((PRODUCT.rows, 16), 1.0, tl.float32)
    tl.store(y_ptr + rows[:, None] * 16 + tl.arange(0, 16)[None, :], _dot(ones, ones, PRODUCT.precision))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_kernel_passes_fields_of_a_named_tuple_to_a_function(arch):
    class Product(NamedTuple):
        rows: int
        precision: str

    compile_for(_constexpr_fields_kernel, [pointer(torch.float32)], {"PRODUCT": Product(16, "ieee")}, arch)
    y = torch.zeros(16, 16)
    _constexpr_fields_kernel[(1,)](y, PRODUCT=Product(16, "ieee"))
    assert torch.equal(y, torch.full((16, 16), 16.0))


@pytest.mark.parametrize(
    "one, other",
    [
        ({"n": 5}, {"n": True}), ({"m": 1}, {"m": True}), ({"FLAG": True}, {"FLAG": 1}), ({"n": 5}, {"n": None}),
        ({"n": 5}, {"n": 5.0}), ({"n": 1 << 40}, {"n": 1 << 63}),
    ],
    ids=str,
)
def test_equal_values_of_other_types_are_other_kernels(searches, one, other):
    _launch(**one)
    _launch(**other)
    assert len(searches) == 2


def test_one_kernel_for_all_floats(searches):
    for n in (0.5, 1.0, -1e30):
        _launch(n=n)
    assert len(searches) == 1


@pytest.mark.parametrize(
    "unusual",
    [
        {"extra": gpu_tensor()}, {"extra": [1]}, {"extra": _descriptor(16)}, {"n": 1j}, {"desc": (gpu_tensor(), 1)},
        {"grid": lambda meta: (1,)},
    ],
    ids=lambda unusual: next(iter(unusual)),
)
def test_unsupported_arguments_always_go_through_triton(searches, unusual):
    for _ in range(2):
        _launch(**unusual)
    assert len(searches) == 2 and not _kernel._known


def test_debugging_is_another_kernel(searches, monkeypatch):
    _launch()
    monkeypatch.setattr(knobs.runtime, "debug", True)
    _launch()
    assert len(searches) == 2


def test_large_tensor_is_another_kernel_on_amd(searches, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    large = gpu_tensor()
    large.untyped_storage = lambda: SimpleNamespace(size=lambda: 1 << 31)
    _launch()
    _launch(x=large)
    assert len(searches) == 2


# ---- caches of the interpreter ----

TYPES = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint64, tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e5]
KINDS = [
    *TYPES,
    *[tl.pointer_type(kind) for kind in TYPES],
    *[tl.block_type(kind, shape) for kind in (*TYPES, tl.pointer_type(tl.int8)) for shape in ([1], [16], [4, 8])],
]


def test_cached_numpy_dtypes():
    for _ in range(2):
        for kind in KINDS:
            assert interpreter._get_np_dtype(kind) == interpreter._get_np_dtype.__wrapped__(kind), kind


def _fields(instance):
    return {name: repr(value) for name, value in vars(instance).items()}


def test_tensor_init_equals_triton():
    for _ in range(2):
        for number, kind in enumerate(KINDS):
            ours = tl.tensor.__new__(tl.tensor)
            our_interpreter._tensor_init(ours, number, kind)
            assert ours.type is kind and ours.dtype is kind.scalar
            assert _fields(ours) == _fields(tl.tensor(number, kind)), kind


@pytest.mark.parametrize("shape", [[16], [4, 8], [tl.constexpr(4), 8], tl.tuple([4, 8]), [8, 4]], ids=str)
def test_block_type_init_equals_triton(shape):
    for _ in range(2):
        for element_ty in (*TYPES, tl.pointer_type(tl.int8)):
            ours = tl.block_type.__new__(tl.block_type)
            our_interpreter._block_init(ours, element_ty, shape)
            assert ours.element_ty is element_ty
            assert _fields(ours) == _fields(tl.block_type(element_ty, shape))


@pytest.mark.parametrize("shape", [[], [3], [2.0], [1 << 30], (4, 8)], ids=str)
def test_invalid_block_shapes_are_rejected_every_time(shape):
    for cached in ([2, 8], [4, 8], [2]):
        our_interpreter._block_init(tl.block_type.__new__(tl.block_type), tl.int32, cached)
        with pytest.raises((AssertionError, TypeError, ValueError)):
            our_interpreter._block_init(tl.block_type.__new__(tl.block_type), tl.int32, shape)


@td.jit
def _read_inits_kernel(found, fails, x_ptr):
    found(tl.tensor.__init__, tl.block_type.__init__)
    if fails:
        raise ValueError("requested by the test")


@pytest.mark.parametrize("fails", [0, 1])
def test_interpreter_patches_are_reverted(fails):
    before, found = (tl.tensor.__init__, tl.block_type.__init__), []
    with contextlib.suppress(InterpreterError):
        _read_inits_kernel[(1,)](lambda *inits: found.append(inits), fails, torch.zeros(1))
    assert found == [(our_interpreter._tensor_init, our_interpreter._block_init)]
    assert (tl.tensor.__init__, tl.block_type.__init__) == before


# ---- waits in the interpreter ----


def test_long_waits_poll_less_often(monkeypatch):
    now, sleeps = 5_000_000_000, []
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    monkeypatch.setattr(time, "sleep", sleeps.append)
    for waited_ms in (0, 1, 8, 20, 4000):
        interpreter_yield(now - waited_ms * 1_000_000)
    assert sleeps == pytest.approx([0.0002, 0.00025, 0.002, 0.005, 0.01])


@td.jit
def _program_id_kernel(out_ptr, factor, SIZE: tl.constexpr):
    """Each program stores its id, times ``factor``, in all its elements."""
    for at in range(SIZE):
        tl.store(out_ptr + tl.program_id(0) * SIZE + at, tl.program_id(0) * factor)


def test_concurrent_threads_are_interpreted_in_turn():
    """The interpreter holds the state of one program, so concurrent threads must not mix their program ids."""
    programs, size, wrong = 16, 4, []

    def work(factor):
        expected = (torch.arange(programs) * factor).repeat_interleave(size)
        for _ in range(10):
            out = torch.zeros(programs * size, dtype=torch.int64)
            try:
                _program_id_kernel[(programs,)](out, factor, SIZE=size)
            except Exception as error:
                wrong.append(repr(error))
            else:
                wrong.extend([] if torch.equal(out, expected) else [out.tolist()])

    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(factor,)) for factor in (3, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(interval)
    assert not wrong, wrong[0]
