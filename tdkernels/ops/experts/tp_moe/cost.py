"""Base class of the tunables of tp_moe, moe_ag_gemm and moe_gemm_rs: search space, operands and cost model."""

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.tunable import Floors
from tdkernels.ops.common import costs, gemm_space
from tdkernels.ops.common.tile_config import LARGE
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.ops.experts.grouped_gemm import dispatch as grouped_gemm_dispatch
from tdkernels.ops.experts.grouped_gemm.synthetic import activation_of, expert_ids, rows_by_expert, why_not_shared
from tdkernels.ops.experts.tp_moe import config as tp_moe_config
from tdkernels.ops.experts.tp_moe import kernel_ag_gemm, routing
from tdkernels.ops.experts.tp_moe import stages as moe_stages
from tdkernels.ops.experts.tp_moe.config import MoeTpConfig
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES
from tdkernels.rounding import cdiv, round_up

if TYPE_CHECKING:
    from tdkernels.autotune.problem import Problem

_SEND_PROGRAMS = 64  # programs of the down stage that send concurrently, enough to saturate the link
_CHUNK_S = 1e-6  # seconds that a pushing program takes to set the signals of a chunk
_SUM_BYTES = 1.5  # memory traffic of the sums of method "torch", in multiples of the size of the rows


class MoeTunable(ConfigTunable):
    """Base class of the three tunables.

    In the shape of a problem the first size is the number of tokens of all ranks. The last two sizes are the number of
    experts and the number of experts per token.

    Attributes:
        divided: Indices of the sizes in ``Problem.shape`` that the ranks divide.
    """

    config_class = MoeTpConfig
    across_nodes = False
    divided: tuple
    plain_words = "torch collective and grouped matmul", "torch's collective and grouped matmul"

    def weights(self, problem: "Problem") -> list[tuple[int, int, int]]:
        """Return the shapes (E, rows, columns) of this rank's weights."""
        raise NotImplementedError

    def why_not(self, problem: "Problem") -> str | None:
        reason = super().why_not(problem)
        if reason is not None:
            return reason
        reason = why_not_shared(self, problem, self.divided, *problem.shape[-2:])
        if reason is None and activation_of(problem) is not None and self.weights(problem)[0][1] % 2:
            return f"a rank's rows of gate and up must be even, not {self.weights(problem)[0][1]}"
        return reason

    def illegal(self, config: Any, problem: "Problem", device: torch.device) -> str | None:
        reason = super().illegal(config, problem, device)
        if reason is None and config.method == "torch":
            for shape in self.weights(problem):
                reason = reason or grouped_gemm_dispatch.why_not_torch(shape, problem.torch_dtype, device)
        return reason

    def completed(self, config: Any, problem: "Problem", device: torch.device) -> Any:
        return config if config.method == "torch" else self._completed(config, problem, device)

    def invariant(self, problem: "Problem", device: torch.device) -> MoeTpConfig:
        return tp_moe_config.invariant_config(problem.torch_dtype, device)

    def default(self, problem: "Problem", device: torch.device) -> MoeTpConfig:
        config = self._completed(None, problem, device)
        if config.warp_specialize and not self._can_specialize(problem, device):
            config = self._completed(replace(config, tiles=None, warp_specialize=False), problem, device)
        return config

    def _completed(self, config, problem, device):
        """Return the config with tiles for the GEMM with the first weight, or that GEMM's default config if ``config``
        is None.
        """
        sizes = problem.shape[0], problem.shape[-1], *self.weights(problem)[0], problem.torch_dtype, device
        activation, is_kn = activation_of(problem), problem.layout == "kn"
        return tp_moe_config.completed(config, *sizes, activation=activation, is_kn=is_kn)

    def _can_specialize(self, problem, device):
        """Return whether the warp-specialized kernels support a problem with ``warp_specialize``."""
        activation, is_kn = activation_of(problem), problem.layout == "kn"
        return all(
            tp_moe_config.can_specialize(LARGE, n, k, problem.torch_dtype, device, None, activation, is_kn)
            for _, n, k in self.weights(problem)
        )

    def plans(self, problem: "Problem", device: torch.device) -> list[tuple[int, int, int]]:
        """Return the candidates for the fields of a config except tiles: (num_comm_sms, chunk_rows, stages)."""
        rows = round_up(cdiv(problem.shape[0], problem.world_size), kernel_ag_gemm.BLOCK_TOKENS)
        on_cpu = device.type == "cpu"
        chunks = sorted({min(chunk, rows) for chunk in ((16,) if on_cpu else (128, 256, 512))})
        found = []
        for chunk_rows in chunks:
            most = min(MAX_STAGES.value, 1 + (problem.world_size - 1) * cdiv(rows, chunk_rows))
            for stages in sorted({min(stages, most) for stages in ((1, 2) if on_cpu else (1, 2, 3, 4, 6, 8))}):
                found += [(num_comm, chunk_rows, stages) for num_comm in ((2,) if on_cpu else (8, 16, 32))]
        return found

    def space(self, problem: "Problem", device: torch.device) -> list[MoeTpConfig]:
        plans = self.plans(problem, device)
        found = [
            MoeTpConfig("fused", tiles, *plan)
            for tiles in gemm_space.tile_space(device, problem.torch_dtype) for plan in plans
        ]
        if not self._can_specialize(problem, device):
            return found
        return found + [MoeTpConfig("fused", LARGE, *plan, warp_specialize=True) for plan in plans]

    def compiled(self, config: MoeTpConfig) -> tuple | None:
        tiles = super().compiled(config)
        return tiles and (config.warp_specialize, *tiles)

    def floors(self, problem: "Problem") -> Floors:
        tokens, *_, choices = problem.shape
        size = problem.torch_dtype.itemsize
        weights = sum(experts * n * k for experts, n, k in self.weights(problem))
        flops = 2 * tokens * choices * weights // problem.shape[-2]
        return Floors(flops, self._rows_on_the_wire(problem) * size, weights * size)

    def _rows_on_the_wire(self, problem):
        """Return the number of elements received from the peers, without ids and routing weights."""
        raise NotImplementedError

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator,
    ) -> tuple[torch.Tensor, ...]:
        tokens, *_, experts, choices = problem.shape
        tokens //= problem.world_size
        ids = expert_ids(tokens, choices, experts, device, generator)
        weights = torch.rand(tokens, choices, generator=generator, device=device)
        draw = functools.partial(torch.randn, generator=generator, dtype=problem.torch_dtype, device=device)
        if problem.layout == "kn":
            new = [draw(e, k, n).mul_(k**-0.5).transpose(1, 2) for e, n, k in self.weights(problem)]
        else:
            new = [draw(shape).mul_(shape[-1] ** -0.5) for shape in self.weights(problem)]
        return draw(self._rows(problem)), ids, weights, *new

    def _rows(self, problem):
        """Return the shape of the first operand of a rank."""
        return problem.shape[0] // problem.world_size, self.weights(problem)[0][2]

    def reference_bytes(self, problem: "Problem") -> int:
        tokens, *_, choices = problem.shape
        weights = self.weights(problem)
        widths = sum(n + k for _, n, k in weights)
        elements = sum(experts * n * k for experts, n, k in weights) + 2 * tokens * (1 + choices) * widths
        return 2 * max(problem.torch_dtype.itemsize, 4) * elements

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        """Return the GEMMs as batched matmuls, with an equal number of rows for each expert."""
        weights = [w.transpose(1, 2) for w in operands[-len(self.weights(problem)) :]]
        tokens, *_, experts, choices = problem.shape
        rows = rows_by_expert(operands[0], tokens * choices, experts)

        def multiply():
            made = rows
            for w in weights:  # the next GEMM reads only the first columns: SwiGLU would halve the width
                made = torch.bmm(made[..., : w.shape[1]], w)
            return made

        return multiply

    def _unrouted(self, problem, config, device):
        tokens, *_, experts, choices = problem.shape
        tokens //= problem.world_size
        return routing.unrouted(problem.world_size, tokens, choices, experts, config, device)

    # ---- cost model ----

    def _product(self, weight, problem, tiles, hardware):
        """Return the seconds (of all tiles, to read the weight once, of one tile) for the GEMM with a weight."""
        tokens, *_, choices = problem.shape
        experts, n, k = weight
        dtype = problem.torch_dtype
        if tiles is None:
            product = 2.0 * tokens * choices * n * k / hardware.flops
        else:
            of_expert = round_up(cdiv(tokens * choices, experts), tiles.block_m)  # rows per expert, with padding
            product, tile = costs.product_s(experts * of_expert, n, k, dtype, tiles, hardware.num_sms, hardware)
        moved = tokens * choices * (n + k) * dtype.itemsize / hardware.memory
        return max(product, moved), experts * n * k * dtype.itemsize / hardware.memory, 0.0 if tiles is None else tile

    def _gate_up_s(self, config, weight, problem, hardware):
        """Return the seconds to gather tokens and multiply them by a weight."""
        tokens, ranks = problem.shape[0], problem.world_size
        row_bytes = weight[2] * problem.torch_dtype.itemsize
        wire = (ranks - 1) * tokens // ranks * row_bytes
        product, reading, tile = self._product(weight, problem, config.tiles, hardware)
        if config.method == "torch":
            moved = (2 * problem.shape[-1] + 1) * tokens * row_bytes / hardware.memory  # copy tokens to their rows
            return self._collective_s(wire, hardware) + moved + max(product, reading)
        rate = costs.push_rate(config.num_comm_sms, hardware)
        chunk_rows = routing.chunk_rows_of(cdiv(tokens, ranks), config.chunk_rows)
        chunks = (ranks - 1) * cdiv(cdiv(tokens, ranks), chunk_rows)
        # Tiles wait for whole chunks, so the time of one chunk is not overlapped.
        chunk = min(chunk_rows, tokens // ranks) * row_bytes / rate
        wire = wire / rate + chunk + cdiv(chunks, config.num_comm_sms) * _CHUNK_S
        stages = [config.stages] if config.stages else range(1, MAX_STAGES.value + 1)  # 0: the best number
        return min(moe_stages.seconds_of_stages(n, ranks, wire, product, reading, 0.5 * tile) for n in stages)

    def _down_s(self, config, weight, problem, hardware):
        """Return the seconds to multiply rows by a weight and to reduce-scatter the sums of the tokens."""
        tokens, ranks = problem.shape[0], problem.world_size
        row_bytes = weight[1] * problem.torch_dtype.itemsize
        wire = (ranks - 1) * tokens // ranks * row_bytes
        product, reading, tile = self._product(weight, problem, config.tiles, hardware)
        rows = problem.shape[-1] * tokens * row_bytes / hardware.memory
        if config.method == "torch":
            return max(product, reading) + _SUM_BYTES * rows + self._collective_s(wire, hardware)
        # This rank's tokens come last, after all sends. Their sums are not overlapped.
        return max(product, reading, wire / costs.push_rate(_SEND_PROGRAMS, hardware)) + 2 * tile + 2 * rows / ranks

    def _collective_s(self, wire_bytes, hardware):
        return costs.sequence_s(0, 0, 0, wire_bytes, torch.bfloat16, hardware)

    # ---- operands passed to ``explain`` ----

    def _operands(self, names, shapes):
        """Return the shapes of a rank's operands. Raise ValueError if their number or number of dimensions is wrong."""
        if len(shapes) != len(names) or any(
            len(shape) != (3 if name.startswith("w") else 2) for name, shape in zip(names, shapes, strict=True)
        ):
            raise ValueError(f"{self.name}: the operands are {', '.join(names)}, not of shapes {list(shapes)}")
        return shapes

    def _require(self, fits, shapes):
        if not fits:
            raise ValueError(f"{self.name}: the operands {list(map(list, shapes))} do not fit")

    def layout_of(self, *operands) -> str:
        return self.layouts[0]
