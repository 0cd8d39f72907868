"""Config of ag_attention, and the heuristic for the fields that a config leaves open."""

from dataclasses import dataclass, fields, replace
from typing import Any

import torch

from tdkernels.ops.attention.ag_attention.vendor_attention import KERNELS, why_not
from tdkernels.rounding import next_power_of_2
from tdkernels.runtime import gpu

_METHODS = ("fused", *KERNELS, "torch")
_BACKWARDS = ("", "fused", *KERNELS)
# From this number of positions per shard, cuDNN is faster than the fused kernel on H200
# (docs/performance/notes/attention.md).
_CUDNN_ROWS, _CUDNN_BACKWARD_ROWS = 8192, 4096
_SIZES = ("block_q", "block_k", "dq_block_q", "dq_block_k", "dkv_block_q", "dkv_block_k")


@dataclass(frozen=True)
class AgAttentionConfig:
    """Config of ``ag_attention``. A field of 0 selects the default for the device, head dimensions and dtype.

    Attributes:
        method: "fused" runs one overlapping kernel. "cudnn" and "flash" run this attention kernel of torch on the keys
            of one rank at a time, as they arrive. "torch" runs an all-gather, then torch's
            scaled_dot_product_attention.
        block_q: Queries per tile of the forward, a power of two of at least 16.
        block_k: Keys per step of a tile, a power of two of at least 16.
        num_warps: Warps per program of the forward.
        num_stages: Pipeline stages of the forward's loop over keys.
        dq_block_q: As block_q, for the gradient of q.
        dq_block_k: As block_k, for the gradient of q.
        dq_num_warps: As num_warps, for the gradient of q.
        dq_num_stages: As num_stages, for the gradient of q.
        dkv_block_q: Queries per step of a tile, for the gradients of k and v.
        dkv_block_k: Keys per tile, for the gradients of k and v.
        dkv_num_warps: As num_warps, for the gradients of k and v.
        dkv_num_stages: As num_stages, for the gradients of k and v, whose loop is over queries.
        num_comm_sms: Number of programs that push concurrently. They compute tiles afterwards, like the others.
        chunk_rows: Positions per chunk, which is sent with one signal; a multiple of 16.
        backward: "fused", "cudnn" or "flash"; not used with method "torch". "cudnn" and "flash" may sum in any order,
            and a call with a gradient of lse uses "fused" instead. "" selects the kernel of ``method``, or, for a call
            without a config, the kernel that was measured to be faster; under torch.use_deterministic_algorithms it
            selects "fused".
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

    def illegal(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why this config cannot run with a device and a dtype, or None if it can."""
        for name, allowed in (("method", _METHODS), ("backward", _BACKWARDS)):
            given = getattr(self, name)
            if given not in allowed:
                return f"{name} must be one of {', '.join(map(repr, allowed))}, not {given!r}"
            if given in KERNELS and why_not(given, device, dtype) is not None:
                return f"{name} {given!r}: {why_not(given, device, dtype)}"
        if self.method == "torch":
            return None  # the other fields are not used
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

    def variant_reason(self) -> str | None:
        """Return why the result of a query depends on other batch entries with this config, or None if it does not."""
        return None if self.method == "fused" else f'method must be "fused", not {self.method!r}'


def _default_tiles(widest, dtype, device):
    """Return (block_q, block_k, num_warps, num_stages) for the forward, for dq, and for dk and dv."""
    if device.type == "cpu":
        return ((32, 32, 1, 1),) * 3
    if dtype == torch.float32:
        # Exact fp32 does not use tensor cores. Small tiles keep the accumulators in registers.
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
    """Return whether cuDNN is expected to be faster: on Hopper, for shards of at least ``least_rows`` positions."""
    if device.type != "cuda" or rows < least_rows or widest > KERNELS["cudnn"].widest:
        return False
    return gpu.capability(device)[0] == 9 and why_not("cudnn", device, dtype) is None


def _default_backward(config, chosen, rows, widest, dtype, device):
    """Return the value of ``backward`` for a config that leaves it open."""
    if torch.are_deterministic_algorithms_enabled():
        return "fused"
    if chosen and config.method == "fused" and _prefers_cudnn(rows, _CUDNN_BACKWARD_ROWS, widest, dtype, device):
        return "cudnn"
    return config.method


def completed(
    config: AgAttentionConfig | None, rows: int, widest: int, dtype: torch.dtype, device: torch.device,
    chosen: bool = False,
) -> AgAttentionConfig:
    """Return the config with its open fields filled in. None selects the method as well.

    Args:
        config: The config, or None.
        rows: Positions per shard.
        widest: The larger of the head dimensions D and Dv.
        dtype: Dtype of the operands.
        device: Device of the operands.
        chosen: The config was selected for a call without a config, by the time of its forward. Implied by None.
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
    defaults: dict[str, Any] = {"num_comm_sms": 2 if cpu else 16, "chunk_rows": 16 if cpu else _chunk_rows(rows)}
    for prefix, tile in zip(("", "dq_", "dkv_"), _default_tiles(widest, dtype, device)):
        defaults.update({prefix + name: value for name, value in zip(names, tile)})
    return replace(config, **{name: value for name, value in defaults.items() if not getattr(config, name)})


def _chunk_rows(rows):
    """Return about a sixteenth of a shard: small, so that tiles start early, but large enough for few signals."""
    return min(max(next_power_of_2(rows) // 16, 128), 1024)
