"""Time calls on a device in bursts between two events, and measure the bandwidth of the links."""

import contextlib
import json
import statistics
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from tdkernels.symm import allocate
from tdkernels.symm.group import group_state

LEAD_CALLS = 2  # untimed calls before a burst: they synchronize the ranks and let the host run ahead
_LINK_MIB = (128, 256)


def synchronize(device: torch.device) -> None:
    """Wait until a CUDA device is idle; do nothing for the CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def barrier(device: torch.device, group: dist.ProcessGroup | None = None) -> None:
    """Wait until all ranks have called this function and this rank's device is idle."""
    dist.barrier(group=group)
    synchronize(device)


def burst(
    call: Callable[[Any], object], input_sets: Sequence[Any], calls: int, device: torch.device,
    group: dist.ProcessGroup | None = None, lead: int | None = None,
) -> tuple[float, float]:
    """Time consecutive calls. Collective.

    The calls cycle through the input sets, so that inputs are not in the cache from the call before. This matches a
    model, where each layer has inputs of its own.

    Args:
        call: Function of one input set.
        input_sets: The input sets.
        calls: Number of timed calls.
        device: The device of this rank.
        group: The group of ranks; None for the world.
        lead: Number of untimed calls before them; None for ``lead_calls``.

    Returns:
        (ms of a call on the device, ms of a call on the host).
    """
    barrier(device, group)
    if lead is None:
        lead = lead_calls(device)
    for i in range(lead):
        call(input_sets[i % len(input_sets)])
    begin, end = _Stamp(device), _Stamp(device)
    begin.record()
    host_begin = time.perf_counter()
    for i in range(lead, lead + calls):
        call(input_sets[i % len(input_sets)])
    host_end = time.perf_counter()
    end.record()
    synchronize(device)
    return begin.elapsed_ms(end) / calls, (host_end - host_begin) * 1e3 / calls


def burst_in_graph(
    call: Callable[[Any], object], input_sets: Sequence[Any], calls: int, device: torch.device,
    group: dist.ProcessGroup | None = None,
) -> tuple[float, float]:
    """Time calls as ``burst`` does, replayed by a CUDA graph, so that host time does not count. Collective."""
    lead = lead_calls(device)
    for i in range(lead):
        call(input_sets[i % len(input_sets)])

    def calls_in_turn():
        for i in range(lead, lead + calls):
            call(input_sets[i % len(input_sets)])  # the result is dropped, so that the next call can reuse its memory

    graph = _captured(calls_in_turn)
    barrier(device, group)
    graph.replay()  # synchronizes the ranks
    begin, end = _Stamp(device), _Stamp(device)
    begin.record()
    graph.replay()
    end.record()
    synchronize(device)
    return begin.elapsed_ms(end) / calls, 0.0


def _captured(calls):
    """Capture calls in a CUDA graph, without ``torch.cuda.graph``, which takes far longer because it empties caches."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            calls()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # the capture was invalidated
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def lead_calls(device: torch.device) -> int:
    """Return the number of untimed calls at the beginning of a burst."""
    return LEAD_CALLS if device.type == "cuda" else 0


class _Stamp:
    """A CUDA event on a GPU, or a host time stamp on the CPU."""

    def __init__(self, device):
        self._event = torch.cuda.Event(enable_timing=True) if device.type == "cuda" else None

    def record(self):
        if self._event is None:
            self._seconds = time.perf_counter()
        else:
            self._event.record()

    def elapsed_ms(self, later):
        if self._event is None:
            return (later._seconds - self._seconds) * 1e3
        return self._event.elapsed_time(later._event)


_slowest_links: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def slowest_link(device: torch.device, group: dist.ProcessGroup) -> float | None:
    """Return the ``link_rate`` of the slowest rank in bytes per second, or None if it cannot be measured. Collective.

    It is measured once for each group.
    """
    if group_state(group).topology.num_nodes > 1:
        return None  # copy engines do not reach other nodes
    if group not in _slowest_links:
        state = group_state(group)
        if not state.has_link:
            return state.link_rate
        room = all(text == "True" for text in state.exchange("link rate", str(_has_room(device))))
        rate = link_rate(device, group) if room else None
        rates = [json.loads(text) for text in state.exchange("link rate", json.dumps(rate))]
        _slowest_links[group] = None if None in rates else min(rates)
    return _slowest_links[group]


def _has_room(device):
    """Return whether this GPU has enough free memory for ``link_rate``."""
    if device.type != "cuda":
        return True
    torch.cuda.empty_cache()  # symmetric memory is allocated outside torch's allocator
    free, _ = torch.cuda.mem_get_info(device)
    return free > 3 * (max(_LINK_MIB) << 20)


def link_rate(
    device: torch.device, group: dist.ProcessGroup | None = None, rounds: int = 5,
) -> float | None:
    """Measure how many bytes per second this GPU sends while it receives the same amount. Collective.

    The copy engines copy around a ring of all ranks. The result is the better of two sizes (128 and 256 MiB), and is
    an upper bound for all operators. It is None without GPUs, or for a single rank.
    """
    ranks = dist.get_world_size(group)
    if device.type != "cuda" or ranks == 1:
        return None
    nbytes = max(_LINK_MIB) << 20
    landing = allocate(nbytes, group, device)
    following = landing.tensor((dist.get_rank(group) + 1) % ranks)
    source = torch.zeros(nbytes, dtype=torch.uint8, device=device)
    best = 0.0
    for mib in _LINK_MIB:
        size = mib << 20
        pair = (following[:size], source[:size])
        times = [burst(_copy, [pair], 8, device, group)[0] for _ in range(rounds)]
        best = max(best, size / statistics.median(times) * 1e3)
    landing.barrier()  # no rank frees its buffer while a peer still writes to it
    landing.close()
    return best


def _copy(pair):
    pair[0].copy_(pair[1], non_blocking=True)
