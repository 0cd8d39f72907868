"""One decorator, two executions: a kernel compiles for GPU tensors and is interpreted for CPU tensors.

Stock ``triton.jit`` decides once, at decoration, by the environment variable ``TRITON_INTERPRET``. Here the launch
decides, by where its tensors live, so that importing the library needs no environment variable and one process can run
a kernel on the CPU and compile the same kernel for a GPU.
"""

import functools

import torch
import triton.language as tl
from triton import knobs
from triton.compiler import CompiledKernel
from triton.runtime import interpreter
from triton.runtime.jit import JITFunction
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.caches import RecentCache
from tdkernels.lang import device_library
from tdkernels.lang.interpreter import interpreter_options, interpreting, on_cpu
from tdkernels.lang.tested_versions import may_keep_launches


class Kernel(JITFunction):
    """A JIT function that can also be interpreted; what a kernel calls must be one too.

    ``network``: it is a kernel that speaks to the network, and has to be linked with the network's library.
    A constexpr argument may be a NamedTuple of plain values, whose fields the kernel reads by their names; it is given
    by keyword.
    """

    def __init__(self, fn, network=False, **options):
        super().__init__(fn, **options)
        self._network = network
        self._known = RecentCache(_MAX_KNOWN)  # what launches were found to run, by all that decides it

    @functools.cached_property
    def _interpreted(self):
        return interpreter.InterpretedFunction(self.fn)

    def __call__(self, *args, **kwargs):
        """A device function called by an interpreted kernel, whose launch has already patched ``triton.language``."""
        return self._interpreted.rewrite()(*args, **kwargs)

    def run(self, *args, grid, warmup, **kwargs):
        if on_cpu(args) or on_cpu(kwargs.values()):
            with interpreting, interpreter_options():
                return self._interpreted.run(*args, grid=grid, warmup=warmup, **kwargs)
        may_be_known = not warmup and not self.pre_run_hooks and type(grid) is tuple and may_keep_launches()
        key = self._key(args, kwargs) if may_be_known else None
        if key is None:
            return self._search(args, grid, warmup, kwargs)
        return self._launch(key, args, grid, kwargs)

    def _search(self, args, grid, warmup, kwargs):
        """What ``JITFunction.run`` does; of a kernel that speaks to the network the library is told first."""
        kwargs = with_constexpr_fields(kwargs)
        if not self._network:
            return super().run(*args, grid=grid, warmup=warmup, **kwargs)
        kwargs = {**kwargs, "extern_libs": device_library.paths()}
        compiled = super().run(*args, grid=grid, warmup=True, **kwargs)
        if warmup:
            return compiled
        device_library.loaded(compiled)
        return super().run(*args, grid=grid, warmup=False, **kwargs)

    def _launch(self, key, args, grid, kwargs):
        """What ``JITFunction.run`` does, without looking for the compiled kernel again: that takes most of its time."""
        known = self._known[key]
        if known is None:
            compiled = self._search(args, grid, False, kwargs)
            if isinstance(compiled, CompiledKernel):
                self._known[key] = compiled, self._others(args, kwargs)
            return compiled
        compiled, others = known
        compiled[(*grid, 1, 1)[:3]](*args, *others)
        return compiled

    def _others(self, args, kwargs):
        """The arguments after ``args``, in the kernel's order."""
        parameters = list(self.signature.parameters.values())[len(args) :]
        return [kwargs.get(parameter.name, parameter.default) for parameter in parameters]

    def launch_bound(self, bound_launch, values, stream=None):
        """``self[alike.grid](*alike.filled(values), **alike.constants)``, without looking again at what is the same.

        Args:
            bound_launch: a BoundLaunch
            values: for its places
            stream: the current one, if the caller knows it
        """
        where = None
        if (
            torch.cuda.is_initialized() and not self.pre_run_hooks and not _is_inspected() and may_keep_launches()
        ):
            where = torch.cuda.current_device(), knobs.runtime.debug
            if bound_launch.launch_captured(where, values, stream):
                return
        args = bound_launch.filled(values)
        compiled = self.run(*args, grid=bound_launch.grid, warmup=False, **bound_launch.constants)
        if where is not None and isinstance(compiled, CompiledKernel):  # it has not been interpreted
            bound_launch.keep(where, compiled, self._others(args, bound_launch.constants))

    def _key(self, args, kwargs):
        """All that decides what a launch runs, or None for one with something in it that is not usual here."""
        grouped = [value for value in kwargs.values() if type(value) not in _PLAIN]
        if not all(hasattr(value, "_fields") for value in grouped) or _is_inspected():
            return None
        try:
            kinds = map(_kind, self._specialized, args)
            return (
                torch.cuda.current_device(), knobs.runtime.debug, *kinds, *kwargs.items(), *map(type, kwargs.values()),
                *[type(field) for value in grouped for field in value],
            )
        except LookupError:
            return None

    @functools.cached_property
    def _specialized(self):
        """For each parameter whether Triton compiles anew for other integers than those seen."""
        return [not parameter.do_not_specialize for parameter in self.params]


def with_constexpr_fields(kwargs):
    """The arguments of a launch, in which each field of a NamedTuple is a constexpr.

    Triton reads a field as it is. Up to 3.6 it does not take a plain value for an argument of a device function.
    """
    return {
        name: type(value)(*map(tl.constexpr, value)) if hasattr(value, "_fields") else value
        for name, value in kwargs.items()
    }


_MAX_KNOWN = 4096  # of one kernel; shapes may go on changing for ever
_PLAIN = {int, bool, str, type(None), tl.dtype}
_HOOK = "add_stages_inspection_hook" if hasattr(knobs.runtime, "add_stages_inspection_hook") else None


def _is_inspected():
    """Whether somebody wants to see, or to change, how Triton compiles."""
    return _HOOK is not None and getattr(knobs.runtime, _HOOK) is not None


def pointer_kind(tensor):
    """What Triton compiles for, of a tensor."""
    # AMD's compiler addresses what is less than 2 GiB in another way.
    small = torch.version.hip is None or tensor.untyped_storage().size() < 1 << 31
    return tensor.dtype, tensor.data_ptr() % 16 == 0, small


def _kind(specialized, arg):
    """What Triton compiles for, of an argument: equal for arguments that the same code serves.

    Raises:
        LookupError: for an argument of another type than those that are usual here
    """
    if isinstance(arg, torch.Tensor):
        return pointer_kind(arg)
    kind = type(arg)
    if kind is int:
        if specialized:
            return int, arg
        return "i32" if -(1 << 31) <= arg < 1 << 31 else "i64" if arg < 1 << 63 else "u64"
    if arg is None or kind is bool:
        return kind, arg
    if kind is float:
        return kind
    if kind is TensorDescriptor:
        return arg.base.dtype, tuple(arg.block_shape), arg.padding
    raise LookupError


def jit(fn=None, **options):
    """Make a kernel or a device function of ``fn``; the options are those of ``triton.jit``, and ``network``.

    ``network=True``: a kernel in which a word of ``lang.rdma`` is used.

    Inside, use ``tl.full`` and ``//`` rather than ``tl.zeros`` and ``tl.cdiv``: what ``triton.language`` itself
    decorates with ``triton.jit`` exists for the compiler only.
    """
    if fn is None:
        return lambda f: Kernel(f, **options)
    return Kernel(fn, **options)
