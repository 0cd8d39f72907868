"""Host side of symmetric memory: a buffer of the same size on every rank of a group, accessible from all ranks.

``allocate`` returns a ``SymmetricBuffer``, the interface of all backends. The backends are ``backends.shm`` for CPU
processes, ``backends.cuda_ipc`` for GPUs of one host, and ``backends.shmem_heap`` for GPUs of several hosts.
``Workspace`` adds what a collective kernel needs: signals, an epoch and double-buffered data.
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
