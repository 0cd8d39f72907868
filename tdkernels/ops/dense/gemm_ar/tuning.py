"""Tunable of gemm_ar: problems, search space and cost model."""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import invariant_ranks
from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.common import costs, gemm_space, small_m_gemm
from tdkernels.ops.common import gemm_tunable as dense
from tdkernels.ops.common.scaled_problem import out_bytes
from tdkernels.ops.common.specialized import launch as launch_specialized
from tdkernels.ops.common.tile_config import LARGE, specialized_tiles
from tdkernels.ops.dense import launch_direct, scaled, tuning_direct
from tdkernels.ops.dense.gemm_ar import config as gemm_ar_config
from tdkernels.ops.dense.gemm_ar import launch, op
from tdkernels.ops.dense.gemm_ar.config import GemmArConfig

if TYPE_CHECKING:
    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_PROGRAMS = 64  # programs that send concurrently: enough for the link
_COMM_SMS = 0, 8, 16, 24  # of transport "direct"
_ONE_SHOT_MOST_ROWS = 1024  # with more rows, the transfers of "one_shot" alone take far longer than "two_shot"


class GemmArTunable(dense.DenseTunable):
    """Tunable of ``gemm_ar``. Shapes are (M, N, K) of the whole problem; the ranks divide K."""

    name = "gemm_ar"
    divided = (2,)
    config_class = GemmArConfig
    op, launch, config_module = op, launch, gemm_ar_config

    def by_torch(self, *call: Any) -> torch.Tensor:
        return scaled.gemm_ar_by_torch(*call)

    def run_scaled(self, *call: Any) -> torch.Tensor:
        return scaled.run("gemm_ar", *call)

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, int, int]:
        x, weight = dense.two_operands("gemm_ar", shapes)
        return torch.Size(x[:-1]).numel(), weight[0], world_size * weight[1]

    def of_a_rank(self, problem: "Problem") -> tuple[int, int, int]:
        m, n, k = problem.shape
        return m, n, k // problem.world_size

    operand_sizes = of_a_rank

    def invariant_config(self, problem: "Problem", device: torch.device) -> GemmArConfig:
        if invariant_ranks():  # the only transport with a reduction tree
            return GemmArConfig(transport="direct")
        return GemmArConfig(item_tiles=2 if device.type == "cpu" else 4)

    def space(self, problem: "Problem", device: torch.device) -> list[GemmArConfig]:
        m, n, k = self.of_a_rank(problem)
        configs = []
        for tiles in self.tiles_for(problem, device, gemm_space.tile_space(device, problem.torch_dtype)):
            tiles_of_z = tiles.count(m, n)
            for item_tiles in sorted({min(item, tiles_of_z) for item in (1, 2, 4, 8)}):
                configs.append(GemmArConfig("fused", "two_shot", tiles, item_tiles))
        if problem.num_nodes == 1 and problem.world_size <= launch_direct.MAX_RANKS:
            configs += [
                GemmArConfig(tiles=tiles, transport="direct", num_comm_sms=sms)
                for tiles in self.tiles_for(problem, device, tuning_direct.candidate_tiles(device, problem.torch_dtype))
                for sms in _COMM_SMS
            ]
            if launch_specialized.suits(LARGE, n, k, problem.torch_dtype, device, problem.layout):
                tiles = specialized_tiles(launch_direct.DIRECT_LARGE, problem.torch_dtype)
                configs.append(GemmArConfig(tiles=tiles, transport="direct", warp_specialize=True))
        if m <= _ONE_SHOT_MOST_ROWS:
            for tiles in self.tiles_for(problem, device, small_m_gemm.tiles_to_try(m, problem.torch_dtype, device)):
                splits = (1, 2, 4, 8) if problem.num_nodes == 1 else (1,)  # no split-K on several nodes
                configs += [GemmArConfig("fused", "one_shot", tiles, split_k=split) for split in splits]
        return configs

    def estimate_ms(self, config: Any, problem: "Problem", hardware: "Hardware") -> float:
        m, n, k = self.of_a_rank(problem)
        ranks, dtype = problem.world_size, problem.torch_dtype
        nbytes = m * n * out_bytes(problem)
        if config.method == "torch":
            return 1e3 * costs.sequence_s(m, n, k, self.floors(problem).wire_bytes, dtype, hardware)
        tiles, rate = config.tiles, costs.push_rate(_PROGRAMS, hardware)
        if config.exchange == "one_shot":
            product = small_m_gemm.seconds(m, n, k, dtype, tiles, config.split_k, hardware)
            summing = (ranks + 1) * nbytes / hardware.memory
            return 1e3 * (product + (ranks - 1) * nbytes / rate + summing + costs.SIGNAL_S)
        wire = self.floors(problem).wire_bytes / rate
        if config.transport == "direct" and config.warp_specialize:
            # The exchange overlaps with the GEMM, but the last tiles are sent twice after it.
            product, tile = costs.product_s(m, n, k, dtype, tiles, hardware.num_sms, hardware)
            last = 2 * hardware.num_sms * tiles.block_m * tiles.block_n * out_bytes(problem) / rate
            return 1e3 * (max(product + last, wire + tile) + 2 * costs.SIGNAL_S)
        if config.transport == "direct":
            sms = max(hardware.num_sms - config.num_comm_sms, 1)
            product, tile = costs.product_s(m, n, k, dtype, tiles, sms, hardware)
            return 1e3 * (max(product, wire) + 2 * tile + 2 * nbytes / hardware.memory + 2 * costs.SIGNAL_S)
        product, tile = costs.product_s(m, n, k, dtype, tiles, hardware.num_sms, hardware)
        item = config.item_tiles * tiles.block_m * tiles.block_n * out_bytes(problem)
        return 1e3 * (max(product, wire) + tile + 3 * item / rate + 4 * nbytes / hardware.memory + 2 * costs.SIGNAL_S)

    def floors(self, problem: "Problem") -> Floors:
        m, n, k = self.of_a_rank(problem)
        # A rank receives its peers' partials of 1 / W of z, and the sums of the rest.
        wire_bytes = 2 * (problem.world_size - 1) * m * n * out_bytes(problem) // problem.world_size
        return Floors(2 * m * n * k, wire_bytes)

    def compiled(self, config: GemmArConfig) -> tuple | None:
        same = super().compiled(config)
        return same and (*same, config.exchange, config.transport, config.split_k > 1, config.warp_specialize)


register(GemmArTunable())
