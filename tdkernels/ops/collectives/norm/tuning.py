"""Tunables of all_reduce_rms_norm and all_reduce_layer_norm: problems, search space and cost model.

The sizes of a problem are those of x as a matrix [rows, hidden]. In the layout "fp8" the operator is called with
``quantize="fp8"``. Operands have a residual, and LayerNorm has a bias.
"""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import invariant_ranks
from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.collectives.norm import launch, reference
from tdkernels.ops.collectives.norm.config import (
    PER_WARP,
    ROW_PROGRAMS,
    AllReduceNormConfig,
    default_config,
    warps_of_row,
    wide_columns,
)
from tdkernels.ops.common import costs
from tdkernels.ops.common.norm_launch import Options
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_EPS = 1e-5
_LAUNCH_S = 5e-6  # from the launch of a kernel until its first program has read x
_ROW_S = 1.5e-6  # latency of the reductions of a row, apart from its loads
_COLLECTIVE_S = 20e-6  # time to start a collective of torch
_KERNEL_S = 3e-6  # from one launch in a sequence to the next
_WARPS_OF_SM = 32  # resident warps of an SM, if a thread needs 64 registers


class AllReduceNormTunable(ConfigTunable):
    """Tunable of ``all_reduce_rms_norm`` or ``all_reduce_layer_norm``, given by its name."""

    sizes = "rows", "hidden"
    config_class = AllReduceNormConfig
    layouts = "rows", "fp8"
    plain_words = "torch collective, addition and norm", "torch's collective, addition and norm"
    local_words = "the norm alone"
    across_nodes = False  # only method "torch" reaches other nodes

    def __init__(self, name: str) -> None:
        self.name = name

    def goes_in_graphs(self, problem: "Problem") -> bool:
        return True

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, ...]:
        if not shapes or not shapes[0]:
            raise ValueError(f"{self.name}: the first operand is x [..., hidden]")
        return math.prod(shapes[0][:-1]), shapes[0][-1]

    def layout_of(self, *operands) -> str:
        return self.layouts[0]

    def default(self, problem: "Problem", device: torch.device) -> AllReduceNormConfig:
        rows, hidden = problem.shape
        return default_config(rows, hidden, problem.torch_dtype, problem.world_size, device)

    def invariant(self, problem: "Problem", device: torch.device) -> AllReduceNormConfig:
        # The additions within a row depend on the exchange and on num_warps, so the rows must not select either. For
        # another number of programs per row another kernel is compiled.
        # Of two ranks, both exchanges send as much. With ``max_ranks`` the number of ranks must not select it either.
        exchange = "one_shot" if problem.world_size == 2 and not invariant_ranks() else "two_shot"
        rows, hidden = problem.shape
        config = default_config(rows, hidden, problem.torch_dtype, problem.world_size, device, exchange)
        num_warps = config.num_warps if device.type == "cpu" else warps_of_row(hidden, device)
        return replace(config, row_programs=1, num_warps=num_warps)

    def space(self, problem: "Problem", device: torch.device) -> list[AllReduceNormConfig]:
        rows, hidden = problem.shape
        if device.type == "cpu":
            return [
                AllReduceNormConfig("fused", exchange, send_columns=4096, num_programs=programs, num_warps=1)
                for exchange in ("one_shot", "two_shot") for programs in (2, 4)
            ]
        found: dict[AllReduceNormConfig, None] = {}  # in order, without duplicates
        sms, most = gpu.num_sms(device), next_power_of_2(hidden)
        for num_warps in (number for number in (4, 8, 16, 32) if number <= gpu.max_warps(device)):
            wide = wide_columns(num_warps, problem.torch_dtype, device)
            pieces = sorted({max(min(columns, most, 16384), 16) for columns in (wide // 4, wide // 2, wide, 2 * wide)})
            for row_programs in ROW_PROGRAMS if hidden <= PER_WARP * num_warps else (1,):
                for send_columns in pieces:
                    self._add(
                        found, problem, (sms // 2, sms, 2 * sms), exchange="one_shot", row_programs=row_programs,
                        send_columns=send_columns, num_warps=num_warps,
                    )
            for piece_rows in (1, 2, 4):
                numbers = sms, 2 * sms, 3 * sms, 4 * sms
                self._add(found, problem, numbers, exchange="two_shot", piece_rows=piece_rows, num_warps=num_warps)
        return list(found)

    def _add(self, found, problem, numbers, **fields):
        """Add the configs with these fields and numbers of programs; there are no more programs than work units."""
        units = self._units(AllReduceNormConfig(**fields), problem)
        for number in numbers:
            found[AllReduceNormConfig(**fields, num_programs=min(number, units))] = None

    def _units(self, config, problem):
        return launch.sizes(*problem.shape, problem.torch_dtype.itemsize, problem.world_size, config)[0]

    def estimate_ms(self, config: AllReduceNormConfig, problem: "Problem", hardware: "Hardware") -> float:
        ranks, nbytes, floors = problem.world_size, _nbytes(problem), self.floors(problem)
        if config.method == "torch":
            after = (floors.memory_bytes + 4 * nbytes) / hardware.memory + 2 * _KERNEL_S
            return 1e3 * (costs.collective_s(floors.wire_bytes, hardware) + _COLLECTIVE_S + after)
        units = self._units(config, problem)
        programs = min(config.num_programs, units)
        at_once = min(programs, max(hardware.num_sms * _WARPS_OF_SM // config.num_warps, 1))
        if config.exchange == "two_shot":
            signals, wire = 2 * cdiv(units, programs), floors.wire_bytes
            # The parts and r are stored by the peers and loaded; the owner stores r once more.
            moved = floors.memory_bytes + 5 * nbytes
            in_turn = cdiv(units, at_once) * ranks * config.piece_rows
        else:
            row_programs = launch.row_programs(problem.shape[1], config)[1]
            receivers = problem.shape[0] * row_programs
            signals, wire = cdiv(receivers, programs), (ranks - 1) * nbytes
            moved = floors.memory_bytes + (ranks - 1) * (1 + row_programs) * nbytes
            in_turn = cdiv(receivers, at_once)
        # A program waits for the signals of its rows one after another. Meanwhile other programs send.
        least = 2 if config.exchange == "two_shot" else 1
        waiting = costs.SIGNAL_S * max(signals * min(1.0, hardware.num_sms / (4 * programs)), least)
        row_bytes = (ranks + 3) * problem.shape[1] * problem.torch_dtype.itemsize
        row_s = _ROW_S + row_bytes * at_once / hardware.memory * hardware.num_sms / max(at_once, hardware.num_sms)
        transfer = max(wire / costs.push_rate(programs, hardware), moved / hardware.memory)
        return 1e3 * (_LAUNCH_S + waiting + max(transfer, in_turn * row_s))

    def floors(self, problem: "Problem") -> Floors:
        # As for all_reduce, a rank receives parts and sums. It reads x and the residual and stores r and y.
        nbytes = _nbytes(problem)
        y = problem.shape[0] * problem.shape[1] if _quantize(problem) else nbytes
        flops = (problem.world_size + 5) * problem.shape[0] * problem.shape[1]
        return Floors(flops, 2 * ((problem.world_size - 1) * nbytes // problem.world_size), 3 * nbytes + y)

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator,
    ) -> tuple[torch.Tensor, ...]:
        def draw(shape, generator):
            return torch.randn(shape, generator=generator, dtype=problem.torch_dtype, device=device)

        shared = torch.Generator(device).manual_seed(1)  # the same on all ranks
        vectors = 1 + _is_layer_norm(problem)  # weight, and the bias of LayerNorm
        return draw(problem.shape, generator), draw(problem.shape, shared), *(
            draw(problem.shape[1:], shared) for _ in range(vectors)
        )

    def reference_bytes(self, problem: "Problem") -> int:
        return 8 * 2 * _nbytes(problem)

    def reference(
        self, operands: Sequence[torch.Tensor], problem: "Problem", group: "dist.ProcessGroup",
    ) -> torch.Tensor:
        # In the wider dtype y is exact, and the error of torch's own result contains that of fp8.
        quantize = _quantize(problem) if operands[0].dtype == problem.torch_dtype else None
        return self.comparable(self._by_torch(operands, problem, group, quantize), problem)

    def _by_torch(self, operands, problem, group, quantize):
        x, residual, weight, bias = _all_operands(operands)
        return reference.forward(x, residual, weight, bias, _EPS, _is_layer_norm(problem), quantize, group)

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        x, _, weight, bias = _all_operands(operands)
        return lambda: reference.norm_ref(x, weight, bias, _EPS, _is_layer_norm(problem))

    def run(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: Any) -> Any:
        if config.method == "torch":
            return self._by_torch(operands, problem, group, _quantize(problem))
        options = Options(self.name, _EPS, _quantize(problem))
        return tuple(launch.launch(_all_operands(operands), options, group, config)[: 3 if options.quantize else 2])

    def comparable(self, output: Any, problem: "Problem") -> torch.Tensor:
        y, r, *scale = output
        if scale:
            y = (y.float() * scale[0]).to(r.dtype)
        return torch.stack([y, r])

    def compile(self, operands: tuple[torch.Tensor, ...], problem: "Problem", config: Any) -> None:
        options = Options(self.name, _EPS, _quantize(problem))
        launch.compile(_all_operands(operands), problem.world_size, options, config)

    def compiled(self, config: Any) -> tuple | None:
        if config.method == "torch":
            return None
        of_one_shot = (config.row_programs, config.send_columns) if config.exchange == "one_shot" else ()
        return config.exchange, config.num_warps, *of_one_shot


def _all_operands(operands) -> launch.Operands:
    """Return (x, residual, weight, bias), with None for a bias that does not exist."""
    x, residual, weight, *bias = operands
    return x, residual, weight, bias[0] if bias else None


def _is_layer_norm(problem):
    return problem.operator == "all_reduce_layer_norm"


def _quantize(problem):
    return "fp8" if problem.layout == "fp8" else None


def _nbytes(problem):
    return problem.shape[0] * problem.shape[1] * problem.torch_dtype.itemsize


for _name in ("all_reduce_rms_norm", "all_reduce_layer_norm"):
    register(AllReduceNormTunable(_name))
