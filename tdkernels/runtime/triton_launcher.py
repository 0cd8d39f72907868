"""Bypass Triton's Python launcher for repeated launches with the same signature.

For each launch Triton looks up the current stream, walks through all arguments, queries the driver about each address,
encodes a tensor map for each descriptor, and calls hooks, although usually none are installed. Together this takes the
host longer than the launch itself, and a small call would be slower than the unfused baseline. Launches with the same
signature differ only in addresses and integers. The first such launch is a normal one. The second one records the
arguments of Triton's C launcher. From then on, launches patch in new pointers and integers and call it directly.
"""

import copy
import inspect
import logging
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.caches import RecentCache
from tdkernels.lang.tested_versions import may_keep_launches, report_slow_launches

if TYPE_CHECKING:
    from triton.compiler import CompiledKernel

_log = logging.getLogger(__name__)
_NOT_CAPTURED = object()
DESCRIPTORS: tuple[type[Any], ...] = (TensorDescriptor,)
try:  # Gluon is experimental: a later Triton may not have this class, and other kernels do not need it
    from triton.experimental.gluon.nvidia.hopper import TensorDescriptor as GluonDescriptor

    DESCRIPTORS += (GluonDescriptor,)
except ImportError:
    pass
_MAX_MAPS = 256  # per descriptor; the number of addresses is unbounded


class Rows(int):
    """A number of rows that differs between launches of a ``BoundLaunch`` or a ``Launch``.

    As a size of a descriptor it is the first dimension of the descriptor's tensor.
    """


def without_rows(layouts: list[Any], numbers: Sequence[int]) -> None:
    """Remove the number of rows R from layouts, tuples that begin with a shape, or None.

    R is the first dimension of the first layout.

    Args:
        layouts: The layouts, changed in place.
        numbers: Indices of the layouts from which it is removed if their first dimension is R and R is more than 1.
            So one scale for all rows differs from a scale for each row.
    """
    rows = layouts[0][0][:1]
    if not rows or rows[0] <= 1:
        return
    for number in numbers:
        layout = layouts[number]
        if layout is not None and layout[0][:1] == rows:
            layouts[number] = layout[0][1:], layout[1:]


class BoundLaunch:
    """Launches of one kernel with the same signature: nothing differs between them that Triton compiles for.

    Args:
        grid: three integers.
        args: as in ``kernel[grid](*args, **constants)``.
        places: indices of the variable arguments: tensors or None, integers, and descriptors, which differ in their
            tensor and in sizes of type ``Rows``. Their values are not kept; other tensors are.
        constants: as in ``kernel[grid](*args, **constants)``.
    """

    def __init__(
        self, grid: tuple[int, ...], args: Iterable[Any], places: Iterable[int], constants: Mapping[str, Any]
    ) -> None:
        self.grid, self.places, self.constants = grid, tuple(places), constants
        self._args = list(args)
        for at in self.places:
            described = isinstance(self._args[at], DESCRIPTORS)
            self._args[at] = _like(self._args[at], None) if described else None
        self._found: dict[tuple[int, Any], list[Any]] = {}

    def filled(self, values: Sequence[Any]) -> list[Any]:
        """Return the arguments of a launch with ``values`` in ``places``; a descriptor gets its tensor."""
        args = self._args.copy()
        for at, value in zip(self.places, values, strict=True):
            args[at] = value if args[at] is None else _like(args[at], value)
        return args

    def launch_captured(self, where: tuple[int, Any], values: Sequence[Any], stream: Any = None) -> bool:
        """Launch the compiled kernel that was kept for ``where``. Return False if there is none.

        Args:
            where: as for ``keep``.
            values: values for the variable arguments.
            stream: the current ``torch.cuda.Stream`` if the caller knows it, or None. It is used if it belongs to the
                device in ``where``.
        """
        found = self._found.get(where)
        if found is None:
            return False
        compiled, others, repeat = found
        if repeat is _NOT_CAPTURED:  # not at the first launch: if shapes keep changing, there may be no second one
            args = [*self.filled(values), *others]
            repeat = found[2] = CapturedArguments.of(compiled, self.grid, args, self.places)
        if repeat is not None and _has_no_launch_hooks():
            known = stream is not None and stream.device_index == where[0]
            repeat(values, stream.cuda_stream if known else driver.active.get_current_stream(where[0]))
        else:
            compiled[self.grid](*self.filled(values), *others)
        return True

    def keep(self, where: tuple[int, Any], compiled: "CompiledKernel", others: Sequence[Any]) -> None:
        """Keep the compiled kernel of a launch.

        Args:
            where: the state that the compiled kernel depends on; its first element is the index of the current device.
            compiled: the compiled kernel.
            others: its arguments after those of ``filled``.
        """
        self._found[where] = [compiled, others, _NOT_CAPTURED]


class CapturedArguments:
    """Captured arguments of Triton's C launcher, for launches with the same signature.

    Args:
        launch: the C launcher.
        args: its arguments, with ``STREAM`` as a placeholder for the stream.
        first: index in ``args`` of the kernel's first argument. None: the kernel's arguments are a list, the last
            element of ``args``.
        plain: [(index among the kernel's arguments, index among values)] of the values that are filled in as they are.
        maps: the same for tensor maps, with a function that encodes one for a tensor, and the indices among the
            kernel's arguments of the sizes of type ``Rows``.
    """

    STREAM = object()

    def __init__(
        self,
        launch: Callable[..., Any],
        args: list[Any],
        first: int | None,
        plain: list[tuple[int, int]],
        maps: list[tuple[int, int, Callable[[torch.Tensor], Any], list[int]]],
    ) -> None:
        self._launch, self._plain = launch, plain
        self._maps = [(*each, RecentCache(_MAX_MAPS)) for each in maps]
        stream = args.index(self.STREAM)
        self._before, self._after = args[:stream], args[stream + 1 :]
        if first is None:
            *self._after, self._args = self._after
        else:
            self._after, self._args = self._after[: first - stream - 1], self._after[first - stream - 1 :]
        self._are_nested = first is None

    @classmethod
    def of(
        cls, compiled: "CompiledKernel", grid: tuple[int, ...], args: Sequence[Any], places: Sequence[int]
    ) -> "CapturedArguments | None":
        """Capture the arguments of a compiled kernel. Return None if Triton's launcher is not supported."""
        if not may_keep_launches():
            return None
        try:
            return cls._of(compiled, grid, args, places)
        except Exception as error:  # another build of Triton may raise anything here
            report_slow_launches(f"its launcher is not the one that was tested ({type(error).__name__}: {error})")
            _log.debug("launches of %s are not cached", compiled, exc_info=True)
            return None

    @classmethod
    def _of(cls, compiled, grid, args, places):
        """Capture the arguments, and compare them with those that Triton's launcher passes to the C launcher."""
        if not _is_supported(compiled.run, any(isinstance(arg, DESCRIPTORS) for arg in args)):
            return None
        flat, expected, plain, maps = _flattened(args, places, getattr(compiled.metadata, "tensordesc_meta", None))
        given, again = (_c_arguments(compiled, grid, cls.STREAM, args) for _ in range(2))
        # From triton 3.7 on, the kernel's arguments are one argument. Before, the last one may be a NamedTuple.
        nested = type(given[-1]) in (tuple, list) and len(given[-1]) == len(flat)
        first = len(given) - (1 if nested else len(flat))
        _compare("kernel argument", given[-1] if nested else given[first:], expected)
        # An object that differs in each launch, such as scratch memory, must not be captured.
        _compare("launch argument", given[:first], again[:first])
        launch = _c_launcher(compiled.run)
        if nested:
            return cls(launch, [*given[:first], flat], None, plain, maps)
        return cls(launch, [*given[:first], *flat], first, plain, maps)

    def __call__(self, values: Sequence[Any], stream: int) -> None:
        """Launch on a stream (its handle) with these values for the variable arguments."""
        args = self._args.copy()
        for at, number in self._plain:
            value = values[number]
            args[at] = value if value is None or type(value) is int else value.data_ptr()
        for at, number, make, rows_at, cache in self._maps:
            tensor = values[number]
            key = tensor.data_ptr()
            if rows_at:
                rows = tensor.shape[0]
                key = key, rows
                for place in rows_at:
                    args[place] = rows
            tensor_map = cache[key]
            if tensor_map is None:
                cache[key] = tensor_map = make(tensor)
            args[at] = tensor_map
        if self._are_nested:
            self._launch(*self._before, stream, *self._after, args)
        else:
            self._launch(*self._before, stream, *self._after, *args)


def _like(descriptor, base):
    """Return a copy of a descriptor with another tensor, without repeating the checks of its constructor.

    Its sizes of type ``Rows`` are those of the tensor.
    """
    other = object.__new__(type(descriptor))
    other.__dict__.update(descriptor.__dict__)
    other.base = base
    if base is not None and Rows in map(type, descriptor.shape):
        other.shape = [Rows(base.shape[0]) if type(size) is Rows else size for size in descriptor.shape]
    return other


def _has_no_launch_hooks():
    """Return whether no launch hooks, such as a profiler's, are installed."""
    runtime = knobs.runtime
    return not (_callbacks_of(runtime.launch_enter_hook) or _callbacks_of(runtime.launch_exit_hook))


def _callbacks_of(hook):
    """Return the callbacks of a hook; a false value if there are none."""
    return hook is not None and getattr(hook, "calls", True)


def _is_supported(launcher, describes):
    """Return whether Triton's launcher is a supported one and passes no object that differs in each launch.

    Args:
        launcher: the launcher of a compiled kernel.
        describes: whether descriptors are among the arguments. A Python function expands them before the C launcher.
    """
    if type(launcher).__module__ != "triton.backends.nvidia.driver" or type(launcher).__name__ != "CudaLauncher":
        return False
    if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
        return False  # scratch memory is allocated in each launch; gsan makes another call after it
    if inspect.isfunction(launcher.launch):
        return _INNER in launcher.launch.__code__.co_freevars
    return not describes


_INNER = "launcher"  # name of the C launcher in the function that expands descriptors


def _c_launcher(launcher):
    """Return the C launcher that Triton's launcher calls."""
    if inspect.isfunction(launcher.launch):
        return inspect.getclosurevars(launcher.launch).nonlocals[_INNER]
    return launcher.launch


def _c_arguments(compiled, grid, stream, args):
    """Return the arguments that Triton's launcher passes to the C launcher, without launching."""
    given, twin = [], copy.copy(compiled.run)

    def take(*args):
        given.extend(args)

    twin.launch = _with_nonlocal(twin.launch, _INNER, take) if inspect.isfunction(twin.launch) else take
    twin(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
    return given


def _with_nonlocal(function, name, value):
    """Return a copy of a function with another value for a variable of its enclosing function."""
    cells = [
        types.CellType(value) if free == name else cell
        for free, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    ]
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )


class _AnyTensorMap:
    """A placeholder for a tensor map, since Triton encodes a new one in each launch."""

    def __init__(self, tensor_map):
        self.type = type(tensor_map)


def _compare(what, given, expected):
    """Raise ValueError unless both sequences hold the same objects; numbers must be equal and of the same type."""
    if len(given) != len(expected):
        raise ValueError(f"{len(given)} {what}s instead of {len(expected)}")
    for number, (mine, theirs) in enumerate(zip(expected, given, strict=True)):
        same = mine is theirs or (type(mine) is type(theirs) and type(mine) in _NUMBERS and mine == theirs)
        if not same and not (isinstance(mine, _AnyTensorMap) and type(theirs) is mine.type):
            raise ValueError(f"{what} {number} is {_describe(theirs)} instead of {_describe(mine)}")


_NUMBERS = {int, bool, float}


def _describe(value):
    """Return a description of an argument for error messages."""
    return repr(value) if type(value) in _NUMBERS or value is None else f"a {type(value).__name__}"


def _flattened(args, places, described):
    """Return the kernel's arguments as the C launcher takes them.

    Args:
        args: the arguments of the launch.
        places: indices of the variable arguments.
        described: for each descriptor, Triton's metadata of its tensor map, or None if it is not a tensor map.

    Returns:
        (flat, expected, plain, maps): the arguments with addresses for tensors; the same as Triton's launcher passes
        them; the variable ones, see ``CapturedArguments``.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    # From triton 3.8 on, it also takes the arguments of the launch, which it does not use for these descriptors.
    unused = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)
    number_of = {at: number for number, at in enumerate(places)}
    described = iter(described or ())
    flat, expected, plain, maps = [], [], [], []
    for at, arg in enumerate(args):
        number = number_of.get(at)
        if isinstance(arg, DESCRIPTORS):
            meta = next(described, None)
            if number is not None and meta is None:
                if Rows in map(type, arg.shape):
                    raise ValueError("sizes of a descriptor that is not a tensor map differ between launches")
                plain.append((len(flat), number))
            elif number is not None:
                like = _like(arg, None)
                make = lambda base, like=like, meta=meta: make_tensordesc_arg(_like(like, base), meta, *unused)[0]  # noqa: E731
                first = len(flat) + 1  # the sizes follow the map
                rows_at = [first + axis for axis, size in enumerate(arg.shape) if type(size) is Rows]
                maps.append((len(flat), number, make, rows_at))
            expanded = make_tensordesc_arg(arg, meta, *unused)
            flat += expanded
            expected += expanded if meta is None else [_AnyTensorMap(expanded[0]), *expanded[1:]]
            continue
        if number is not None:
            plain.append((len(flat), number))
        flat.append(arg.data_ptr() if isinstance(arg, torch.Tensor) and arg.is_cuda else arg)
        expected.append(arg)
    return flat, expected, plain, maps
