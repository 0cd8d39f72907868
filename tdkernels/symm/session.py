"""A name for one meeting of a group's ranks, under which they keep their keys in the store.

torch gives the names of groups again after the world was destroyed, and a store may outlive both, as that of torchrun
does. A counter in each process cannot tell one group from the next one of its name: a process that raised early, or a
new one in the place of a process that died, has counted less. So rank 0 names the session, and tells each rank that has
just said hello. A hello of an earlier group may still be in the store; it is answered as well, and no rank reads that.
"""

import secrets
import time

from tdkernels.symm.agreement import poll

_POLL_S = 0.002


class MissingRank(Exception):
    """A rank did not come to the session in time. ``rank`` says which."""

    def __init__(self, rank):
        super().__init__(f"rank {rank} did not come")
        self.rank = rank


def meet(store, prefix, rank, world_size, deadline):
    """Return the prefix of this session's keys, the same on all ranks; collective.

    Args:
        store: the group's store.
        prefix: of keys that only groups of this name use.
        rank, world_size: of this process in the group, and the group's size.
        deadline: on ``time.monotonic``'s clock.

    Raises:
        MissingRank: at the deadline.
        RuntimeError: if the store's server is gone.
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
    """Answer every hello until all ranks are in the session."""
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
