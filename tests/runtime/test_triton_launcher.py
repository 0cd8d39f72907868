"""Launches that are alike give Triton's C function what Triton's own launcher would, and less often ask for it.

On the launcher of the Triton that is installed, without a GPU: its C function is one that takes notes.
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
from tdkernels.runtime.triton_launcher import BoundLaunch, CapturedArguments
from tests.lang.gpu_tensor import gpu_tensor

GRID, STREAM = (3, 2, 1), 77
MAPPED = {"swizzle": 3}  # what Triton has compiled for, where it is a tensor map
SIGNATURE = {0: "*bf16", 1: "tensordesc<bf16[4,4]>", 2: "i32", 3: "*bf16", 4: "tensordesc<bf16[4,4]>", 5: "constexpr"}


def descriptor(address):
    made, base = object.__new__(TensorDescriptor), gpu_tensor(address)
    made.__dict__.update(base=base, shape=[4, 8], strides=[8, 1], block_shape=[4, 4], padding="zero")
    made.round_f32_to_tf32 = False
    return made


class _Notes(list):
    """In the place of the C function."""

    def __call__(self, *args):
        self.append(args)


class _Compiled(CompiledKernel):
    """A compiled kernel with Triton's launcher, whose C function keeps what it is given in ``given``."""

    module = None  # nothing to unload, see CompiledKernel.__del__ from triton 3.8 on

    def __init__(self, described=(MAPPED, None), scratch=0):
        self.given = _Notes()
        self.function, self.packed_metadata = 11, (4, 1, 0)
        self.metadata = SimpleNamespace(tensordesc_meta=described)
        launcher = object.__new__(driver.CudaLauncher)
        launcher.__dict__.update(num_ctas=1, launch_cooperative_grid=False, launch_pdl=True, gsan_enabled=False)
        launcher.__dict__.update(arg_annotations="annotations", kernel_signature=b"signature")
        for size in ("global_scratch", "profile_scratch"):
            launcher.__dict__.update({f"{size}_size": scratch, f"{size}_align": 1})
        signature = SIGNATURE if described is not None else {0: "*bf16", 1: "i32", 2: "*bf16"}
        meta = None if described is None else [*described]
        launcher.launch = driver.wrap_handle_tensordesc(self.given, signature, meta)
        self._run = launcher

    run = property(lambda self: self._run)

    def __getitem__(self, grid):
        return lambda *args: self.by_triton(grid, args)

    def by_triton(self, grid, args):
        self.run(*grid, STREAM, self.function, self.packed_metadata, None, None, None, *args)
        return self.given[-1]


@pytest.fixture(autouse=True)
def a_driver(monkeypatch):
    """Triton's launcher asks for the active driver in each launch, from 3.8 on; here there is no GPU for it."""
    monkeypatch.setattr(triton.runtime.driver, "_active", SimpleNamespace())


@pytest.fixture
def encoded(monkeypatch):
    """The addresses for which a tensor map was made, in turn."""
    addresses, plain = [], driver.make_tensordesc_arg

    @functools.wraps(plain)
    def make(arg, metadata, *rest):
        if metadata is None:
            return plain(arg, None, *rest)
        addresses.append(arg.base.data_ptr())
        return [("map", arg.base.data_ptr()), *arg.shape, *arg.strides]

    monkeypatch.setattr(driver, "make_tensordesc_arg", make)
    return addresses


def pointer_signature(given):
    """What the C function makes of its arguments."""
    if isinstance(given, (tuple, list)) and not (given and given[0] == "map"):
        return [pointer_signature(arg) for arg in given]
    return given.data_ptr() if isinstance(given, torch.Tensor) else given


def arguments(address, number):
    return [gpu_tensor(address), descriptor(address + 64), number, gpu_tensor(8), descriptor(address + 128), 5]


PLACES = 4, 0, 2, 1  # of the arguments; 3 and 5 are the same in all launches


def values_of(args):
    return [getattr(args[at], "base", args[at]) for at in PLACES]


def test_the_c_function_gets_what_triton_would_give_it(encoded):
    compiled = _Compiled()
    repeat = CapturedArguments.of(compiled, GRID, arguments(4096, 1), PLACES)
    assert not compiled.given, "nothing has been launched"
    for address, number in ((8192, 2), (4096, -1), (0, 1 << 40), (8192, 3)):
        args = arguments(address, number)
        expected = pointer_signature(compiled.by_triton(GRID, args))
        repeat(values_of(args), STREAM)
        assert pointer_signature(compiled.given[-1]) == expected
        repeat(values_of(args), STREAM + 1)
        assert pointer_signature(compiled.given[-1]) != expected


def test_of_kernels_without_descriptors_too(encoded):
    compiled = _Compiled(described=None)
    repeat = CapturedArguments.of(compiled, GRID, [gpu_tensor(16), 2, None], [1, 0])
    expected = pointer_signature(compiled.by_triton(GRID, [gpu_tensor(32), 3, None]))
    repeat([3, gpu_tensor(32)], STREAM)
    assert pointer_signature(compiled.given[-1]) == expected
    repeat([3, None], STREAM)
    assert pointer_signature(compiled.given[-1]) == pointer_signature(compiled.by_triton(GRID, [None, 3, None]))


class Sizes(NamedTuple):
    rows: int
    columns: int
    planes: int
    width: int


def test_tuples_are_the_same_in_all_launches(encoded):
    compiled = _Compiled(described=None)
    args = [gpu_tensor(16), 2, (1, 8, 64), Sizes(16, 32, 1, 4)]  # as many fields as there are arguments
    repeat = CapturedArguments.of(compiled, GRID, args, [1, 0])
    args[:2] = gpu_tensor(32), 3
    expected = pointer_signature(compiled.by_triton(GRID, args))
    repeat([3, gpu_tensor(32)], STREAM)
    assert pointer_signature(compiled.given[-1]) == expected


def test_a_tensor_map_is_made_once_for_an_address(encoded, monkeypatch):
    monkeypatch.setattr(triton_launcher, "_MAX_MAPS", 2)
    repeat = CapturedArguments.of(_Compiled(), GRID, arguments(4096, 1), PLACES)
    encoded.clear()
    for address in (0, 256, 0, 256, 512, 0):  # the third of them is one too many
        repeat(values_of(arguments(address, 1)), STREAM)
    assert encoded == [64, 320, 576, 64]


def test_what_is_kept_are_no_operands(encoded):
    bound_launch = BoundLaunch(GRID, arguments(4096, 1), PLACES, {})
    kept = [arg for arg in bound_launch._args if arg is not None]
    assert [getattr(arg, "base", None) for arg in kept] == [None] * 4
    other = arguments(64, 9)
    filled = bound_launch.filled(values_of(other))
    assert pointer_signature([filled[at] for at in (0, 2, 3, 5)]) == [64, 9, 8, 5]
    assert [vars(filled[at]) for at in (1, 4)] == [vars(other[at]) for at in (1, 4)]


@pytest.mark.parametrize("unknown", ["scratch", "no scratch", "module", "wrapper", "expands by itself", "takes fewer"])
def test_another_launcher_than_is_known_is_called_as_it_is(encoded, monkeypatch, unknown):
    compiled = _Compiled(scratch=16 if unknown == "scratch" else 0)
    if unknown == "no scratch":
        del compiled.run.global_scratch_size
    elif unknown == "module":
        compiled._run = SimpleNamespace(launch=print)
    elif unknown == "wrapper":
        compiled.run.launch = lambda *args: None
    elif unknown == "expands by itself":
        compiled.run.launch = compiled.given
    elif unknown == "takes fewer":
        monkeypatch.setattr(driver.CudaLauncher, "__call__", lambda self, x, y: None)
    assert CapturedArguments.of(compiled, GRID, arguments(4096, 1), PLACES) is None


def _changed(compiled, change):
    """Let Triton's launcher hand on what ``change`` makes of the arguments of the launch and those of the kernel."""
    expand, launcher = compiled.run.launch, compiled.given

    def inner(*args):
        given = []
        triton_launcher._with_nonlocal(expand, "launcher", lambda *args: given.extend(args))(*args)
        nested = isinstance(given[-1], (tuple, list))
        first = len(given) - 1 if nested else next(at for at, arg in enumerate(given) if isinstance(arg, torch.Tensor))
        of_launch, of_kernel = change(given[:first], list(given[-1] if nested else given[first:]))
        launcher(*of_launch, of_kernel) if nested else launcher(*of_launch, *of_kernel)

    compiled.run.launch = inner


CHANGES = {
    "nothing": lambda of_launch, of_kernel: (of_launch, of_kernel),
    "the order": lambda of_launch, of_kernel: (
        of_launch, [of_kernel[7], *of_kernel[1:7], of_kernel[0], *of_kernel[8:]]
    ),
    "the number": lambda of_launch, of_kernel: (of_launch, [*of_kernel, 0]),
    "an integer": lambda of_launch, of_kernel: (of_launch, [*of_kernel[:-1], of_kernel[-1] + 1]),
    "the type of a number": lambda of_launch, of_kernel: (of_launch, [*of_kernel[:-1], float(of_kernel[-1])]),
    "a tensor": lambda of_launch, of_kernel: (of_launch, [gpu_tensor(of_kernel[0].data_ptr()), *of_kernel[1:]]),
    "what a map is": lambda of_launch, of_kernel: (of_launch, [of_kernel[0], 4160, *of_kernel[2:]]),
    "memory of each launch": lambda of_launch, of_kernel: (
        [object() if arg is None else arg for arg in of_launch], of_kernel
    ),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_launcher_that_hands_on_other_arguments_is_called_as_it_is(encoded, caplog, monkeypatch, change):
    monkeypatch.setattr(tested_versions, "_reported_slow_launches", False)
    compiled = _Compiled()
    args = arguments(4096, 1)
    of_kernel = pointer_signature(compiled.by_triton(GRID, args)[-1])
    assert not isinstance(of_kernel, list) or of_kernel[7:9] == [8, 4224], "the pointers that CHANGES swaps"
    _changed(compiled, CHANGES[change])
    with caplog.at_level(logging.WARNING):
        repeats = [CapturedArguments.of(compiled, GRID, args, PLACES) for _ in range(3)]
    if change == "nothing":
        assert None not in repeats and not caplog.records
    else:
        assert repeats == [None] * 3
        assert ["its launcher is not the one that was tested" in record.message for record in caplog.records] == [True]


@pytest.fixture
def another_version(monkeypatch):
    """As if a Triton of an untested version were installed."""
    monkeypatch.setattr(triton, "__version__", "3.999.0")
    monkeypatch.setattr(tested_versions, "_reported_slow_launches", False)
    tested_versions.triton_is_tested.cache_clear()
    yield
    monkeypatch.undo()
    tested_versions.triton_is_tested.cache_clear()


def test_the_installed_version_is_tested():
    assert tested_versions.triton_is_tested(), "add it to TESTED_VERSIONS once these tests pass with it"


@td.jit(do_not_specialize=["n"])
def _kernel(x_ptr, desc, n, y_ptr, other, SIZE: tl.constexpr):
    pass


@pytest.fixture
def found(monkeypatch, encoded):
    """What Triton was asked to look for, each time with the compiled kernel that it found."""
    kernels = []

    def run(self, *args, grid, warmup, **kwargs):
        kernels.append(_Compiled())
        kernels[-1].by_triton(grid, [*args, *kwargs.values()])
        return kernels[-1]

    monkeypatch.setattr(JITFunction, "run", run)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(_kernel, "_key", lambda args, kwargs: None)  # nor has a launch that is none like another
    active = SimpleNamespace(get_current_stream=lambda at: STREAM)
    monkeypatch.setattr(triton_launcher, "driver", SimpleNamespace(active=active))
    return kernels


def launch(bound_launch, address, **options):
    args = arguments(address, 1)
    _kernel.launch_bound(bound_launch, values_of(args), **options)
    return args


def test_the_second_launch_does_not_search_and_the_third_does_not_work_anything_out(found, encoded, monkeypatch):
    bound_launch = BoundLaunch(GRID, arguments(0, 1)[:5], PLACES, {"SIZE": 5})
    for address in (4096, 8192, 4096, 8192):
        args = launch(bound_launch, address)
        assert pointer_signature(found[-1].given[-1]) == pointer_signature(found[-1].by_triton(GRID, args))
    assert len(found) == 1
    encoded.clear()
    launch(bound_launch, 8192)
    assert not encoded
    for device, stream in ((0, 99), (1, STREAM)):  # that of another device is not the current one
        launch(bound_launch, 8192, stream=SimpleNamespace(cuda_stream=99, device_index=device))
        assert [number for number in (99, STREAM) if number in found[0].given[-1]] == [stream]
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    launch(bound_launch, 8192)
    assert len(found) == 2, "another device has its own"


def test_of_another_version_every_launch_is_left_to_triton(found, another_version, caplog):
    bound_launch = BoundLaunch(GRID, arguments(0, 1)[:5], PLACES, {"SIZE": 5})
    with caplog.at_level(logging.WARNING):
        for address in (4096, 4096, 4096):
            launch(bound_launch, address)
        for _ in range(2):
            _kernel[GRID](*arguments(4096, 1)[:5], SIZE=5)
    assert len(found) == 5 and not _kernel._known
    assert CapturedArguments.of(_Compiled(), GRID, arguments(4096, 1), PLACES) is None
    (record,) = caplog.records
    assert "triton 3.999.0, which takes the host longer: it was tested with triton 3.6, 3.7, 3.8" in record.message


def test_who_listens_to_launches_hears_of_them(found, encoded):
    bound_launch = BoundLaunch(GRID, arguments(0, 1)[:5], PLACES, {"SIZE": 5})
    for _ in range(3):
        launch(bound_launch, 4096)
    heard = lambda metadata: None  # noqa: E731
    knobs.runtime.launch_enter_hook.add(heard)
    try:
        encoded.clear()
        launch(bound_launch, 4096)
        assert encoded == [4160], "Triton's own launcher, which calls hooks, makes its maps anew"
    finally:
        knobs.runtime.launch_enter_hook.remove(heard)
