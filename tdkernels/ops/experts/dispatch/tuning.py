"""Tunables of ep_dispatch, ep_combine and all_to_all: problems, search space and cost model.

The first size of a problem is the number of tokens of all ranks. Tokens are distributed evenly over the ranks, and all
experts are equally likely. Calls look up their config by a number of tokens that all ranks know (``token_buckets``),
rounded up to a power of two. Layouts:

    exact     without max_tokens: the host waits for the number of rows
    static    with a max_tokens that always suffices
    bounded   with max_tokens_per_rank; ep_dispatch and all_to_all only
    *_fp8     with quantize="fp8"; ep_dispatch only
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.common import costs
from tdkernels.ops.common.scaling import dequantize
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.ops.experts.dispatch import (
    all_to_all,
    kernel_payload,
    launch,
    layout,
    low_latency,
    op,
    payload,
    torch_backend,
)
from tdkernels.ops.experts.dispatch import config as ep_config
from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.counted import routing_to_compile
from tdkernels.ops.experts.dispatch.request import RoutingShape
from tdkernels.ops.experts.dispatch.token_buckets import bucket, crossing_share, sure_capacity
from tdkernels.ops.experts.grouped_gemm.synthetic import expert_ids, why_not_shared
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

    Group = dist.ProcessGroup | None

_QUANTUM = kernel_payload.QUANTUM.value
_LAUNCH_S = 5e-6
_CHUNK_S, _TOKEN_S = 1e-6, 0.5e-6  # a program's time for a chunk (find it, signal it), and for a token of the chunk
_HOST_S = 30e-6  # until the host knows the number of rows
_MOST_DIRECT = layout.MAX_CHUNKS.value  # maximum of EpConfig.direct_tokens


class _EpTunable(ConfigTunable):
    """Base class of the three tunables."""

    sizes: tuple = ("tokens", "hidden", "experts", "choices")
    layouts: tuple = ("exact", "static")
    config_class = EpConfig
    plain_words = "torch's all-to-all between sorts", "torch's all-to-all and sorts"
    _blocks: tuple = (4096, 4), (8192, 4), (8192, 8), (16384, 4)  # (block_bytes, num_warps)

    def why_not(self, problem: "Problem") -> str | None:
        if problem.num_nodes > 1:
            return "on several nodes it runs in its default config, and there is nothing to tune"
        reason = super().why_not(problem)
        return reason or why_not_shared(self, problem, (2,), problem.shape[2], _choices(problem))

    def key(self, problem: "Problem") -> "Problem":
        """Return the problem with its tokens rounded up to a power of two, which is all that calls know."""
        return replace(problem, shape=(bucket(problem.shape[0]), *problem.shape[1:]))

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, ...]:
        raise ValueError(
            f"{self.name}: operands do not determine all of its sizes; give them: {', '.join(self.sizes)}, with the "
            "tokens of all ranks"
        )

    def layout_of(self, *operands) -> str:
        return self.layouts[0]

    def illegal(self, config: EpConfig, problem: "Problem", device: torch.device) -> str | None:
        if config.method == "torch" and not problem.layout.startswith("exact"):
            return "torch's collectives need the host to wait, but with max_tokens the host does not wait"
        return super().illegal(config, problem, device)

    def default(self, problem: "Problem", device: torch.device) -> EpConfig:
        return ep_config.default_config(device, self.name, _is_bounded(problem), _tokens(problem))

    invariant = default  # rows are copied, and the default combines "per_expert" in this mode

    def goes_in_graphs(self, problem: "Problem") -> bool:
        return not problem.layout.startswith("exact")

    def space(self, problem: "Problem", device: torch.device) -> list[EpConfig]:
        tokens, ranks = _tokens(problem), problem.world_size
        if device.type == "cpu":
            default = self.default(problem, device)
            return [replace(default, chunk_tokens=chunk, num_senders=n) for chunk in (8, 32) for n in (1, 2)]
        most = gpu.num_sms(device)
        configs = []
        for chunk_tokens in self._chunks():
            work = max(cdiv(tokens, chunk_tokens) * (ranks - 1), 1)
            for programs in sorted({min(number * most, work) for number in (1, 2, 4, 8)}):
                # As many receivers as senders, or so many receivers that some can always run next to the senders.
                for receivers in sorted({programs, min(8 * most, work)}):
                    for block_bytes, num_warps in self._blocks:
                        configs.append(
                            EpConfig("per_rank", programs, receivers, chunk_tokens, block_bytes, num_warps)
                        )
        return configs

    def _chunks(self):
        return 1, 2, 4, 8

    def estimate_ms(self, config: EpConfig, problem: "Problem", hardware: "Hardware") -> float:
        if config.method == "torch":
            return self._sequence_ms(problem, hardware)
        tokens, crosses = _tokens(problem), _crossing(problem)
        chunks = min(max(cdiv(tokens, config.chunk_tokens), 1), launch.MAX_CHUNKS)
        in_chunk = cdiv(tokens, chunks)
        senders, receivers = min(config.num_senders, chunks), min(config.num_receivers, chunks)
        # A program processes its chunks and their tokens one after the other. Programs run concurrently.
        turns = cdiv(chunks, senders) + cdiv(chunks, receivers)
        walking = turns * (_CHUNK_S + in_chunk * _TOKEN_S)
        floors = self.floors(problem)
        moved = floors.memory_bytes + 2 * crosses * self._row_bytes(problem)
        moving = max(floors.wire_bytes / costs.push_rate(senders, hardware), moved / hardware.memory)
        return 1e3 * (self._latency_s(problem, config) + walking + moving)

    def _sequence_ms(self, problem, hardware):
        """Estimate torch's method: a row is sent once for each assignment, and sorted in memory before and after."""
        floors, choices = self.floors(problem), _choices(problem)
        sent = _tokens(problem) * choices * self._row_bytes(problem)
        memory = (4 * sent + floors.memory_bytes) / hardware.memory
        return 1e3 * (_HOST_S + 8 * _LAUNCH_S + memory + costs.collective_s(sent, hardware))

    def _latency_s(self, problem, config):
        """Return the latency of launches, signals and host waits of the two phases, counts and tokens."""
        waits = _HOST_S if problem.layout.startswith("exact") else 0.0
        return 2 * (_LAUNCH_S + costs.SIGNAL_S) + waits

    def _row_bytes(self, problem):
        """Return the bytes of a row on the wire."""
        return problem.shape[1] * problem.torch_dtype.itemsize

    def floors(self, problem: "Problem") -> Floors:
        tokens = _tokens(problem)
        own = problem.shape[1] * problem.torch_dtype.itemsize
        # Each token is accessed once on its own rank, and each row once on the rank of its expert.
        memory = tokens * own + tokens * _choices(problem) * self._row_bytes(problem)
        return Floors(0, int(_crossing(problem) * self._row_bytes(problem)), memory)

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator
    ) -> tuple[torch.Tensor, ...]:
        tokens, (_, hidden, experts, choices) = _tokens(problem), problem.shape
        x = torch.randn(tokens, hidden, generator=generator, dtype=problem.torch_dtype, device=device)
        ids = expert_ids(tokens, choices, experts, device, generator)
        return x, ids, torch.rand(tokens, choices, generator=generator, device=device)

    def reference_bytes(self, problem: "Problem") -> int:
        elements = problem.shape[1] * _tokens(problem) * (4 * _choices(problem) + 2)
        return 2 * max(problem.torch_dtype.itemsize, 4) * elements

    def local(self, operands: Sequence[Any], problem: "Problem") -> Callable[[], Any]:
        x, choices = operands[0], _choices(problem)
        return lambda: x.repeat_interleave(choices, 0)  # the work on one rank without communication is a copy

    def compiled(self, config: EpConfig) -> tuple | None:
        return None if config.method == "torch" else (config.block_bytes, config.num_warps)


def _choices(problem):
    return problem.shape[3] if len(problem.shape) > 3 else 1


def _tokens(problem):
    """Return the tokens of a rank."""
    return cdiv(problem.shape[0], problem.world_size)


def _crossing(problem):
    """Return the expected number of tokens that a rank receives from its peers, each counted once."""
    ranks = problem.world_size
    return (ranks - 1) * _tokens(problem) * crossing_share(ranks, problem.shape[2], _choices(problem))


def _capacity(problem):
    """Return the max_tokens of a call."""
    if problem.layout.startswith("exact"):
        return None
    ranks = problem.world_size
    return sure_capacity(ranks * _tokens(problem), ranks, problem.shape[2], _choices(problem))


def _shape_of(problem):
    return RoutingShape(
        problem.operator, _tokens(problem), _choices(problem), problem.shape[2], problem.world_size,
        _capacity(problem), _most_tokens(problem), problem.operator == "all_to_all",
    )


def _compile_dispatch(problem, config, x, weights=None, quantize=False):
    if x.device.type == "cpu":
        return  # the interpreter compiles nothing
    routing = routing_to_compile(_shape_of(problem), config, x.device)
    tensors = launch.prepare_dispatch(routing, x, weights=weights, quantize=quantize)
    parts = payload.parts_of(tensors, config)
    if _is_low_latency(config, problem):
        ids = torch.empty(1, dtype=torch.int64, device=x.device)
        code = routing.tables[0] if problem.operator == "all_to_all" else None  # error code of the splits
        known = routing.tables, routing.tables, ids, code, routing.tables
        kernel, _, args, constants = low_latency.low_latency_call(_ctx(x), routing, tensors, parts, 0, known)
    else:
        kernel, _, args, constants = launch.dispatch_call(_ctx(x), routing, tensors, parts, 0)
    kernel.warmup(*args, grid=(1,), **constants)


def _ctx(x):
    return torch.empty(1, dtype=torch.int64, device=x.device)


class _DirectTunable(_EpTunable):
    """Base class of the operators that have a low-latency strategy, for few tokens with max_tokens_per_rank."""

    def space(self, problem: "Problem", device: torch.device) -> list[EpConfig]:
        configs = super().space(problem, device)
        if not _is_bounded(problem):
            return configs
        direct = [replace(config, direct_tokens=_MOST_DIRECT) for config in configs]
        direct = [config for config in direct if config.chunk_tokens == direct[0].chunk_tokens]
        counted = [replace(config, direct_tokens=0) for config in configs]
        return direct + counted if _is_low_latency(direct[0], problem) else counted

    def _latency_s(self, problem, config):
        latency = super()._latency_s(problem, config)
        return latency / 2 if _is_low_latency(config, problem) else latency

    def compiled(self, config: EpConfig) -> tuple | None:
        same = super().compiled(config)
        return same and (config.direct_tokens, *same)


class EpDispatchTunable(_DirectTunable):
    """Tunable of ``ep_dispatch``: counts and dispatch, with weights."""

    name = "ep_dispatch"
    layouts = ("exact", "static", "bounded", "exact_fp8", "static_fp8", "bounded_fp8")

    def _row_bytes(self, problem):
        hidden = problem.shape[1]
        if _is_quantized(problem):
            return hidden + 4 * cdiv(hidden, _QUANTUM)
        return super()._row_bytes(problem)

    def reference(self, operands: Sequence[Any], problem: "Problem", group: "Group") -> Any:
        x, ids, _ = operands
        if _is_quantized(problem) and x.dtype == problem.torch_dtype:
            x = _quantize_roundtrip(x)  # as torch would send it; a reference in a wider dtype is not quantized
        return op.ep_dispatch_ref(x, ids, num_experts=problem.shape[2], group=group)[0].x

    def run(self, operands: Sequence[Any], problem: "Problem", group: "Group", config: EpConfig | None) -> Any:
        x, ids, weights = operands
        return op.ep_dispatch(
            x, ids, weights, num_experts=problem.shape[2], quantize="fp8" if _is_quantized(problem) else None,
            max_tokens=_capacity(problem), max_tokens_per_rank=_most_tokens(problem), group=group, config=config,
        )

    def comparable(self, output: Any, problem: "Problem") -> torch.Tensor:
        recv, _ = output
        rows = int(recv.splits.sum())
        x = recv.x[:rows]
        return x if recv.scales is None else dequantize(x, recv.scales[:rows]).to(problem.torch_dtype)

    def compile(self, operands: Sequence[Any], problem: "Problem", config: EpConfig) -> None:
        x, _, weights = operands
        _compile_dispatch(problem, config, x, weights, _is_quantized(problem))


class EpCombineTunable(_EpTunable):
    """Tunable of ``ep_combine`` alone, after a dispatch in the default config, whose chunks it uses.

    Torch's method is not a candidate: a combine must use the method of its dispatch.
    """

    name = "ep_combine"
    _blocks = (4096, 4), (8192, 4), (8192, 8), (16384, 16)

    def plain(self) -> None:
        return None

    def illegal(self, config: EpConfig, problem: "Problem", device: torch.device) -> str | None:
        if config.method == "torch":
            return 'a combine uses the method of its dispatch, which is "fused"'
        return super().illegal(config, problem, device)

    def goes_in_graphs(self, problem: "Problem") -> bool:
        return True  # the host knows all sizes since the dispatch

    def _chunks(self):
        return (EpConfig().chunk_tokens,)

    def _latency_s(self, problem, config):
        return _LAUNCH_S + costs.SIGNAL_S

    def reference(self, operands: Sequence[Any], problem: "Problem", group: "Group") -> Any:
        recv, state = op.ep_dispatch_ref(*operands, num_experts=problem.shape[2], group=group)
        return op.ep_combine_ref(recv.x, state, group=group)

    def prepared(self, operands: Sequence[Any], problem: "Problem", group: "Group", config: EpConfig | None) -> Any:
        recv, handle = op.ep_dispatch(
            *operands, num_experts=problem.shape[2], max_tokens=_capacity(problem), group=group,
            config=ep_config.default_config(operands[0].device),
        )
        return recv.x, handle

    def run(self, operands: Sequence[Any], problem: "Problem", group: "Group", config: EpConfig | None) -> Any:
        return op.ep_combine(*operands, group=group, config=config)

    def compiled(self, config: EpConfig) -> tuple | None:
        return config.combine, *super().compiled(config)  # type: ignore[misc]  # the method is "fused"

    def compile(self, operands: Sequence[Any], problem: "Problem", config: EpConfig) -> None:
        x, _, weights = operands
        if x.device.type == "cpu":
            return  # the interpreter compiles nothing
        routing = routing_to_compile(_shape_of(problem), config, x.device)
        routing.make_received()
        row_weights = weights.new_empty(1) if routing.weighs_rows(config) else None
        tensors = launch.prepare_combine(routing, x[:1], weights, row_weights, None, config)
        kernel, _, args, constants = launch.combine_call(_ctx(x), routing, tensors, 0, config)
        kernel.warmup(*args, grid=(1,), **constants)


class AllToAllTunable(_DirectTunable):
    """Tunable of ``all_to_all``: counts and all-to-all."""

    name = "all_to_all"
    layouts = ("exact", "static", "bounded")
    sizes = ("tokens", "hidden", "experts")

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, ...]:
        if len(shapes) != 2 or len(shapes[0]) != 2 or len(shapes[1]) != 1:
            raise ValueError(f"{self.name}: the operands are x [T, H] and splits [E], not of shapes {list(shapes)}")
        (tokens, hidden), (experts,) = shapes
        return world_size * tokens, hidden, experts

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator
    ) -> tuple[torch.Tensor, ...]:
        tokens, (_, hidden, experts) = _tokens(problem), problem.shape
        x = torch.randn(tokens, hidden, generator=generator, dtype=problem.torch_dtype, device=device)
        ids = torch.randint(experts, (tokens,), generator=generator, device=device)
        return x, torch.bincount(ids, minlength=experts)

    def reference(self, operands: Sequence[Any], problem: "Problem", group: "Group") -> Any:
        return all_to_all.all_to_all_ref(*operands, group=group)[0]

    def run(self, operands: Sequence[Any], problem: "Problem", group: "Group", config: EpConfig | None) -> Any:
        return all_to_all.all_to_all(
            *operands, max_tokens=_capacity(problem), max_tokens_per_rank=_most_tokens(problem), group=group,
            config=config,
        )

    def comparable(self, output: Any, problem: "Problem") -> torch.Tensor:
        out, out_splits, _ = output
        return out[: int(out_splits.sum())]

    def compile(self, operands: Sequence[Any], problem: "Problem", config: EpConfig) -> None:
        _compile_dispatch(problem, config, operands[0])


def _most_tokens(problem):
    """Return the max_tokens_per_rank of a call."""
    return _tokens(problem) if _is_bounded(problem) else None


def _is_bounded(problem):
    return problem.layout.startswith("bounded")


def _is_low_latency(config, problem):
    return _is_bounded(problem) and low_latency.can_be_low_latency(config, _shape_of(problem))


def _is_quantized(problem):
    return problem.layout.endswith("_fp8")


def _quantize_roundtrip(x):
    """Return x after quantization to float8_e4m3fn and dequantization."""
    return dequantize(*torch_backend.quantized(x)).to(x.dtype)


for _tunable in (EpDispatchTunable(), EpCombineTunable(), AllToAllTunable()):
    register(_tunable)
