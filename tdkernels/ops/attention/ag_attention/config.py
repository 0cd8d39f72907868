"""How ag_attention runs: its config, and what fills in the fields that one leaves open."""

from dataclasses import dataclass, fields, replace

import torch

from tdkernels.ops.attention.ag_attention.vendor_attention import KERNELS, why_not
from tdkernels.rounding import next_power_of_2
from tdkernels.runtime import gpu

_METHODS = ("fused", *KERNELS, "torch")
_BACKWARDS = ("", "fused", *KERNELS)
_CUDNN_ROWS, _CUDNN_BACKWARD_ROWS = 8192, 4096  # of a shard, from which on cuDNN is faster on H200 (bench/NOTES.md)
_SIZES = ("block_q", "block_k", "dq_block_q", "dq_block_k", "dkv_block_q", "dkv_block_k")


@dataclass(frozen=True)
class AgAttentionConfig:
    """How ``ag_attention`` runs. A field of 0 takes the default for the device, head dimensions and dtype.

    Attributes:
        method: "fused": one kernel of ours; "cudnn" or "flash": that attention kernel of torch's on one rank's keys at
            a time, as they come; "torch": a plain all-gather, then torch's scaled_dot_product_attention
        block_q, block_k: a tile has so many queries, and goes through its keys by so many
        num_warps, num_stages: of the forward

    dq_…:                  the same for the gradient of q
    dkv_…:                 the same for those of k and v, where a tile has block_k keys and goes through queries
    Attributes:
        num_comm_sms: programs that push at the same time, before they attend like the others
        chunk_rows: positions that travel together under one signal, a multiple of 16
        backward: "fused", "cudnn" or "flash" likewise, of what is not "torch". The latter two may add up in any order,
            and where lse has a gradient it is "fused". "": as method; of a call without a config what is known to be
            faster; "fused" where torch.use_deterministic_algorithms is on
    """

    method: str = "fused"
    block_q: int = 0
    block_k: int = 0
    num_warps: int = 0
    num_stages: int = 0
    dq_block_q: int = 0
    dq_block_k: int = 0
    dq_num_warps: int = 0
    dq_num_stages: int = 0
    dkv_block_q: int = 0
    dkv_block_k: int = 0
    dkv_num_warps: int = 0
    dkv_num_stages: int = 0
    num_comm_sms: int = 0
    chunk_rows: int = 0
    backward: str = ""

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        for name, allowed in (("method", _METHODS), ("backward", _BACKWARDS)):
            given = getattr(self, name)
            if given not in allowed:
                return f"{name} must be one of {', '.join(map(repr, allowed))}, not {given!r}"
            if given in KERNELS and why_not(given, device, dtype) is not None:
                return f"{name} {given!r}: {why_not(given, device, dtype)}"
        if self.method == "torch":
            return None  # takes none of the rest
        for field in (field for field in fields(self) if field.type is int):
            size = getattr(self, field.name)
            if size < 0:
                return f"{field.name} must be at least 1, or 0 for the default, not {size}"
            if field.name in _SIZES and size and (size < 16 or size & (size - 1)):
                return f"{field.name} must be a power of two of at least 16, or 0 for the default, not {size}"
            if field.name.endswith("num_warps") and size not in (0, 1, 2, 4, 8, 16):
                return f"{field.name} must be 1, 2, 4, 8 or 16, or 0 for the default, not {size}"
        if self.chunk_rows % 16:
            return f"chunk_rows must be a multiple of 16, not {self.chunk_rows}"
        if device.type == "cuda" and self.num_comm_sms >= gpu.num_sms(device):
            return f"num_comm_sms must leave some of the {gpu.num_sms(device)} free, not be {self.num_comm_sms}"
        return None


def _default_tiles(widest, dtype, device):
    """(block_q, block_k, num_warps, num_stages) of the forward, of dq and of dk and dv."""
    if device.type == "cpu":
        return ((32, 32, 1, 1),) * 3
    if dtype == torch.float32:
        # Exact fp32 has no tensor cores: small tiles keep the sums in registers.
        small = 32 if widest <= 128 else 16
        return ((small, small, 4, 1),) * 3
    if torch.version.hip:
        small = 64 if widest <= 128 else 32
        return (64, small, 4, 1), (64, 32, 4, 1), (32, small, 4, 1)
    if gpu.capability(device) < (9, 0):
        return ((128, 64, 8, 2), (64, 64, 4, 2), (32, 64, 4, 2)) if widest <= 128 else (
            (64, 32, 8, 2), (32, 32, 4, 1), (32, 32, 4, 1)
        )
    if widest <= 128:
        return (128, 128, 8, 3), (128, 64, 8, 3), (64, 128, 8, 3)
    return (128, 64, 8, 2), (64, 32, 4, 2), (32, 64, 4, 2)


def _prefers_cudnn(rows, least_rows, widest, dtype, device):
    """Whether cuDNN's kernels are faster than ours: of shards of at least so many positions, on Hopper."""
    if device.type != "cuda" or rows < least_rows or widest > KERNELS["cudnn"].widest:
        return False
    return gpu.capability(device)[0] == 9 and why_not("cudnn", device, dtype) is None


def _default_backward(config, chosen, rows, widest, dtype, device):
    """Whose kernels make the gradients where the config leaves it open."""
    if torch.are_deterministic_algorithms_enabled():
        return "fused"
    if chosen and config.method == "fused" and _prefers_cudnn(rows, _CUDNN_BACKWARD_ROWS, widest, dtype, device):
        return "cudnn"
    return config.method


def completed(config, rows, widest, dtype, device, chosen=False):
    """The config with what it leaves open filled in, for shards of ``rows`` positions and heads of so many elements.

    ``chosen``: by its forward, for a call that was given none, as is None.
    """
    chosen |= config is None
    if config is None:
        faster = _prefers_cudnn(rows, _CUDNN_ROWS, widest, dtype, device)
        config = AgAttentionConfig(method="cudnn" if faster else "fused")
    if config.method == "torch":
        return config
    if not config.backward:
        config = replace(config, backward=_default_backward(config, chosen, rows, widest, dtype, device))
    cpu = device.type == "cpu"
    names = ("block_q", "block_k", "num_warps", "num_stages")
    defaults = {"num_comm_sms": 2 if cpu else 16, "chunk_rows": 16 if cpu else _chunk_rows(rows)}
    for prefix, tile in zip(("", "dq_", "dkv_"), _default_tiles(widest, dtype, device)):
        defaults.update({prefix + name: value for name, value in zip(names, tile)})
    return replace(config, **{name: value for name, value in defaults.items() if not getattr(config, name)})


def _chunk_rows(rows):
    """About a sixteenth of a shard: so small that tiles soon have something to do, and signals are few."""
    return min(max(next_power_of_2(rows) // 16, 128), 1024)
