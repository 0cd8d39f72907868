"""Bound launches: Triton's C launcher gets the arguments that Triton's Python launcher would pass, without calling it.

The tests use the launcher of the installed Triton without a GPU; a recorder replaces its C function.
"""

import functools
import logging
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import torch
import triton
import triton.language as tl
from triton import knobs
from triton.backends.nvidia import driver
from triton.compiler import CompiledKernel
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels import lang as td
from tdkernels.lang import tested_versions
from tdkernels.runtime import triton_launcher
from tdkernels.runtime.triton_launcher import BoundLaunch, CapturedArguments, Rows
from tests.lang.gpu_tensor import gpu_tensor

GRID, STREAM = (3, 2, 1), 77
MAPPED = {"swizzle": 3}  # Triton's metadata of a descriptor that is a tensor map
SIGNATURE = {0: "*bf16", 1: "tensordesc<bf16[4,4]>", 2: "i32", 3: "*bf16", 4: "tensordesc<bf16[4,4]>", 5: "constexpr"}


def descriptor(address):
    descriptor, base = object.__new__(TensorDescriptor), gpu_tensor(address)
    descriptor.__dict__.update(base=base, shape=[4, 8], strides=[8, 1], block_shape=[4, 4], padding="zero")
    descriptor.round_f32_to_tf32 = False
    return descriptor


class _Recorder(list):
    """Stand-in for the C function; records its arguments."""

    def __call__(self, *args):
        self.append(args)


class _Compiled(CompiledKernel):
    """A compiled kernel with Triton's launcher; the arguments of the C function are recorded in ``given``."""

    module = None  # nothing to unload, see CompiledKernel.__del__ from triton 3.8 on

    def __init__(self, tensordesc_meta=(MAPPED, None), scratch=0):
        self.given = _Recorder()
        self.function, self.packed_metadata = 11, (4, 1, 0)
        self.metadata = SimpleNamespace(tensordesc_meta=tensordesc_meta)
        launcher = object.__new__(driver.CudaLauncher)
        launcher.__dict__.update(num_ctas=1, launch_cooperative_grid=False, launch_pdl=True, gsan_enabled=False)
        launcher.__dict__.update(arg_annotations="annotations", kernel_signature=b"signature")
        for size in ("global_scratch", "profile_scratch"):
            launcher.__dict__.update({f"{size}_size": scratch, f"{size}_align": 1})
        signature = SIGNATURE if tensordesc_meta is not None else {0: "*bf16", 1: "i32", 2: "*bf16"}
        meta = None if tensordesc_meta is None else [*tensordesc_meta]
        launcher.launch = driver.wrap_handle_tensordesc(self.given, signature, meta)
        self._run = launcher

    run = property(lambda self: self._run)

    def __getitem__(self, grid):
        return lambda *args: self.launch_by_triton(grid, args)

    def launch_by_triton(self, grid, args):
        self.run(*grid, STREAM, self.function, self.packed_metadata, None, None, None, *args)
        return self.given[-1]


@pytest.fixture(autouse=True)
def active_driver(monkeypatch):
    """Provide an active driver without a GPU; from 3.8 on Triton's launcher queries it in each launch."""
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace())


@pytest.fixture
def encoded(monkeypatch):
    """The addresses of encoded tensor maps, in order."""
    addresses, plain = [], driver.make_tensordesc_arg

    @functools.wraps(plain)
    def make(arg, metadata, *rest):
        if metadata is None:
            return plain(arg, None, *rest)
        addresses.append(arg.base.data_ptr())
        return [("map", arg.base.data_ptr(), *arg.shape), *arg.shape, *arg.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    return addresses


def pointer_signature(given):
    """Return the addresses and values that the C function reads from its arguments."""
    if isinstance(given, (tuple, list)) and not (given and given[0] == "map"):
        return [pointer_signature(arg) for arg in given]
    return given.data_ptr() if isinstance(given, torch.Tensor) else given


def arguments(address, number):
    return [gpu_tensor(address), descriptor(address + 64), number, gpu_tensor(8), descriptor(address + 128), 5]


INDICES = 4, 0, 2, 1  # indices of the arguments; 3 and 5 are constant


def values_of(args):
    return [getattr(args[at], "base", args[at]) for at in INDICES]


def test_c_function_gets_the_arguments_of_triton(encoded):
    compiled = _Compiled()
    captured = CapturedArguments.of(compiled, GRID, arguments(4096, 1), INDICES)
    assert not compiled.given, "the capture must not launch"
    for address, number in ((8192, 2), (4096, -1), (0, 1 << 40), (8192, 3)):
        args = arguments(address, number)
        expected = pointer_signature(compiled.launch_by_triton(GRID, args))
        captured(values_of(args), STREAM)
        assert pointer_signature(compiled.given[-1]) == expected
        captured(values_of(args), STREAM + 1)
        assert pointer_signature(compiled.given[-1]) != expected


def test_kernels_without_descriptors(encoded):
    compiled = _Compiled(tensordesc_meta=None)
    captured = CapturedArguments.of(compiled, GRID, [gpu_tensor(16), 2, None], [1, 0])
    expected = pointer_signature(compiled.launch_by_triton(GRID, [gpu_tensor(32), 3, None]))
    captured([3, gpu_tensor(32)], STREAM)
    assert pointer_signature(compiled.given[-1]) == expected
    captured([3, None], STREAM)
    assert pointer_signature(compiled.given[-1]) == pointer_signature(compiled.launch_by_triton(GRID, [None, 3, None]))


class Sizes(NamedTuple):
    rows: int
    columns: int
    planes: int
    width: int


def test_tuples_are_constant(encoded):
    compiled = _Compiled(tensordesc_meta=None)
    args = [gpu_tensor(16), 2, (1, 8, 64), Sizes(16, 32, 1, 4)]  # a tuple with as many fields as there are arguments
    captured = CapturedArguments.of(compiled, GRID, args, [1, 0])
    args[:2] = gpu_tensor(32), 3
    expected = pointer_signature(compiled.launch_by_triton(GRID, args))
    captured([3, gpu_tensor(32)], STREAM)
    assert pointer_signature(compiled.given[-1]) == expected


def test_tensor_map_is_encoded_once_per_address(encoded, monkeypatch):
    monkeypatch.setattr(triton_launcher, "_MAX_MAPS", 2)
    captured = CapturedArguments.of(_Compiled(), GRID, arguments(4096, 1), INDICES)
    encoded.clear()
    for address in (0, 256, 0, 256, 512, 0):  # the third address exceeds the limit
        captured(values_of(arguments(address, 1)), STREAM)
    assert encoded == [64, 320, 576, 64]


def with_rows(args, at, rows):
    """Give the tensor of a descriptor, and the size of the descriptor, a number of rows."""
    args[at].base, args[at].shape = gpu_tensor(args[at].base.data_ptr(), rows=rows), [Rows(rows), 8]
    return args


def test_descriptors_get_the_rows_of_their_tensors(encoded):
    compiled = _Compiled()
    captured = CapturedArguments.of(compiled, GRID, with_rows(arguments(4096, 1), 1, 4), INDICES)
    bound_launch = BoundLaunch(GRID, with_rows(arguments(4096, 1), 1, 4), INDICES, {})
    encoded.clear()
    for rows in (5, 300, 5):
        args = with_rows(arguments(8192, 2), 1, rows)
        captured(values_of(args), STREAM)
        found = pointer_signature(compiled.given[-1])
        assert found == pointer_signature(compiled.launch_by_triton(GRID, args))
        assert found == pointer_signature(compiled.launch_by_triton(GRID, bound_launch.filled(values_of(args))))
    assert encoded == [8256] * 8, "two of three launches without Triton encode a map"


def test_descriptors_without_a_map_have_fixed_sizes(encoded):
    """Sizes of type ``Rows`` are arguments of their own then, which a captured launch would not change."""
    args = with_rows(arguments(4096, 1), 4, 4)
    assert CapturedArguments.of(_Compiled(), GRID, args, INDICES) is None


def test_bound_launch_keeps_no_operands(encoded):
    bound_launch = BoundLaunch(GRID, arguments(4096, 1), INDICES, {})
    constants = [arg for arg in bound_launch._args if arg is not None]
    assert [getattr(arg, "base", None) for arg in constants] == [None] * 4
    other = arguments(64, 9)
    filled = bound_launch.filled(values_of(other))
    assert pointer_signature([filled[at] for at in (0, 2, 3, 5)]) == [64, 9, 8, 5]
    assert [vars(filled[at]) for at in (1, 4)] == [vars(other[at]) for at in (1, 4)]


@pytest.mark.parametrize("unknown", ["scratch", "no scratch", "module", "wrapper", "expands args", "takes fewer"])
def test_unknown_launchers_are_not_bypassed(encoded, monkeypatch, unknown):
    compiled = _Compiled(scratch=16 if unknown == "scratch" else 0)
    if unknown == "no scratch":
        del compiled.run.global_scratch_size
    elif unknown == "module":
        compiled._run = SimpleNamespace(launch=print)
    elif unknown == "wrapper":
        compiled.run.launch = lambda *args: None
    elif unknown == "expands args":
        compiled.run.launch = compiled.given
    elif unknown == "takes fewer":
        monkeypatch.setattr(driver.CudaLauncher, "__call__", lambda self, x, y: None)
    assert CapturedArguments.of(compiled, GRID, arguments(4096, 1), INDICES) is None


def _changed(compiled, change):
    """Make Triton's launcher pass ``change(launch arguments, kernel arguments)`` to the C function."""
    expand, launcher = compiled.run.launch, compiled.given

    def inner(*args):
        given = []
        triton_launcher._with_nonlocal(expand, "launcher", lambda *args: given.extend(args))(*args)
        nested = isinstance(given[-1], (tuple, list))
        first = len(given) - 1 if nested else next(at for at, arg in enumerate(given) if isinstance(arg, torch.Tensor))
        launch_args, kernel_args = change(given[:first], list(given[-1] if nested else given[first:]))
        launcher(*launch_args, kernel_args) if nested else launcher(*launch_args, *kernel_args)

    compiled.run.launch = inner


CHANGES = {
    "nothing": lambda launch_args, kernel_args: (launch_args, kernel_args),
    "the order": lambda launch_args, kernel_args: (
        launch_args, [kernel_args[7], *kernel_args[1:7], kernel_args[0], *kernel_args[8:]]
    ),
    "the number": lambda launch_args, kernel_args: (launch_args, [*kernel_args, 0]),
    "an integer": lambda launch_args, kernel_args: (launch_args, [*kernel_args[:-1], kernel_args[-1] + 1]),
    "the type of a number": lambda launch_args, kernel_args: (launch_args, [*kernel_args[:-1], float(kernel_args[-1])]),
    "a tensor": lambda launch_args, kernel_args: (
        launch_args, [gpu_tensor(kernel_args[0].data_ptr()), *kernel_args[1:]]
    ),
    "a tensor map": lambda launch_args, kernel_args: (launch_args, [kernel_args[0], 4160, *kernel_args[2:]]),
    "scratch memory": lambda launch_args, kernel_args: (
        [object() if arg is None else arg for arg in launch_args], kernel_args
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_launchers_that_pass_other_arguments_are_not_bypassed(encoded, caplog, monkeypatch, change):
    monkeypatch.setattr(tested_versions, "_reported_slow_launches", False)
    compiled = _Compiled()
    args = arguments(4096, 1)
    kernel_args = pointer_signature(compiled.launch_by_triton(GRID, args)[-1])
    assert not isinstance(kernel_args, list) or kernel_args[7:9] == [8, 4224], "CHANGES swaps these pointers"
    _changed(compiled, CHANGES[change])
    with caplog.at_level(logging.WARNING):
        captures = [CapturedArguments.of(compiled, GRID, args, INDICES) for _ in range(3)]
    if change == "nothing":
        assert None not in captures and not caplog.records
    else:
        assert captures == [None] * 3
        assert ["its launcher is not the one that was tested" in record.message for record in caplog.records] == [True]


@pytest.fixture
def another_version(monkeypatch):
    """Pretend that an untested version of Triton is installed."""
    monkeypatch.setattr(triton, "__version__", "3.999.0")
    monkeypatch.setattr(tested_versions, "_reported_slow_launches", False)
    tested_versions.triton_is_tested.cache_clear()
    yield
    monkeypatch.undo()
    tested_versions.triton_is_tested.cache_clear()


def test_installed_version_is_tested():
    assert tested_versions.triton_is_tested(), "add it to TESTED_VERSIONS once these tests pass with it"


@td.jit(do_not_specialize=["n"])
def _kernel(x_ptr, desc, n, y_ptr, other, SIZE: tl.constexpr):
    pass


@pytest.fixture
def found(monkeypatch, encoded):
    """The kernels that Triton compiled or found, one for each launch that went through it."""
    kernels = []

    def run(self, *args, grid, warmup, **kwargs):
        kernels.append(_Compiled())
        kernels[-1].launch_by_triton(grid, [*args, *kwargs.values()])
        return kernels[-1]

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_kernel, "_key", lambda args, kwargs: None)  # launches are not cached by their key
    active = SimpleNamespace(get_current_stream=lambda at: STREAM)
    monkeypatch.setattr(triton_launcher, "driver", SimpleNamespace(active=active))
    return kernels


def launch(bound_launch, address, **options):
    args = arguments(address, 1)
    _kernel.launch_bound(bound_launch, values_of(args), **options)
    return args


def test_second_launch_bypasses_jit_and_third_reuses_tensor_maps(found, encoded, monkeypatch):
    bound_launch = BoundLaunch(GRID, arguments(0, 1)[:5], INDICES, {"SIZE": 5})
    for address in (4096, 8192, 4096, 8192):
        args = launch(bound_launch, address)
        assert pointer_signature(found[-1].given[-1]) == pointer_signature(found[-1].launch_by_triton(GRID, args))
    assert len(found) == 1
    encoded.clear()
    launch(bound_launch, 8192)
    assert not encoded
    for device, stream in ((0, 99), (1, STREAM)):  # a stream of another device is not used
        launch(bound_launch, 8192, stream=SimpleNamespace(cuda_stream=99, device_index=device))
        assert [number for number in (99, STREAM) if number in found[0].given[-1]] == [stream]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(bound_launch, 8192)
    assert len(found) == 2, "each device has its own kernel"


def test_untested_versions_are_not_bypassed(found, another_version, caplog):
    bound_launch = BoundLaunch(GRID, arguments(0, 1)[:5], INDICES, {"SIZE": 5})
    with caplog.at_level(logging.WARNING):
        for address in (4096, 4096, 4096):
            launch(bound_launch, address)
        for _ in range(2):
            _kernel[GRID](*arguments(4096, 1)[:5], SIZE=5)
    assert len(found) == 5 and not _kernel._known
    assert CapturedArguments.of(_Compiled(), GRID, arguments(4096, 1), INDICES) is None
    (record,) = caplog.records
    assert "triton 3.999.0, which takes the host longer: it was tested with triton 3.6, 3.7, 3.8, 3.9" in record.message


def test_launch_hooks_are_called(found, encoded):
    bound_launch = BoundLaunch(GRID, arguments(0, 1)[:5], INDICES, {"SIZE": 5})
    for _ in range(3):
        launch(bound_launch, 4096)
    hook = lambda metadata: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(hook)
    try:
        encoded.clear()
        launch(bound_launch, 4096)
        assert encoded == [4160], "Triton's own launcher, which calls hooks, encodes its tensor map again"
    finally:
        knobs.runtime.launch_enter_hook.remove(hook)
