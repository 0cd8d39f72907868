"""Run kernels in Triton's interpreter: one launch at a time, with patches that save half of its time."""

import contextlib
import dataclasses
import functools
import threading

import triton
import triton.language as tl
from triton import knobs
from triton.runtime import interpreter

from tdkernels.lang.tested_versions import triton_is_tested

# The interpreter has one state for all threads: what program it is in, and triton.language as it has patched it. A
# thread that waits here for a kernel that waits for a peer waits no longer than that kernel.
interpreting = threading.RLock()


def on_cpu(args):
    for arg in args:
        device = getattr(arg, "device", None)
        if device is not None:
            return device.type == "cpu"
    return False


@contextlib.contextmanager
def interpreter_options():
    """Check every integer operation for overflow only where the compiler would: it takes a third of the time."""
    builder = interpreter.interpreter_builder
    saved = builder.options
    builder.options = dataclasses.replace(saved, sanitize_overflow=knobs.runtime.debug)
    try:
        yield
    finally:
        builder.options = saved


def _let_scalars_be_indices(tensor, scope):
    """For triton 3.6 with numpy >= 2.4: what makes a scalar an index in the interpreter.

    A scalar is an array of one element there, which such a numpy does not convert to an integer any more.
    """
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


# ---- what the interpreter works out again for every operation, though it never changes: half of its time ----


def _remember_np_dtype(find):
    """Wrap what finds the numpy dtype for a type of ``triton.language``, which makes a table of them on each call."""
    known = {}

    @functools.wraps(find)
    def np_dtype(kind):
        name = kind.scalar.name  # blocks have that of their elements
        if name not in known:
            known[name] = find(kind)
        return known[name]

    return np_dtype


def _remember_shape(init):
    """Wrap ``tensor.__init__``: tensors of equal types share the objects that say of which shape they are."""
    known = {}

    def __init__(self, handle, kind):
        shape = known.get(kind.name)
        if shape is None:
            init(self, handle, kind)
            known[kind.name] = self.shape, self.numel
        else:
            self.handle, self.type, self.dtype = handle, kind, kind.scalar
            self.shape, self.numel = shape

    return __init__


def _remember_block(init):
    """Wrap ``block_type.__init__``: equal types share what describes them."""
    known = {}

    def __init__(self, element_ty, shape):
        key = type(shape), element_ty.name, *[getattr(size, "value", size) for size in shape]
        may_be_known = _INT.issuperset(map(type, key[2:]))  # True is equal to 1, and 2.0 to 2
        description = known.get(key) if may_be_known else None
        if description is None:
            init(self, element_ty, shape)
            if may_be_known:
                known[key] = self.shape, self.numel, self.name
        else:
            self.element_ty = element_ty
            self.shape, self.numel, self.name = description

    return __init__


_INT = {int}
_tensor_init = _remember_shape(tl.tensor.__init__)
_block_init = _remember_block(tl.block_type.__init__)


def _and_ours(patch):
    """Wrap what patches the tensors of ``triton.language`` for as long as a kernel is interpreted."""

    def patched(tensor, scope):
        patch(tensor, scope)
        if triton.__version__.startswith("3.6."):
            _let_scalars_be_indices(tensor, scope)
        scope.set_attr(tensor, "__init__", _tensor_init)
        scope.set_attr(tl.block_type, "__init__", _block_init)

    return patched


# The interpreter of another Triton may lack these functions, or may keep more in a tensor than is copied above. Without
# the patches it takes longer, and compiled kernels need none of them.
if triton_is_tested() and hasattr(interpreter, "_get_np_dtype") and hasattr(interpreter, "_patch_lang_tensor"):
    interpreter._get_np_dtype = _remember_np_dtype(interpreter._get_np_dtype)
    interpreter._patch_lang_tensor = _and_ours(interpreter._patch_lang_tensor)
