"""all_gather, reduce_scatter and all_reduce for the tuner: problems, their configs, and about how long each takes.

A problem is the number of elements of the full tensor: what is gathered, scattered or reduced.
"""

import math

import torch

from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.collectives import launch, op
from tdkernels.ops.collectives.config import EXCHANGES, CollectiveConfig, default_config
from tdkernels.ops.common import gemm_tunable as dense
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

_LAUNCH_S = 5e-6  # of a kernel of ours, until its first program has read x
_COPY_S = 20e-6  # to start the copy of a shard
_COLLECTIVE_SHARE, _COLLECTIVE_S = 0.85, 20e-6  # torch's collectives: of the link's best rate, and to start


class CollectiveTunable(ConfigTunable):
    """One of the three, by its name."""

    sizes = ("n",)
    config_class = CollectiveConfig
    layouts = ("rows",)
    plain_words = "torch collective", "torch's collective"
    across_nodes = False  # torch alone reaches other nodes

    def __init__(self, name):
        self.name = name

    def goes_in_graphs(self, problem):
        return True

    def why_not(self, problem):
        reason = super().why_not(problem)
        if reason is None and self.name != "all_reduce" and problem.shape[0] % problem.world_size:
            return f"{problem.shape[0]} elements are not divisible by {problem.world_size} ranks"
        return reason

    def sizes_of(self, *shapes, world_size):
        if len(shapes) != 1:
            raise ValueError(f"{self.name}: the operand is x alone, not {len(shapes)} of them")
        return (math.prod(shapes[0]) * (world_size if self.name == "all_gather" else 1),)

    def layout_of(self, *operands):
        return self.layouts[0]

    def illegal(self, config, problem, device):
        if isinstance(config, CollectiveConfig):
            return config.illegal(device, problem.torch_dtype, self.name)
        return super().illegal(config, problem, device)

    def default(self, problem, device):
        return default_config(self.name, _nbytes(problem), problem.world_size, device)

    def space(self, problem, device):
        on_cpu = device.type == "cpu"
        blocks = ((1024, 1), (4096, 1)) if on_cpu else ((4096, 4), (8192, 8), (16384, 8), (16384, 16), (32768, 16))
        most = gpu.num_sms(device)
        numbers = (2, 4) if on_cpu else (8, 16, most // 4, most // 2, most, 2 * most, 4 * most)
        configs = []
        for exchange in EXCHANGES[self.name]:
            if exchange == "copy_engine":
                configs.append(CollectiveConfig("fused", exchange))
                continue
            for block_bytes, num_warps in blocks:
                for piece_blocks in (1, 2, 4):
                    config = CollectiveConfig("fused", exchange, 1, block_bytes, piece_blocks, num_warps)
                    units = self._units(config, problem)
                    for programs in sorted({min(number, units) for number in numbers}):
                        configs.append(
                            CollectiveConfig("fused", exchange, programs, block_bytes, piece_blocks, num_warps)
                        )
        return configs

    def _share_bytes(self, problem):
        """Of the x that a kernel takes, see ``collective_launch.share_bytes``."""
        nbytes = _nbytes(problem)
        return nbytes if self.name == "all_reduce" else nbytes // problem.world_size

    def _units(self, config, problem):
        return launch.sizes(self.name, self._share_bytes(problem), problem.world_size, config)[0]

    def estimate_ms(self, config, problem, hardware):
        ranks, wire = problem.world_size, self.floors(problem).wire_bytes
        if config.method == "torch":
            return 1e3 * (wire / (_COLLECTIVE_SHARE * hardware.link) + _COLLECTIVE_S)
        if config.exchange == "copy_engine":
            return 1e3 * (wire / dense.copy_rate(hardware) + (ranks - 1) * _COPY_S + _LAUNCH_S)
        two_shot = config.exchange == "two_shot"
        if self.name == "all_reduce" and not two_shot:
            wire = (ranks - 1) * _nbytes(problem)
        units = self._units(config, problem)
        programs = min(config.num_programs, units)
        # A program waits for the signals of each of its pieces in turn; while it does, others send.
        signals = cdiv(units, programs) * (2 if two_shot else 1)
        waiting = dense.SIGNAL_S * max(signals * min(1.0, hardware.num_sms / (4 * programs)), 2 if two_shot else 1)
        moved = (ranks + 1) * self._share_bytes(problem) * (2 if two_shot else 1)
        return 1e3 * (_LAUNCH_S + waiting + max(wire / dense.push_rate(programs, hardware), moved / hardware.memory))

    def floors(self, problem):
        # A rank needs what its peers have of all but its own part; to reduce for all, that comes twice.
        wire = (problem.world_size - 1) * _nbytes(problem) // problem.world_size
        flops = 0 if self.name == "all_gather" else problem.shape[0]
        return Floors(flops, 2 * wire if self.name == "all_reduce" else wire)

    def operands(self, problem, device, generator):
        n = problem.shape[0] // (problem.world_size if self.name == "all_gather" else 1)
        return (torch.randn(n, generator=generator, dtype=problem.torch_dtype, device=device),)

    def reference_bytes(self, problem):
        return 3 * 2 * _nbytes(problem)

    def reference(self, operands, problem, group):
        return getattr(op, f"{self.name}_ref")(*operands, group=group)

    def local(self, operands, problem):
        return operands[0].clone  # one rank alone copies

    def run(self, operands, problem, group, config):
        if config.method == "torch":
            return self.reference(operands, problem, group)
        return launch.launch(self.name, *operands, group, config)

    def compile(self, operands, problem, config):
        launch.compile(self.name, *operands, problem.world_size, config)

    def compiled(self, config):
        if config.method == "torch" or config.exchange == "copy_engine":
            return None
        return config.exchange, config.block_bytes, config.num_warps


def _nbytes(problem):
    return problem.shape[0] * problem.torch_dtype.itemsize


for _name in EXCHANGES:
    register(CollectiveTunable(_name))
