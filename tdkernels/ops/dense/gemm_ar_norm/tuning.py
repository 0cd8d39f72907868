"""Tunables of gemm_ar_rms_norm and gemm_ar_layer_norm: problems, search space and cost model.

The sizes of a problem are (M, N, K) of the whole GEMM; the ranks divide K. In the layout "fp8" the operator is called
with ``quantize="fp8"``. Operands have a residual, and LayerNorm has a bias.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tdkernels.autotune import tunable as tunables
from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.collectives.norm.config import ROW_PROGRAMS, AllReduceNormConfig
from tdkernels.ops.common import costs, small_m_gemm
from tdkernels.ops.common import gemm_tunable as dense
from tdkernels.ops.common.norm_launch import Options
from tdkernels.ops.common.tile_config import Tiles
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.ops.dense.gemm_ar_norm import launch, op, reference
from tdkernels.ops.dense.gemm_ar_norm.config import (
    GemmArNormConfig,
    completed,
    default_config,
    invariant_config,
    registers_hold,
)
from tdkernels.rounding import cdiv

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_EPS = 1e-5
_SPLITS = 1, 2, 4, 8
# With more rows, programs of one launch read the weight many times, and all ranks add all rows.
_FUSED_MOST_ROWS = 512
# Programs that add rows also take shared memory for the stages of the GEMM, so an SM holds few of them. (Estimate.)
_ROW_PROGRAMS_OF_SM = 1
_PROGRAMS = 64  # programs that send concurrently: enough for the link
_LAUNCH_S = 5e-6  # from the launch of a kernel until its first program has loaded its operands
_ROW_S = 1.5e-6  # latency of the reductions of a row, apart from its loads
_KERNEL_S = 3e-6  # from one launch in a sequence to the next


class GemmArNormTunable(ConfigTunable):
    """Tunable of ``gemm_ar_rms_norm`` or ``gemm_ar_layer_norm``, given by its name."""

    sizes = "m", "n", "k"
    config_class = GemmArNormConfig
    layouts = "rows", "fp8"
    plain_words = "torch matmul, collective, addition and norm", "torch's matmul, collective, addition and norm"
    across_nodes = False  # only method "torch" reaches other nodes

    def __init__(self, name: str) -> None:
        self.name = name
        self.norm_name = name.replace("gemm_ar", "all_reduce")  # the operator of method "separate"

    def goes_in_graphs(self, problem: "Problem") -> bool:
        return True

    def why_not(self, problem: "Problem") -> str | None:
        return super().why_not(problem) or self.why_not_divided(problem, (2,))

    def sizes_of(self, *shapes, world_size: int) -> tuple[int, ...]:
        x, weight = dense.two_operands(self.name, shapes[:2])
        return torch.Size(x[:-1]).numel(), weight[0], world_size * weight[1]

    def layout_of(self, *operands) -> str:
        return self.layouts[0]

    def config_to_dict(self, config: GemmArNormConfig) -> dict:
        # The other methods use no other field.
        return super().config_to_dict(config) if config.method == "fused" else {"method": config.method}

    def config_from_dict(self, values: dict) -> GemmArNormConfig:
        if values == {"method": "separate"}:
            return GemmArNormConfig("separate")
        return super().config_from_dict(values)

    def completed(self, config: GemmArNormConfig, problem: "Problem", device: torch.device) -> GemmArNormConfig:
        m, n, k = _of_a_rank(problem)
        return completed(config, m, n, k, problem.torch_dtype, device)

    def default(self, problem: "Problem", device: torch.device) -> GemmArNormConfig:
        m, n, k = _of_a_rank(problem)
        return default_config(m, n, k, problem.torch_dtype, device)

    def invariant(self, problem: "Problem", device: torch.device) -> GemmArNormConfig:
        return invariant_config(problem.torch_dtype, device)

    def space(self, problem: "Problem", device: torch.device) -> list[GemmArNormConfig]:
        (m, n, _), dtype = _of_a_rank(problem), problem.torch_dtype
        separate = GemmArNormConfig("separate")
        if device.type == "cpu":
            fused = self.default(problem, device)
            fused = fused if fused.method == "fused" else self.invariant(problem, device)
            return [fused, replace(fused, split_k=2, row_programs=2), separate]
        if m > _FUSED_MOST_ROWS:
            return [separate]
        tiles = small_m_gemm.tiles_to_try(m, dtype, device)
        more_warps = [replace(each, num_warps=8) for each in tiles if each.num_warps < 8]
        configs = []
        for each in dict.fromkeys((*tiles, *more_warps)):
            for row_programs in ROW_PROGRAMS if n <= registers_hold(each.num_warps, dtype) else (1,):
                for split_k in _SPLITS:
                    configs.append(GemmArNormConfig("fused", each, split_k, row_programs, min(m * row_programs, 128)))
        return [*configs, separate]

    def estimate_ms(self, config: GemmArNormConfig, problem: "Problem", hardware: "Hardware") -> float:
        m, n, k = _of_a_rank(problem)
        dtype = problem.torch_dtype
        if config.method == "torch":
            after = 7 * _nbytes(problem) / hardware.memory + 3 * _KERNEL_S  # the addition and the norm
            return 1e3 * (costs.sequence_s(m, n, k, self.floors(problem).wire_bytes, dtype, hardware) + after)
        if config.method == "separate":
            norm, of_norm = self._norm(problem)
            configs = [AllReduceNormConfig(exchange=exchange) for exchange in ("one_shot", "two_shot")]
            after = min(norm.estimate_ms(each, of_norm, hardware) for each in configs)
            return 1e3 * (costs.vendor_s(m, n, k, dtype, hardware) + _KERNEL_S) + after
        return 1e3 * self._fused_s(config, problem, hardware)

    def _norm(self, problem):
        """Return the tunable of the operator that method "separate" calls, and its problem."""
        m, n, _ = problem.shape
        return tunables.tunable(self.norm_name), replace(problem, operator=self.norm_name, shape=(m, n))

    def _fused_s(self, config, problem, hardware):
        """Estimate the seconds of the fused kernel."""
        m, n, k = _of_a_rank(problem)
        ranks, nbytes, itemsize = problem.world_size, _nbytes(problem), problem.torch_dtype.itemsize
        product = small_m_gemm.seconds(m, n, k, problem.torch_dtype, config.tiles, config.split_k, hardware)
        sending = (ranks - 1) * nbytes / costs.push_rate(_PROGRAMS, hardware)
        in_registers = n <= registers_hold(config.tiles.num_warps, problem.torch_dtype)
        row_programs = config.row_programs if in_registers else 1
        units = m * row_programs
        at_once = min(config.num_programs, units, _ROW_PROGRAMS_OF_SM * hardware.num_sms)
        # A program loads the row of all ranks, residual and weights, and stores its share of r and y.
        row_bytes = (ranks + 2 + 2 / row_programs) * n * itemsize
        row_s = _ROW_S + row_bytes / (hardware.memory / hardware.num_sms)
        adding = max(cdiv(units, at_once) * row_s, units * row_bytes / hardware.memory)
        return _LAUNCH_S + product + sending + costs.SIGNAL_S + adding

    def floors(self, problem: "Problem") -> Floors:
        (m, n, k), nbytes = _of_a_rank(problem), _nbytes(problem)
        # As for gemm_ar, a rank receives parts and sums. It reads x, weight and residual and stores r and y.
        wire_bytes = 2 * (problem.world_size - 1) * nbytes // problem.world_size
        y = m * n if _quantize(problem) else nbytes
        return Floors(2 * m * n * k, wire_bytes, (m * k + n * k) * problem.torch_dtype.itemsize + 2 * nbytes + y)

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator,
    ) -> tuple[torch.Tensor, ...]:
        m, n, k = _of_a_rank(problem)

        def draw(shape, generator):
            return torch.randn(shape, generator=generator, dtype=problem.torch_dtype, device=device)

        shared = torch.Generator(device).manual_seed(1)  # the same on all ranks
        weight = draw((n, k), generator).mul_(problem.shape[2] ** -0.5)
        vectors = 1 + _is_layer_norm(problem)  # norm_weight, and norm_bias of LayerNorm
        return draw((m, k), generator), weight, draw((m, n), shared), *(draw((n,), shared) for _ in range(vectors))

    def reference_bytes(self, problem: "Problem") -> int:
        m, n, k = _of_a_rank(problem)
        return 2 * problem.torch_dtype.itemsize * (m * k + n * k + 8 * m * n)

    def reference(
        self, operands: Sequence[torch.Tensor], problem: "Problem", group: "dist.ProcessGroup",
    ) -> torch.Tensor:
        # In the wider dtype y is exact, and the error of torch's own result contains that of fp8.
        quantize = _quantize(problem) if operands[0].dtype == problem.torch_dtype else None
        output = reference.forward(*_all_operands(operands), _EPS, _is_layer_norm(problem), quantize, group)
        return self.comparable(output, problem)

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        return lambda: F.linear(*operands[:2])

    def run(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: Any) -> Any:
        options = _options(problem)
        return tuple(op.run_by(config, _all_operands(operands), options, group)[: 3 if options.quantize else 2])

    def comparable(self, output: Any, problem: "Problem") -> torch.Tensor:
        y, r, *scale = output
        if scale:
            y = (y.float() * scale[0]).to(r.dtype)
        return torch.stack([y, r])

    def compile(self, operands: tuple[torch.Tensor, ...], problem: "Problem", config: Any) -> None:
        if config.method == "fused":
            launch.compile(_all_operands(operands), problem.world_size, _options(problem), config)
            return
        norm, of_norm = self._norm(problem)
        x, _, *rest = operands
        partial = x.new_empty(of_norm.shape)
        norm.compile((partial, *rest), of_norm, norm.default(of_norm, x.device))

    def compiled(self, config: Any) -> tuple | None:
        if config.method != "fused":
            return None if config.method == "torch" else (config.method,)
        tiles: Tiles = config.tiles
        sizes = tiles.block_m, tiles.block_n, tiles.block_k, tiles.num_warps, tiles.num_stages
        return *sizes, config.split_k > 1, config.row_programs


def _of_a_rank(problem):
    m, n, k = problem.shape
    return m, n, k // problem.world_size


def _all_operands(operands) -> launch.Operands:
    """Return (x, weight, bias, residual, norm_weight, norm_bias), with None for a bias that does not exist."""
    x, weight, residual, norm_weight, *norm_bias = operands
    return x, weight, None, residual, norm_weight, norm_bias[0] if norm_bias else None


def _options(problem):
    return Options(problem.operator, _EPS, _quantize(problem))


def _is_layer_norm(problem):
    return problem.operator == "gemm_ar_layer_norm"


def _quantize(problem):
    return "fp8" if problem.layout == "fp8" else None


def _nbytes(problem):
    return problem.shape[0] * problem.shape[1] * problem.torch_dtype.itemsize


for _name in ("gemm_ar_rms_norm", "gemm_ar_layer_norm"):
    register(GemmArNormTunable(_name))
