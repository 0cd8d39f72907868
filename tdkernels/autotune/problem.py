"""What a config is tuned for: an operator at a shape, on a kind of GPU, in a group of a size."""

import functools
import re
from dataclasses import dataclass

import torch
import torch.distributed as dist


@dataclass(frozen=True)
class Problem:
    """The key of the tables.

    Attributes:
        operator, gpu: names; the GPU's as ``torch.cuda.get_device_name`` says it, or "cpu"
        world_size: ranks in the group; local_world_size: of them, those on one host
        dtype: such as "bfloat16"
        layout: how the operands lie in memory, in words of the operator's
        shape: the operator's sizes of the whole problem, before it is divided between ranks
    """

    operator: str
    gpu: str
    world_size: int
    local_world_size: int
    dtype: str
    layout: str
    shape: tuple

    @classmethod
    def on(cls, device, operator, shape, dtype, layout, world_size, local_world_size):
        """The problem of an operator for ranks on devices like this one; dtype is a torch.dtype."""
        name = str(dtype).removeprefix("torch.")
        return cls(operator, gpu_name(device), world_size, local_world_size, name, layout, tuple(shape))

    @property
    def num_nodes(self):
        return self.world_size // self.local_world_size

    @property
    def torch_dtype(self):
        return getattr(torch, self.dtype)

    def __str__(self):
        sizes = "x".join(map(str, self.shape))
        where = f"{self.num_nodes} nodes of " if self.num_nodes > 1 else ""
        return f"{self.operator} {sizes} {self.dtype} {self.layout} on {where}{self.local_world_size} x {self.gpu}"


@functools.cache
def gpu_name(device):
    """The name under which a device's configs are kept."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def slug(name):
    """A name as a folder's: "NVIDIA H200" is nvidia-h200."""
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-") or "unnamed"


def device_of(group):
    """Where the ranks of a group compute: the current GPU if the group has collectives for GPUs, else the CPU."""
    if torch.cuda.is_available() and "nccl" in str(dist.get_backend_config(group)):  # RCCL is called nccl too
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu")


def with_index(device):
    """The device with the number of the current GPU, if it says none."""
    if device.type == "cuda" and device.index is None:
        return torch.device("cuda", torch.cuda.current_device())
    return device
