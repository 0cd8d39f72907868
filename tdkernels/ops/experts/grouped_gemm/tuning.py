"""group_gemm and its gradients for the tuner: problems, the space of their configs, and about how long each takes.

They are of one rank, so a group of one tunes them. Calls look their config up by their rows up to a power of two. The
layout says what is computed: y, with an activation or without; y of weights that lie as [K, N], which dx is, of dy and
the weights the other way round; or dw [E, N, K], of whose tiles block_m and block_n are of N and K, block_k of rows.
"""

import torch

from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.common import gemm_tunable as dense
from tdkernels.ops.common.tile_config import Tiles
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.ops.experts.grouped_gemm import config as grouped_gemm_config
from tdkernels.ops.experts.grouped_gemm import dispatch, launch, op
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig
from tdkernels.ops.experts.grouped_gemm.dispatch import DW, KN, LAYOUTS
from tdkernels.ops.experts.grouped_gemm.synthetic import activation_of, rows_by_expert
from tdkernels.rounding import cdiv, round_up

_LAUNCH_S = 5e-6
# Of dw, beside those of a product: the loops are as short as the groups, so that several small programs on a
# multiprocessor gain more than large tiles.
_SMALL = [
    Tiles(128, 128, 32, num_warps=4, num_stages=3),
    Tiles(128, 128, 32, num_warps=4, num_stages=5),
    Tiles(128, 128, 64, num_warps=4, num_stages=2),
    Tiles(128, 256, 32, num_warps=8, num_stages=4),
    Tiles(64, 256, 32, num_warps=4, num_stages=4),
]


class GroupGemmTunable(ConfigTunable):
    name = "group_gemm"
    sizes = ("rows", "n", "k", "experts")
    layouts = LAYOUTS
    alone = True
    config_class = GroupGemmConfig
    plain_words = "torch's grouped matmul", "torch's grouped matmul"

    def why_not(self, problem):
        if problem.world_size > 1:
            return "it runs on one rank: tune it in a group of one (--nproc 1), ask with world_size=1"
        reason = super().why_not(problem)
        if reason is None and activation_of(problem) and problem.shape[1] % 2:
            return f"N = {problem.shape[1]}, the rows of gate and up, must be even"
        return reason

    def sizes_of(self, *shapes, world_size):
        if list(map(len, shapes)) != [2, 3, 1]:
            raise ValueError(f"{self.name}: the operands are x, w and splits, not of shapes {list(shapes)}")
        (rows, k), w, _ = shapes
        if k != w[2] or shapes[2][0] != w[0]:
            raise ValueError(f"{self.name}: the operands {list(map(list, shapes))} do not fit")
        return rows, w[1], k, w[0]

    def layout_of(self, *operands):
        w = operands[1] if len(operands) == 3 else None
        if not isinstance(w, torch.Tensor) or w.dim() != 3:
            return self.layouts[0]  # what is wrong with them ``sizes_of`` says
        return dispatch.layout_of(w)

    def illegal(self, config, problem, device):
        reason = super().illegal(config, problem, device)
        if reason is None and config.method == "torch":
            return dispatch.why_not_torch((problem.shape[3], *problem.shape[1:3]), problem.torch_dtype, device)
        return reason

    def completed(self, config, problem, device):
        if config.method == "torch" or config.tiles is not None:
            return config
        return self.default(problem, device)

    def default(self, problem, device):
        rows, n, k, experts = problem.shape
        if problem.layout == DW:
            return GroupGemmConfig(tiles=launch.weight_tiles(rows // experts, n, k, problem.torch_dtype, device))
        return grouped_gemm_config.default_config(rows // experts, n, problem.torch_dtype, device)

    def space(self, problem, device):
        tiles = dense.tile_space(device, problem.torch_dtype)
        if problem.layout == DW and device.type == "cuda" and problem.torch_dtype != torch.float32:
            tiles = [*tiles, *_SMALL]
        return [GroupGemmConfig(tiles=each) for each in tiles]

    def estimate_ms(self, config, problem, hardware):
        rows, n, k, experts = problem.shape
        floors = self.floors(problem)
        reading = floors.memory_bytes / hardware.memory
        if config.method == "torch":
            return 1e3 * (max(floors.flops / hardware.flops, reading) + _LAUNCH_S)
        computed = self._tiles_s(config.tiles, problem, hardware)
        return 1e3 * (max(computed, reading) + _LAUNCH_S)

    def _tiles_s(self, tiles, problem, hardware):
        """Seconds of the product, what its tiles compute beyond it included."""
        rows, n, k, experts = problem.shape
        each = cdiv(rows, experts)
        height, width, depth = (n, k, each) if problem.layout == DW else (each, n, k)
        padded = experts * round_up(height, tiles.block_m)  # with rows that there are not
        return dense.product_s(padded, width, depth, problem.torch_dtype, tiles, hardware.num_sms, hardware)[0]

    def floors(self, problem):
        rows, n, k, experts = problem.shape
        width = n // 2 if activation_of(problem) else n
        moved = (experts * n * k + rows * (k + width)) * problem.torch_dtype.itemsize
        return Floors(2 * rows * n * k, 0, moved)

    def operands(self, problem, device, generator):
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

    def reference_bytes(self, problem):
        rows, n, k, experts = problem.shape
        return 2 * max(problem.torch_dtype.itemsize, 4) * (experts * n * k + rows * (k + 4 * n))

    def reference(self, operands, problem, group):
        if problem.layout == DW:
            return dispatch.weight_gradient_by_group(*operands)
        return op.group_gemm_ref(*operands, activation=activation_of(problem))

    def local(self, operands, problem):
        """The product by the library: as many rows for each expert."""
        rows, experts = problem.shape[0], problem.shape[3]
        x = rows_by_expert(operands[0], rows, experts)
        if problem.layout == DW:
            of_dy = x.transpose(1, 2)
            of_x = rows_by_expert(operands[1], rows, experts)
            return lambda: torch.bmm(of_dy, of_x)
        weights = operands[1].transpose(1, 2)
        return lambda: torch.bmm(x, weights)

    def run(self, operands, problem, group, config):
        dispatch.forget_choices()  # made before it was tuned
        if problem.layout == DW:
            return dispatch.weight_gradient(*operands, problem.shape[3], config)
        return op.group_gemm(*operands, activation=activation_of(problem), config=config)

    def compile(self, operands, problem, config):
        if problem.layout == DW:
            return launch.compile_gradient(*operands, problem.shape[3], config)
        launch.compile(*operands, activation_of(problem), config)


register(GroupGemmTunable())
