"""Tunable of gemm_rs: problems, search space and cost model."""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import reject_invariant
from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.common import costs, gemm_space, small_m_gemm
from tdkernels.ops.common import gemm_tunable as dense
from tdkernels.ops.common.scaled_problem import out_bytes
from tdkernels.ops.common.specialized import launch as launch_specialized
from tdkernels.ops.common.tile_config import LARGE, specialized_tiles
from tdkernels.ops.dense import launch_direct, scaled, tuning_direct
from tdkernels.ops.dense.gemm_rs import config as gemm_rs_config
from tdkernels.ops.dense.gemm_rs import launch, op
from tdkernels.ops.dense.gemm_rs.config import GemmRsConfig

if TYPE_CHECKING:
    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_PROGRAMS = 64  # programs that send concurrently: enough for the link
_ONE_SHOT_MOST_ROWS = 1024  # of all ranks; with more rows the GEMM is not a small-M GEMM


class GemmRsTunable(dense.DenseTunable):
    """Tunable of ``gemm_rs``. Shapes are (M, N, K) of the whole problem; the ranks divide M and K."""

    name = "gemm_rs"
    divided = (0, 2)
    config_class = GemmRsConfig
    op, launch, config_module = op, launch, gemm_rs_config

    def by_torch(self, *call: Any) -> torch.Tensor:
        return scaled.gemm_rs_by_torch(*call)

    def run_scaled(self, *call: Any) -> torch.Tensor:
        return scaled.run("gemm_rs", *call)

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, int, int]:
        x, weight = dense.two_operands("gemm_rs", shapes)
        return torch.Size(x[:-1]).numel(), weight[0], world_size * weight[1]

    def of_a_rank(self, problem: "Problem") -> tuple[int, int, int]:
        m, n, k = problem.shape
        return m // problem.world_size, n, k // problem.world_size

    def operand_sizes(self, problem: "Problem") -> tuple[int, int, int]:
        m, n, k = problem.shape
        return m, n, k // problem.world_size

    def invariant_config(self, problem: "Problem", device: torch.device) -> GemmRsConfig:
        if problem.world_size > launch_direct.MAX_RANKS:
            reject_invariant(self.name, f"a group of more than {launch_direct.MAX_RANKS} ranks")
        return GemmRsConfig(transport="direct")

    def space(self, problem: "Problem", device: torch.device) -> list[GemmRsConfig]:
        rows, n, k = self.of_a_rank(problem)
        configs = []
        for tiles in self.tiles_for(problem, device, gemm_space.tile_space(device, problem.torch_dtype)):
            of_a_shard = tiles.count(rows, n)
            for item_tiles in sorted({min(item, of_a_shard) for item in (1, 2, 4, 8)}):
                configs.append(GemmRsConfig(tiles=tiles, item_tiles=item_tiles))
        if problem.num_nodes == 1 and problem.world_size <= launch_direct.MAX_RANKS:
            configs += [
                GemmRsConfig(tiles=tiles, transport="direct")
                for tiles in self.tiles_for(problem, device, tuning_direct.candidate_tiles(device, problem.torch_dtype))
            ]
            if launch_specialized.suits(LARGE, n, k, problem.torch_dtype, device, problem.layout):
                tiles = specialized_tiles(launch_direct.DIRECT_LARGE, problem.torch_dtype)
                configs.append(GemmRsConfig(tiles=tiles, transport="direct", warp_specialize=True))
        if problem.num_nodes == 1:
            configs += gemm_space.in_parts(GemmRsConfig, *self.operand_sizes(problem), problem.world_size)
        m = problem.shape[0]
        if problem.num_nodes == 1 and m <= _ONE_SHOT_MOST_ROWS:
            configs += [
                GemmRsConfig(tiles=tiles, transport="one_shot", split_k=split)
                for tiles in self.tiles_for(problem, device, small_m_gemm.tiles_to_try(m, problem.torch_dtype, device))
                for split in (1, 2, 4, 8)
            ]
        return configs

    def compiled(self, config: GemmRsConfig) -> tuple | None:
        tiles = super().compiled(config)
        return tiles and (config.transport, config.split_k > 1, config.warp_specialize, *tiles)

    def estimate_ms(self, config: GemmRsConfig, problem: "Problem", hardware: "Hardware") -> float:
        m, n, k = self.operand_sizes(problem)
        dtype, wire_bytes = problem.torch_dtype, self.floors(problem).wire_bytes
        if config.method == "torch":
            return 1e3 * costs.sequence_s(m, n, k, wire_bytes, dtype, hardware)
        if config.method == "parts":
            product = costs.vendor_s(m, n, k, dtype, hardware)
            count, wire = config.pieces * problem.world_size, wire_bytes / costs.copy_rate(hardware)
            return 1e3 * costs.parts_s(count, product, wire, wire_bytes, hardware)
        tiles: Any = config.tiles
        if config.transport == "one_shot":
            product = small_m_gemm.seconds(m, n, k, dtype, tiles, config.split_k, hardware)
            wire = wire_bytes / costs.push_rate(_PROGRAMS, hardware)
            return 1e3 * (product + wire + wire_bytes / hardware.memory + costs.SIGNAL_S)
        product, tile = costs.product_s(m, n, k, dtype, tiles, hardware.num_sms, hardware)
        rate = costs.push_rate(_PROGRAMS, hardware)
        if config.transport == "direct":
            if config.warp_specialize:  # the sums overlap with the GEMM, and a signal follows its tile
                return 1e3 * (max(product, wire_bytes / rate) + tile)
            return 1e3 * (max(product, wire_bytes / rate) + 2 * tile + wire_bytes / hardware.memory)
        item = config.item_tiles * tiles.block_m * tiles.block_n * out_bytes(problem)
        total = wire_bytes / hardware.memory  # to read the partials again and add them
        return 1e3 * (max(product, wire_bytes / rate) + tile + item / rate + total)

    def floors(self, problem: "Problem") -> Floors:
        m, n, k = self.operand_sizes(problem)
        wire_bytes = (problem.world_size - 1) * (m // problem.world_size) * n * out_bytes(problem)
        return Floors(2 * m * n * k, wire_bytes)


register(GemmRsTunable())
