"""Symmetric memory seen from the host: the same buffer on every rank of a group, each reachable by all.

One small interface (``SymmetricBuffer``), one file for each way of getting such memory: ``backends.shm`` for
CPU processes, ``backends.cuda_ipc`` for GPUs of one host. ``Workspace`` adds what a collective kernel needs: signals,
an epoch and two halves.
"""

from tdkernels.symm.buffer import SymmetricBuffer
from tdkernels.symm.factory import allocate
from tdkernels.symm.group import GroupLike, resolve_group
from tdkernels.symm.timeout import get_timeout, set_timeout
from tdkernels.symm.workspace import Workspace, get_workspace, synchronize

__all__ = [
    "GroupLike", "SymmetricBuffer", "Workspace", "allocate", "get_timeout", "get_workspace", "resolve_group",
    "set_timeout", "synchronize",
]
