"""Config of tp_moe and its two operators, and the heuristic that selects a config without tuning."""

from dataclasses import dataclass, replace

import torch

from tdkernels.ops.common.scaling import BLOCK, layout_of
from tdkernels.ops.common.specialized.launch import suits
from tdkernels.ops.common.tile_config import LARGE, Tiles, default_tiles, invariant_tiles
from tdkernels.ops.experts.grouped_gemm.config import num_waves
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import BLOCK_TOKENS
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES
from tdkernels.runtime import gpu

# Waves from which the warp-specialized kernels are faster. As one of 8 ranks on an H200 (solo mode) they take 0.70 to
# 1.00 of the time with 112 and 128 tiles, and 1.04 to 1.20 with 16 to 64. An exception is moe_ag_gemm for groups of 128
# rows or more: 0.85 to 0.90 with 4 to 64 tiles.
_LEAST_WAVES = 0.8


@dataclass(frozen=True)
class MoeTpConfig:
    """Config of ``moe_ag_gemm``, ``moe_gemm_rs`` and ``tp_moe``.

    Attributes:
        method: "fused" runs the overlapping kernels, "torch" the collectives of torch.distributed and torch's grouped
            GEMM.
        tiles: Tile of the GEMMs, see ``Tiles``. None selects the default for the device and shape.
        num_comm_sms: Number of programs that push tokens concurrently. They compute tiles afterwards, like the others.
        chunk_rows: Maximum number of tokens per chunk, which is sent with one signal; a multiple of 16. The chunks of a
            rank have about the same size.
        stages: Number of overlap stages, 1 to 8. The first stage has this rank's tokens, the others share the tokens of
            the peers. Each stage reads the weights of the experts once. 0 selects the number by a cost model.
        warp_specialize: Whether different warps of a program may load, multiply, store, and push or add rows. They do
            so on Hopper for the operands of ``GroupGemmConfig.warp_specialize``, with any number of experts. Eight
            times as many programs push then, each with one warp, while the other warps multiply. ``moe_gemm_rs`` does
            not use the stages. Otherwise the same config runs without it. Results are the same. True is the heuristic
            default for 16-bit and fp8 operands and at least 0.8 tiles for each multiprocessor.
    """

    method: str = "fused"
    tiles: Tiles | None = None
    num_comm_sms: int = 16
    chunk_rows: int = 256
    stages: int = 0
    warp_specialize: bool = False

    def illegal(self, device: torch.device, dtype: torch.dtype) -> str | None:
        """Return why this config cannot run with a device and a dtype, or None if it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            known = device.type == "cpu" or dtype == torch.bfloat16 and gpu.has_tma(device)
            return None if known else f'method "torch" needs bfloat16 and sm_90 or sm_100, not {dtype} on {device}'
        if self.num_comm_sms < 1:
            return f"num_comm_sms must be at least 1, not {self.num_comm_sms}"
        if device.type == "cuda" and self.num_comm_sms >= gpu.num_sms(device):
            return f"num_comm_sms must leave some of the {gpu.num_sms(device)} free, not be {self.num_comm_sms}"
        if self.chunk_rows < 16 or self.chunk_rows % BLOCK_TOKENS:
            return f"chunk_rows must be a multiple of {BLOCK_TOKENS}, not {self.chunk_rows}"
        if not 0 <= self.stages <= MAX_STAGES.value:
            return f"stages must be 0 to {MAX_STAGES.value}, not {self.stages}"
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None

    def variant_reason(self) -> str | None:
        """Return why a row of a result depends on the batch with this config, or None if it does not."""
        return None if self.method == "fused" else f'method must be "fused", not {self.method!r}'


def invariant_config(dtype: torch.dtype, device: torch.device, layout: str | None = None) -> MoeTpConfig:
    """Return the config of the batch-invariant mode. ``layout`` is that of fp8 operands (``Scales.layout``), or None.
    """
    return replace(default_config(1, 1, 1, 1, 1, dtype, device), tiles=invariant_tiles(dtype, device, layout))


def completed_invariant(
    config: MoeTpConfig | None, dtype: torch.dtype, device: torch.device, layout: str | None = None
) -> MoeTpConfig:
    """Return the config of a call in the batch-invariant mode, which has tiles, for the config that it was given."""
    if config is None:
        return invariant_config(dtype, device, layout)
    return config if config.tiles is not None else replace(config, tiles=invariant_tiles(dtype, device, layout))


def default_config(
    tokens: int, choices: int, experts: int, n: int, k: int, dtype: torch.dtype, device: torch.device,
    layout: str | None = None,
) -> MoeTpConfig:
    """Return the heuristic config for weights [E, n, k].

    Args:
        tokens: Number of tokens of all ranks.
        choices: Number of experts per token (top-k).
        experts: Number of experts E.
        n: Rows of an expert's weight on this rank.
        k: Columns of an expert's weight on this rank.
        layout: The layout of fp8 operands, see ``scaling.layout_of``. The tiles are those of 16-bit operands.
    """
    rows = tokens * choices
    if num_waves(rows, n, experts, device) >= _LEAST_WAVES and suits(LARGE, n, k, dtype, device, layout):
        return MoeTpConfig(tiles=LARGE, warp_specialize=True)
    tiles = default_tiles(rows // experts, n, dtype, device)
    return MoeTpConfig(tiles=tiles, num_comm_sms=2, chunk_rows=16) if device.type == "cpu" else MoeTpConfig(tiles=tiles)


def completed(
    config: MoeTpConfig | None, tokens: int, choices: int, experts: int, n: int, k: int, dtype: torch.dtype,
    device: torch.device, layout: str | None = None, activation: str | None = None, is_kn: bool = False,
) -> MoeTpConfig:
    """Return a config with tiles: the given one, with the default tiles if it has none, or ``default_config``.

    If it has no tiles, ``warp_specialize`` remains set only if it is supported. Otherwise tiles are smaller for few
    rows.

    Args:
        config: A config, or None.
        activation: The activation of the GEMM.
        is_kn: Whether the weights are stored as [k, n].

    The other arguments are those of ``default_config``.
    """
    if config is not None and config.tiles is not None:
        return config
    default = default_config(tokens, choices, experts, n, k, dtype, device, layout)
    asked = default if config is None else config
    if asked.warp_specialize and can_specialize(default.tiles, n, k, dtype, device, layout, activation, is_kn):
        return replace(asked, tiles=default.tiles)
    return replace(asked, tiles=default_tiles(tokens * choices // experts, n, dtype, device), warp_specialize=False)


def can_specialize(
    tiles: Tiles | None, n: int, k: int, dtype: torch.dtype, device: torch.device, layout: str | None = None,
    activation: str | None = None, is_kn: bool = False,
) -> bool:
    """Return whether the warp-specialized kernels multiply with weights [E, n, k] if ``tiles`` are the default.

    The other arguments are those of ``completed``.
    """
    # With block-wise scales each plane of an expert must start at a block boundary.
    has_whole_blocks = layout != layout_of("block", use_fast_accum=False) or n % (2 * BLOCK) == 0
    if not (activation is None or activation == "swiglu" and has_whole_blocks) or is_kn and k % LARGE.block_k:
        return False
    return suits(tiles, n, k, dtype, device, layout)
