"""Config of all_gather, reduce_scatter and all_reduce, and the heuristic that selects a config without tuning."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch

EXCHANGES: dict[str, tuple[str, ...]] = {
    "all_gather": ("one_shot", "copy_engine"),
    "reduce_scatter": ("one_shot",),
    "all_reduce": ("one_shot", "two_shot"),
}

# "two_shot" is selected if it saves more bytes than this: they take about as long over the wire as a second signal,
# which costs 2.9 us for 1 KiB, at 390 GB/s (4 H200).
_SECOND_SHOT_BYTES = 1 << 20
# From this shard size on, the copy engine is faster than programs that push (H200).
_COPY_ENGINE_BYTES = 64 << 20
# Bytes per peer: up to _FEW_BYTES the latency dominates; above _MANY_BYTES the programs must saturate the link.
_FEW_BYTES, _MANY_BYTES = 64 << 10, 2 << 20


@dataclass(frozen=True)
class CollectiveConfig:
    """Config of ``all_gather``, ``reduce_scatter`` or ``all_reduce``.

    Attributes:
        method: "fused" runs one kernel of this library, "torch" the collective of torch.distributed.
        exchange: With "one_shot" data goes directly to the ranks that need it, and each rank that sums receives all
            parts. With "two_shot" one rank sums each chunk and sends the sum to all ranks (all_reduce, large sizes).
            With "copy_engine" the copy engine sends the shards, which takes no SM (all_gather, large sizes); the fields
            below are not used.
        num_programs: Maximum number of programs.
        block_bytes: Bytes that a program moves at a time.
        piece_blocks: Number of blocks per chunk, which is sent with one signal.
        num_warps: Warps per program.
    """

    method: str = "fused"
    exchange: str = "one_shot"
    num_programs: int = 128
    block_bytes: int = 8192
    piece_blocks: int = 1
    num_warps: int = 8

    def illegal(self, device: "torch.device", dtype: "torch.dtype", operator: str | None = None) -> str | None:
        """Return why this config cannot run with a device, dtype and operator (None: any), or None if it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # uses no other field
        known = EXCHANGES[operator] if operator else sorted({name for names in EXCHANGES.values() for name in names})
        if self.exchange not in known:
            names = " or ".join(f'"{name}"' for name in known)
            return f"exchange must be {names}, not {self.exchange!r}"
        for name in ("num_programs", "piece_blocks"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        if not 256 <= self.block_bytes <= 65536 or self.block_bytes & (self.block_bytes - 1):
            return f"block_bytes must be a power of two from 256 to 65536, not {self.block_bytes}"
        if self.num_warps not in (1, 2, 4, 8, 16):
            return f"num_warps must be 1, 2, 4, 8 or 16, not {self.num_warps}"
        return None

    def variant_reason(self) -> str | None:
        """Return why a sum depends on its place in the tensor with this config, or None if it does not."""
        return None if self.method == "fused" else f'method must be "fused", not {self.method!r}'


def default_config(
    operator: str, nbytes: int, world_size: int, device: "torch.device", exchange: str | None = None
) -> CollectiveConfig:
    """Return the heuristic config for a full tensor (gathered, to be scattered, or to be reduced) of ``nbytes``."""
    exchange = exchange or default_exchange(operator, nbytes, world_size, device)
    apart = nbytes if operator == "all_reduce" and exchange == "one_shot" else cdiv(nbytes, world_size)  # per peer
    if device.type == "cpu":  # few programs, because the interpreter is slow
        return CollectiveConfig("fused", exchange, num_programs=4, block_bytes=4096, piece_blocks=2, num_warps=1)
    if apart <= _FEW_BYTES:
        return CollectiveConfig("fused", exchange, num_programs=32, block_bytes=4096, num_warps=4)
    multiprocessors = gpu.num_sms(device)
    if apart <= _MANY_BYTES:
        return CollectiveConfig("fused", exchange, num_programs=multiprocessors, block_bytes=8192, num_warps=8)
    if operator == "all_gather":  # a copy needs fewer programs
        return CollectiveConfig(
            "fused", exchange, max(multiprocessors // 4, 1), block_bytes=32768, piece_blocks=2, num_warps=16
        )
    return CollectiveConfig(
        "fused", exchange, max(multiprocessors // 2, 1), block_bytes=16384, piece_blocks=4, num_warps=16
    )


def saved_by_two_shots(nbytes: int, world_size: int) -> int:
    """Return how many bytes fewer a rank sends with "two_shot" than with "one_shot", for a tensor of ``nbytes``."""
    return nbytes * (world_size - 1) * (world_size - 2) // world_size


def default_exchange(operator: str, nbytes: int, world_size: int, device: "torch.device") -> str:
    """Return the heuristic exchange; arguments as for ``default_config``."""
    if operator == "all_gather" and nbytes >= world_size * _COPY_ENGINE_BYTES and device.type != "cpu":
        return "copy_engine"
    if operator == "all_reduce":
        return "two_shot" if saved_by_two_shots(nbytes, world_size) > _SECOND_SHOT_BYTES else "one_shot"
    return "one_shot"
