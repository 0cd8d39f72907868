"""Tunable of flash_decode: problems, search space and cost model.

The sizes of a problem are the batch size, query tokens, query heads, heads of the cache, elements per head of the keys
and of the values, and the capacity of a rank's cache in keys per entry. Tuning uses full caches. The layout encodes
whether the cache is paged, whether its values are the first columns of its keys ("latent", as in MLA), and whether it
is fp8. A window, a soft cap or scales are not part of the problem, so they use the same config.

The capacity may differ between ranks, and an empty cache does not show whether its values are its keys. Therefore
``key`` drops both properties, and the ranks use the config for the problem of rank 0. The config does not change when
the capacity changes later.
"""

import functools
import itertools
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.tunable import Floors, register
from tdkernels.ops.attention.flash_decode import launch as launcher
from tdkernels.ops.attention.flash_decode import op, torch_attention
from tdkernels.ops.attention.flash_decode.config import (
    LATENT_ROWS,
    DecodeShape,
    FlashDecodeConfig,
    can_split,
    default_config,
    fused_config,
    has_latent_kernel,
    invariant_config,
    layout_of,
    num_programs,
)
from tdkernels.ops.attention.flash_decode.reference import flash_decode_ref
from tdkernels.ops.attention.flash_decode.validation import FP8, MAX_BATCH, MAX_D
from tdkernels.ops.common import gemm_tunable as dense
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_PAGE, _LATENT_PAGE = 16, 64  # keys per block of the paged caches used for tuning
_AT_ONCE_BYTES = 1 << 30  # memory bound of the reference, which processes the batch in parts
_MORE_BYTES = 1 << 10  # shared memory that a kernel may need in addition to ``FlashDecodeConfig.shared_memory_bytes``
_LAUNCH_S = 5e-6
_IN_FLIGHT = 32 << 10  # bytes in flight per SM that saturate the memory bandwidth (H200)
_BLOCK_S = 0.3e-6  # overhead per block of keys, in addition to its loads and products
# Kernel launches of the torch baseline, counted on CPUs plus 4 within flash attention: attention in fp32, flash
# attention, its page tables, its completion if there are several query tokens, and the merge of the ranks.
_PLAIN_STEPS, _FLASH_STEPS, _PAGES_STEPS, _LAST_KEYS_STEPS, _MERGE_STEPS = 34, 11, 19, 57, 10
# Share of the memory bandwidth that torch's flash attention reaches in bench/results/h200x2/flash_decode.jsonl without
# lengths: 0.82 to 0.97 of long sequences, 0.63 for 128 sequences of 1K keys. For lengths on the device, an estimate.
_FLASH_SHARE = 0.85
# Share of the peak rate that products of "fused" reach for heads of more than 256 elements. With merging, the default
# reaches 0.13 to 0.15 for 8 sequences of 32K and 32 of 4K latent keys on H100.
_WIDE_SHARE = 0.2
# Share of the peak rate that products of method "split" with latent caches reach on H100 and H200 (8 sequences of 32K
# keys).
_SPLIT_SHARE = 0.5
_FLASH_ROWS = 64  # query rows per tile of torch's flash attention, to which rows are padded


@functools.lru_cache(1024)
def _key(problem):
    return replace(problem, shape=problem.shape[:-1], layout=problem.layout.replace(" latent", ""))


@functools.lru_cache(1024)
def _shape_of(problem):
    batch, queries, heads, kv_heads, d, dv, _ = problem.shape
    size = 1 if "fp8" in problem.layout else problem.torch_dtype.itemsize
    latent, paged = "latent" in problem.layout, "paged" in problem.layout
    return DecodeShape(batch, queries, kv_heads, heads // kv_heads, d, dv, size, latent, paged)


def _page_of(problem):
    """Return the keys per block of a paged cache; ``latent_kernel`` needs a multiple of 32."""
    return _LATENT_PAGE if "latent" in problem.layout else _PAGE


def _can_split(problem):
    return can_split(problem.shape[1], problem.world_size, problem.num_nodes)


class FlashDecodeTunable(ConfigTunable):
    """The Tunable of flash_decode."""

    name = "flash_decode"
    sizes = ("batch", "queries", "heads", "kv_heads", "d", "dv", "keys")
    layouts = tuple(layout_of(*kinds) for kinds in itertools.product((False, True), repeat=3))
    config_class = FlashDecodeConfig
    baseline = "flash attention"  # before: attention in fp32
    local_words = "a copy of as many bytes"
    alone = True

    def key(self, problem: "Problem") -> "Problem":
        return _key(problem)

    def goes_in_graphs(self, problem: "Problem") -> bool:
        return problem.num_nodes == 1  # replay across nodes is not tested

    def why_not(self, problem: "Problem") -> str | None:
        reason = super().why_not(problem)
        if reason is not None:
            return reason
        batch, _, heads, kv_heads, d, dv, _ = problem.shape
        if batch > MAX_BATCH or max(d, dv) > MAX_D:
            return f"BATCH is at most {MAX_BATCH}, D and DV at most {MAX_D}, not {batch}, {d} and {dv}"
        if heads % kv_heads:
            return f"HEADS = {heads} is not a multiple of KV_HEADS = {kv_heads}"
        if "latent" in problem.layout and dv != 1 << (d.bit_length() - 1):
            return f"latent values are the first columns of keys, as many as the greatest power of two in D, not {dv}"
        return None

    def sizes_of(self, *shapes: Sequence[int], world_size: int) -> tuple[int, ...]:
        if not 3 <= len(shapes) <= 5:
            raise ValueError(
                "flash_decode: the operands are q, k_cache, v_cache, kv_lens and perhaps block_table, not "
                f"{len(shapes)} of them"
            )
        q, k, v, *_ = map(tuple, shapes)
        table = tuple(shapes[4]) if len(shapes) == 5 else None
        fit = len(q) in (3, 4) and len(k) == len(v) == 4 and q[-1] == k[3] and k[:3] == v[:3]
        if not fit or (len(table) != 2 or table[0] != q[0] if table else k[0] != q[0]):
            paged = f" and block_table {list(table)}" if table else ""
            raise ValueError(f"flash_decode: q {list(q)}, k_cache {list(k)}, v_cache {list(v)}{paged} do not fit")
        queries = q[1] if len(q) == 4 else 1
        return q[0], queries, q[-2], k[2], q[-1], v[3], k[1] * (table[1] if table else 1)

    def layout_of(self, *operands) -> str:
        caches, paged = operands[1:3], len(operands) == 5 and operands[4] is not None
        if len(caches) < 2 or not all(isinstance(cache, torch.Tensor) and cache.dim() == 4 for cache in caches):
            return layout_of(paged, False, False)
        return layout_of(paged, launcher.value_is_key(*caches), caches[0].dtype == FP8)

    def config_to_dict(self, config: FlashDecodeConfig) -> dict:
        values = super().config_to_dict(config)
        return {name: value for name, value in values.items() if value or name not in ("chunk_keys", "tile_rows")}

    def illegal(self, config: FlashDecodeConfig, problem: "Problem", device: torch.device) -> str | None:
        reason = super().illegal(config, problem, device)
        if reason is None and config.method != "torch":
            needed = config.shared_memory_bytes(_shape_of(problem)) + _MORE_BYTES
            available = gpu.shared_memory_bytes(device)
            if needed > available:
                return f"its blocks of keys need {needed} bytes of shared memory, {device} has {available}"
        return reason

    def default(self, problem: "Problem", device: torch.device) -> FlashDecodeConfig:
        choose = default_config if _can_split(problem) else fused_config
        return choose(_shape_of(problem), device)

    def recordable(self, problem: "Problem", device: torch.device) -> FlashDecodeConfig:
        return fused_config(_shape_of(problem), device)  # the kernels of "split" record nothing

    def invariant(self, problem: "Problem", device: torch.device) -> FlashDecodeConfig:
        # As if values were not keys: the ranks, and calls with the same key, need not agree on it. See ``key``.
        return invariant_config(replace(_shape_of(problem), value_is_key=False), device)

    def space(self, problem: "Problem", device: torch.device) -> list[FlashDecodeConfig]:
        if device.type == "cpu":
            fused = [FlashDecodeConfig("fused", block_n, 1, 1, programs) for block_n in (16, 32) for programs in (0, 2)]
            return [*fused, FlashDecodeConfig("split", 16, 1, 1)] if _can_split(problem) else fused
        shape, num_sms = _shape_of(problem), gpu.num_sms(device)
        configs = []
        for block_n, num_warps, num_stages in itertools.product((16, 32, 64, 128), (4, 8), (2, 3, 4)):
            config = FlashDecodeConfig("fused", block_n, num_warps, num_stages)
            usual = num_programs(config, shape, problem.shape[-1], device)
            others = {num_sms, 2 * num_sms, 4 * num_sms} - {usual}
            configs += [replace(config, num_programs=number) for number in (0, *sorted(others))]
        if _can_split(problem) and has_latent_kernel(shape, device):
            configs.append(replace(fused_config(shape, device), method="split"))
        if shape.is_wide and shape.rows >= 64:  # the accumulator of a tile with 64 rows needs the registers of 8 warps
            high = itertools.product((32, 64), (2, 3))
            configs += [FlashDecodeConfig("fused", block_n, 8, stages, tile_rows=64) for block_n, stages in high]
        return configs

    def estimate_ms(self, config: FlashDecodeConfig, problem: "Problem", hardware: "Hardware") -> float:
        if config.method == "torch":
            return 1e3 * self._sequence_s(problem, hardware)
        if config.method == "split":
            return 1e3 * self._split_s(config, problem, hardware)
        floors, shape, keys = self.floors(problem), config.tiled(_shape_of(problem)), problem.shape[-1]
        num_sms = hardware.num_sms
        resident = num_sms * max(1, 8 // config.num_warps)
        programs = config.num_programs or resident
        blocks = shape.tiles * cdiv(keys, config.block_n)
        share = cdiv(blocks, programs)
        # Bytes in flight per SM: all stages of all resident programs except the block being computed.
        asked = max(config.num_stages - 1, 1) * config.block_n * shape.bytes_of_key * min(programs, resident) / num_sms
        memory = hardware.memory * min(1.0, asked / _IN_FLIGHT)
        read = floors.memory_bytes * share * programs / blocks  # programs with a smaller share count as full
        padded = 2 * shape.tiles * shape.block_m * keys * (sum(shape.parts_of_d) + shape.padded_dv)
        flops = (_WIDE_SHARE if shape.is_wide else 1.0) * hardware.flops * min(1.0, programs / num_sms)
        busy = max(read / memory, padded / flops)
        steps = cdiv(programs, resident) * share * _BLOCK_S
        # Programs that share a tile write partial results to memory; one of them reads and merges these.
        parts = 2 * programs * shape.rows_of_tile * (shape.padded_dv + 1) * 4 / hardware.memory
        sent = (problem.world_size - 1) * shape.tiles * shape.rows_of_tile * (shape.padded_dv + 1) * 4
        wire = 2 * dense.SIGNAL_S + sent / dense.push_rate(programs, hardware) if sent else 0.0
        return 1e3 * (_LAUNCH_S + busy + steps + parts + wire)

    def _split_s(self, config, problem, hardware):
        """Return the estimated seconds of method "split", whose programs merge few rows each."""
        floors, shape, keys = self.floors(problem), _shape_of(problem), problem.shape[-1]
        rows = cdiv(shape.rows, LATENT_ROWS) * LATENT_ROWS
        padded = 2 * shape.batch * shape.heads * rows * keys * (shape.d + shape.padded_dv)
        busy = max(floors.memory_bytes / hardware.memory, padded / (_SPLIT_SHARE * hardware.flops))
        tiles = shape.batch * shape.heads * rows // LATENT_ROWS
        parts = 2 * (tiles + (config.num_programs or hardware.num_sms)) * LATENT_ROWS * shape.padded_dv * 4
        sent = (problem.world_size - 1) * shape.batch * shape.heads * shape.rows * (shape.padded_dv + 1) * 4
        wire = 2 * dense.SIGNAL_S + sent / dense.push_rate(hardware.num_sms, hardware) if sent else 0.0
        return 2 * _LAUNCH_S + busy + parts / hardware.memory + wire

    def plain_words_of(self, problem: "Problem") -> tuple[str, str]:
        words = _PATH_WORDS[_path_of(problem)]
        if problem.world_size == 1:
            return words, words
        return f"{words}, then an all-gather", f"{words} and all-gather"

    def _sequence_s(self, problem, hardware):
        """Return the estimated seconds of the torch baseline."""
        batch, queries, heads, _, _, dv, _ = problem.shape
        if _path_of(problem) == torch_attention.PLAIN:
            attention, steps = self._plain_s(problem, hardware), _PLAIN_STEPS
        else:
            attention, more = self._flash_s(problem, hardware), _LAST_KEYS_STEPS * (queries > 1)
            steps = _FLASH_STEPS + _PAGES_STEPS * ("paged" in problem.layout) + more
        if problem.world_size == 1:
            return attention + steps * _LAUNCH_S
        # Each rank sends fp32 results and their lse to all others. With several query tokens it also sends lengths.
        sent = (problem.world_size - 1) * batch * queries * heads * (dv + 1) * 4
        lengths = dense.collective_s(0, hardware) if queries > 1 else 0.0
        return attention + lengths + dense.collective_s(sent, hardware) + (steps + _MERGE_STEPS) * _LAUNCH_S

    def _plain_s(self, problem, hardware):
        """Return the seconds of attention that converts keys and values to fp32 and materializes scores."""
        batch, queries, heads, kv_heads, d, dv, keys = problem.shape
        floors = self.floors(problem)
        moved = floors.memory_bytes + 16 * batch * keys * kv_heads * (d + dv) + 40 * batch * queries * heads * keys
        return max(moved / hardware.memory, 16 * floors.flops / hardware.flops)  # without tensor cores

    def _flash_s(self, problem, hardware):
        """Return the seconds of torch's flash attention, and of copying pages that it cannot read in place."""
        batch, queries, heads, kv_heads, d, dv, keys = problem.shape
        read = batch * keys * kv_heads * (d + dv) * problem.torch_dtype.itemsize
        copied = 2 * read if _path_of(problem) == torch_attention.FLASH_COPIED else 0
        rows = cdiv(queries * heads // kv_heads, _FLASH_ROWS) * _FLASH_ROWS
        padded = 2 * batch * kv_heads * rows * keys * (d + dv)
        attention = max(read / (_FLASH_SHARE * hardware.memory), padded / hardware.flops)
        return copied / hardware.memory + attention

    def floors(self, problem: "Problem") -> Floors:
        batch, queries, heads, kv_heads, d, dv, keys = problem.shape
        shape, ranks = _shape_of(problem), problem.world_size
        of_key = shape.cache_bytes * (d if shape.value_is_key else d + dv)
        # Lower bound: a reduce-scatter of the peers' partial outputs, then an all-gather of the merged outputs.
        wire = 2 * (ranks - 1) * batch * queries * heads * dv * problem.torch_dtype.itemsize // ranks
        return Floors(2 * batch * queries * heads * keys * (d + dv), wire, batch * keys * kv_heads * of_key)

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator
    ) -> tuple[torch.Tensor, ...]:
        batch, queries, heads, kv_heads, d, dv, keys = problem.shape
        dtype, shape = problem.torch_dtype, _shape_of(problem)
        same = torch.Generator(device).manual_seed(0)  # q is the same on all ranks
        q = torch.randn(batch, queries, heads, d, generator=same, dtype=dtype, device=device)
        page = _page_of(problem)
        pages = cdiv(keys, page)
        rows = (batch * pages, page) if shape.paged else (batch, keys)

        def draw(width):
            cache = torch.randn(*rows, kv_heads, width, generator=generator, dtype=dtype, device=device)
            return cache.to(FP8) if shape.cache_bytes == 1 else cache

        k = draw(d)
        v = k[..., :dv] if shape.value_is_key else draw(dv)
        lens = torch.full((batch,), keys, dtype=torch.int32, device=device)
        if not shape.paged:
            return q, k, v, lens
        table = torch.randperm(batch * pages, generator=generator, device=device).to(torch.int32)
        return q, k, v, lens, table.view(batch, pages)

    def reference_bytes(self, problem: "Problem") -> int:
        batch, queries, heads, kv_heads, d, dv, keys = problem.shape
        wide = 8 if problem.dtype == "float32" else 4
        # The operands in a wider dtype, the same again for the torch baseline, which converts them to fp32, and scores.
        return batch * keys * (2 * wide * kv_heads * (d + dv) + 12 * queries * heads) + 2 * _AT_ONCE_BYTES

    def reference(
        self, operands: Sequence[torch.Tensor], problem: "Problem", group: "dist.ProcessGroup"
    ) -> torch.Tensor:
        q, k, v, lens, *table = operands
        _, queries, heads, kv_heads, d, dv, keys = problem.shape
        of_entry = 8 * keys * (2 * kv_heads * (d + dv) + 3 * queries * heads)
        at_once = max(1, _AT_ONCE_BYTES // of_entry)
        outputs = []
        for part in range(0, len(q), at_once):
            of = slice(part, part + at_once)
            caches = (k, v) if table else (k[of], v[of])
            outputs.append(flash_decode_ref(
                q[of], *caches, lens[of], block_table=table[0][of] if table else None, group=group
            ))
        return torch.cat(outputs)  # type: ignore[arg-type]

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        """Return a copy that reads and writes together as many bytes as the keys and values have."""
        _, k, v, *_ = operands
        halves = [cache.view(torch.uint8).flatten() for cache in ((k,) if _shape_of(problem).value_is_key else (k, v))]
        halves = [cache[: cache.numel() // 2] for cache in halves]
        copies = [torch.empty_like(half) for half in halves]
        return lambda: [copy.copy_(half) for copy, half in zip(copies, halves, strict=True)]

    def run(
        self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: FlashDecodeConfig | None
    ) -> torch.Tensor:
        q, k, v, lens, *table = operands
        others = group if problem.world_size > 1 else None
        return op.forward(  # type: ignore[call-arg]
            q, k, v, lens, *(table or [None]), None, _options(problem), others, config
        )[0]

    def compiled(self, config: FlashDecodeConfig) -> tuple[int, ...] | None:
        compiled = config.block_n, config.num_warps, config.num_stages, config.chunk_keys, config.tile_rows
        return compiled if config.method == "fused" else None

    def compile(self, operands: Any, problem: "Problem", config: FlashDecodeConfig) -> None:
        q, k, v, lens, *table = operands
        launcher.compile(  # type: ignore[call-arg]
            q, k, v, lens, *(table or [None]), _options(problem), problem.world_size, problem.num_nodes, config
        )


_PATH_WORDS = {
    torch_attention.FLASH: "torch's flash attention",
    torch_attention.FLASH_PAGED: "torch's flash attention over pages",
    torch_attention.FLASH_COPIED: "a copy of the pages, torch's flash attention",
    torch_attention.PLAIN: "attention in fp32 with torch",
}


def _path_of(problem):
    """Return the path of method "torch" for a problem. GPUs are assumed to be NVIDIA's, of sm_80 or later."""
    _, _, _, _, d, dv, _ = problem.shape
    shape, dtype = _shape_of(problem), problem.torch_dtype
    return torch_attention.select_path(
        dtype, FP8 if "fp8" in problem.layout else dtype, d, dv, on_gpu=problem.gpu != "cpu",
        has_flash=not torch.version.hip, page=_page_of(problem) if shape.paged else None,
    )


def _options(problem):
    """Return (scale, soft_cap, window) of a problem's calls."""
    return problem.shape[4] ** -0.5, None, None


register(FlashDecodeTunable())
