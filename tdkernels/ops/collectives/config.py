"""How all_gather, reduce_scatter and all_reduce run: the config, and the default for a size."""

from dataclasses import dataclass

from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

EXCHANGES = {
    "all_gather": ("one_shot", "copy_engine"),
    "reduce_scatter": ("one_shot",),
    "all_reduce": ("one_shot", "two_shot"),
}

# Bytes that take about as long over the wire as a second signal does: 2.9 us more for 1 KiB, at 390 GB/s (4 H200).
_SECOND_SHOT_BYTES = 1 << 20
# Shards from which on the copy engine is faster than programs that push (H200).
_COPY_ENGINE_BYTES = 64 << 20
# Up to so many bytes for a peer, latency is what counts; from so many on, enough programs for the link.
_FEW_BYTES, _MANY_BYTES = 64 << 10, 2 << 20


@dataclass(frozen=True)
class CollectiveConfig:
    """How ``all_gather``, ``reduce_scatter`` or ``all_reduce`` runs.

    Attributes:
        method: "fused", one kernel of ours, or "torch", the collective of torch's backend
        exchange: "one_shot": everything goes straight to those who need it, and whoever sums gets all parts;
            "two_shot": each piece is summed by one rank, which sends the sum to all (all_reduce, many bytes);
            "copy_engine": shards are sent by the copy engine, which takes no multiprocessor (all_gather, many bytes; it
            takes none of the rest)
        num_programs: at most so many programs
        block_bytes: what a program moves at a time
        piece_blocks: blocks under one signal
        num_warps: of a program
    """

    method: str = "fused"
    exchange: str = "one_shot"
    num_programs: int = 128
    block_bytes: int = 8192
    piece_blocks: int = 1
    num_warps: int = 8

    def illegal(self, device, dtype, operator=None):
        """Why this config cannot run on a device with a dtype, or for an operator if one is named; None when it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # takes none of the rest
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


def default_config(operator, nbytes, world_size, device, exchange=None):
    """The config for a full tensor (gathered, to be scattered or reduced) of a size that nobody has tuned."""
    exchange = exchange or default_exchange(operator, nbytes, world_size, device)
    apart = nbytes if operator == "all_reduce" and exchange == "one_shot" else cdiv(nbytes, world_size)  # for a peer
    if device.type == "cpu":  # each program takes the interpreter long
        return CollectiveConfig("fused", exchange, num_programs=4, block_bytes=4096, piece_blocks=2, num_warps=1)
    if apart <= _FEW_BYTES:
        return CollectiveConfig("fused", exchange, num_programs=32, block_bytes=4096, num_warps=4)
    multiprocessors = gpu.num_sms(device)
    if apart <= _MANY_BYTES:
        return CollectiveConfig("fused", exchange, num_programs=multiprocessors, block_bytes=8192, num_warps=8)
    if operator == "all_gather":  # which only copies
        return CollectiveConfig(
            "fused", exchange, max(multiprocessors // 4, 1), block_bytes=32768, piece_blocks=2, num_warps=16
        )
    return CollectiveConfig(
        "fused", exchange, max(multiprocessors // 2, 1), block_bytes=16384, piece_blocks=4, num_warps=16
    )


def default_exchange(operator, nbytes, world_size, device):
    if operator == "all_gather" and nbytes >= world_size * _COPY_ENGINE_BYTES and device.type != "cpu":
        return "copy_engine"
    if operator == "all_reduce":
        more = nbytes * (world_size - 1) * (world_size - 2) // world_size  # than two shots carry
        return "two_shot" if more > _SECOND_SHOT_BYTES else "one_shot"
    return "one_shot"
