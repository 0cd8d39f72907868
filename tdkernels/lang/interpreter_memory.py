"""Faster loads and stores in Triton's interpreter.

Triton broadcasts the mask and the value to the shape of the pointers, and casts the value. Most loads and stores need
neither. They still call the builder's methods, where the race checker observes them.
"""

from collections.abc import Callable
from typing import Any

import triton.language as tl

from tdkernels.lang.interpreter_operands import have_same_shape

# Triton's methods and those of the builder take different options. From Triton 3.9 on, a cache policy replaces the
# cache modifier and the eviction policy, and there are no checks of boundaries.


def has_cache_policy(semantic: Any) -> bool:
    """Return whether loads and stores take a cache policy."""
    return hasattr(semantic.builder, "get_cache_policy")


def _load_options(semantic):
    """Return a function that converts options of ``semantic.load`` to those of the builder's method.

    It returns None if Triton's own ``load`` must run.
    """
    if has_cache_policy(semantic):
        return lambda cache_policy, is_volatile: (cache_policy._to_ir(semantic.builder), is_volatile)

    def options(boundary_check, padding, cache_modifier, eviction_policy, is_volatile):
        if boundary_check or padding:
            return None
        cache = semantic._str_to_load_cache_modifier(cache_modifier)
        return cache, semantic._str_to_eviction_policy(eviction_policy), is_volatile

    return options


def _store_options(semantic):
    """Return a function that converts options of ``semantic.store``, as ``_load_options`` does."""
    if has_cache_policy(semantic):
        return lambda cache_policy: (cache_policy._to_ir(semantic.builder),)

    def options(boundary_check, cache_modifier, eviction_policy):
        if boundary_check:
            return None
        return semantic._str_to_store_cache_modifier(cache_modifier), semantic._str_to_eviction_policy(eviction_policy)

    return options


def _pointee(kind):
    """Return the type of the elements that pointers of a type point to, or None if Triton's own method must run."""
    if not kind.scalar.is_ptr():
        return None
    element = kind.scalar.element_ty
    return None if element.is_block() or element.is_ptr() or element.name == tl.int1.name else element


def _is_mask(kind, pointers):
    return kind is None or kind.scalar.name == tl.int1.name and have_same_shape(kind, pointers)


def with_fast_load(semantic: Any) -> Callable[..., Any]:
    """Return a replacement for the method ``load`` of a TritonSemantic."""
    load, builder, options_of = semantic.load, semantic.builder, _load_options(semantic)
    known: dict[tuple[str, str | None, str | None], Any] = {}

    def result_of(pointers, mask, other):
        """Return the type of the loaded tensor, or None."""
        element = _pointee(pointers)
        if element is None or not _is_mask(mask, pointers):
            return None
        if other is not None and (mask is None or other.is_block() or element.is_fp8() and not other.is_floating()):
            return None
        return pointers.with_element_ty(element) if pointers.is_block() else element

    def fast(ptr, mask, other, *options):
        kinds = ptr.type, None if mask is None else mask.type, None if other is None else other.type
        key = kinds[0].name, kinds[1] and kinds[1].name, kinds[2] and kinds[2].name
        if key not in known:
            known[key] = result_of(*kinds)
        result = known[key]
        for_builder = None if result is None or not _is_zero(other) else options_of(*options)
        if for_builder is None:
            return load(ptr, mask, other, *options)
        if mask is None:
            return tl.tensor(builder.create_load(ptr.handle, *for_builder), result)
        return tl.tensor(builder.create_masked_load(ptr.handle, mask.handle, None, *for_builder), result)

    return fast


def _is_zero(other):
    """Return whether the bits of a scalar are 0. Then masked elements are the same as without it."""
    return other is None or not any(other.handle.data.tobytes())


def with_fast_store(semantic: Any) -> Callable[..., Any]:
    """Return a replacement for the method ``store`` of a TritonSemantic."""
    store, builder, options_of = semantic.store, semantic.builder, _store_options(semantic)
    known: dict[tuple[str, str, str | None], bool] = {}

    def is_plain(pointers, value, mask):
        element = _pointee(pointers)
        if element is None or pointers.scalar.is_const() or not _is_mask(mask, pointers):
            return False
        return element.name == value.scalar.name and have_same_shape(value, pointers)

    def fast(ptr, val, mask, *options):
        kinds = ptr.type, val.type, None if mask is None else mask.type
        key = kinds[0].name, kinds[1].name, kinds[2] and kinds[2].name
        if key not in known:
            known[key] = is_plain(*kinds)
        for_builder = options_of(*options) if known[key] else None
        if for_builder is None:
            return store(ptr, val, mask, *options)
        if mask is None:
            return tl.tensor(builder.create_store(ptr.handle, val.handle, *for_builder), tl.void)
        return tl.tensor(builder.create_masked_store(ptr.handle, val.handle, mask.handle, *for_builder), tl.void)

    return fast
