"""Hook points in Triton's interpreter and in the host code, for the race checker and the scheduler.

The library itself does not check whether it is observed. While at least one ``observer.Observer`` is installed, methods
of the interpreter, of ``lang.kernel.Kernel`` and of the host classes are replaced by versions that call the observers.
When the last observer is removed, the original methods are restored. All of this applies to CPU ranks only.
"""

import contextlib
import functools
from collections.abc import Iterator
from typing import TYPE_CHECKING

import numpy as np
import torch.distributed as dist
from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, interpreter_builder

from tdkernels.lang import signals
from tdkernels.lang.interpreter import on_cpu
from tdkernels.lang.kernel import Kernel
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.collectives.async_collective import AsyncCollective
from tdkernels.ops.common import torch_collectives
from tdkernels.symm.backends.emulated_network import EmulatedNetwork
from tdkernels.symm.backends.shm import ShmBuffer
from tdkernels.symm.group import GroupState
from tdkernels.symm.workspace import Workspace

if TYPE_CHECKING:
    from tdkernels.sanitizer.observer import Observer

ON_GPU = (
    "tdkernels.sanitizer: the race checker and the scheduler run on CPU ranks only, where Triton's interpreter "
    'executes the kernels. Start the ranks with RankPool(world_size, device="cpu") and pass CPU tensors'
)


DEVICE_FUNCTIONS = {"_spin", "finish", "await_work_item", "await_put"}

_observers: list = []
_patched: list = []  # (owner, name, original)


@contextlib.contextmanager
def observed(observer: "Observer") -> Iterator["Observer"]:
    """Call an observer at every hook point within a ``with`` block."""
    if not _observers:
        _install()
    _observers.append(observer)
    try:
        yield observer
    finally:
        _observers.remove(observer)
        if not _observers:
            _uninstall()


def _replace(owner, name, make):
    original = owner.__dict__[name] if isinstance(owner, type) else getattr(owner, name)
    _patched.append((owner, name, original))
    setattr(owner, name, make(original))


def _uninstall():
    while _patched:
        owner, name, original = _patched.pop()
        setattr(owner, name, original)


@contextlib.contextmanager
def _all(contexts):
    with contextlib.ExitStack() as stack:
        for context in contexts:
            stack.enter_context(context)
        yield


def _install():
    _replace(InterpreterBuilder, "create_masked_load", _load)
    _replace(InterpreterBuilder, "create_masked_store", _store)
    _replace(InterpreterBuilder, "create_atomic_rmw", _rmw)
    _replace(InterpreterBuilder, "create_atomic_cas", _cas)
    _replace(GridExecutor, "__call__", _grid)
    _replace(Kernel, "run", _run)
    _replace(Kernel, "__call__", _call)
    _replace(Workspace, "before_launch", _before_launch)
    _replace(AsyncCollective, "_copy", _copy)
    _replace(AsyncCollective, "_beside", _beside)
    _replace(AsyncCollective, "_join", _join)
    _replace(AsyncAllGather, "_await", _await)
    _replace(AsyncCollective, "close", _close)
    _replace(GroupState, "exchange", _exchange)
    _replace(dist, "barrier", _barrier)
    for name in _COLLECTIVES:
        _replace(dist, name, _collective)
    _replace(torch_collectives, "_all_gather", _collective)
    _replace(torch_collectives, "_reduce_scatter", _collective)
    _replace(signals, "interpreter_yield", _spin)
    _replace(EmulatedNetwork, "put", _put)
    _replace(EmulatedNetwork, "set_signal", _set_signal)
    _replace(EmulatedNetwork, "fence", _fence)
    _replace(EmulatedNetwork, "quiet", _quiet)
    _replace(ShmBuffer, "__init__", _buffer_changes)
    _replace(ShmBuffer, "close", _buffer_changes)


# ---- the interpreter's memory accesses ----


def _masked(ptrs, mask):
    data = ptrs.data if isinstance(ptrs.data, np.ndarray) else np.asarray(ptrs.data)
    if mask is None:
        return data.reshape(-1)
    return data[np.broadcast_to(np.asarray(mask.data, dtype=bool), data.shape)]


def _item_bytes(ptrs):
    return max(ptrs.get_element_ty().primitive_bitwidth // 8, 1)


def _load(original):
    def create_masked_load(self, ptrs, mask, other, *hints, **named_hints):
        result = original(self, ptrs, mask, other, *hints, **named_hints)
        is_volatile = named_hints["is_volatile"] if named_hints else hints[-1]
        # A volatile load polls a word that other programs change. Like a relaxed atomic it cannot be part of a race.
        if not is_volatile:
            addresses = _masked(ptrs, mask)
            if addresses.size:
                for observer in _observers:
                    observer.accessed("read", addresses, _item_bytes(ptrs))
        return result

    return create_masked_load


def _store(original):
    def create_masked_store(self, ptrs, value, mask, *hints):
        addresses = _masked(ptrs, mask)
        if not addresses.size:
            return original(self, ptrs, value, mask, *hints)
        for observer in _observers:
            observer.before("store", addresses)
        result = original(self, ptrs, value, mask, *hints)
        for observer in _observers:
            observer.accessed("write", addresses, _item_bytes(ptrs))
        return result

    return create_masked_store


def _rmw(original):
    def create_atomic_rmw(self, op, ptr, val, mask, sem, scope):
        addresses = _masked(ptr, mask)
        if not addresses.size:
            return original(self, op, ptr, val, mask, sem, scope)
        for observer in _observers:
            observer.before("atomic", addresses)
        result = original(self, op, ptr, val, mask, sem, scope)
        chosen = np.broadcast_to(np.asarray(mask.data, dtype=bool), ptr.data.shape)
        operands = np.broadcast_to(val.data, ptr.data.shape)[chosen]
        for observer in _observers:
            observer.atomic(op.name, addresses, operands, result.data.reshape(ptr.data.shape)[chosen], sem, scope)
        return result

    return create_atomic_rmw


def _cas(original):
    def create_atomic_cas(self, ptr, cmp, val, sem, scope):
        addresses = _masked(ptr, None)
        for observer in _observers:
            observer.before("atomic", addresses)
        result = original(self, ptr, cmp, val, sem, scope)
        operands = list(zip(np.atleast_1d(cmp.data).reshape(-1), np.atleast_1d(val.data).reshape(-1)))
        for observer in _observers:
            observer.atomic("CAS", addresses, operands, result.data.reshape(-1), sem, scope)
        return result

    return create_atomic_cas


# ---- launches and device functions ----


def _grid(original):
    def __call__(self, *args, **kwargs):
        call = lambda: original(self, *args, **kwargs)  # noqa: E731
        for observer in _observers:
            call = _nested(observer, self, call)
        return call()

    return __call__


def _nested(observer, executor, call):
    return lambda: observer.run_programs(executor, call)


def _run(original):
    def run(self, *args, grid, warmup, **kwargs):
        if warmup or not (on_cpu(args) or on_cpu(kwargs.values())):
            return original(self, *args, grid=grid, warmup=warmup, **kwargs)
        with _all(observer.launch(self) for observer in list(_observers)):
            return original(self, *args, grid=grid, warmup=warmup, **kwargs)

    return run


def _call(original):
    def __call__(self, *args, **kwargs):
        name = self.fn.__name__
        if name not in DEVICE_FUNCTIONS:
            return original(self, *args, **kwargs)
        with _all(observer.device_function(name, args) for observer in _observers):
            result = original(self, *args, **kwargs)
        for observer in _observers:
            observer.device_function_returned(name, result)
        return result

    return __call__


def program() -> tuple[int, int, int]:
    """Return the id (x, y, z) of the program that the interpreter is executing."""
    return getattr(interpreter_builder, "grid_idx", (0, 0, 0))


def _before_launch(original):
    def before_launch(self):
        if self.device.type != "cpu":
            raise RuntimeError(ON_GPU)
        return original(self)

    return before_launch


# ---- host code ----


def _copy(original):
    def _copy(self, dst, src):
        for observer in _observers:
            observer.before("copy", np.array([dst.data_ptr()], dtype=np.uint64))
        original(self, dst, src)
        for observer in _observers:
            observer.host_access("write", dst.data_ptr(), dst.data_ptr() + dst.numel() * dst.element_size())

    return _copy


def _beside(original):
    def _beside(self, enqueue):
        with _all(observer.on_side_stream() for observer in _observers):
            return original(self, enqueue)

    return _beside


def _join(original):
    def _join(self):
        original(self)
        for observer in _observers:
            observer.joins_side_stream()

    return _join


def _await(original):
    def _await(self, first_step, last_step, chunk=None):
        original(self, first_step, last_step, chunk)
        for step in range(first_step, last_step):
            _reads(self, self.source(step), chunk)

    return _await


def _reads(gather, source, chunk):
    """Report a read by the host: after its wait, the host may pass this memory to torch until ``close``."""
    first, last = (0, gather.rows) if chunk is None else (chunk * gather.chunk_rows, (chunk + 1) * gather.chunk_rows)
    start = gather.storage.data_ptr() + source * gather.slot_bytes
    for observer in _observers:
        observer.host_access(
            "read", start + first * gather.row_bytes, start + min(last, gather.rows) * gather.row_bytes
        )
    gather.__dict__.setdefault("_observed_reads", set()).add((source, chunk))


def _close(original):
    def close(self):
        for source, chunk in sorted(self.__dict__.get("_observed_reads", ()), key=str):
            _reads(self, source, chunk)
        original(self)

    return close


def _exchange(original):
    def exchange(self, operator, text):
        key = f"{self._prefix if self._has_met else self.members}/{self._turn}"
        with _all(observer.meets(key, self.members) for observer in _observers):
            return original(self, operator, text)

    return exchange


# Collectives that block until other ranks take part. The library and its tests use no others.
_COLLECTIVES = (
    "all_gather", "all_gather_into_tensor", "all_gather_object", "all_reduce", "all_to_all_single", "broadcast",
    "new_group", "reduce_scatter_tensor",
)


def _collective(original):
    def collective(*args, **kwargs):
        with _all(observer.blocks() for observer in _observers):
            return original(*args, **kwargs)

    return collective


def _spin(original):
    @functools.wraps(original)  # keeps it a builtin for Triton, which checks the globals that kernels use
    def interpreter_yield(start_ns, _semantic=None):
        if not any([observer.spins() for observer in _observers]):
            original(start_ns)

    return interpreter_yield


_barriers: dict = {}


def _barrier(original):
    def barrier(group=None, *args, **kwargs):
        ranks = dist.get_process_group_ranks(dist.group.WORLD if group is None else group)
        number = _barriers[tuple(ranks)] = _barriers.get(tuple(ranks), 0) + 1
        with _all(observer.meets(f"barrier/{ranks}/{number}", ranks) for observer in _observers):
            return original(group, *args, **kwargs)

    return barrier


def restart_barriers() -> None:
    """Reset the numbers of barriers. All ranks call it at the same point."""
    _barriers.clear()


def _put(original):
    def put(self, dst, src, num_bytes, peer, signal=None, value=0):
        for observer in _observers:
            observer.puts(self, dst, src, num_bytes, peer, signal, value)
        original(self, dst, src, num_bytes, peer, signal, value)

    return put


def _set_signal(original):
    def set_signal(self, signal, value, peer):
        for observer in _observers:
            observer.puts(self, 0, 0, 0, peer, signal, value)
        original(self, signal, value, peer)

    return set_signal


def _fence(original):
    def fence(self):
        for observer in _observers:
            observer.fences(self)
        original(self)

    return fence


def _quiet(original):
    def quiet(self):
        for observer in _observers:
            observer.quiets(self)
        original(self)

    return quiet


def _buffer_changes(original):
    def changed(self, *args):
        original(self, *args)
        for observer in _observers:
            observer.buffers_changed()

    return changed
