"""The ``jit`` decorator: the same kernel is compiled for GPU tensors and interpreted for CPU tensors.

Stock ``triton.jit`` decides once, at decoration, by the environment variable ``TRITON_INTERPRET``. Here each launch
decides by the device of its tensors. So importing the library needs no environment variable, and one process can run a
kernel on the CPU and compile the same kernel for a GPU.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    """A JIT function that can also be interpreted. Every function that a kernel calls must be a ``Kernel``, too.

    A constexpr argument may be a NamedTuple of plain values. It is passed by keyword, and the kernel reads its fields
    by name.

    Args:
        fn: the Python function.
        network: whether the kernel uses the network (``lang.rdma``), so that it must be linked with the network's
            device library.
        **options: options of ``triton.jit``.
    """

    def __init__(self, fn: Callable[..., Any], network: bool = False, **options: Any) -> None:
        super().__init__(fn, **options)
        self._network = network
        self._known = RecentCache(_MAX_KNOWN)  # compiled kernels, keyed by everything that selects one

    @functools.cached_property
    def _interpreted(self):
        return interpreter.InterpretedFunction(self.fn)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run a device function called by an interpreted kernel.

        The launch of the kernel has already patched ``triton.language``.
        """
        return self._interpreted.rewrite()(*args, **kwargs)

    def run(self, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        """Launch the kernel like ``JITFunction.run``, in the interpreter if its first tensor is on the CPU."""
        if on_cpu(args) or on_cpu(kwargs.values()):
            with interpreting, interpreter_options():
                return self._interpreted.run(*args, grid=grid, warmup=warmup, **kwargs)
        may_be_known = not warmup and not self.pre_run_hooks and type(grid) is tuple and may_keep_launches()
        key = self._key(args, kwargs) if may_be_known else None
        if key is None:
            return self._search(args, grid, warmup, kwargs)
        return self._launch(key, args, grid, kwargs)

    def _search(self, args, grid, warmup, kwargs):
        """Call ``JITFunction.run``; first initialize the device library if the kernel uses the network."""
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
        """Launch like ``JITFunction.run``, but look up the compiled kernel only once per key.

        That lookup takes most of the time of ``JITFunction.run``.
        """
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
        """Return the arguments after ``args``, in the kernel's order."""
        parameters = list(self.signature.parameters.values())[len(args) :]
        return [kwargs.get(parameter.name, parameter.default) for parameter in parameters]

    def launch_bound(
        self, bound_launch: Any, values: Sequence[Any], stream: torch.cuda.Stream | None = None
    ) -> None:
        """Launch a bound launch with new values, without checking again what is the same in all its launches.

        Equals ``self[bound_launch.grid](*bound_launch.filled(values), **bound_launch.constants)``.

        Args:
            bound_launch: a ``runtime.triton_launcher.BoundLaunch``.
            values: values for its variable arguments (``places``).
            stream: the current stream, if the caller knows it.
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
        if where is not None and isinstance(compiled, CompiledKernel):  # not interpreted
            bound_launch.keep(where, compiled, self._others(args, bound_launch.constants))

    def _key(self, args, kwargs):
        """Return the key of the compiled kernel for a launch, or None if an argument is of an unsupported type."""
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
        """For each parameter, whether Triton specializes the kernel for its integer values."""
        return [not parameter.do_not_specialize for parameter in self.params]


def with_constexpr_fields(kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a launch with each field of a NamedTuple wrapped in a constexpr.

    Triton reads a field as it is. Up to 3.6 it does not accept a plain value as an argument of a device function.
    """
    return {
        name: type(value)(*map(tl.constexpr, value)) if hasattr(value, "_fields") else value
        for name, value in kwargs.items()
    }


_MAX_KNOWN = 4096  # entries per kernel; the number of shapes is unbounded
_PLAIN = {int, bool, str, type(None), tl.dtype}
_HOOK = "add_stages_inspection_hook" if hasattr(knobs.runtime, "add_stages_inspection_hook") else None


def _is_inspected():
    """Return whether a hook that inspects or changes Triton's compilation is installed."""
    return _HOOK is not None and getattr(knobs.runtime, _HOOK) is not None


def pointer_kind(tensor: torch.Tensor) -> tuple[torch.dtype, bool, bool]:
    """Return the properties of a tensor for which Triton specializes a kernel.

    They are the dtype, whether the address is a multiple of 16, and on AMD whether the storage is below 2 GiB.
    """
    # AMD's compiler uses another addressing mode for storage below 2 GiB.
    small = torch.version.hip is None or tensor.untyped_storage().size() < 1 << 31
    return tensor.dtype, tensor.data_ptr() % 16 == 0, small


def _kind(specialized, arg):
    """Return the part of the key that an argument contributes: equal for arguments that the same compiled code serves.

    Raises:
        LookupError: for an argument of an unsupported type.
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


def jit(fn: Callable[..., Any] | None = None, **options: Any) -> Any:
    """Turn ``fn`` into a kernel or a device function, in place of ``triton.jit``.

    Inside, use ``tl.full`` and ``//`` rather than ``tl.zeros`` and ``tl.cdiv``: functions that ``triton.language``
    itself decorates with ``triton.jit`` exist for the compiler only.

    Args:
        fn: the Python function; None if the decorator is used with options.
        **options: options of ``triton.jit``, and ``network=True`` for a kernel that uses a function of ``lang.rdma``.

    Returns:
        A ``Kernel``, or a decorator that returns one if ``fn`` is None.
    """
    if fn is None:
        return lambda f: Kernel(f, **options)
    return Kernel(fn, **options)
