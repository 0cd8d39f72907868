"""Times of calls on a device: bursts between two events, and the rate of a link."""

import contextlib
import json
import statistics
import time
import weakref

import torch
import torch.distributed as dist

from tdkernels.symm import allocate
from tdkernels.symm.group import group_state

LEAD_CALLS = 2  # before the clock starts: they bring the ranks into step and let the host run ahead
_LINK_MIB = (128, 256)


def synchronize(device):
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def barrier(device, group=None):
    """Return when all ranks have come here and their devices are idle."""
    dist.barrier(group=group)
    synchronize(device)


def burst(call, input_sets, calls, device, group=None):
    """ms on the device and ms on the host of one of ``calls`` calls, on sets of inputs that take turns; collective.

    Inputs that take turns are not in the cache from the call before, as they are not in a model.
    """
    barrier(device, group)
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


def burst_in_graph(call, input_sets, calls, device, group=None):
    """``burst`` of calls that a CUDA graph replays, so that the host takes no part in their time; collective."""
    lead = lead_calls(device)
    for i in range(lead):
        call(input_sets[i % len(input_sets)])

    def calls_in_turn():
        for i in range(lead, lead + calls):
            call(input_sets[i % len(input_sets)])  # whose results' memory the next call can have

    graph = _captured(calls_in_turn)
    barrier(device, group)
    graph.replay()  # brings the ranks into step
    begin, end = _Stamp(device), _Stamp(device)
    begin.record()
    graph.replay()
    end.record()
    synchronize(device)
    return begin.elapsed_ms(end) / calls, 0.0


def _captured(calls):
    """The graph of some calls. By itself, since ``torch.cuda.graph`` empties caches first, which takes far longer."""
    graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="thread_local")
        try:
            calls()
        except BaseException:
            with contextlib.suppress(RuntimeError):  # of a capture that has been spoilt
                graph.capture_end()
            raise
        graph.capture_end()
    torch.cuda.current_stream().wait_stream(stream)
    return graph


def lead_calls(device):
    """How many calls a burst makes before the clock starts."""
    return LEAD_CALLS if device.type == "cuda" else 0


class _Stamp:
    """A CUDA event, or the clock where there is no GPU."""

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


def slowest_link(device, group):
    """``link_rate`` of the slowest rank, None if it cannot be measured; once for a group. Collective."""
    if group_state(group).topology.num_nodes > 1:
        return None  # no copy engine reaches other nodes
    if group not in _slowest_links:
        state = group_state(group)
        room = all(text == "True" for text in state.exchange("link rate", str(_has_room(device))))
        rate = link_rate(device, group) if room else None
        rates = [json.loads(text) for text in state.exchange("link rate", json.dumps(rate))]
        _slowest_links[group] = None if None in rates else min(rates)
    return _slowest_links[group]


def _has_room(device):
    """Whether this GPU has the memory that ``link_rate`` needs."""
    if device.type != "cuda":
        return True
    torch.cuda.empty_cache()  # symmetric memory does not come from torch's allocator
    free, _ = torch.cuda.mem_get_info(device)
    return free > 3 * (max(_LINK_MIB) << 20)


def link_rate(device, group=None, rounds=5):
    """Bytes a second that this GPU sends while it receives as much, by copy engines round a ring; None without GPUs.

    The best of two sizes. No operator moves data faster than this. Collective.
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
    landing.barrier()  # nobody frees what a peer still writes to
    landing.close()
    return best


def _copy(pair):
    pair[0].copy_(pair[1], non_blocking=True)
