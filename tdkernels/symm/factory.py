"""Allocate symmetric memory by the backend that fits the device and the group."""

import torch

from tdkernels.symm.group import group_state, resolve_group


def allocate(nbytes, group=None, device=None):
    """Allocate zeroed symmetric memory; collective over the group.

    Args:
        nbytes: bytes on each rank, the same on all
        group: as for the operators
        device: where; None means the current GPU when there is one, the CPU otherwise

    Returns:
        SymmetricBuffer

    Raises:
        ValueError: when the ranks disagree on nbytes or on the kind of device
        PeerTimeoutError
    """
    state = group_state(resolve_group(group))
    if device is None:
        device = torch.device("cuda", torch.cuda.current_device()) if torch.cuda.is_available() else "cpu"
    device = torch.device(device)
    if not isinstance(nbytes, int) or nbytes <= 0:
        raise ValueError(f"nbytes must be a positive integer, not {nbytes!r}")
    state.check_consensus("symm.allocate", {"nbytes": nbytes, "device": device.type})
    return make_buffer(state, nbytes, device)


def make_buffer(state, nbytes, device):
    """As ``allocate``, after the ranks have agreed."""
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
