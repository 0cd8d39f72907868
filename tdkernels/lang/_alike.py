"""Launches of one kernel that are alike: what Triton's launcher works out for each of them is worked out for the first.

For every launch Triton looks for the current stream, walks through all arguments, asks the driver about each address,
encodes a tensor map for each descriptor and calls hooks, of which there are mostly none. Together that takes the host
longer than the launch itself, and a small call is then slower than torch's sequence. Of launches that are alike only
addresses and integers differ: what Triton's C function was given is kept, and those are filled in.
"""

import copy
import inspect
import logging

import torch
from triton import knobs
from triton.runtime import driver
from triton.tools.tensor_descriptor import TensorDescriptor

_log = logging.getLogger(__name__)
_UNTRIED = object()
_MAX_MAPS = 256  # of one descriptor; addresses may go on changing for ever


class Alike:
    """What is the same in launches of a kernel between which nothing differs that Triton compiles for.

    Args:     grid: three numbers; args, constants: as for ``kernel[grid](*args, **constants)``
              places: numbers of the args that differ from launch to launch: tensors or None, integers, descriptors,
              which differ by their tensors. They are forgotten; of the others tensors are kept
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

    def launch_known(self, where, values, stream=None):
        """Launch what was kept for ``where``; False if nothing was.

        Args:     stream: of the device in ``where``, or it is not taken; None: the current one
        """
        found = self._found.get(where)
        if found is None:
            return False
        compiled, others, repeat = found
        if repeat is _UNTRIED:  # not for the first launch: shapes may go on changing, and there may be no second
            args = [*self.filled(values), *others]
            repeat = found[2] = Repeat.of(compiled, self.grid, args, self.places)
        if repeat is not None and _nobody_listens():
            known = stream is not None and stream.device_index == where[0]
            repeat(values, stream.cuda_stream if known else driver.active.get_current_stream(where[0]))
        else:
            compiled[self.grid](*self.filled(values), *others)
        return True

    def keep(self, where, compiled, others):
        """Keep the compiled kernel that was launched.

        Args:     where: what decides which one it is, the number of the current device first
                  others: its arguments after those in ``filled``
        """
        self._found[where] = [compiled, others, _UNTRIED]


class Repeat:
    """The arguments of Triton's C function for launches that are alike.

    Args:     launch: that function; args: its arguments, with STREAM in the place of a stream
              first: the number, among these, of the kernel's first one; None: they are a list, the last of these
              plain: [(number among the kernel's, number among values)] of what is filled in as it is
              maps: the same of tensor maps, and a function that makes one for a tensor
    """

    STREAM = object()

    def __init__(self, launch, args, first, plain, maps):
        self._launch, self._plain = launch, plain
        self._maps = [(at, number, make, {}) for at, number, make in maps]
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
        try:
            return cls._of(compiled, grid, args, places)
        except Exception:  # whatever another Triton makes of it: then each launch goes its way
            _log.debug("launches of %s are not repeated", compiled, exc_info=True)
            return None

    @classmethod
    def _of(cls, compiled, grid, args, places):
        launcher = compiled.run
        launch = _c_function(launcher, any(isinstance(arg, TensorDescriptor) for arg in args))
        if launch is None:
            return None
        flat, plain, maps = _flattened(args, places, getattr(compiled.metadata, "tensordesc_meta", None))
        twin, given = copy.copy(launcher), []
        twin.launch = lambda *args: given.extend(args)
        twin(*grid, cls.STREAM, compiled.function, compiled.packed_metadata, None, None, None, *flat)
        if isinstance(given[-1], tuple) and len(given[-1]) == len(flat):  # from triton 3.7 on
            return cls(launch, [*given[:-1], flat], None, plain, maps)
        first = len(given) - len(flat)
        if not all(mine is theirs for mine, theirs in zip(flat, given[first:], strict=True)):
            return None
        return cls(launch, given, first, plain, maps)

    def __call__(self, values, stream):
        args = self._args.copy()
        for at, number in self._plain:
            value = values[number]
            args[at] = value if value is None or type(value) is int else value.data_ptr()
        for at, number, make, known in self._maps:
            tensor = values[number]
            address = tensor.data_ptr()
            args[at] = known.get(address) or _remember(known, address, make(tensor))
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


def _remember(known, address, tensor_map):
    if len(known) >= _MAX_MAPS:
        known.clear()
    known[address] = tensor_map
    return tensor_map


def _nobody_listens():
    """Whether there are no hooks around launches, such as a profiler's."""
    runtime = knobs.runtime
    return not (_calls_of(runtime.launch_enter_hook) or _calls_of(runtime.launch_exit_hook))


def _calls_of(hook):
    return hook is not None and getattr(hook, "calls", True)


def _c_function(launcher, describes):
    """What a launcher of Triton's calls at last; None for launchers that are not of the kind that is known here.

    ``describes``: descriptors are among the arguments, which a function of Python expands before that
    """
    if type(launcher).__module__ != "triton.backends.nvidia.driver" or type(launcher).__name__ != "CudaLauncher":
        return None
    if launcher.global_scratch_size or launcher.profile_scratch_size:
        return None  # which each launch allocates
    if inspect.isfunction(launcher.launch):
        return inspect.getclosurevars(launcher.launch).nonlocals.get("launcher")
    return None if describes else launcher.launch


def _flattened(args, places, described):
    """The kernel's arguments as the C function takes them, and of those that differ where they are (see ``Repeat``).

    Args:     described: of each descriptor, what Triton has compiled for; None: it is no tensor map
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    number_of = {at: number for number, at in enumerate(places)}
    described = iter(described or ())
    flat, plain, maps = [], [], []
    for at, arg in enumerate(args):
        number = number_of.get(at)
        if isinstance(arg, TensorDescriptor):
            meta = next(described, None)
            if number is not None and meta is None:
                plain.append((len(flat), number))
            elif number is not None:
                like = _like(arg, None)
                make = lambda base, like=like, meta=meta: make_tensordesc_arg(_like(like, base), meta)[0]  # noqa: E731
                maps.append((len(flat), number, make))
            flat += make_tensordesc_arg(arg, meta)
            continue
        if number is not None:
            plain.append((len(flat), number))
        flat.append(arg.data_ptr() if isinstance(arg, torch.Tensor) and arg.is_cuda else arg)
    return flat, plain, maps
