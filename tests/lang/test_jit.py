"""A launch that was seen before goes straight to the compiled kernel, with the right arguments; any other does not.

And what the interpreter remembers, to be quicker, is what it would have found.
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
    """What Triton was asked to look for, each time with what it found."""
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


def test_the_second_launch_does_not_search(searches):
    _launch()
    args = _launch(x=gpu_tensor(8192), y=gpu_tensor(32), n=6, grid=(9,))
    assert len(searches) == 1
    assert searches[0].launches == [((9, 1, 1), (*args, 16, True, None))]


def test_constants_go_to_their_places_in_whatever_order_they_come(searches):
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
def test_what_may_be_another_kernel_is_searched_for(searches, other):
    _launch()
    _launch(**other)
    _launch(**other)
    assert [len(found.launches) for found in searches] == [0, 1]


def test_descriptors_of_other_blocks_are_other_kernels(searches):
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


@pytest.mark.parametrize("one, other, known", [
    (Sizes(16, True), Sizes(16, True), True), (Sizes(16, True), Sizes(32, True), False),
    (Sizes(16, True), Sizes(16, 1), False), (Sizes(16, True), (16, True), False),
], ids=str)
def test_constants_may_be_a_named_tuple(searches, one, other, known):
    _launch(SIZE=one)
    _launch(SIZE=other)
    assert [len(found.launches) for found in searches] == ([1] if known else [0, 0])


@td.jit
def _dot(a, b, PRECISION: tl.constexpr):
    return tl.dot(a, b, input_precision=PRECISION)


@td.jit
def _of_fields(y_ptr, PRODUCT: tl.constexpr):
    rows = tl.arange(0, PRODUCT.rows)
    ones = tl.full((PRODUCT.rows, 16), 1.0, tl.float32)
    tl.store(y_ptr + rows[:, None] * 16 + tl.arange(0, 16)[None, :], _dot(ones, ones, PRODUCT.precision))


@pytest.mark.parametrize("arch", ["sm_90", "gfx942"])
def test_a_kernel_passes_fields_of_a_named_tuple_on(arch):
    class Product(NamedTuple):
        rows: int
        precision: str

    compile_for(_of_fields, [pointer(torch.float32)], {"PRODUCT": Product(16, "ieee")}, arch)
    y = torch.zeros(16, 16)
    _of_fields[(1,)](y, PRODUCT=Product(16, "ieee"))
    assert torch.equal(y, torch.full((16, 16), 16.0))


@pytest.mark.parametrize(
    "one, other",
    [
        ({"n": 5}, {"n": True}), ({"m": 1}, {"m": True}), ({"FLAG": True}, {"FLAG": 1}), ({"n": 5}, {"n": None}),
        ({"n": 5}, {"n": 5.0}), ({"n": 1 << 40}, {"n": 1 << 63}),
    ],
    ids=str,
)
def test_values_that_are_equal_are_not_the_same(searches, one, other):
    _launch(**one)
    _launch(**other)
    assert len(searches) == 2


def test_all_floats_are_served_by_one_kernel(searches):
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
def test_what_is_unusual_is_always_searched_for(searches, unusual):
    for _ in range(2):
        _launch(**unusual)
    assert len(searches) == 2 and not _kernel._known


def test_debugging_is_another_kernel(searches, monkeypatch):
    _launch()
    monkeypatch.setattr(knobs.runtime, "debug", True)
    _launch()
    assert len(searches) == 2


def test_on_amd_a_large_tensor_is_another_kernel(searches, monkeypatch):
    monkeypatch.setattr(torch.version, "hip", "7.0")
    large = gpu_tensor()
    large.untyped_storage = lambda: SimpleNamespace(size=lambda: 1 << 31)
    _launch()
    _launch(x=large)
    assert len(searches) == 2


# ---- what the interpreter remembers ----

TYPES = [tl.int1, tl.int8, tl.uint8, tl.int32, tl.uint64, tl.float16, tl.bfloat16, tl.float32, tl.float64, tl.float8e5]
KINDS = [
    *TYPES,
    *[tl.pointer_type(kind) for kind in TYPES],
    *[tl.block_type(kind, shape) for kind in (*TYPES, tl.pointer_type(tl.int8)) for shape in ([1], [16], [4, 8])],
]


def test_numpy_dtypes_are_those_of_the_interpreter():
    for _ in range(2):
        for kind in KINDS:
            assert interpreter._get_np_dtype(kind) == interpreter._get_np_dtype.__wrapped__(kind), kind


def _described(thing):
    return {name: repr(value) for name, value in vars(thing).items()}


def test_tensors_are_made_as_triton_makes_them():
    for _ in range(2):
        for number, kind in enumerate(KINDS):
            ours = tl.tensor.__new__(tl.tensor)
            our_interpreter._tensor_init(ours, number, kind)
            assert ours.type is kind and ours.dtype is kind.scalar
            assert _described(ours) == _described(tl.tensor(number, kind)), kind


@pytest.mark.parametrize("shape", [[16], [4, 8], [tl.constexpr(4), 8], tl.tuple([4, 8]), [8, 4]], ids=str)
def test_types_of_blocks_are_made_as_triton_makes_them(shape):
    for _ in range(2):
        for element_ty in (*TYPES, tl.pointer_type(tl.int8)):
            ours = tl.block_type.__new__(tl.block_type)
            our_interpreter._block_init(ours, element_ty, shape)
            assert ours.element_ty is element_ty
            assert _described(ours) == _described(tl.block_type(element_ty, shape))


@pytest.mark.parametrize("shape", [[], [3], [2.0], [1 << 30], (4, 8)], ids=str)
def test_a_shape_that_no_block_has_is_refused_each_time(shape):
    for known in ([2, 8], [4, 8], [2]):
        our_interpreter._block_init(tl.block_type.__new__(tl.block_type), tl.int32, known)
        with pytest.raises((AssertionError, TypeError, ValueError)):
            our_interpreter._block_init(tl.block_type.__new__(tl.block_type), tl.int32, shape)


@td.jit
def _asks(found, fails, x_ptr):
    found(tl.tensor.__init__, tl.block_type.__init__)
    if fails:
        raise ValueError("as it was told")


@pytest.mark.parametrize("fails", [0, 1])
def test_the_compiler_keeps_what_is_its_own(fails):
    before, found = (tl.tensor.__init__, tl.block_type.__init__), []
    with contextlib.suppress(InterpreterError):
        _asks[(1,)](lambda *inits: found.append(inits), fails, torch.zeros(1))
    assert found == [(our_interpreter._tensor_init, our_interpreter._block_init)]
    assert (tl.tensor.__init__, tl.block_type.__init__) == before


# ---- waits in the interpreter ----


def test_who_has_waited_for_long_looks_less_often(monkeypatch):
    now, naps = 5_000_000_000, []
    monkeypatch.setattr(time, "monotonic_ns", lambda: now)
    monkeypatch.setattr(time, "sleep", naps.append)
    for waited_ms in (0, 1, 8, 20, 4000):
        interpreter_yield(now - waited_ms * 1_000_000)
    assert naps == pytest.approx([0.0002, 0.00025, 0.002, 0.005, 0.01])


@td.jit
def _number_kernel(out_ptr, factor, SIZE: tl.constexpr):
    """Each program writes its number, times ``factor``, once for each element."""
    for at in range(SIZE):
        tl.store(out_ptr + tl.program_id(0) * SIZE + at, tl.program_id(0) * factor)


def test_threads_interpret_one_after_the_other():
    """The interpreter knows of one program at a time: of two threads, one computed with the other's numbers."""
    programs, size, wrong = 16, 4, []

    def work(factor):
        expected = (torch.arange(programs) * factor).repeat_interleave(size)
        for _ in range(10):
            out = torch.zeros(programs * size, dtype=torch.int64)
            try:
                _number_kernel[(programs,)](out, factor, SIZE=size)
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
