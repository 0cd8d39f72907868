"""What the dense operators have in common for the tuner: problems are (M, N, K), a weight lies as [N, K] or [K, N]."""

import math
from dataclasses import replace
from types import ModuleType

import torch
import torch.nn.functional as F

from tdkernels.autotune import tunable as tunables
from tdkernels.autotune.hardware import hardware
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import from_text
from tdkernels.ops.common.tile_config import Tiles
from tdkernels.ops.common.tunable_base import ConfigTunable, problem_of, select
from tdkernels.runtime import gpu

# What programs and copy engines reach of a link's best rate, and how many programs it takes (H200).
_PUSH_SHARE, _COPY_SHARE, _PROGRAMS_A_LINK = 0.88, 0.8, 8
_COLLECTIVE_SHARE = 0.85
_LAUNCH_S = 20e-6
SIGNAL_S = 3e-6  # from a store to a peer until the peer has seen the signal
# A sequence that takes less is left to torch where nobody has tuned, unless all rows fit into one tile: the weight is
# then read by each tile row of each shard, and cuBLAS reads it once (2 H200; see bench/NOTES.md).
_SMALL_MS = 0.2
# A config that was tuned for a similar problem keeps so much of the multiprocessors busy as the default does. On 2 H200
# 512 x 10240 x 8192 by the tiles of 512 x 8192 x 8192, 0.75 of the default's, took 1.10 to 1.19 times as long.
_LEAST_BUSY = 0.8
_FEW_ROWS = 128
# Of a piece of a shard: less takes the GPU less than the host takes to wait for it and to multiply it (2 H200).
_PIECE_FLOPS = 1e11


class DenseTunable(ConfigTunable):
    """A dense operator.

    Attributes:
        divided: the sizes, by number, that the ranks divide
        op, launch, config_module: the modules of the operator, its launcher and its default config
    """

    sizes = ("m", "n", "k")
    layouts = ("nk", "kn")
    divided: tuple
    op: ModuleType
    launch: ModuleType
    config_module: ModuleType

    def goes_in_graphs(self, problem):
        return True

    def why_not(self, problem):
        return super().why_not(problem) or self.why_not_divided(problem, self.divided)

    def layout_of(self, *operands):
        weight = operands[1] if len(operands) > 1 else None
        return "kn" if isinstance(weight, torch.Tensor) and gemm_operands.lies_as_kn(weight) else "nk"

    def config_to_dict(self, config):
        values = super().config_to_dict(config)
        if config.method == "parts":
            return {name: values[name] for name in ("method", "pieces")}  # it takes none of the rest
        values.pop("pieces", None)
        return values

    def completed(self, config, problem, device):
        if not _leaves_tiles_open(config):
            return config
        config = replace(config, tiles=self.default(problem, device).tiles)
        while config.illegal(device, problem.torch_dtype) and config.tiles.num_stages > 1:
            # What else the config asks for may need shared memory, too.
            config = replace(config, tiles=replace(config.tiles, num_stages=config.tiles.num_stages - 1))
        return config

    def default(self, problem, device):
        sizes = self.of_a_rank(problem)
        return self.config_module.default_config(*sizes, problem.torch_dtype, device, problem.world_size)

    def suits(self, config, problem, device):
        """Not if its tiles, which may be whole waves of the other problem, leave much more idle here than the default.

        Of few rows that is not what counts.
        """
        default = self.default(problem, device)
        if device.type == "cpu" or problem.shape[0] <= _FEW_ROWS or config.method != "fused" or config.tiles is None:
            return True
        rows, n, _ = self.of_a_rank(problem)
        shards = problem.shape[0] // max(rows, 1)
        busy = [tiles.busy_share(shards, rows, n, gpu.num_sms(device)) for tiles in (config.tiles, default.tiles)]
        return busy[0] >= _LEAST_BUSY * busy[1]

    def fallback(self, problem, device):
        default, dtype = self.default(problem, device), problem.torch_dtype
        if device.type == "cuda" and not _for_few_rows(default, problem):
            if self.estimate_ms(self.plain(), problem, hardware(device, dtype)) < _SMALL_MS:
                return self.plain()
        return default

    def operands(self, problem, device, generator):
        m, n, k = self.operand_sizes(problem)
        dtype = problem.torch_dtype
        x = torch.randn(m, k, generator=generator, dtype=dtype, device=device)
        shape = (n, k) if problem.layout == "nk" else (k, n)
        weight = torch.randn(shape, generator=generator, dtype=dtype, device=device).mul_(k**-0.5)
        return x, weight if problem.layout == "nk" else weight.t()

    def reference_bytes(self, problem):
        m, (_, n, k) = problem.shape[0], self.operand_sizes(problem)
        wide = 2 * problem.torch_dtype.itemsize
        # x, gathered or not, the weight, and the product, which is compared with another.
        return wide * (m * k + n * k + 3 * m * n)

    def reference(self, operands, problem, group):
        return getattr(self.op, f"{self.name}_ref")(*operands, group=group)

    def local(self, operands, problem):
        return lambda: F.linear(*operands)

    def run(self, operands, problem, group, config):
        if config.method == "torch":
            return self.reference(operands, problem, group)
        return self.op.run(*operands, None, group, config)

    def compile(self, operands, problem, config):
        self.launch.compile(*operands, None, problem.world_size, config, problem.num_nodes)


def two_operands(operator, shapes):
    """The shapes of x and weight, which shall fit; a bias after them changes nothing."""
    if not 2 <= len(shapes) <= 3:
        raise ValueError(f"{operator}: the operands are x and weight, not {len(shapes)} of them")
    x, weight = shapes[:2]
    if len(x) < 2 or len(weight) != 2 or x[-1] != weight[1]:
        raise ValueError(f"{operator}: x {list(x)} and weight {list(weight)} do not fit")
    return x, weight


def _for_few_rows(config, problem):
    """Whether a config reads the weight once, with all rows in a tile, and as fast as cuBLAS does."""
    if problem.num_nodes > 1 or problem.torch_dtype.itemsize > 2:  # which are multiplied without tensor cores
        return False
    return "one_shot" in (getattr(config, "transport", None), getattr(config, "exchange", None))


def _leaves_tiles_open(config):
    return config.method == "fused" and config.tiles is None


def call_of(x, weight):
    """What ``select`` knows a call of 2-D operands by, besides the operator, dtype and device."""
    return x.shape, weight.shape, weight.stride()


def config_for(operator, text, x, weight, group, fields):
    """The config of a call: what ``text`` stands for if it was given one, else what the group has chosen.

    Args:
        fields: a function; what must be the same on all ranks
    """

    def problem():
        tunable = tunables.tunable(operator)
        return tunable.sizes_of(x.shape, weight.shape, world_size=group.size()), tunable.layout_of(x, weight)

    if not text:
        return select(operator, x, group, call_of(x, weight), lambda: (*problem(), fields())).config
    tunable = tunables.tunable(operator)
    config = from_text(tunable.config_class, text)
    if not _leaves_tiles_open(config):
        return config
    return tunable.completed(config, problem_of(operator, *problem(), x, group), x.device)


# ---- spaces and costs ----


def in_parts(config_class, m, n, k, world_size):
    """Configs of that method for a product on a rank; a piece is to take the GPU longer than the host."""
    flops = 2.0 * m * n * k / world_size
    numbers = [pieces for pieces in (1, 2, 4) if pieces == 1 or flops / pieces >= _PIECE_FLOPS]
    return [config_class(method="parts", pieces=pieces) for pieces in numbers]


def tile_space(device, dtype):
    """Tiles worth trying on a device, legal or not."""
    if device.type == "cpu":
        return [Tiles(64, 64, 64, num_warps=1, num_stages=1), Tiles(32, 64, 64, num_warps=1, num_stages=1)]
    if dtype == torch.float32:
        return [Tiles(m, n, 32, num_warps=4, num_stages=2) for m, n in ((64, 64), (128, 64), (64, 128), (32, 64))]
    if torch.version.hip or gpu.capability(device) < (9, 0):
        stages = 2 if torch.version.hip else 3
        sizes = ((128, 256), (128, 128), (64, 256), (64, 128), (64, 64), (128, 64))
        return [Tiles(m, n, 64, num_warps=8 if m * n >= 128 * 128 else 4, num_stages=stages) for m, n in sizes]
    return [
        Tiles(128, 256, 64, num_warps=8, num_stages=4),
        Tiles(128, 256, 64, num_warps=8, num_stages=3),
        Tiles(256, 128, 64, num_warps=8, num_stages=3),
        Tiles(128, 128, 64, num_warps=8, num_stages=5),
        Tiles(128, 128, 64, num_warps=4, num_stages=4),
        Tiles(64, 256, 64, num_warps=4, num_stages=4),
        Tiles(64, 128, 64, num_warps=4, num_stages=5),
        Tiles(64, 128, 128, num_warps=4, num_stages=4),
        Tiles(64, 64, 64, num_warps=4, num_stages=6),
        Tiles(64, 64, 128, num_warps=4, num_stages=5),
    ]


def product_s(m, n, k, dtype, tiles, num_sms, hardware):
    """Seconds of a product by tiles on some of the multiprocessors, and of one tile."""
    per_sm = hardware.flops / hardware.num_sms * tiles.reach
    tile_s = 2.0 * tiles.block_m * tiles.block_n * k / per_sm
    waves = tiles.count(m, n) / num_sms
    return max(math.ceil(waves) * tile_s, (n * k + m * k + m * n) * dtype.itemsize / hardware.memory), tile_s


def vendor_s(m, n, k, dtype, hardware):
    """Seconds of a product by the vendor's library."""
    return max(2.0 * m * n * k / hardware.flops, (n * k + m * k + m * n) * dtype.itemsize / hardware.memory)


def sequence_s(m, n, k, wire_bytes, dtype, hardware):
    """Seconds of the plain sequence."""
    return vendor_s(m, n, k, dtype, hardware) + collective_s(wire_bytes, hardware)


def collective_s(wire_bytes, hardware):
    """Seconds of a collective of torch's by itself."""
    return wire_bytes / (_COLLECTIVE_SHARE * hardware.link) + _LAUNCH_S


def parts_s(count, product, wire, received, hardware):
    """Seconds of ``count`` products that follow one another, beside transfers one ahead or one behind of them.

    Args:
        product, wire: seconds of all of them
        received: bytes, which were stored and are read again
    """
    return max(product, wire) + min(product, wire) / count + count * _LAUNCH_S + received / hardware.memory


def push_rate(programs, hardware):
    """Bytes a second that so many pushing programs reach."""
    return _PUSH_SHARE * hardware.link * min(1.0, programs / _PROGRAMS_A_LINK)


def copy_rate(hardware):
    """Bytes a second of copy engines that serve all peers."""
    return _COPY_SHARE * hardware.link
