"""Tunable of ep_moe: method "sequence", "fused" with some tiles, or "torch".

The first size of a problem is the number of tokens of all ranks. The model assumes an equal number on each rank and
uniformly distributed experts. The parts of the sequence (``ep_dispatch``, ``group_gemm``, ``ep_combine``) are tuned
under their own names. Here the sequence, with the configs that are known for its parts, is one candidate. The fused
method with different tiles gives the others.

Layouts:
    exact      The host waits for the number of rows. The unfused baseline is a candidate too.
    bounded    Calls with a max_tokens_per_rank, which do not wait. It is the number of tokens of each rank.

A call with max_tokens alone selects no config, see ``layout_of``.
"""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.common import costs, gemm_space
from tdkernels.ops.common.config import text_of
from tdkernels.ops.common.tile_config import Tiles
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.low_latency import can_be_low_latency
from tdkernels.ops.experts.dispatch.request import RoutingShape
from tdkernels.ops.experts.dispatch.token_buckets import bucket, crossing_share
from tdkernels.ops.experts.ep_moe import fused as ep_moe_fused
from tdkernels.ops.experts.ep_moe import op
from tdkernels.ops.experts.ep_moe.config import SEQUENCE, EpMoeConfig
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig
from tdkernels.ops.experts.grouped_gemm.synthetic import expert_ids, rows_by_expert, why_not_shared
from tdkernels.rounding import cdiv, round_up

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_LAUNCH_S = 5e-6
_HOST_S = 30e-6  # until the host knows the number of rows
_PROGRAMS = 64  # programs that send concurrently
# Slowdown of both GEMMs while tokens are sent and received. Measured on 2 ranks: 1.10 to 1.19 for the three
# largest experts in docs/performance/notes/ep-moe.md, 1.35 and 1.55 for small ones.
_SLOWED = 1.15


class EpMoeTunable(ConfigTunable):
    """Tunable of ``ep_moe``. Shapes are (tokens, hidden size, intermediate size, experts, experts per token)."""

    name = "ep_moe"
    sizes = ("tokens", "hidden", "intermediate", "experts", "choices")
    layouts = ("exact", "bounded")
    config_class = EpMoeConfig
    plain_words = "torch's all-to-all and grouped matmul", "torch's all-to-all and grouped matmul"

    def why_not(self, problem: "Problem") -> str | None:
        if problem.num_nodes > 1:
            return "on several nodes it is the sequence of its parts, and there is nothing to tune"
        reason = super().why_not(problem)
        return reason or why_not_shared(self, problem, (3,), *problem.shape[3:])

    def key(self, problem: "Problem") -> "Problem":
        """Return the problem with the number of tokens rounded up to a power of two."""
        return replace(problem, shape=(bucket(problem.shape[0]), *problem.shape[1:]))

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, ...]:
        names = "x", "topk_ids", "topk_weights", "w_gate_up", "w_down"
        if list(map(len, shapes)) != [2, 2, 2, 3, 3]:
            raise ValueError(f"{self.name}: the operands are {', '.join(names)}, not of shapes {list(shapes)}")
        x, ids, weights, gate_up, down = map(tuple, shapes)
        fits = x[0] == ids[0] and ids == weights and down[:2] == (gate_up[0], x[1])
        if not fits or gate_up[1:] != (2 * down[2], x[1]):
            raise ValueError(f"{self.name}: the operands {list(map(list, shapes))} do not fit")
        return world_size * x[0], x[1], down[2], world_size * down[0], ids[1]

    def layout_of(self, *operands) -> str:
        return self.layouts[0]

    # ---- configs ----

    def config_to_dict(self, config: Any) -> dict[str, Any]:
        gemm = config.gemm
        tiles = {} if gemm is None or gemm.tiles is None else {"tiles": asdict(gemm.tiles)}
        # Entries of the tables never have these fields, but ``explain`` may be called for such a config.
        others: dict[str, Any] = {} if config.ep is None else {"ep": text_of(config.ep)}
        if gemm is not None and gemm.method != "fused":
            others["gemm"] = gemm.method
        if gemm is not None and gemm.warp_specialize:
            others["warp_specialize"] = True
        return {"method": config.method or "sequence", **tiles, **others}

    def config_from_dict(self, values: dict[str, Any]) -> EpMoeConfig:
        if not values.keys() <= {"method", "tiles"} or not isinstance(values.get("method"), str):
            raise ValueError(f"no EpMoeConfig: {values}")
        tiles = values.get("tiles")
        if tiles is None:
            return EpMoeConfig(method=values["method"])
        if not isinstance(tiles, dict) or any(type(value) is not int for value in tiles.values()):
            raise ValueError(f"tiles must be an object of integers, not {tiles!r}")
        return EpMoeConfig(gemm=GroupGemmConfig(tiles=Tiles(**tiles)), method=values["method"])

    def illegal(self, config: Any, problem: "Problem", device: torch.device) -> str | None:
        if isinstance(config, EpMoeConfig) and config.method == "torch" and _is_bounded(problem):
            return "the unfused baseline waits for the host, which a call with max_tokens_per_rank does not"
        return super().illegal(config, problem, device)

    def default(self, problem: "Problem", device: torch.device) -> EpMoeConfig:
        return SEQUENCE

    def goes_in_graphs(self, problem: "Problem") -> bool:
        return _is_bounded(problem)

    def invariant(self, problem: "Problem", device: torch.device) -> EpMoeConfig:
        return EpMoeConfig(method="sequence")

    def space(self, problem: "Problem", device: torch.device) -> list[EpMoeConfig]:
        fused = [
            EpMoeConfig(gemm=GroupGemmConfig(tiles=tiles), method="fused")
            for tiles in gemm_space.tile_space(device, problem.torch_dtype)
        ]
        return [SEQUENCE, EpMoeConfig(method="fused"), *fused]

    # ---- cost model ----

    def estimate_ms(self, config: Any, problem: "Problem", hardware: "Hardware") -> float:
        tokens, hidden, _, _, choices = problem.shape
        ranks = problem.world_size
        row = hidden * problem.torch_dtype.itemsize
        rows = cdiv(tokens * choices, ranks)
        tiles = config.gemm.tiles if config.gemm else Tiles()  # similar to the default
        products, last = self._products_s(rows, tiles, problem, hardware)
        # Unused capacity takes memory but no time, because kernels process only the received rows. The GEMMs of the
        # sequence select their default tiles by the capacity, so these tiles are large. The model assumes large tiles
        # for all configs.
        waits = 0.0 if _is_bounded(problem) else _HOST_S
        rate = costs.push_rate(_PROGRAMS, hardware)
        if config.method == "fused":
            wire = 2 * (ranks - 1) * rows // ranks * row / rate  # each assignment is sent separately
            return 1e3 * (max(_SLOWED * products, wire) + last + waits + 4 * _LAUNCH_S + 2 * costs.SIGNAL_S)
        moved = (2 * cdiv(tokens, ranks) + 4 * rows) * row / hardware.memory  # tokens, and rows to and from staging
        if config.method == "torch":
            sent = (ranks - 1) * rows // ranks * row
            return 1e3 * (products + 2 * moved + 2 * costs.collective_s(sent, hardware) + waits + 16 * _LAUNCH_S)
        wire = 2 * self._crossing(problem) * row / rate
        if _is_low_latency(problem):  # there is no counting phase
            waits -= _LAUNCH_S + costs.SIGNAL_S
        return 1e3 * (products + max(wire, moved) + waits + 5 * _LAUNCH_S + 2 * costs.SIGNAL_S)

    def _products_s(self, rows, tiles, problem, hardware):
        """Return the seconds (of both GEMMs of ``rows`` rows with padding, of one tile of the second GEMM)."""
        _, hidden, inner, experts, _ = problem.shape
        mine = experts // problem.world_size
        padded = mine * round_up(max(rows // mine, 1), tiles.block_m)
        dtype = problem.torch_dtype
        up, _ = costs.product_s(padded, 2 * inner, hidden, dtype, tiles, hardware.num_sms, hardware)
        down, last = costs.product_s(padded, hidden, inner, dtype, tiles, hardware.num_sms, hardware)
        reading = 3 * mine * hidden * inner * dtype.itemsize / hardware.memory
        return max(up + down, reading), last

    def _crossing(self, problem):
        """Return the number of distinct tokens that a rank receives from its peers."""
        tokens, *_, experts, choices = problem.shape
        ranks = problem.world_size
        return (ranks - 1) * cdiv(tokens, ranks) * crossing_share(ranks, experts, choices)

    def floors(self, problem: "Problem") -> Floors:
        tokens, hidden, inner, experts, choices = problem.shape
        ranks, size = problem.world_size, problem.torch_dtype.itemsize
        weights = 3 * hidden * inner
        memory = (experts // ranks * weights + 2 * cdiv(tokens, ranks) * hidden) * size
        flops = 2 * (tokens * choices // ranks) * weights
        return Floors(flops, int(2 * self._crossing(problem) * hidden * size), memory)

    # ---- calls ----

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator,
    ) -> tuple[torch.Tensor, ...]:
        tokens, hidden, inner, experts, choices = problem.shape
        tokens, mine = cdiv(tokens, problem.world_size), experts // problem.world_size
        options: dict[str, Any] = {"generator": generator, "dtype": problem.torch_dtype, "device": device}
        x = torch.randn(tokens, hidden, **options)
        ids = expert_ids(tokens, choices, experts, device, generator)
        weights = torch.rand(tokens, choices, generator=generator, device=device)
        gate_up = torch.randn(mine, 2 * inner, hidden, **options).mul_(hidden**-0.5)
        return x, ids, weights, gate_up, torch.randn(mine, hidden, inner, **options).mul_(inner**-0.5)

    def reference_bytes(self, problem: "Problem") -> int:
        tokens, hidden, inner, experts, choices = problem.shape
        rows = 2 * tokens * choices  # a rank may receive more than an equal share
        elements = 3 * experts * hidden * inner + rows * (4 * hidden + 4 * inner)
        return 2 * max(problem.torch_dtype.itemsize, 4) * elements // problem.world_size

    def reference(
        self, operands: Sequence[torch.Tensor], problem: "Problem", group: "dist.ProcessGroup",
    ) -> torch.Tensor:
        return op.ep_moe_ref(*operands, num_experts=problem.shape[3], group=group)

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        """Return both GEMMs as batched matmuls, with an equal number of rows for each expert."""
        x, ids, _, gate_up, down = operands
        rows = rows_by_expert(x, ids.numel(), gate_up.shape[0])
        inner = down.shape[2]

        def multiply():
            return torch.bmm(torch.bmm(rows, gate_up.transpose(1, 2))[..., :inner], down.transpose(1, 2))

        return multiply

    def run(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: Any) -> Any:
        most = operands[0].shape[0] if _is_bounded(problem) else None
        return op.ep_moe(
            *operands, num_experts=problem.shape[3], max_tokens_per_rank=most, group=group, config=config
        )

    def compiled(self, config: Any) -> Hashable | None:
        if config.method != "fused":
            return None  # the parts of the sequence are compiled under their own names
        tiles = config.gemm and config.gemm.tiles
        return "fused", tiles and replace(tiles, group_m=1)

    def compile(self, operands: tuple[torch.Tensor, ...], problem: "Problem", config: Any) -> None:
        x, _, _, gate_up, down = operands
        tokens, *_, choices = problem.shape
        rows = cdiv(tokens * choices, problem.world_size)
        ep_moe_fused.compile(x, gate_up, down, choices, problem.world_size, rows, config)


def _is_bounded(problem):
    return problem.layout == "bounded"


def _is_low_latency(problem):
    """Return whether the dispatch of the sequence is low-latency (one launch, without counting) by default."""
    tokens, _, _, experts, choices = problem.shape
    ranks = problem.world_size
    of_rank = cdiv(tokens, ranks)
    shape = RoutingShape("ep_moe", of_rank, choices, experts, ranks, max_tokens_per_rank=of_rank)
    return _is_bounded(problem) and can_be_low_latency(EpConfig(), shape)


register(EpMoeTunable())
