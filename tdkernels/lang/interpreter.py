"""Run kernels in Triton's interpreter: one launch at a time, with patches that more than halve its run time."""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Iterable, Iterator
from typing import Any

import triton
import triton.language as tl
from triton import knobs
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

from tdkernels.lang.interpreter_memory import with_fast_load, with_fast_store
from tdkernels.lang.interpreter_operands import (
    with_fast_broadcast,
    with_fast_checks,
    with_fast_unwrap,
    with_identity,
)
from tdkernels.lang.interpreter_operators import (
    OPERATORS,
    splat,
    with_fast_cast,
    with_fast_operator,
    with_fast_where,
)
from tdkernels.lang.tested_versions import triton_is_tested

# The interpreter has one state for all threads: the current program, and its patches of triton.language. If a kernel
# holds this lock while it waits for a peer, another thread waits for the lock as long as that kernel, and no longer.
interpreting = threading.RLock()


def on_cpu(args: Iterable[Any]) -> bool:
    """Return whether the first argument that has a device is on the CPU."""
    for arg in args:
        device = getattr(arg, "device", None)
        if device is not None:
            return device.type == "cpu"
    return False


@contextlib.contextmanager
def interpreter_options() -> Iterator[None]:
    """Set the interpreter's options within a ``with`` block.

    Integer operations are checked for overflow only if the compiler would check them: the checks take a third of the
    time.
    """
    builder = interpreter.interpreter_builder
    saved = builder.options
    builder.options = dataclasses.replace(saved, sanitize_overflow=knobs.runtime.debug)
    try:
        yield
    finally:
        builder.options = saved


def _allow_scalar_index(tensor, scope):
    """Allow scalars as indices in the interpreter of triton 3.6 with numpy >= 2.4.

    There a scalar is an array of one element, which numpy >= 2.4 no longer converts to an integer.
    """
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


# ---- caches for values that the interpreter recomputes for every operation, which takes half of its time ----


def _cache_np_dtype(find):
    """Cache the numpy dtype of each type of ``triton.language``; ``find`` builds a table on each call."""
    known = {}

    @functools.wraps(find)
    def np_dtype(kind):
        name = kind.scalar.name  # a block has the dtype of its elements
        if name not in known:
            known[name] = find(kind)
        return known[name]

    return np_dtype


def _cache_shape(init):
    """Wrap ``tensor.__init__``: tensors of equal types share their shape objects."""
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


def _cache_block(init):
    """Wrap ``block_type.__init__``: equal types share their shape, size and name."""
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
_tensor_init = _cache_shape(tl.tensor.__init__)
_block_init = _cache_block(tl.block_type.__init__)
_dtype_eq = with_identity(tl.dtype.__eq__)


def _with_patches(patch):
    """Wrap the function that patches the tensors of ``triton.language`` while a kernel is interpreted."""
    unwrap = with_fast_unwrap(tl.core._unwrap_if_constexpr)

    def patched(tensor, scope):
        patch(tensor, scope)
        if triton.__version__.startswith("3.6."):
            _allow_scalar_index(tensor, scope)
        if not interpreter.interpreter_builder.options.sanitize_overflow:
            for name in OPERATORS:
                scope.set_attr(tensor, name, with_fast_operator(name, getattr(tensor, name)))
        scope.set_attr(tensor, "__init__", _tensor_init)
        scope.set_attr(tl.block_type, "__init__", _block_init)
        scope.set_attr(tl.dtype, "__eq__", _dtype_eq)
        scope.set_attr(tl.core, "_unwrap_if_constexpr", unwrap)

    return patched


def _bind_semantic(obj, name, member, builder, scope):
    """Replace a builtin of the language by one that gets the interpreter's semantic. It saves one Python call."""
    function, semantic = getattr(member, "__wrapped__", member), interpreter.interpreter_semantic

    def bound(*args, **kwargs):
        kwargs["_semantic"] = semantic
        return function(*args, **kwargs)

    scope.set_attr(obj, name, bound)


def _keep_patches(patch):
    """Wrap the function that patches ``triton.language`` for a launch: it searches the language for builtins each time.

    Its result depends on the modules of the language that the kernel's module has imported, and on the options.
    """
    known = {}

    def patch_lang(fn):
        modules = frozenset(id(value) for value in fn.__globals__.values() if value is tl or value is tl.core)
        key = modules, interpreter.interpreter_builder.options.sanitize_overflow
        if key not in known:
            scope = patch(fn)
            changed = dict.fromkeys((owner, name) for owner, name, _ in scope._changes)
            known[key] = [(owner, name, getattr(owner, name)) for owner, name in changed]
            return scope
        scope = interpreter._LangPatchScope()
        for change in known[key]:
            scope.set_attr(*change)
        return scope

    return patch_lang


# Another version of Triton may lack these functions, or may store more in a tensor than the wrappers copy. Without the
# patches the interpreter is slower. Compiled kernels do not need them.
_PATCHED = (
    (interpreter, (
        "_LangPatchScope", "_get_np_dtype", "_patch_attr", "_patch_lang", "_patch_lang_tensor", "interpreter_semantic",
    )),
    (tl.core, ("_unwrap_if_constexpr",)),
    (TritonSemantic, (
        "_str_to_eviction_policy", "_str_to_load_cache_modifier", "_str_to_store_cache_modifier",
        "binary_op_type_checking_impl", "broadcast_impl_value", "cast", "load", "store", "where",
    )),
)


def _replace_methods(semantic):
    """Replace methods of the interpreter's semantic, each before those that wrap a caller of it."""
    semantic.broadcast_impl_value = with_fast_broadcast(semantic.broadcast_impl_value)
    semantic.cast = with_fast_cast(semantic.cast)
    semantic.binary_op_type_checking_impl = with_fast_checks(semantic)
    semantic.where = with_fast_where(semantic.where)
    semantic.load, semantic.store = with_fast_load(semantic), with_fast_store(semantic)


if triton_is_tested() and all(hasattr(where, name) for where, names in _PATCHED for name in names):
    interpreter._get_np_dtype = _cache_np_dtype(interpreter._get_np_dtype)
    interpreter._patch_lang_tensor = _with_patches(interpreter._patch_lang_tensor)
    interpreter._patch_attr = _bind_semantic
    interpreter._patch_lang = _keep_patches(interpreter._patch_lang)
    interpreter.interpreter_builder.create_splat = splat
    _replace_methods(interpreter.interpreter_semantic)
