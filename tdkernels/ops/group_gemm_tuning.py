"""group_gemm for the tuner: problems, the space of its configs, and about how long each takes.

It is of one rank, so a group of one tunes it. Calls look their config up by their rows up to a power of two.
"""

import torch

from tdkernels.autotune.operator import Floors, register
from tdkernels.ops import _dense_tuning as dense
from tdkernels.ops import _gemm, _grouped, _swiglu, _tiles
from tdkernels.ops import group_gemm as op
from tdkernels.ops import group_gemm_kernel as kernel
from tdkernels.ops._expert_tuning import activation_of, rows_by_expert
from tdkernels.ops._tuning import ConfigTunable
from tdkernels.ops.group_gemm_kernel import GroupGemmConfig

_LAUNCH_S = 5e-6


class GroupGemmTunable(ConfigTunable):
    name = "group_gemm"
    sizes = ("rows", "n", "k", "experts")
    layouts = ("none", "swiglu", "swiglu_interleaved")
    alone = True
    config_class = GroupGemmConfig
    plain_words = "torch's grouped matmul", "torch's grouped matmul"
    sources = (op, kernel, _gemm, _grouped, _swiglu, _tiles)

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
        return self.layouts[0]

    def illegal(self, config, problem, device):
        reason = super().illegal(config, problem, device)
        if reason is None and config.method == "torch":
            return op.why_not_torch((problem.shape[3], *problem.shape[1:3]), problem.torch_dtype, device)
        return reason

    def completed(self, config, problem, device):
        if config.method == "torch" or config.tiles is not None:
            return config
        return self.default(problem, device)

    def default(self, problem, device):
        rows, n, _, experts = problem.shape
        return kernel.default_config(rows // experts, n, problem.torch_dtype, device)

    def space(self, problem, device):
        return [GroupGemmConfig(tiles=tiles) for tiles in dense.tile_space(device, problem.torch_dtype)]

    def estimate_ms(self, config, problem, hardware):
        rows, n, k, experts = problem.shape
        floors = self.floors(problem)
        reading = floors.memory_bytes / hardware.memory
        if config.method == "torch":
            return 1e3 * (max(floors.flops / hardware.flops, reading) + _LAUNCH_S)
        tiles = config.tiles
        padded = experts * -(-rows // experts // tiles.block_m) * tiles.block_m  # with rows that there are not
        product = dense.product_s(padded, n, k, problem.torch_dtype, tiles, hardware.num_sms, hardware)[0]
        return 1e3 * (max(product, reading) + _LAUNCH_S)

    def floors(self, problem):
        rows, n, k, experts = problem.shape
        width = n // 2 if activation_of(problem) else n
        moved = (experts * n * k + rows * (k + width)) * problem.torch_dtype.itemsize
        return Floors(2 * rows * n * k, 0, moved)

    def operands(self, problem, device, generator):
        rows, n, k, experts = problem.shape
        dtype = problem.torch_dtype
        x = torch.randn(rows, k, generator=generator, dtype=dtype, device=device)
        w = torch.randn(experts, n, k, generator=generator, dtype=dtype, device=device).mul_(k**-0.5)
        of_rows = torch.randint(experts, (rows,), generator=generator, device=device)
        return x, w, torch.bincount(of_rows, minlength=experts).to(torch.int32)

    def reference_bytes(self, problem):
        rows, n, k, experts = problem.shape
        return 2 * max(problem.torch_dtype.itemsize, 4) * (experts * n * k + rows * (k + 4 * n))

    def reference(self, operands, problem, group):
        return op.group_gemm_ref(*operands, activation=activation_of(problem))

    def local(self, operands, problem):
        """The product by the library: as many rows for each expert."""
        x, w, _ = operands
        rows, weights = rows_by_expert(x, problem.shape[0], problem.shape[3]), w.transpose(1, 2)
        return lambda: torch.bmm(rows, weights)

    def run(self, operands, problem, group, config):
        op.forget_choices()  # made before it was tuned
        return op.group_gemm(*operands, activation=activation_of(problem), config=config)

    def compile(self, operands, problem, config):
        kernel.compile(*operands, activation_of(problem), config)


register(GroupGemmTunable())
