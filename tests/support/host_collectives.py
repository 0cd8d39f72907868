"""torch's collectives on GPU tensors through host memory, for ranks that share GPUs.

NCCL needs a GPU for each rank, and gloo supports few collectives of GPU tensors. Tests use these as a baseline, so they
need not be fast: each tensor is copied to the host, exchanged there, and copied back. Collectives of host tensors are
torch's own.
"""

import functools

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from tdkernels.ops.common import torch_collectives

_NAMES = [
    "all_gather", "all_gather_into_tensor", "all_gather_single", "all_reduce", "all_to_all", "all_to_all_single",
    "broadcast", "reduce_scatter", "reduce_scatter_single", "reduce_scatter_tensor",
]


def install():
    """Replace torch's collectives in this process."""
    for name in _NAMES:
        if hasattr(dist, name):  # some exist only in later versions of torch
            through_host = _through_host(getattr(dist, name))
            for module in (dist, c10d):
                setattr(module, name, through_host)
    # This module has already looked up its functions.
    torch_collectives._all_gather = _through_host(torch_collectives._all_gather)
    torch_collectives._reduce_scatter = _through_host(torch_collectives._reduce_scatter)


def _through_host(collective):
    @functools.wraps(collective)
    def call(*args, **kwargs):
        if not _has_gpu_tensor((*args, *kwargs.values())):
            return collective(*args, **kwargs)
        copies, async_op = [], kwargs.pop("async_op", False)
        # The first argument of every collective is its output.
        args = [_to_host(arg, [] if number else copies) for number, arg in enumerate(args)]
        kwargs = {name: _to_host(arg, [] if args else copies) for name, arg in kwargs.items()}
        result = collective(*args, **kwargs)
        with torch.no_grad():
            for there, here in copies:
                there.copy_(here)
        return _Done() if async_op else result

    return call


def _has_gpu_tensor(args):
    lists = (list, tuple)
    return any(_has_gpu_tensor(arg) if isinstance(arg, lists) else getattr(arg, "is_cuda", False) for arg in args)


def _to_host(arg, copies):
    """Return the argument with all GPU tensors copied to the host; append (tensor, copy) of each to ``copies``."""
    if isinstance(arg, list | tuple):
        return type(arg)(_to_host(one, copies) for one in arg)
    if not isinstance(arg, torch.Tensor) or not arg.is_cuda:
        return arg
    copies.append((arg, arg.detach().cpu()))
    return copies[-1][1]


class _Done:
    """The result of a finished collective with ``async_op``."""

    def wait(self):
        return True
