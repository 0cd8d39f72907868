"""The key of tuned configs: an operator with its shape, dtype and layout, the GPU model and the group size."""

import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Problem:
    """A tuning problem: the key of the tables.

    Attributes:
        operator: Name of the operator.
        gpu: Name of the GPU as ``torch.cuda.get_device_name`` returns it, or "cpu".
        world_size: Number of ranks in the group.
        local_world_size: Number of ranks of the group on one host.
        dtype: Such as "bfloat16".
        layout: Memory layout of the operands, in the operator's own terms. It also holds properties that are not sizes
            but affect performance, such as the mask of an attention.
        shape: Sizes of the whole problem, before it is divided between ranks.
    """

    operator: str
    gpu: str
    world_size: int
    local_world_size: int
    dtype: str
    layout: str
    shape: tuple

    @classmethod
    def on(
        cls, device: torch.device, operator: str, shape: Iterable[int], dtype: torch.dtype, layout: str,
        world_size: int, local_world_size: int,
    ) -> "Problem":
        """Return the problem of an operator for ranks whose devices are of the same model as ``device``."""
        name = str(dtype).removeprefix("torch.")
        return cls(operator, gpu_name(device), world_size, local_world_size, name, layout, tuple(shape))

    @property
    def num_nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    def __str__(self) -> str:
        sizes = "x".join(map(str, self.shape))
        where = f"{self.num_nodes} nodes of " if self.num_nodes > 1 else ""
        return f"{self.operator} {sizes} {self.dtype} {self.layout} on {where}{self.local_world_size} x {self.gpu}"


@functools.cache
def gpu_name(device: torch.device) -> str:
    """Return the name under which the configs of a device are stored: the GPU's name, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def slug(name: str) -> str:
    """Return the folder name for a GPU name: "nvidia-h200" for "NVIDIA H200"."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


def device_of(group: dist.ProcessGroup) -> torch.device:
    """Return the device on which this rank of a group computes: the current GPU if the group's backend is NCCL, else
    the CPU.
    """
    if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group)):  # RCCL is called nccl too
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def with_index(device: torch.device) -> torch.device:
    """Return the device with an index; a CUDA device without one gets the index of the current GPU."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
