"""Tunable of ag_gemm: problems, search space and cost model."""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.common import costs, gemm_space, small_m_gemm
from tdkernels.ops.common import gemm_tunable as dense
from tdkernels.ops.common.scaled_problem import is_scaled, scales_of
from tdkernels.ops.common.scaling import scaled_linear
from tdkernels.ops.common.specialized import launch as launch_specialized
from tdkernels.ops.common.tile_config import LARGE, specialized_tiles
from tdkernels.ops.dense import scaled
from tdkernels.ops.dense.ag_gemm import config as ag_gemm_config
from tdkernels.ops.dense.ag_gemm import launch, op
from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig
from tdkernels.rounding import cdiv

if TYPE_CHECKING:
    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_COPY_S = 20e-6  # time to start one copy of the copy engine
_SPECIALIZED_RATE = 10e9  # bytes per second that a program of the warp-specialized kernel pushes (H200)
_ENOUGH_PROGRAMS = 64  # for the rate of the link
_ONE_SHOT_MOST_ROWS = 1024  # of all ranks; with more rows the GEMM is not a small-M GEMM


def _numbers_of_programs(peers):
    """Return candidates for the number of pushing programs: enough for the link, or a multiple of the peers."""
    return sorted({8, 16, 24, 32} | {peers * each for each in (1, 2, 3, 4, 6, 8, 12) if 6 <= peers * each <= 36})


class AgGemmTunable(dense.DenseTunable):
    """Tunable of ``ag_gemm``. Shapes are (M, N, K) of the whole problem; the ranks divide M and N."""

    name = "ag_gemm"
    divided = (0, 1)
    config_class = AgGemmConfig
    op, launch, config_module = op, launch, ag_gemm_config

    def by_torch(self, *call: Any) -> torch.Tensor:
        return scaled.ag_gemm_by_torch(*call)

    def run_scaled(self, *call: Any) -> torch.Tensor:
        return scaled.run("ag_gemm", *call)

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, int, int]:
        x, weight = dense.two_operands("ag_gemm", shapes)
        return world_size * torch.Size(x[:-1]).numel(), world_size * weight[0], weight[1]

    def of_a_rank(self, problem: "Problem") -> tuple[int, int, int]:
        m, n, k = problem.shape
        return m // problem.world_size, n // problem.world_size, k

    operand_sizes = of_a_rank

    def default_of(self, problem: "Problem", device: torch.device, specializes: bool = True) -> AgGemmConfig:
        sizes, layout = self.of_a_rank(problem), problem.layout if specializes else None
        return ag_gemm_config.default_config(
            *sizes, problem.torch_dtype, device, problem.world_size, problem.num_nodes, layout
        )

    def smallest_tile(self, config: AgGemmConfig) -> Any:
        tiles: Any = config.tiles
        return replace(tiles, block_n=tiles.block_n // 2) if launch_specialized.is_enabled(config) else tiles

    def invariant_config(self, problem: "Problem", device: torch.device) -> AgGemmConfig:
        if device.type == "cpu":
            return AgGemmConfig(num_comm_sms=2)
        return AgGemmConfig(num_comm_sms=ag_gemm_config.num_pushing(problem.world_size))

    def space(self, problem: "Problem", device: torch.device) -> list[AgGemmConfig]:
        rows = problem.shape[0] // problem.world_size
        configs = []
        for tiles in self.tiles_for(problem, device, gemm_space.tile_space(device, problem.torch_dtype)):
            of_a_shard = cdiv(rows, tiles.block_m)
            for chunk_tiles in sorted({min(chunk, of_a_shard) for chunk in (1, 2, 4)}):
                for num_comm in (2,) if device.type == "cpu" else _numbers_of_programs(problem.world_size - 1):
                    configs.append(AgGemmConfig("fused", tiles, "push", num_comm, chunk_tiles))
            for chunk_tiles in sorted({of_a_shard, cdiv(of_a_shard, 2)}) if problem.num_nodes == 1 else ():
                configs.append(AgGemmConfig("fused", tiles, "copy_engine", chunk_tiles=chunk_tiles))
        configs += self._specialized(problem, device)
        m = problem.shape[0]
        configs += gemm_space.in_parts(AgGemmConfig, m, *self.of_a_rank(problem)[1:], problem.world_size)
        if m <= _ONE_SHOT_MOST_ROWS and problem.num_nodes == 1:
            configs += [
                AgGemmConfig("fused", tiles, "one_shot", num_comm, split_k=split)
                for tiles in self.tiles_for(problem, device, small_m_gemm.tiles_to_try(m, problem.torch_dtype, device))
                for num_comm in ((2,) if device.type == "cpu" else (16, 32)) for split in (1, 2, 4)
            ]
        return configs

    def _specialized(self, problem, device):
        """Return the candidates for the warp-specialized kernel."""
        n, k = self.of_a_rank(problem)[1:]
        if problem.num_nodes > 1 or not launch_specialized.suits(
            LARGE, n, k, problem.torch_dtype, device, problem.layout
        ):
            return []
        default = ag_gemm_config.specialized_config(problem.torch_dtype, device)
        default = replace(default, tiles=specialized_tiles(LARGE, problem.torch_dtype))
        return [
            replace(default, num_comm_sms=num_comm, chunk_tiles=chunk_tiles)
            for num_comm in (32, 64, 96) for chunk_tiles in (1, 2)
        ]

    def estimate_ms(self, config: AgGemmConfig, problem: "Problem", hardware: "Hardware") -> float:
        rows, n, k = self.of_a_rank(problem)
        m, peers, dtype = problem.shape[0], problem.world_size - 1, problem.torch_dtype
        wire_bytes = self.floors(problem).wire_bytes
        if config.method == "torch":
            return 1e3 * costs.sequence_s(m, n, k, wire_bytes, dtype, hardware)
        if config.method == "parts":
            product = costs.vendor_s(m, n, k, dtype, hardware)
            count = config.pieces * problem.world_size
            return 1e3 * costs.parts_s(count, product, wire_bytes / costs.copy_rate(hardware), 0, hardware)
        tiles: Any = config.tiles
        if config.transport == "one_shot":
            product = small_m_gemm.seconds(m, n, k, dtype, tiles, config.split_k, hardware)
            return 1e3 * (product + wire_bytes / costs.push_rate(config.num_comm_sms, hardware) + costs.SIGNAL_S)
        if config.warp_specialize and config.transport == "push":
            # All SMs multiply. The tiles of the last chunk begin with its first slice.
            product, tile = costs.product_s(m, n, k, dtype, tiles, hardware.num_sms, hardware)
            rate = min(config.num_comm_sms * _SPECIALIZED_RATE, costs.push_rate(_ENOUGH_PROGRAMS, hardware))
            return 1e3 * (max(product, wire_bytes / rate) + tile / 2)
        copies = peers * cdiv(rows, config.chunk_tiles * tiles.block_m)
        if config.transport == "push":
            num_sms = max(hardware.num_sms - config.num_comm_sms, 1)
            # One program sends one chunk to one peer. In the last turn, too few programs may be left for the link.
            turns, left = divmod(copies - 1, config.num_comm_sms)
            full, last = (costs.push_rate(programs, hardware) for programs in (config.num_comm_sms, left + 1))
            rate = copies / (turns * config.num_comm_sms / full + (left + 1) / last)
            start = 0.0
        else:
            num_sms, rate, start = hardware.num_sms, costs.copy_rate(hardware), copies * _COPY_S
        product, tile = costs.product_s(m, n, k, dtype, tiles, num_sms, hardware)
        # The last chunk can only be multiplied after it has arrived.
        chunk = min(config.chunk_tiles * tiles.block_m, rows) * k * dtype.itemsize * peers
        return 1e3 * (max(product, wire_bytes / rate + start) + tile + min(chunk / rate, product))

    def floors(self, problem: "Problem") -> Floors:
        rows, n, k = self.of_a_rank(problem)
        wire_bytes = (problem.world_size - 1) * rows * k * problem.torch_dtype.itemsize
        return Floors(2 * problem.shape[0] * n * k, wire_bytes)

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], torch.Tensor]:
        x, weight, *scales = operands
        if is_scaled(problem):
            full = x.view(torch.uint8).repeat(problem.world_size, 1).view(x.dtype)
            of_all = scales_of(problem, scales[0].repeat(problem.world_size, 1), scales[1])
            return lambda: scaled_linear(full, weight, None, of_all)
        full = x.repeat(problem.world_size, 1)
        return lambda: F.linear(full, weight)

    def compiled(self, config: AgGemmConfig) -> tuple | None:
        same = super().compiled(config)
        return same and (*same, config.transport, config.split_k > 1, config.warp_specialize)


register(AgGemmTunable())
