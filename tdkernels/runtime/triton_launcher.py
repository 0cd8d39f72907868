"""Launches of one kernel that are alike: what Triton's launcher works out for each of them is worked out for the first.

For every launch Triton looks for the current stream, walks through all arguments, asks the driver about each address,
encodes a tensor map for each descriptor and calls hooks, of which there are mostly none. Together that takes the host
longer than the launch itself, and a small call is then slower than torch's sequence. Of launches that are alike only
addresses and integers differ: what Triton's C function was given is kept, and those are filled in.
"""

import copy
import inspect
import logging
import types

import torch
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.caches import RecentCache
from tdkernels.lang.tested_versions import may_keep_launches, report_slow_launches

_log = logging.getLogger(__name__)
_UNTRIED = object()
_MAX_MAPS = 256  # of one descriptor; addresses may go on changing for ever


class BoundLaunch:
    """What is the same in launches of a kernel between which nothing differs that Triton compiles for.

    Args:
        grid: three numbers
        args, constants: as for ``kernel[grid](*args, **constants)``
        places: numbers of the args that differ from launch to launch: tensors or None, integers, descriptors, which
            differ by their tensors. They are forgotten; of the others tensors are kept
    """

    def __init__(self, grid, args, places, constants):
        self.grid, self.places, self.constants = grid, tuple(places), constants
        self._args = list(args)
        for at in self.places:
            described = isinstance(self._args[at], TensorDescriptor)
            self._args[at] = _like(self._args[at], None) if described else None
        self._found = {}

    def filled(self, values):
        """The arguments of a launch in whose places are ``values``; of a descriptor its tensor."""
        args = self._args.copy()
        for at, value in zip(self.places, values, strict=True):
            args[at] = value if args[at] is None else _like(args[at], value)
        return args

    def launch_captured(self, where, values, stream=None):
        """Launch what was kept for ``where``; False if nothing was.

        Args:
            stream: of the device in ``where``, or it is not taken; None: the current one
        """
        found = self._found.get(where)
        if found is None:
            return False
        compiled, others, repeat = found
        if repeat is _UNTRIED:  # not for the first launch: shapes may go on changing, and there may be no second
            args = [*self.filled(values), *others]
            repeat = found[2] = CapturedArguments.of(compiled, self.grid, args, self.places)
        if repeat is not None and _nobody_listens():
            known = stream is not None and stream.device_index == where[0]
            repeat(values, stream.cuda_stream if known else driver.active.get_current_stream(where[0]))
        else:
            compiled[self.grid](*self.filled(values), *others)
        return True

    def keep(self, where, compiled, others):
        """Keep the compiled kernel that was launched.

        Args:
            where: what decides which one it is, the number of the current device first
            others: its arguments after those in ``filled``
        """
        self._found[where] = [compiled, others, _UNTRIED]


class CapturedArguments:
    """The arguments of Triton's C function for launches that are alike.

    Args:
        launch: that function
        args: its arguments, with STREAM in the place of a stream
        first: the number, among these, of the kernel's first one; None: they are a list, the last of these
        plain: [(number among the kernel's, number among values)] of what is filled in as it is
        maps: the same of tensor maps, and a function that makes one for a tensor
    """

    STREAM = object()

    def __init__(self, launch, args, first, plain, maps):
        self._launch, self._plain = launch, plain
        self._maps = [(at, number, make, RecentCache(_MAX_MAPS)) for at, number, make in maps]
        stream = args.index(self.STREAM)
        self._before, self._after = args[:stream], args[stream + 1 :]
        if first is None:
            *self._after, self._args = self._after
        else:
            self._after, self._args = self._after[: first - stream - 1], self._after[first - stream - 1 :]
        self._are_nested = first is None

    @classmethod
    def of(cls, compiled, grid, args, places):
        """For a compiled kernel and its arguments; None where Triton's launcher is not as it is known here."""
        if not may_keep_launches():
            return None
        try:
            return cls._of(compiled, grid, args, places)
        except Exception as error:  # whatever another build of Triton makes of it
            report_slow_launches(f"its launcher is not the one that was tested ({type(error).__name__}: {error})")
            _log.debug("launches of %s are not kept", compiled, exc_info=True)
            return None

    @classmethod
    def _of(cls, compiled, grid, args, places):
        if not _is_known(compiled.run, any(isinstance(arg, TensorDescriptor) for arg in args)):
            return None
        flat, expected, plain, maps = _flattened(args, places, getattr(compiled.metadata, "tensordesc_meta", None))
        given, again = (_given(compiled, grid, cls.STREAM, args) for _ in range(2))
        # From triton 3.7 on the kernel's arguments are one; before, the last of them may be a NamedTuple.
        nested = type(given[-1]) in (tuple, list) and len(given[-1]) == len(flat)
        first = len(given) - (1 if nested else len(flat))
        _compare("argument of the kernel", given[-1] if nested else given[first:], expected)
        # An object that is another one each time, such as scratch memory, must not be kept.
        _compare("argument of the launch", given[:first], again[:first])
        launch = _c_function(compiled.run)
        if nested:
            return cls(launch, [*given[:first], flat], None, plain, maps)
        return cls(launch, [*given[:first], *flat], first, plain, maps)

    def __call__(self, values, stream):
        args = self._args.copy()
        for at, number in self._plain:
            value = values[number]
            args[at] = value if value is None or type(value) is int else value.data_ptr()
        for at, number, make, known in self._maps:
            tensor = values[number]
            address = tensor.data_ptr()
            tensor_map = known[address]
            if tensor_map is None:
                known[address] = tensor_map = make(tensor)
            args[at] = tensor_map
        if self._are_nested:
            self._launch(*self._before, stream, *self._after, args)
        else:
            self._launch(*self._before, stream, *self._after, *args)


def _like(descriptor, base):
    """A TensorDescriptor like one that was checked when it was made."""
    other = object.__new__(TensorDescriptor)
    other.__dict__.update(descriptor.__dict__)
    other.base = base
    return other


def _nobody_listens():
    """Whether there are no hooks around launches, such as a profiler's."""
    runtime = knobs.runtime
    return not (_calls_of(runtime.launch_enter_hook) or _calls_of(runtime.launch_exit_hook))


def _calls_of(hook):
    return hook is not None and getattr(hook, "calls", True)


def _is_known(launcher, describes):
    """Whether a launcher of Triton's is of the kind that is known here, and gives each launch nothing of its own.

    ``describes``: descriptors are among the arguments, which a function of Python expands before the C function
    """
    if type(launcher).__module__ != "triton.backends.nvidia.driver" or type(launcher).__name__ != "CudaLauncher":
        return False
    if launcher.global_scratch_size or launcher.profile_scratch_size or getattr(launcher, "gsan_enabled", False):
        return False  # memory that each launch allocates, and a launch that is followed by another call
    if inspect.isfunction(launcher.launch):
        return _INNER in launcher.launch.__code__.co_freevars
    return not describes


_INNER = "launcher"  # how the function that expands descriptors calls the C function


def _c_function(launcher):
    """What a launcher of Triton's calls at last."""
    if inspect.isfunction(launcher.launch):
        return inspect.getclosurevars(launcher.launch).nonlocals[_INNER]
    return launcher.launch


def _given(compiled, grid, stream, args):
    """What Triton's launcher gives its C function for a launch, which does not take place."""
    given, twin = [], copy.copy(compiled.run)

    def take(*args):
        given.extend(args)

    twin.launch = _with_nonlocal(twin.launch, _INNER, take) if inspect.isfunction(twin.launch) else take
    twin(*grid, stream, compiled.function, compiled.packed_metadata, None, None, None, *args)
    return given


def _with_nonlocal(function, name, value):
    """A copy of a function that has another value in the place of a variable of the function around it."""
    cells = [
        types.CellType(value) if free == name else cell
        for free, cell in zip(function.__code__.co_freevars, function.__closure__, strict=True)
    ]
    return types.FunctionType(
        function.__code__, function.__globals__, function.__name__, function.__defaults__, tuple(cells)
    )


class _SomeMap:
    """A placeholder for a tensor map, which each launch makes anew."""

    def __init__(self, tensor_map):
        self.type = type(tensor_map)


def _compare(what, given, expected):
    """Raise ValueError unless both are the same objects in the same order; of numbers, equal ones of the same type."""
    if len(given) != len(expected):
        raise ValueError(f"{len(given)} {what}s instead of {len(expected)}")
    for number, (mine, theirs) in enumerate(zip(expected, given, strict=True)):
        same = mine is theirs or (type(mine) is type(theirs) and type(mine) in _NUMBERS and mine == theirs)
        if not same and not (isinstance(mine, _SomeMap) and type(theirs) is mine.type):
            raise ValueError(f"{what} {number} is {_shown(theirs)} instead of {_shown(mine)}")


_NUMBERS = {int, bool, float}


def _shown(value):
    return repr(value) if type(value) in _NUMBERS or value is None else f"a {type(value).__name__}"


def _flattened(args, places, described):
    """The kernel's arguments as the C function takes them.

    Args:
        described: of each descriptor, what Triton has compiled for; None: it is no tensor map

    Returns:
        (the arguments, with addresses for tensors; the same as Triton's launcher hands them on; of those that differ
        from launch to launch ``plain`` and ``maps``, see ``Repeat``)
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    # From triton 3.8 on it is given the arguments of the launch as well, which it does not use for our descriptors.
    unused = (None,) * (len(inspect.signature(make_tensordesc_arg).parameters) - 2)
    number_of = {at: number for number, at in enumerate(places)}
    described = iter(described or ())
    flat, expected, plain, maps = [], [], [], []
    for at, arg in enumerate(args):
        number = number_of.get(at)
        if isinstance(arg, TensorDescriptor):
            meta = next(described, None)
            if number is not None and meta is None:
                plain.append((len(flat), number))
            elif number is not None:
                like = _like(arg, None)
                make = lambda base, like=like, meta=meta: make_tensordesc_arg(_like(like, base), meta, *unused)[0]  # noqa: E731
                maps.append((len(flat), number, make))
            expanded = make_tensordesc_arg(arg, meta, *unused)
            flat += expanded
            expected += expanded if meta is None else [_SomeMap(expanded[0]), *expanded[1:]]
            continue
        if number is not None:
            plain.append((len(flat), number))
        flat.append(arg.data_ptr() if isinstance(arg, torch.Tensor) and arg.is_cuda else arg)
        expected.append(arg)
    return flat, expected, plain, maps
