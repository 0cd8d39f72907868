"""Tunable of group_gemm and its gradients: problems, search space and cost model.

The operator is local, so it is tuned in a group of one rank. Calls look up their config by the number of rows, rounded
up to a power of two. The layout of a problem says what is computed:

    none, swiglu, swiglu_interleaved    y, with or without an activation
    kn                                  y for weights that are stored as [K, N]; dx is such a product, of dy and the
                                        transposed weights
    dw                                  dw [E, N, K]; block_m and block_n of its tiles are along N and K, block_k is
                                        along the rows
"""

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.common import costs, gemm_space
from tdkernels.ops.common.specialized.launch import suits
from tdkernels.ops.common.tile_config import LARGE, Tiles
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.ops.experts.grouped_gemm import config as grouped_gemm_config
from tdkernels.ops.experts.grouped_gemm import dispatch, launch, launch_weights, op
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig
from tdkernels.ops.experts.grouped_gemm.dispatch import DW, KN, LAYOUTS
from tdkernels.ops.experts.grouped_gemm.launch_specialized import has_registers
from tdkernels.ops.experts.grouped_gemm.synthetic import activation_of, rows_by_expert
from tdkernels.rounding import cdiv, round_up

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_LAUNCH_S = 5e-6
# Tiles for dw, in addition to the tiles of a product. The main loops of dw are as short as the groups, so several small
# programs per multiprocessor are faster than large tiles.
_SMALL = [
    Tiles(128, 128, 32, num_warps=4, num_stages=3),
    Tiles(128, 128, 32, num_warps=4, num_stages=5),
    Tiles(128, 128, 64, num_warps=4, num_stages=2),
    Tiles(128, 256, 32, num_warps=8, num_stages=4),
    Tiles(64, 256, 32, num_warps=4, num_stages=4),
]


class GroupGemmTunable(ConfigTunable):
    """Tunable of ``group_gemm``. Shapes are (rows, N, K, experts)."""

    name = "group_gemm"
    sizes = ("rows", "n", "k", "experts")
    layouts = LAYOUTS
    alone = True
    prefers_default = True
    config_class = GroupGemmConfig
    plain_words = "torch's grouped matmul", "torch's grouped matmul"

    def why_not(self, problem: "Problem") -> str | None:
        if problem.world_size > 1:
            return "it runs on one rank: tune it in a group of one (--nproc 1), ask with world_size=1"
        reason = super().why_not(problem)
        if reason is None and activation_of(problem) and problem.shape[1] % 2:
            return f"N = {problem.shape[1]}, the rows of gate and up, must be even"
        return reason

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, ...]:
        if list(map(len, shapes)) != [2, 3, 1]:
            raise ValueError(f"{self.name}: the operands are x, w and splits, not of shapes {list(shapes)}")
        (rows, k), w, _ = shapes
        if k != w[2] or shapes[2][0] != w[0]:
            raise ValueError(f"{self.name}: the operands {list(map(list, shapes))} do not fit")
        return rows, w[1], k, w[0]

    def layout_of(self, *operands) -> str:
        w = operands[1] if len(operands) == 3 else None
        if not isinstance(w, torch.Tensor) or w.dim() != 3:
            return self.layouts[0]  # the operands are invalid, and ``sizes_of`` raises the error
        return dispatch.layout_of(w)

    def illegal(self, config: Any, problem: "Problem", device: torch.device) -> str | None:
        reason = super().illegal(config, problem, device)
        if reason is None and config.method == "torch":
            return dispatch.why_not_torch((problem.shape[3], *problem.shape[1:3]), problem.torch_dtype, device)
        return reason

    def completed(self, config: Any, problem: "Problem", device: torch.device) -> Any:
        if config.method == "torch" or config.tiles is not None:
            return config
        rows, n, k, experts = problem.shape
        sizes = rows, n, k, experts, problem.torch_dtype, device
        if problem.layout == DW:
            return launch_weights.completed(config, *sizes)
        specialized = config.warp_specialize and self._can_specialize(problem, device)
        tiles = grouped_gemm_config.completed(GroupGemmConfig(warp_specialize=specialized), *sizes).tiles
        return replace(config, tiles=tiles)

    def default(self, problem: "Problem", device: torch.device) -> GroupGemmConfig:
        rows, n, k, experts = problem.shape
        if problem.layout == DW:
            return launch_weights.default_config(rows, n, k, experts, problem.torch_dtype, device)
        config = grouped_gemm_config.default_config(rows, n, k, experts, problem.torch_dtype, device)
        can_specialize = not config.warp_specialize or self._can_specialize(problem, device)
        return config if can_specialize else self.completed(GroupGemmConfig(), problem, device)

    def _can_specialize(self, problem, device):
        """Return whether the warp-specialized kernel supports a problem with ``warp_specialize``."""
        _, n, k, experts = problem.shape
        if problem.layout == "swiglu_interleaved" or problem.layout == KN and k % LARGE.block_k:
            return False
        return has_registers(experts, None) and suits(LARGE, n, k, problem.torch_dtype, device)

    def invariant(self, problem: "Problem", device: torch.device) -> GroupGemmConfig:
        if problem.layout == DW:  # it sums over the rows
            return self.default(problem, device)
        return grouped_gemm_config.invariant_config(problem.torch_dtype, device)

    def space(self, problem: "Problem", device: torch.device) -> list[GroupGemmConfig]:
        tiles = gemm_space.tile_space(device, problem.torch_dtype)
        if problem.layout == DW and device.type == "cuda" and problem.torch_dtype != torch.float32:
            tiles = [*tiles, *_SMALL]
        configs = [GroupGemmConfig(tiles=each) for each in tiles]
        if self._can_specialize(problem, device):
            configs.append(GroupGemmConfig(tiles=LARGE, warp_specialize=True))
        return configs

    def compiled(self, config: GroupGemmConfig) -> tuple | None:
        tiles = super().compiled(config)
        return tiles and (config.warp_specialize, *tiles)

    def estimate_ms(self, config: Any, problem: "Problem", hardware: "Hardware") -> float:
        rows, n, k, experts = problem.shape
        floors = self.floors(problem)
        reading = floors.memory_bytes / hardware.memory
        if config.method == "torch":
            return 1e3 * (max(floors.flops / hardware.flops, reading) + _LAUNCH_S)
        # The warp-specialized kernel skips the last half of a tile if it has no rows of the group.
        skips = config.warp_specialize and problem.layout != DW
        computed = self._tiles_s(config.tiles, config.tiles.block_m // (2 if skips else 1), problem, hardware)
        return 1e3 * (max(computed, reading) + _LAUNCH_S)

    def _tiles_s(self, tiles, step, problem, hardware):
        """Return the seconds of the product, if the rows of a group are padded to a multiple of ``step``."""
        rows, n, k, experts = problem.shape
        each = cdiv(rows, experts)
        height, width, depth = (n, k, each) if problem.layout == DW else (each, n, k)
        padded = experts * round_up(height, step)
        return costs.product_s(padded, width, depth, problem.torch_dtype, tiles, hardware.num_sms, hardware)[0]

    def floors(self, problem: "Problem") -> Floors:
        rows, n, k, experts = problem.shape
        width = n // 2 if activation_of(problem) else n
        moved = (experts * n * k + rows * (k + width)) * problem.torch_dtype.itemsize
        return Floors(2 * rows * n * k, 0, moved)

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator,
    ) -> tuple[torch.Tensor, ...]:
        rows, n, k, experts = problem.shape
        dtype = problem.torch_dtype
        of_rows = torch.randint(experts, (rows,), generator=generator, device=device)
        splits = torch.bincount(of_rows, minlength=experts).to(torch.int32)

        def draw(*shape):
            return torch.randn(shape, generator=generator, dtype=dtype, device=device)

        x = draw(rows, k)
        if problem.layout == DW:
            return draw(rows, n), x, splits
        if problem.layout == KN:
            return x, draw(experts, k, n).mul_(k**-0.5).transpose(1, 2), splits
        return x, draw(experts, n, k).mul_(k**-0.5), splits

    def reference_bytes(self, problem: "Problem") -> int:
        rows, n, k, experts = problem.shape
        return 2 * max(problem.torch_dtype.itemsize, 4) * (experts * n * k + rows * (k + 4 * n))

    def reference(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup") -> torch.Tensor:
        if problem.layout == DW:
            return dispatch.weight_gradient_by_group(*operands)
        return op.group_gemm_ref(*operands, activation=activation_of(problem))

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        """Return the product as a batched matmul, with an equal number of rows for each expert."""
        rows, experts = problem.shape[0], problem.shape[3]
        x = rows_by_expert(operands[0], rows, experts)
        if problem.layout == DW:
            of_dy = x.transpose(1, 2)
            of_x = rows_by_expert(operands[1], rows, experts)
            return lambda: torch.bmm(of_dy, of_x)
        weights = operands[1].transpose(1, 2)
        return lambda: torch.bmm(x, weights)

    def run(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: Any) -> Any:
        dispatch.forget_choices()  # configs selected before the tuning must not be used
        if problem.layout == DW:
            return dispatch.weight_gradient(*operands, problem.shape[3], config)  # type: ignore[call-arg]
        return op.group_gemm(*operands, activation=activation_of(problem), config=config)

    def compile(self, operands: Any, problem: "Problem", config: Any) -> None:
        if problem.layout == DW:
            return launch_weights.compile(*operands, problem.shape[3], config)  # type: ignore[call-arg]
        launch.compile(*operands, activation_of(problem), config)  # type: ignore[call-arg]


register(GroupGemmTunable())
