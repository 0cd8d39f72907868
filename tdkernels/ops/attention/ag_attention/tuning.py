"""Tunable of ag_attention: problems, search space and cost model.

The sizes of a problem are the batch size, the sequence length over all ranks, the query heads, the key-value heads, and
the head dimensions of keys and of values. The layout encodes the mask and, with a causal mask, the sharding. Tuning
measures the forward, so a tuned config leaves the fields of the backward at 0, their defaults. If the torch baseline is
the fastest, its backward is torch's, too.
"""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.attention.ag_attention import launch, op
from tdkernels.ops.attention.ag_attention.config import AgAttentionConfig, completed
from tdkernels.ops.attention.ag_attention.validation import LEAST, MOST
from tdkernels.ops.attention.ag_attention.vendor_attention import KERNELS
from tdkernels.ops.common import costs
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_FORWARD = ("method", "block_q", "block_k", "num_warps", "num_stages", "num_comm_sms", "chunk_rows")
_REACHED_BY = {"cudnn": 0.75, "flash": 0.5}  # share of the peak flop rate
_LAUNCHES_S = 30e-6  # launches per rank's keys: wait for the copy, attention and merge
_REACHED = 0.75  # share of the peak flop rate that the best attention reaches; the rest is spent on the softmax
_SIGNAL_S, _WAIT_S = 3e-6, 1e-6  # cost of a chunk's signal for the sender, and of a wait for a signal that is set
_BARRIERS_BYTES = 1 << 10  # shared memory for the barriers of TMA loads, in addition to the tiles
_SCORES_BYTES = 4 << 30  # memory bound of the scores that the reference computes at a time
_CALLS = {"causal contiguous": (True, "contiguous"), "causal zigzag": (True, "zigzag"), "full": (False, "contiguous")}


class AgAttentionTunable(ConfigTunable):
    """The Tunable of ag_attention."""

    name = "ag_attention"
    sizes = ("batch", "seq", "heads", "kv_heads", "d", "dv")
    layouts = tuple(_CALLS)
    config_class = AgAttentionConfig
    plain_words = "torch all-gathers, then its attention", "torch's all-gathers and attention"
    across_nodes = False

    def why_not(self, problem: "Problem") -> str | None:
        reason = super().why_not(problem)
        if reason is not None:
            return reason
        _, seq, heads, kv_heads, *elements = problem.shape
        if seq % problem.world_size:
            return f"SEQ = {seq} is not divisible by {problem.world_size} ranks"
        if heads % kv_heads:
            return f"HEADS = {heads} is not a multiple of KV_HEADS = {kv_heads}"
        if not LEAST <= min(elements) <= max(elements) <= MOST:
            return f"D and DV must be from {LEAST} to {MOST}, not {elements[0]} and {elements[1]}"
        return None

    def sizes_of(self, *shapes: Sequence[int], world_size: int) -> tuple[int, ...]:
        if len(shapes) != 3:
            raise ValueError(f"ag_attention: the operands are q, k and v, not {len(shapes)} of them")
        q, k, v = map(tuple, shapes)
        if {len(q), len(k), len(v)} != {4} or q[:2] != k[:2] or k[:3] != v[:3] or q[3] != k[3]:
            raise ValueError(f"ag_attention: q {list(q)}, k {list(k)} and v {list(v)} do not fit")
        return q[0], world_size * q[1], q[2], k[2], q[3], v[3]

    def layout_of(self, *operands) -> str:
        return self.layouts[0]  # the operands do not show the mask or the sharding

    def config_to_dict(self, config: AgAttentionConfig) -> dict:
        return {name: value for name, value in super().config_to_dict(config).items() if value}

    def illegal(self, config: AgAttentionConfig, problem: "Problem", device: torch.device) -> str | None:
        reason = super().illegal(config, problem, device)
        if reason is None and config.method in KERNELS and max(problem.shape[4:]) > KERNELS[config.method].widest:
            return f"{config.method} takes heads of at most {KERNELS[config.method].widest} elements"
        if reason is None and config.method == "fused":
            needed = _shared_memory_bytes(self.completed(config, problem, device), problem)
            available = gpu.shared_memory_bytes(device)
            if needed > available:
                return f"its tiles need {needed} bytes of shared memory, {device} has {available}"
        return reason

    def completed(
        self, config: AgAttentionConfig | None, problem: "Problem", device: torch.device
    ) -> AgAttentionConfig:
        rows, widest = problem.shape[1] // problem.world_size, max(problem.shape[4:])
        return completed(config, rows, widest, problem.torch_dtype, device)

    def default(self, problem: "Problem", device: torch.device) -> AgAttentionConfig:
        return _of_forward(self.completed(None, problem, device))

    def recordable(self, problem: "Problem", device: torch.device) -> AgAttentionConfig:
        return _of_forward(self.completed(AgAttentionConfig(), problem, device))

    invariant = recordable

    def space(self, problem: "Problem", device: torch.device) -> list[AgAttentionConfig]:
        rows = problem.shape[1] // problem.world_size
        on_cpu = device.type == "cpu"
        chunks = (16, 32) if on_cpu else sorted({256, 512, 1024, 2048, self.recordable(problem, device).chunk_rows})
        positions = problem.shape[0] * rows  # larger chunks are all the same
        chunks = [chunk for chunk in chunks if chunk == chunks[0] or chunk < 2 * positions]
        tiles = (
            dict(zip(_FORWARD[1:], tile)) for tile in _tiles(max(problem.shape[4:]), problem.torch_dtype, device)
        )
        return [AgAttentionConfig(method=name) for name in KERNELS] + [
            AgAttentionConfig(**tile, num_comm_sms=num_comm, chunk_rows=chunk)
            for tile in tiles for num_comm in ((2,) if on_cpu else (8, 16, 32)) for chunk in chunks
        ]

    def estimate_ms(self, config: AgAttentionConfig, problem: "Problem", hardware: "Hardware") -> float:
        batch, seq, heads, kv_heads, d, dv = problem.shape
        ranks, floors, size = problem.world_size, self.floors(problem), problem.torch_dtype.itemsize
        rows = seq // ranks
        if config.method == "torch":
            attention = floors.flops / (_REACHED * hardware.flops)
            moved = 4 * batch * seq * (d + dv) * heads * size / hardware.memory  # gather, reorder, repeat
            return 1e3 * (attention + moved + 2 * costs.collective_s(floors.wire_bytes / 2, hardware))
        if config.method in KERNELS:
            merging = 3 * (ranks - 1) * batch * rows * heads * dv * size / hardware.memory
            attention = floors.flops / (_REACHED_BY[config.method] * hardware.flops)
            return 1e3 * (max(attention, floors.wire_bytes / hardware.link) + merging + ranks * _LAUNCHES_S)
        tiles = batch * heads * cdiv(rows, config.block_q)
        # A small tile does less arithmetic per byte loaded. More stages hide more of the loads.
        reach = _REACHED * min(1.0, config.block_q * config.block_k / (128 * 128)) ** 0.2
        reach *= 1.0 - 0.15 / max(config.num_stages, 1)
        a_tile = floors.flops / tiles / (reach * hardware.flops / hardware.num_sms)
        # Tiles differ in length and the longest come first, so the last wave is full except for about one tile.
        product = max(tiles / hardware.num_sms, 1.0) * a_tile
        chunks = cdiv(batch * rows, config.chunk_rows)
        rate = costs.push_rate(min(config.num_comm_sms, (ranks - 1) * chunks), hardware)
        wire = floors.wire_bytes / rate + _SIGNAL_S * (ranks - 1) * chunks / config.num_comm_sms
        pushing = wire * config.num_comm_sms / hardware.num_sms  # programs that push start their tiles later
        first = min(config.chunk_rows, batch * rows) * kv_heads * (d + dv) * size / costs.push_rate(1, hardware)
        own = a_tile / ranks  # the part of a tile that needs no peer
        waits = _WAIT_S * (ranks - 1) * chunks  # in a program's first tile
        return 1e3 * (max(product + pushing, wire) + a_tile / 2 + max(0.0, first - own) + waits)

    def floors(self, problem: "Problem") -> Floors:
        batch, seq, heads, kv_heads, d, dv = problem.shape
        rows = seq // problem.world_size
        pairs = batch * heads * _pairs(seq, rows, problem.layout, problem.world_size)
        wire_bytes = (problem.world_size - 1) * batch * rows * kv_heads * (d + dv) * problem.torch_dtype.itemsize
        return Floors(2 * (d + dv) * pairs, wire_bytes)  # of the rank with the most work and the most keys

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator
    ) -> tuple[torch.Tensor, ...]:
        batch, seq, heads, kv_heads, d, dv = problem.shape
        rows, dtype = seq // problem.world_size, problem.torch_dtype
        return tuple(
            torch.randn(batch, rows, *of_row, generator=generator, dtype=dtype, device=device)
            for of_row in ((heads, d), (kv_heads, d), (kv_heads, dv))
        )

    def reference_bytes(self, problem: "Problem") -> int:
        batch, seq, heads, _, d, dv = problem.shape
        wide, rows = 2 * problem.torch_dtype.itemsize, seq // problem.world_size
        # Keys and values: gathered, reordered, and repeated for each query head. Outputs, and copies for comparison.
        nbytes = wide * batch * heads * (3 * seq * (d + dv) + 4 * rows * dv)
        # Scores, masked scores and weights: for some rows at a time, but for all rows if torch attends in fp32.
        scores = wide * batch * heads * rows * seq
        return nbytes + 3 * (scores if problem.dtype == "float32" else min(scores, max(_SCORES_BYTES, scores // rows)))

    def reference(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup") -> torch.Tensor:
        causal, sharding = _CALLS[problem.layout]
        batch, seq, heads = problem.shape[:3]
        at_once = max(1, _SCORES_BYTES // (batch * heads * seq * operands[0].element_size()))
        scale = problem.shape[4] ** -0.5
        return op.attend_by_torch(  # type: ignore[call-arg,misc]
            *operands, causal, scale, sharding, group, at_once=at_once
        )[0]

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        causal, sharding = _CALLS[problem.layout]
        q, k, v = (x.transpose(1, 2) for x in operands)
        keys, values = (x.repeat(1, 1, problem.world_size, 1) for x in (k, v))
        # The last rank has the most work.
        pieces = op.pieces_of(operands[0].shape[1], sharding, problem.world_size - 1, problem.world_size)
        parts = [part for part in zip(q.split([count for _, count in pieces], 2), pieces, strict=True) if part[1][1]]
        scale = q.shape[3] ** -0.5

        def attend():
            return [op.attend_to_part(part, keys, values, first, causal, scale) for part, (first, _) in parts]

        return attend

    def run(
        self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: AgAttentionConfig
    ) -> torch.Tensor:
        causal, sharding = _CALLS[problem.layout]
        config = self.completed(config, problem, operands[0].device)
        return op.attend(  # type: ignore[call-arg]
            *operands, causal, problem.shape[4] ** -0.5, sharding, False, group, config
        )[0]

    def compiled(self, config: AgAttentionConfig) -> tuple[int, ...] | None:
        if config.method != "fused":
            return None
        return config.block_q, config.block_k, config.num_warps, config.num_stages

    def compile(self, operands: Any, problem: "Problem", config: AgAttentionConfig) -> None:
        causal, sharding = _CALLS[problem.layout]
        config = self.completed(config, problem, operands[0].device)
        if config.method != "fused":
            return
        launch.compile(  # type: ignore[call-arg]
            *map(op.padded, operands), causal, sharding, problem.world_size, config  # type: ignore[arg-type]
        )


def _of_forward(config):
    """Return the config with only those fields set that the forward uses."""
    values = asdict(config)
    return AgAttentionConfig(**{name: values[name] for name in (_FORWARD if config.method == "fused" else ("method",))})


def _tiles(widest, dtype, device):
    """Return (block_q, block_k, num_warps, num_stages) of the search space for a head dimension, legal or not."""
    narrow = widest <= 128
    if device.type == "cpu":
        return (32, 32, 1, 1), (16, 32, 1, 1)
    if dtype == torch.float32:
        small = 32 if narrow else 16
        return (small, small, 4, 1), (2 * small, small, 4, 1), (small, 2 * small, 4, 1)
    if torch.version.hip:
        if narrow:
            return (64, 64, 4, 1), (64, 32, 4, 1), (128, 32, 4, 1), (128, 64, 8, 1)
        return (64, 32, 4, 1), (32, 32, 4, 1), (64, 16, 4, 1), (64, 32, 8, 1)
    if gpu.capability(device) < (9, 0):
        if narrow:
            return (128, 64, 8, 2), (128, 32, 4, 3), (128, 32, 8, 3), (64, 64, 4, 2), (64, 32, 4, 3)
        return (64, 32, 8, 2), (64, 32, 4, 2), (32, 32, 4, 2), (64, 16, 4, 3)
    if narrow:
        return (
            (128, 128, 8, 3), (128, 128, 8, 2), (128, 64, 8, 4), (128, 64, 8, 3), (128, 64, 8, 2), (64, 64, 8, 3),
            (64, 64, 4, 3), (64, 64, 4, 2),
        )
    return (128, 64, 8, 2), (128, 32, 8, 3), (128, 32, 8, 2), (64, 64, 8, 2), (64, 32, 8, 2), (64, 32, 4, 2)


def _shared_memory_bytes(config, problem):
    """Return the shared memory that a tile of queries and the stages of the main loop need."""
    d, dv = (launch.width_of(size) for size in problem.shape[4:])
    stages = config.num_stages * config.block_k * (d + dv)
    return (config.block_q * d + stages) * problem.torch_dtype.itemsize + _BARRIERS_BYTES


def _pairs(seq, rows, layout, ranks):
    """Return the number of (query, key) pairs per head of the rank with the most pairs."""
    causal, sharding = _CALLS[layout]
    if not causal:
        return rows * seq
    return max(
        sum(count * first + count * (count + 1) // 2 for first, count in op.pieces_of(rows, sharding, rank, ranks))
        for rank in range(ranks)
    )


register(AgAttentionTunable())
