"""Tunables of all_gather, reduce_scatter and all_reduce: problems, search space and cost model.

The size of a problem is the number of elements of the full tensor, which is gathered, scattered or reduced.
"""

import math
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.collectives import launch, op
from tdkernels.ops.collectives.config import EXCHANGES, CollectiveConfig, default_config
from tdkernels.ops.common import costs
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_LAUNCH_S = 5e-6  # from the launch of a kernel until its first program has read x
_COPY_S = 20e-6  # time to start the copy of a shard
_COLLECTIVE_SHARE, _COLLECTIVE_S = 0.85, 20e-6  # collectives of torch: share of the link's peak rate, time to start


class CollectiveTunable(ConfigTunable):
    """Tunable of ``all_gather``, ``reduce_scatter`` or ``all_reduce``, given by its name."""

    sizes = ("n",)
    config_class = CollectiveConfig
    layouts = ("rows",)
    plain_words = "torch collective", "torch's collective"
    across_nodes = False  # only method "torch" reaches other nodes

    def __init__(self, name: str) -> None:
        self.name = name

    def goes_in_graphs(self, problem: "Problem") -> bool:
        return True

    def why_not(self, problem: "Problem") -> str | None:
        reason = super().why_not(problem)
        if reason is None and self.name != "all_reduce" and problem.shape[0] % problem.world_size:
            return f"{problem.shape[0]} elements are not divisible by {problem.world_size} ranks"
        return reason

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, ...]:
        if len(shapes) != 1:
            raise ValueError(f"{self.name}: the operand is x alone, not {len(shapes)} of them")
        return (math.prod(shapes[0]) * (world_size if self.name == "all_gather" else 1),)

    def layout_of(self, *operands) -> str:
        return self.layouts[0]

    def illegal(self, config: Any, problem: "Problem", device: torch.device) -> str | None:
        if isinstance(config, CollectiveConfig):
            return config.illegal(device, problem.torch_dtype, self.name)
        return super().illegal(config, problem, device)

    def default(self, problem: "Problem", device: torch.device) -> CollectiveConfig:
        return default_config(self.name, _nbytes(problem), problem.world_size, device)

    def invariant(self, problem: "Problem", device: torch.device) -> CollectiveConfig:
        # All fused exchanges add the same numbers in the same order, so the config may depend on the size.
        return self.default(problem, device)

    def space(self, problem: "Problem", device: torch.device) -> list[CollectiveConfig]:
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
        """Return the bytes of the kernel's operand, see ``launch.share_bytes``."""
        nbytes = _nbytes(problem)
        return nbytes if self.name == "all_reduce" else nbytes // problem.world_size

    def _units(self, config, problem):
        return launch.sizes(self.name, self._share_bytes(problem), problem.world_size, config)[0]

    def estimate_ms(self, config: CollectiveConfig, problem: "Problem", hardware: "Hardware") -> float:
        ranks, wire = problem.world_size, self.floors(problem).wire_bytes
        if config.method == "torch":
            return 1e3 * (wire / (_COLLECTIVE_SHARE * hardware.link) + _COLLECTIVE_S)
        if config.exchange == "copy_engine":
            return 1e3 * (wire / costs.copy_rate(hardware) + (ranks - 1) * _COPY_S + _LAUNCH_S)
        two_shot = config.exchange == "two_shot"
        if self.name == "all_reduce" and not two_shot:
            wire = (ranks - 1) * _nbytes(problem)
        units = self._units(config, problem)
        programs = min(config.num_programs, units)
        # A program waits for the signals of its chunks one after another. Meanwhile other programs send.
        signals = cdiv(units, programs) * (2 if two_shot else 1)
        waiting = costs.SIGNAL_S * max(signals * min(1.0, hardware.num_sms / (4 * programs)), 2 if two_shot else 1)
        moved = (ranks + 1) * self._share_bytes(problem) * (2 if two_shot else 1)
        return 1e3 * (_LAUNCH_S + waiting + max(wire / costs.push_rate(programs, hardware), moved / hardware.memory))

    def floors(self, problem: "Problem") -> Floors:
        # A rank receives all parts but its own from its peers; for all_reduce this happens twice.
        wire = (problem.world_size - 1) * _nbytes(problem) // problem.world_size
        flops = 0 if self.name == "all_gather" else problem.shape[0]
        return Floors(flops, 2 * wire if self.name == "all_reduce" else wire)

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator,
    ) -> tuple[torch.Tensor, ...]:
        n = problem.shape[0] // (problem.world_size if self.name == "all_gather" else 1)
        return (torch.randn(n, generator=generator, dtype=problem.torch_dtype, device=device),)

    def reference_bytes(self, problem: "Problem") -> int:
        return 3 * 2 * _nbytes(problem)

    def reference(
        self, operands: Sequence[torch.Tensor], problem: "Problem", group: "dist.ProcessGroup",
    ) -> torch.Tensor:
        return getattr(op, f"{self.name}_ref")(*operands, group=group)

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        return operands[0].clone  # the computation of one rank is a copy

    def run(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: Any) -> torch.Tensor:
        if config.method == "torch":
            return self.reference(operands, problem, group)
        return launch.launch(self.name, *operands, group, config)  # type: ignore[call-arg]

    def compile(self, operands: Any, problem: "Problem", config: Any) -> None:
        launch.compile(self.name, *operands, problem.world_size, config)  # type: ignore[call-arg]

    def compiled(self, config: Any) -> tuple | None:
        if config.method == "torch" or config.exchange == "copy_engine":
            return None
        return config.exchange, config.block_bytes, config.num_warps


def _nbytes(problem):
    return problem.shape[0] * problem.torch_dtype.itemsize


for _name in EXCHANGES:
    register(CollectiveTunable(_name))
