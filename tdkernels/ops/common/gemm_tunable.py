"""Base class of the tunables of GEMM operators, and config selection.

Problems are (M, N, K). The layouts "nk" and "kn" are the memory layouts of the weight, [N, K] and [K, N].
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tdkernels.autotune import tunable as tunables
from tdkernels.autotune.hardware import hardware
from tdkernels.autotune.invariance import check_invariant, is_batch_invariant, reject_invariant
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import from_text
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.scaled_problem import (
    is_scaled,
    prefers_torch_gemm,
    quantized_operands,
    scales_of,
    torch_dequantizes,
    why_not_scaled,
)
from tdkernels.ops.common.scaling import FP8, LAYOUTS, Scales, dequantize, is_fp8, layout_of, scaled_linear
from tdkernels.ops.common.tile_config import (
    Tiles,
    invariant_tiles,
    scaled_candidates,
    scaled_tiles,
    specialized_tiles,
    with_wide_steps,
)
from tdkernels.ops.common.tunable_base import ConfigTunable, problem_of, select
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.problem import Problem

# Without tuning, the torch baseline is selected if it takes less than this, unless all rows fit into one tile.
# Otherwise each tile row of each shard reads the weight, while cuBLAS reads it once (2 H200; see
# docs/performance/notes/small-m.md).
_SMALL_MS = 0.2
# A config tuned for a similar problem is used if it occupies at least this share of the SMs that the default occupies.
# On 2 H200, 512 x 10240 x 8192 with the tiles of 512 x 8192 x 8192, a share of 0.75, took 1.10 to 1.19 times as long.
_LEAST_BUSY = 0.8
_FEW_ROWS = 128
_COMPARED_ROWS = 1024  # see ``_kind``
_SMALLEST_ROWS = 64  # up to which a GEMM only takes as long as reading the weight
_TORCH_ROWS, _TORCH_ROWS_OF_TWO, _TORCH_ROWS_OF_TWO_IN_FP8 = 33, 513, 401  # see ``_least_rows``


class DenseTunable(ConfigTunable):
    """Base class of the tunables of ag_gemm, gemm_rs and gemm_ar.

    A subclass also defines ``of_a_rank``, the sizes for its ``default_config``, ``operand_sizes``, the sizes of the
    operands of a rank, and ``invariant_config``, the config of the batch-invariant mode without tiles.

    Attributes:
        divided: Indices of the sizes that the ranks divide.
        op: Module of the operator.
        launch: Module that launches it.
        config_module: Module with its ``default_config``.
    """

    sizes = ("m", "n", "k")
    layouts: tuple = ("nk", "kn", *LAYOUTS)
    dtypes = [*ConfigTunable.dtypes, *(str(dtype).removeprefix("torch.") for dtype in FP8)]
    divided: tuple
    op: ModuleType
    launch: ModuleType
    config_module: ModuleType

    if TYPE_CHECKING:

        def of_a_rank(self, problem: "Problem") -> tuple[int, ...]: ...

        def operand_sizes(self, problem: "Problem") -> tuple[int, ...]: ...

        def invariant_config(self, problem: "Problem", device: torch.device) -> Any: ...

    def goes_in_graphs(self, problem: "Problem") -> bool:
        return True

    def why_not(self, problem: "Problem") -> str | None:
        reason = super().why_not(problem) or self.why_not_divided(problem, self.divided)
        return reason or why_not_scaled(problem, self.operand_sizes(problem)[-1])

    def default_layout(self, dtype: torch.dtype) -> str:
        return LAYOUTS[0] if dtype in FP8 else self.layouts[0]

    def layout_of(self, *operands) -> str:
        if is_fp8(operands[0]):
            return LAYOUTS[0]
        weight = operands[1] if len(operands) > 1 else None
        return "kn" if isinstance(weight, torch.Tensor) and gemm_operands.is_stored_kn(weight) else "nk"

    def config_to_dict(self, config: Any) -> dict:
        values = super().config_to_dict(config)
        if config.method == "parts":
            return {name: values[name] for name in ("method", "pieces")}  # "parts" uses no other field
        values.pop("pieces", None)
        return values

    def completed(self, config: Any, problem: "Problem", device: torch.device) -> Any:
        if not _leaves_tiles_open(config):
            return config
        if is_batch_invariant():
            return self._with_tiles(config, self.invariant(problem, device).tiles, problem, device)
        return self._with_tiles(config, self._default_tiles(config, problem, device), problem, device)

    def _default_tiles(self, config, problem, device):
        """Return the default tile for a config of method "fused"."""
        if not is_scaled(problem):
            return self.default(problem, device).tiles
        default = self.default_of(problem, device)  # whose method is not "parts"
        if getattr(config, "warp_specialize", False) and getattr(default, "warp_specialize", False):
            return specialized_tiles(default.tiles, problem.torch_dtype)
        return self.plain_tiles(default.tiles, problem, device)

    def _with_tiles(self, config, tiles, problem, device):
        """Return the config with these tiles, or with fewer stages."""
        config = replace(config, tiles=tiles)
        while config.illegal(device, problem.torch_dtype) and config.tiles.num_stages > 1:
            # Other fields of the config may need shared memory, too.
            config = replace(config, tiles=replace(config.tiles, num_stages=config.tiles.num_stages - 1))
        return config

    def invariant(self, problem: "Problem", device: torch.device) -> Any:
        if problem.num_nodes > 1:
            reject_invariant(self.name, "a group on several nodes")
        layout, (rows, n, _) = problem.layout if is_scaled(problem) else None, self.of_a_rank(problem)
        shards = problem.shape[0] // max(rows, 1)
        tiles = invariant_tiles(problem.torch_dtype, device, layout, rows, n, shards)
        return self._with_tiles(self.invariant_config(problem, device), tiles, problem, device)

    def default(self, problem: "Problem", device: torch.device) -> Any:
        config = self.default_of(problem, device)
        if not is_scaled(problem) or config.tiles is None:
            return config
        if not getattr(config, "warp_specialize", False):
            return self._without_specialization(config, problem, device)
        if self._prefers_torch_gemm(problem, device, True):
            return self.without_specialization(problem, device)
        return replace(config, tiles=specialized_tiles(config.tiles, problem.torch_dtype))

    def without_specialization(self, problem: "Problem", device: torch.device) -> Any:
        """Return the default config for scaled operands that the warp-specialized kernels do not support."""
        return self._without_specialization(self.default_of(problem, device, specializes=False), problem, device)

    def _without_specialization(self, config, problem, device):
        """Return a config of ``default_of`` with tiles for scaled operands, or one of method "parts"."""
        has_parts = hasattr(config, "pieces") and problem.num_nodes == 1 and not _for_few_rows(config, problem)
        if has_parts and self._prefers_torch_gemm(problem, device, False):
            return self.config_class(method="parts")
        return replace(config, tiles=self.plain_tiles(config.tiles, problem, device))

    def plain_tiles(self, tiles: Tiles, problem: "Problem", device: torch.device) -> Tiles:
        """Return the tile of a kernel without warp specialization, given one for 16-bit or for specialized operands."""
        if not is_scaled(problem):
            return tiles
        return with_wide_steps(scaled_tiles(tiles, problem.layout, device), problem.layout, device)

    def _prefers_torch_gemm(self, problem, device, specializes):
        return prefers_torch_gemm(problem, problem.shape[0], *self.operand_sizes(problem)[1:], device, specializes)

    def default_of(self, problem: "Problem", device: torch.device, specializes: bool = True) -> Any:
        """Return the default config. For scaled operands its tiles are those of 16-bit operands.

        ``specializes``: whether it may be one of a warp-specialized kernel, for scaled operands
        """
        sizes, layout = self.of_a_rank(problem), problem.layout if specializes else None
        return self.config_module.default_config(*sizes, problem.torch_dtype, device, problem.world_size, layout)

    def tiles_for(self, problem: "Problem", device: torch.device, tiles: Sequence[Tiles]) -> list[Tiles]:
        """Return ``tiles``, candidates for 16-bit operands, or those that correspond to them for scaled operands."""
        if not is_scaled(problem):
            return list(tiles)
        return scaled_candidates(tiles, problem.layout, device)

    def suits(self, config: Any, problem: "Problem", device: torch.device) -> bool:
        """Return False if the tiles leave many more SMs idle than the tiles of the default config do.

        Tiles that give whole waves for the problem they were tuned for may not do so for this one. For small M this is
        not checked, because the GEMM is bound by reading the weight.
        """
        default = self.default(problem, device)
        if device.type == "cpu" or problem.shape[0] <= _FEW_ROWS or config.tiles is None or default.tiles is None:
            return True
        rows, n, _ = self.of_a_rank(problem)
        shards = problem.shape[0] // max(rows, 1)
        tiles = self.smallest_tile(config), self.smallest_tile(default)
        busy = [each.busy_share(shards, rows, n, gpu.num_sms(device)) for each in tiles]
        return busy[0] >= _LEAST_BUSY * busy[1]

    def smallest_tile(self, config: Any) -> Tiles:
        """Return the tile of a config, or the smallest one into which its kernel divides it to use more SMs."""
        return config.tiles

    def trusts_similar(self, problem: "Problem", device: torch.device) -> bool:
        """Return False for few rows on Hopper, unless the GEMM is bound by reading the weight.

        There the fastest kernel depends on waves of tiles and on full tiles, as the default config does. In solo mode
        on an H200, configs of other shapes took 1.13 (``gemm_rs``) and 1.11 times (``ag_gemm``) as long as the fastest
        one on average, up to 2.2 times, and the default configs 1.02 and 1.01 times (4 and 8 ranks, 82 and 83 cases).
        With two ranks the default configs took 0.96 and 0.94 of the time of those that were selected before (128 to 768
        rows).
        """
        if not _has_compared_defaults(problem) or gpu.capability(device) != (9, 0):
            return True
        return not _SMALLEST_ROWS < problem.shape[0] < _COMPARED_ROWS

    def is_superseded(self, config: Any, problem: "Problem", device: torch.device) -> bool:
        least = _least_rows(problem) if config.method == "torch" else _COMPARED_ROWS
        return problem.shape[0] >= least and _kind(config) < _kind(self.default(problem, device))

    def fallback(self, problem: "Problem", device: torch.device) -> Any:
        default, dtype = self.default(problem, device), problem.torch_dtype
        _, n, k = self.operand_sizes(problem)
        is_fast = _kind(default) > 0 and problem.shape[0] >= _least_rows(problem)
        torch_is_slow = device.type == "cpu" or torch_dequantizes(problem, n, k, device)
        if not torch_is_slow and not _for_few_rows(default, problem) and not is_fast:
            if self.estimate_ms(self.plain(), problem, hardware(device, dtype)) < _SMALL_MS:
                return self.plain()
        return default

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator,
    ) -> tuple[torch.Tensor, ...]:
        m, n, k = self.operand_sizes(problem)
        dtype = torch.float32 if is_scaled(problem) else problem.torch_dtype
        x = torch.randn(m, k, generator=generator, dtype=dtype, device=device)
        if is_scaled(problem):
            weight = torch.randn(n, k, generator=generator, dtype=dtype, device=device).mul_(k**-0.5)
            return quantized_operands(x, weight, problem)
        shape = (n, k) if problem.layout == "nk" else (k, n)
        weight = torch.randn(shape, generator=generator, dtype=dtype, device=device).mul_(k**-0.5)
        return x, weight if problem.layout == "nk" else weight.t()

    def reference_bytes(self, problem: "Problem") -> int:
        m, (_, n, k) = problem.shape[0], self.operand_sizes(problem)
        wide = 8 if is_scaled(problem) else 2 * problem.torch_dtype.itemsize
        # The whole x, the weight, and three matrices of the size of the product for the comparison.
        return wide * (m * k + n * k + 3 * m * n)

    def reference(
        self, operands: Sequence[torch.Tensor], problem: "Problem", group: "dist.ProcessGroup",
    ) -> torch.Tensor:
        if not is_scaled(problem):
            return getattr(self.op, f"{self.name}_ref")(*operands, group=group)
        x, weight, *scales = operands
        given = scales_of(problem, *scales)
        if is_fp8(x):
            return self.by_torch(x, weight, None, given, group)  # type: ignore[attr-defined]
        full = dequantize(x, given.x), dequantize(weight, given.weight)  # in the wider dtype of the accuracy check
        return getattr(self.op, f"{self.name}_ref")(*full, group=group)

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        if is_scaled(problem):
            x, weight, *scales = operands
            return lambda: scaled_linear(x, weight, None, scales_of(problem, *scales))
        return lambda: F.linear(*operands)

    def run(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: Any) -> torch.Tensor:
        if config.method == "torch":
            return self.reference(operands, problem, group)
        if is_scaled(problem):
            x, weight, *scales = operands
            return self.run_scaled(x, weight, None, scales_of(problem, *scales), group, config)  # type: ignore[attr-defined]
        return self.op.run(*operands, None, group, config)

    def compile(self, operands: tuple[torch.Tensor, ...], problem: "Problem", config: Any) -> None:
        x, weight, *scales = operands
        given = scales_of(problem, *scales) if scales else None
        self.launch.compile(x, weight, None, problem.world_size, config, problem.num_nodes, given)


def two_operands(operator: str, shapes: Sequence[Sequence[int]]) -> Sequence[Sequence[int]]:
    """Return the shapes of x and weight among the shapes of a call's operands, which may include a bias.

    Raises:
        ValueError: If the shapes do not fit together.
    """
    if not 2 <= len(shapes) <= 3:
        raise ValueError(f"{operator}: the operands are x and weight, not {len(shapes)} of them")
    x, weight = shapes[:2]
    if len(x) < 2 or len(weight) != 2 or x[-1] != weight[1]:
        raise ValueError(f"{operator}: x {list(x)} and weight {list(weight)} do not fit")
    return x, weight


def _kind(config):
    """Return the kind of kernel of a dense operator: 2 with warp specialization, 1 if it sends by TMA, otherwise 0.

    On 4 or 8 H200 and with at least _COMPARED_ROWS, tuned configs of kind 0 took longer than the default of kind 2 in
    all of 54 problems, 1.11 to 1.26 times as long on average for each operator (the default in solo mode). On 2 H200
    configs of a lower kind took 0.97 to 1.20 times as long in 13 problems, 1.04 on average. torch's collective and
    matmul took longer than a default of kind 1 or 2 in all of 40 problems on 4 or 8, and of 16 on 2 H200.
    """
    if config.method != "fused":
        return 0
    if getattr(config, "warp_specialize", False):
        return 2
    return int(getattr(config, "transport", "") == "direct")


def _has_compared_defaults(problem):
    """Return whether default configs for fewer than _COMPARED_ROWS rows were compared with others.

    They were in 16 bits. In fp8 they were compared with other fused configs only, with 2, 4 and 8 ranks in solo mode.
    For two ranks the time of torch's collective and matmul was estimated, see ``_least_rows``.
    """
    size = problem.torch_dtype.itemsize
    return problem.num_nodes == 1 and (size == 2 or size == 1 and problem.world_size > 1)


def _least_rows(problem):
    """Return from how many rows on a default of kind 1 or 2 is taken to be faster than torch's collective and matmul.

    With 64 to 1024 rows, torch's took longer on 4 and 8 H200 than the selected configs of kind 0 and 1 in all of 17
    problems (in 16 bits, CUDA graphs), and solo mode says that defaults of kind 1 and 2 are faster than those. With 64
    rows "direct" of ``gemm_ar`` took 0.73 to 0.84 of the time of torch's on 8 H200 (three sizes), and with 33 rows it
    has as many tiles. With two ranks and up to 512 rows the default is "one_shot" for ``gemm_rs`` and ``gemm_ar``.

    In fp8 with two ranks, torch's time was estimated as its GEMM alone plus NCCL's collective on 2 H200. It is 0.98 to
    1.3 times the time of the faster one of "one_shot" and the warp-specialized kernel in solo mode with 448 to 640 rows
    (geometric means for each operator and kind of scales), and 0.8 to 1.3 times with 320 and 384 rows.
    """
    if not _has_compared_defaults(problem):
        return _COMPARED_ROWS
    if problem.world_size != 2:
        return _TORCH_ROWS
    return _TORCH_ROWS_OF_TWO if problem.torch_dtype.itemsize == 2 else _TORCH_ROWS_OF_TWO_IN_FP8


def _for_few_rows(config, problem):
    """Return whether a config is a small-M config, which reads the weight once, and as fast as cuBLAS."""
    if problem.num_nodes > 1 or problem.torch_dtype.itemsize > 2:  # fp32 does not use tensor cores
        return False
    return "one_shot" in (getattr(config, "transport", None), getattr(config, "exchange", None))


def _leaves_tiles_open(config):
    return config.method == "fused" and config.tiles is None


def call_of(x: torch.Tensor, weight: torch.Tensor) -> tuple:
    """Return the argument ``call`` of ``select`` for 2-D operands."""
    return x.shape, weight.shape, weight.stride()


def explicit_config(operator: str, text: str) -> Any:
    """Return the config given as ``text``, and raise ValueError if it is not allowed in the batch-invariant mode."""
    config = from_text(tunables.tunable(operator).config_class, text)  # type: ignore[attr-defined]
    check_invariant(operator, config)
    return config


def config_for(
    operator: str, text: str, x: torch.Tensor, weight: torch.Tensor, group: "dist.ProcessGroup",
    fields: Callable[[], dict[str, Any]], scales: Scales | None = None,
) -> Any:
    """Return the resolved config of a call: the config given as ``text``, or the selected one if it is empty.

    Args:
        operator: Name of the operator.
        text: The config of the call, from ``as_argument``.
        x: 2-D operand.
        weight: 2-D operand.
        group: The group of the call. Selection is collective in the first call with a problem.
        fields: Returns the properties of the call that must be equal on all ranks.
        scales: The scales of scaled operands.
    """

    def problem():
        tunable = tunables.tunable(operator)
        layout = tunable.layout_of(x, weight) if scales is None else scales.layout
        return tunable.sizes_of(x.shape, weight.shape, world_size=group.size()), layout

    if not text:
        call = call_of(x, weight) if scales is None else (*call_of(x, weight), scales.key)
        config = select(operator, x, group, call, lambda: (*problem(), fields())).config
        if scales is None or not _needs_other_tiles(config, scales):
            return config
        found = problem_of(operator, *problem(), x, group)  # type: ignore[call-arg]
        return tunables.tunable(operator).without_specialization(found, x.device)  # type: ignore[attr-defined]
    if is_batch_invariant() and spans_nodes(group):
        reject_invariant(operator, "a group on several nodes")
    tunable, config = tunables.tunable(operator), explicit_config(operator, text)
    if not _leaves_tiles_open(config):
        return config
    return tunable.completed(config, problem_of(operator, *problem(), x, group), x.device)  # type: ignore[call-arg]


def _needs_other_tiles(config, scales):
    """Return whether the tile of a selected config is too large because the output is fp32.

    The warp-specialized kernel does not support such outputs, and the other kernels have no registers for its tile if
    there is a second accumulator.
    """
    is_specialized = config.method == "fused" and getattr(config, "warp_specialize", False)
    return is_specialized and scales.out_dtype.itemsize > 2 and scales.layout != layout_of("row", True)
