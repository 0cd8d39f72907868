"""One decorator, two executions: a kernel compiles for GPU tensors and is interpreted for CPU tensors.

Stock ``triton.jit`` decides once, at decoration, by the environment variable ``TRITON_INTERPRET``. Here the launch
decides, by where its tensors live, so that importing the library needs no environment variable and one process can run
a kernel on the CPU and compile the same kernel for a GPU.
"""

import contextlib
import dataclasses

import triton
from triton import knobs
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction, interpreter_builder
from triton.runtime.jit import JITFunction


class Kernel(JITFunction):
    """A JIT function that can also be interpreted; what a kernel calls must be one too."""

    def __init__(self, fn, **options):
        super().__init__(fn, **options)
        self._interpreted = InterpretedFunction(fn)

    def __call__(self, *args, **kwargs):
        """A device function called by an interpreted kernel, whose launch has already patched ``triton.language``."""
        return self._interpreted.rewrite()(*args, **kwargs)

    def run(self, *args, grid, warmup, **kwargs):
        if _on_cpu(args) or _on_cpu(kwargs.values()):
            with _interpreter_options():
                return self._interpreted.run(*args, grid=grid, warmup=warmup, **kwargs)
        return super().run(*args, grid=grid, warmup=warmup, **kwargs)


@contextlib.contextmanager
def _interpreter_options():
    """Check every integer operation for overflow only where the compiler would: it takes a third of the time."""
    saved = interpreter_builder.options
    interpreter_builder.options = dataclasses.replace(saved, sanitize_overflow=knobs.runtime.debug)
    try:
        yield
    finally:
        interpreter_builder.options = saved


def _let_scalars_be_indices(patch):
    """Wrap what makes tensors of ``triton.language`` behave in the interpreter, for triton 3.6 with numpy >= 2.4.

    A scalar is an array of one element there, which such a numpy does not convert to an integer any more.
    """

    def patched(tensor, scope):
        patch(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))

    return patched


if triton.__version__.startswith("3.6."):
    interpreter._patch_lang_tensor = _let_scalars_be_indices(interpreter._patch_lang_tensor)


def _on_cpu(args):
    for arg in args:
        device = getattr(arg, "device", None)
        if device is not None:
            return device.type == "cpu"
    return False


def jit(fn=None, **options):
    """Make a kernel or a device function of ``fn``; the options are those of ``triton.jit``.

    Inside, use ``tl.full`` and ``//`` rather than ``tl.zeros`` and ``tl.cdiv``: what ``triton.language`` itself
    decorates with ``triton.jit`` exists for the compiler only.
    """
    if fn is None:
        return lambda f: Kernel(f, **options)
    return Kernel(fn, **options)
