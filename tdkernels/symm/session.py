"""Session of a group: a unique prefix for the keys of its ranks in the store.

torch reuses the names of groups after the world was destroyed, and a store may outlive both, such as that of torchrun.
A counter in each process cannot distinguish two groups of the same name: a process that raised early, or a process that
replaces one that died, has a lower count. So rank 0 picks a random name for the session.

Each other rank posts a "hello" with a nonce. Rank 0 answers under that nonce with the name of the session. A hello of
an earlier group may still be in the store. Rank 0 answers it too, but no rank reads that answer.
"""

import secrets
import time
from typing import TYPE_CHECKING

from tdkernels.symm.agreement import poll

if TYPE_CHECKING:
    import torch.distributed as dist

_POLL_S = 0.002


class MissingRank(Exception):
    """Rank ``rank`` did not join the session in time."""

    def __init__(self, rank: int):
        super().__init__(f"rank {rank} did not join the session")
        self.rank = rank


def meet(store: "dist.Store", prefix: str, rank: int, world_size: int, deadline: float) -> str:
    """Join the session of a group and return the prefix of its keys, which is the same on all ranks. Collective.

    Args:
        store: The group's store.
        prefix: A prefix that only groups with this name use.
        rank: This process's rank in the group.
        world_size: The number of ranks.
        deadline: A time on the clock of ``time.monotonic``.

    Raises:
        MissingRank: If a rank has not joined at the deadline.
        RuntimeError: If the store's server is gone.
    """
    nonce = secrets.token_hex(8)
    if rank == 0:
        session = f"{prefix}/{nonce}"
        _invite(store, prefix, session, world_size, deadline)
        return session
    store.set(f"{prefix}/hello/{rank}", nonce)
    welcome = f"{prefix}/welcome/{nonce}"
    if not poll(lambda: store.check([welcome]), deadline):
        raise MissingRank(0)
    session = store.get(welcome).decode()
    store.set(f"{session}/here/{rank}", "")
    return session


def _invite(store, prefix, session, world_size, deadline):
    """Answer every hello until all ranks have joined the session."""
    missing, answered = set(range(1, world_size)), set()
    while missing:
        for rank in sorted(missing):
            hello = f"{prefix}/hello/{rank}"
            if store.check([f"{session}/here/{rank}"]):
                missing.discard(rank)
            elif store.check([hello]) and (nonce := store.get(hello).decode()) not in answered:
                store.set(f"{prefix}/welcome/{nonce}", session)
                answered.add(nonce)
        if missing:
            if time.monotonic() > deadline:
                raise MissingRank(min(missing))
            time.sleep(_POLL_S)
    for nonce in answered:
        store.delete_key(f"{prefix}/welcome/{nonce}")
