"""Choose between tdkernels and torch's kernel for the calls of torch.ops.symm_mem, by their times on this machine.

In the tuning mode "on" the first call with new shapes times both, on all ranks. The choice is kept until ``install`` or
the end of the process. In the other modes tdkernels runs.
"""

import json
import math
from collections.abc import Callable, Hashable
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import is_batch_invariant
from tdkernels.autotune.modes import get_mode
from tdkernels.autotune.timing import burst
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    import torch.distributed as dist

_CALLS, _ROUNDS = 10, 3
_torch_is_faster: dict[Hashable, bool] = {}


def forget() -> None:
    """Forget all choices."""
    _torch_is_faster.clear()


def torch_is_faster(
    key: Hashable, device: torch.device, group: "dist.ProcessGroup", own: Callable[[], Any], by_torch: Callable[[], Any]
) -> bool:
    """Return whether torch's kernel is faster for the calls with this key. Collective if both are timed.

    On a CPU an interpreter runs the kernels, so nothing is timed.

    Args:
        key: Everything that the times depend on, equal on all ranks.
        device: The device of this rank.
        group: The group of the call.
        own: Makes the call with tdkernels.
        by_torch: Makes the call with torch's kernel.
    """
    if is_batch_invariant():
        return False
    if key not in _torch_is_faster:
        if get_mode() != "on" or device.type != "cuda" or torch.cuda.is_current_stream_capturing():
            return False
        _torch_is_faster[key] = _compare(device, group, own, by_torch)
    return _torch_is_faster[key]


def _compare(device, group, own, by_torch):
    """Time both kernels by turns. The slowest rank counts, so the result is equal on all ranks."""
    best = [math.inf, math.inf]
    for _ in range(_ROUNDS):
        for candidate, call in enumerate((own, by_torch)):
            ms, _host = burst(lambda _inputs, call=call: call(), [None], _CALLS, device, group)
            best[candidate] = min(best[candidate], ms)
    every = [json.loads(text) for text in group_state(group).exchange("symm_mem tuning", json.dumps(best))]
    own_ms, torch_ms = (max(times) for times in zip(*every, strict=True))
    return torch_ms < own_ms
