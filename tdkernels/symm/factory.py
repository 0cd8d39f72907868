"""Allocation of symmetric memory: select the backend by device type and number of nodes."""

from typing import TYPE_CHECKING

import torch

from tdkernels.symm.group import group_state, resolve_group

if TYPE_CHECKING:
    from tdkernels.symm.buffer import SymmetricBuffer
    from tdkernels.symm.group import GroupLike, GroupState


def allocate(
    nbytes: int, group: "GroupLike" = None, device: torch.device | str | None = None
) -> "SymmetricBuffer":
    """Allocate zeroed symmetric memory. Collective over the group.

    Args:
        nbytes: The size on each rank in bytes, the same on all ranks.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the world.
        device: The device of the memory. None means the current GPU if there is one, otherwise the CPU.

    Returns:
        The buffer. Its memory is mapped for all ranks of the same node.

    Raises:
        ValueError: If ``nbytes`` is not a positive integer, or if the ranks pass different sizes or device types.
        PeerTimeoutError: If a rank does not call it within the timeout.

    Example:
        >>> buffer = allocate(1 << 20)
        >>> buffer.tensor((buffer.rank + 1) % buffer.world_size)[:8].fill_(buffer.rank)
        >>> buffer.barrier()
    """
    state = group_state(resolve_group(group))
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if not isinstance(nbytes, int) or nbytes <= 0:
        raise ValueError(f"nbytes must be a positive integer, not {nbytes!r}")
    state.check_consensus("symm.allocate", {"nbytes": nbytes, "device": device.type})
    return make_buffer(state, nbytes, device)


def make_buffer(state: "GroupState", nbytes: int, device: torch.device) -> "SymmetricBuffer":
    """Allocate as ``allocate`` does, without its consensus check. Collective."""
    if device.type == "cpu":
        from tdkernels.symm.backends.shm import ShmBuffer

        return ShmBuffer(state, nbytes, device)
    if device.type == "cuda":  # ROCm's devices are called cuda too
        if state.topology.num_nodes > 1:
            from tdkernels.symm.backends.shmem_heap import HeapBuffer

            return HeapBuffer(state, nbytes, device)
        from tdkernels.symm.backends.cuda_ipc import P2PBuffer

        return P2PBuffer(state, nbytes, device)
    raise ValueError(f"there is no symmetric memory for device type {device.type!r}; use cpu or cuda")
