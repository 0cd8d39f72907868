"""GEMM-AR for the tuner: problems, the space of its configs, and about how long each takes."""

import torch

from tdkernels.autotune.operator import Floors, register
from tdkernels.ops import _dense_tuning as dense
from tdkernels.ops import _device, _gemm, _rank_sum, _staging, _tiles
from tdkernels.ops import gemm_ar as op
from tdkernels.ops import gemm_ar_kernel as kernel
from tdkernels.ops import gemm_ar_nodes_kernel as nodes_kernel
from tdkernels.ops import gemm_ar_one_shot as one_shot
from tdkernels.ops import gemm_ar_tiles as shared
from tdkernels.ops._tiles import Tiles
from tdkernels.ops.gemm_ar_kernel import GemmArConfig

_PROGRAMS = 64  # that send at a time: enough for the link
_SIGNAL_S = 3e-6  # from a store to a peer until the peer has seen the signal
_ONE_SHOT_MOST_ROWS = 1024  # beyond, the wire alone takes far longer than two_shot


class GemmArTunable(dense.DenseTunable):
    name = "gemm_ar"
    sources = (op, kernel, one_shot, nodes_kernel, shared, _gemm, _rank_sum, _staging, _tiles)
    divided = (2,)
    config_class = GemmArConfig
    op, kernel = op, kernel

    def sizes_of(self, *shapes, world_size):
        x, weight = dense.two_operands("gemm_ar", shapes)
        return torch.Size(x[:-1]).numel(), weight[0], world_size * weight[1]

    def of_a_rank(self, problem):
        m, n, k = problem.shape
        return m, n, k // problem.world_size

    operand_sizes = of_a_rank

    def space(self, problem, device):
        m, n, _ = self.of_a_rank(problem)
        configs = []
        for tiles in dense.tile_space(device, problem.torch_dtype):
            tiles_of_z = -(-m // tiles.block_m) * -(-n // tiles.block_n)
            for item_tiles in sorted({min(item, tiles_of_z) for item in (1, 2, 4, 8)}):
                configs.append(GemmArConfig("fused", "two_shot", tiles, item_tiles))
        if m <= _ONE_SHOT_MOST_ROWS:
            for tiles in _one_shot_tiles(m, problem.torch_dtype, device):
                splits = (1, 2, 4, 8) if problem.num_nodes == 1 else (1,)  # on several K stays whole
                configs += [GemmArConfig("fused", "one_shot", tiles, split_k=split) for split in splits]
        return configs

    def estimate_ms(self, config, problem, hardware):
        m, n, k = self.of_a_rank(problem)
        ranks, dtype = problem.world_size, problem.torch_dtype
        nbytes = m * n * dtype.itemsize
        if config.method == "torch":
            return 1e3 * dense.sequence_s(m, n, k, self.floors(problem).wire_bytes, dtype, hardware)
        tiles, rate = config.tiles, dense.push_rate(_PROGRAMS, hardware)
        if config.exchange == "one_shot":
            programs = -(-m // tiles.block_m) * -(-n // tiles.block_n) * config.split_k
            # Reading the weight is what takes time, and too few programs cannot read at full speed.
            reading = (n * k + m * k) * dtype.itemsize / hardware.memory / min(1.0, programs / hardware.num_sms)
            k_of_part = one_shot.k_of_part(k, config)
            product = max(reading, dense.product_s(m, n, k_of_part, dtype, tiles, hardware.num_sms, hardware)[0])
            summing = (ranks + 1 + 2 * config.split_k) * nbytes / hardware.memory
            return 1e3 * (product + (ranks - 1) * nbytes / rate + summing + _SIGNAL_S)
        product, tile = dense.product_s(m, n, k, dtype, tiles, hardware.num_sms, hardware)
        item = config.item_tiles * tiles.block_m * tiles.block_n * dtype.itemsize
        wire = self.floors(problem).wire_bytes / rate
        return 1e3 * (max(product, wire) + tile + 3 * item / rate + 4 * nbytes / hardware.memory + 2 * _SIGNAL_S)

    def floors(self, problem):
        m, n, k = self.of_a_rank(problem)
        # A rank needs its peers' partials of a W-th of z, and the sums of the rest.
        wire_bytes = 2 * (problem.world_size - 1) * m * n * problem.torch_dtype.itemsize // problem.world_size
        return Floors(2 * m * n * k, wire_bytes)

    def compiled(self, config):
        same = super().compiled(config)
        return same and (*same, config.exchange, config.split_k > 1)


def _one_shot_tiles(m, dtype, device):
    """Tiles worth trying for few rows: no taller than need be, narrow enough to occupy the GPU."""
    if device.type == "cpu" or dtype == torch.float32:
        return [one_shot.default_tiles(m, 64, 1, dtype, device)[0]]
    heights = [height for height in (16, 32, 64, 128) if height < 2 * m] or [16]
    depths = ((64, 2), (128, 2)) if torch.version.hip or _device.capability(device) < (9, 0) else ((128, 4), (128, 5))
    tiles = [
        Tiles(height, width, depth, num_warps=4, num_stages=stages)
        for height in heights[-2:] for width in (32, 64, 128) for depth, stages in depths
    ]  # fmt: skip
    return [tile for tile in tiles if tile.illegal(device, dtype) is None]


register(GemmArTunable())
