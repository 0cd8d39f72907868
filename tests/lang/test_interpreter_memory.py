"""Fast loads and stores of the interpreter: the results, memory and errors are those of Triton's own."""

import functools
import itertools
from types import SimpleNamespace

import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle, _get_np_dtype

from tdkernels.lang.interpreter_memory import has_cache_policy, with_fast_load, with_fast_store
from tests.lang.test_interpreter_operands import FLOATS, INTEGERS, operand
from tests.lang.test_interpreter_operators import outcome, rejects

SHAPES = ((), (4,), (2, 4))


def memory(kind):
    return np.arange(1, 9).astype(_get_np_dtype(kind))


def pointers(kind, data, shape):
    """Return pointers to the first elements of an array."""
    size = shape or (1,)
    addresses = data.ctypes.data + data.itemsize * np.arange(np.prod(size), dtype=np.uint64).reshape(size)
    pointer = tl.pointer_type(kind)
    return tl.tensor(TensorHandle(addresses, pointer), tl.block_type(pointer, list(shape)) if shape else pointer)


def mask_of(shape):
    mask = operand(tl.int1, shape)
    mask.handle.data = np.arange(mask.handle.data.size).reshape(mask.handle.data.shape) % 3 != 1
    return mask


def load_options(semantic, cache="", eviction="", padding=""):
    """Return the arguments of ``semantic.load`` after the mask and the values of masked elements."""
    if has_cache_policy(semantic):
        return tl.core._normalize_cache_policy(None, cache, eviction), False
    return (), padding, cache, eviction, False


def store_options(semantic, cache="", eviction=""):
    """Return the arguments of ``semantic.store`` after the mask."""
    if has_cache_policy(semantic):
        return (tl.core._normalize_cache_policy(None, cache, eviction),)
    return (), cache, eviction


@pytest.mark.parametrize("kind", (*INTEGERS, *FLOATS), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_loads(semantic, kind, shape):
    fast, data = with_fast_load(semantic), memory(kind)
    masks = [None, mask_of(shape), mask_of(()), mask_of((4,)), operand(tl.int32, shape)]
    others = [None, *[semantic.to_tensor(number) for number in (0, 0.0, -0.0, 1, 2.5)], operand(kind, shape)]
    paddings = ("",) if has_cache_policy(semantic) else ("", "zero")
    for mask, other, padding in itertools.product(masks, others, paddings):
        args = pointers(kind, data, shape), mask, other, *load_options(semantic, padding=padding)
        assert outcome(fast, *args) == outcome(semantic.load, *args), (mask, other)


@pytest.mark.parametrize("kind", (*INTEGERS, *FLOATS), ids=str)
@pytest.mark.parametrize("shape", SHAPES)
def test_stores(semantic, kind, shape):
    fast = with_fast_store(semantic)
    values = [operand(kind, shape), operand(kind, ()), operand(tl.float32, shape), operand(kind, (4,))]
    for mask, value in itertools.product([None, mask_of(shape), mask_of(()), operand(tl.int32, shape)], values):
        stored, errors = [], []
        for store in (fast, semantic.store):
            data = memory(kind)
            try:
                result = store(pointers(kind, data, shape), value, mask, *store_options(semantic))
                errors.append(result.type.name)
            except Exception as error:
                errors.append((type(error).__name__, str(error)))
            stored.append(data.tobytes())
        assert stored[0] == stored[1] and errors[0] == errors[1], (mask, value)


def test_modifiers_and_constant_pointers(semantic):
    load, store, data = with_fast_load(semantic), with_fast_store(semantic), memory(tl.float32)
    ptr, value = pointers(tl.float32, data, (4,)), operand(tl.float32, (4,))
    for cache, eviction in (("bad", ""), ("", "bad")):
        with pytest.raises(ValueError, match="bad not supported|Unsupported .* 'bad'"):
            load(ptr, None, None, *load_options(semantic, cache, eviction))
        with pytest.raises(ValueError, match="bad not supported|Unsupported .* 'bad'"):
            store(ptr, value, None, *store_options(semantic, cache, eviction))
    hints = ".cg", "evict_first"
    assert load(ptr, None, None, *load_options(semantic, *hints)).handle.data.tolist() == [1, 2, 3, 4]
    store(ptr, value, None, *store_options(semantic, *hints))
    assert data[:4].tolist() == [0, 1, 2, 3]
    constant = tl.tensor(ptr.handle, tl.block_type(tl.pointer_type(tl.float32, const=True), [4]))
    with pytest.raises(ValueError, match="constant pointer"):
        store(constant, value, None, *store_options(semantic))


def test_common_accesses_do_not_need_triton(semantic):
    same = ("builder", "_str_to_eviction_policy", "_str_to_load_cache_modifier", "_str_to_store_cache_modifier")
    own = SimpleNamespace(load=rejects, store=rejects, **{name: getattr(semantic, name) for name in same})
    data = memory(tl.float32)
    load, store = with_fast_load(own), with_fast_store(own)
    ptr, mask = pointers(tl.float32, data, (4,)), mask_of((4,))
    zero = semantic.to_tensor(0.0)
    assert load(ptr, mask, zero, *load_options(semantic)).handle.data.tolist() == [1, 0, 3, 4]
    store(ptr, operand(tl.float32, (4,)), mask, *store_options(semantic))
    assert data[:4].tolist() == [0, 2, 2, 3]


def test_builder_is_called(semantic, monkeypatch):
    """The race checker replaces methods of the builder later."""
    load, store, calls = with_fast_load(semantic), with_fast_store(semantic), []

    def observed(method, *args):
        calls.append(method.__name__)
        return method(*args)

    for name in ("create_masked_load", "create_masked_store"):
        method = getattr(InterpreterBuilder, name)
        monkeypatch.setattr(InterpreterBuilder, name, functools.partialmethod(functools.partial(observed, method)))
    for mask in (None, mask_of((4,))):
        ptr = pointers(tl.float32, memory(tl.float32), (4,))
        load(ptr, mask, None, *load_options(semantic))
        store(ptr, operand(tl.float32, (4,)), mask, *store_options(semantic))
    assert calls == ["create_masked_load", "create_masked_store"] * 2
