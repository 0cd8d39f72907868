"""Tunable of flash_decode: problems and search space.

The sizes of a problem are the batch size, query tokens, query heads, heads of the cache, elements per head of the keys
and of the values, and the capacity of a rank's cache in keys per entry. Tuning uses full caches. The layout encodes
whether the cache is paged, whether its values are the first columns of its keys ("latent", as in MLA), whether it is
fp8, and whether then the other columns of its keys have a cache of their own ("rope"). A window, a soft cap or scales
are not part of the problem, so they use the same config.

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
from tdkernels.ops.attention.flash_decode import cost, launch_split, op, torch_attention
from tdkernels.ops.attention.flash_decode import launch as launcher
from tdkernels.ops.attention.flash_decode.config import (
    FlashDecodeConfig,
    can_split,
    default_config,
    fused_config,
    invariant_config,
    layout_of,
    num_programs,
)
from tdkernels.ops.attention.flash_decode.operands import Operands
from tdkernels.ops.attention.flash_decode.problem import page_of_problem, path_of_problem, shape_of_problem
from tdkernels.ops.attention.flash_decode.reference import flash_decode_ref
from tdkernels.ops.attention.flash_decode.validation import FP8, MAX_BATCH, MAX_D
from tdkernels.ops.common.tunable_base import ConfigTunable
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem

_AT_ONCE_BYTES = 1 << 30  # memory bound of the reference, which processes the batch in parts
_MORE_BYTES = 1 << 10  # shared memory that a kernel may need in addition to ``FlashDecodeConfig.shared_memory_bytes``


@functools.lru_cache(1024)
def _key(problem):
    return replace(problem, shape=problem.shape[:-1], layout=problem.layout.replace(" latent", ""))


def _can_split(problem):
    return can_split(problem.shape[1], problem.world_size, problem.num_nodes)


class FlashDecodeTunable(ConfigTunable):
    """The Tunable of flash_decode."""

    name = "flash_decode"
    sizes = ("batch", "queries", "heads", "kv_heads", "d", "dv", "keys")
    layouts = (
        *(layout_of(*kinds) for kinds in itertools.product((False, True), repeat=3)),
        *(layout_of(paged, latent, True, True) for paged in (False, True) for latent in (False, True)),
    )
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
        if "rope" in problem.layout and (d < 17 or d & (d - 1) == 0):
            return f"a cache for the columns after the greatest power of two in D needs such columns, D is {d}"
        if "latent" in problem.layout and dv != 1 << (d.bit_length() - 1):
            return f"latent values are the first columns of keys, as many as the greatest power of two in D, not {dv}"
        return None

    def sizes_of(self, *shapes: Sequence[int], world_size: int) -> tuple[int, ...]:
        if not 3 <= len(shapes) <= 6:
            raise ValueError(
                "flash_decode: the operands are q, k_cache, v_cache, kv_lens and perhaps block_table and k_rope, not "
                f"{len(shapes)} of them"
            )
        q, k, v, *others = map(tuple, shapes)
        table = next((shape for shape in others if len(shape) == 2), None)
        rope = next((shape for shape in others if len(shape) == 4), None)
        fit = len(q) in (3, 4) and len(k) == len(v) == 4 and k[:3] == v[:3]
        fit = fit and q[-1] == k[3] + (rope[3] if rope else 0)
        if not fit or (len(table) != 2 or table[0] != q[0] if table else k[0] != q[0]):
            paged = f" and block_table {list(table)}" if table else ""
            raise ValueError(f"flash_decode: q {list(q)}, k_cache {list(k)}, v_cache {list(v)}{paged} do not fit")
        queries = q[1] if len(q) == 4 else 1
        return q[0], queries, q[-2], k[2], q[-1], v[3], k[1] * (table[1] if table else 1)

    def layout_of(self, *operands) -> str:
        shapes = [getattr(operand, "shape", operand) for operand in operands[4:] if operand is not None]
        caches, others = operands[1:3], [len(shape) for shape in shapes]
        paged, rope = 2 in others, 4 in others
        if len(caches) < 2 or not all(isinstance(cache, torch.Tensor) and cache.dim() == 4 for cache in caches):
            return layout_of(paged, False, False)
        fp8 = caches[0].dtype == FP8
        return layout_of(paged, launcher.value_is_key(*caches), fp8, fp8 and rope)

    def config_to_dict(self, config: FlashDecodeConfig) -> dict:
        values = super().config_to_dict(config)
        return {name: value for name, value in values.items() if value or name not in ("chunk_keys", "tile_rows")}

    def illegal(self, config: FlashDecodeConfig, problem: "Problem", device: torch.device) -> str | None:
        reason = super().illegal(config, problem, device)
        if reason is None and config.method != "torch":
            needed = config.shared_memory_bytes(shape_of_problem(problem)) + _MORE_BYTES
            available = gpu.shared_memory_bytes(device)
            if needed > available:
                return f"its blocks of keys need {needed} bytes of shared memory, {device} has {available}"
        return reason

    def default(self, problem: "Problem", device: torch.device) -> FlashDecodeConfig:
        return default_config(shape_of_problem(problem), device, problem.world_size, problem.num_nodes)

    def recordable(self, problem: "Problem", device: torch.device) -> FlashDecodeConfig:
        return fused_config(shape_of_problem(problem), device)

    def is_recordable(self, config: FlashDecodeConfig) -> bool:
        return config.method == "fused"  # the kernels of "split" record nothing

    def invariant(self, problem: "Problem", device: torch.device) -> FlashDecodeConfig:
        return invariant_config(shape_of_problem(problem), device, problem.world_size, problem.num_nodes)

    def space(self, problem: "Problem", device: torch.device) -> list[FlashDecodeConfig]:
        if device.type == "cpu":
            fused = [FlashDecodeConfig("fused", block_n, 1, 1, programs) for block_n in (16, 32) for programs in (0, 2)]
            return [*fused, FlashDecodeConfig("split", 16, 1, 1)] if _can_split(problem) else fused
        shape, num_sms = shape_of_problem(problem), gpu.num_sms(device)
        configs = []
        for block_n, num_warps, num_stages in itertools.product((16, 32, 64, 128), (4, 8), _stages(shape)):
            config = FlashDecodeConfig("fused", block_n, num_warps, num_stages)
            usual = num_programs(config, shape, problem.shape[-1], device)
            others = {num_sms, 2 * num_sms, 4 * num_sms} - {usual}
            configs += [replace(config, num_programs=number) for number in (0, *sorted(others))]
        if _can_split(problem):
            configs += _split_space(shape, device)
        if shape.is_wide and shape.rows >= 64:  # the accumulator of a tile with 64 rows needs the registers of 8 warps
            high = itertools.product((32, 64), (2, 3))
            configs += [FlashDecodeConfig("fused", block_n, 8, stages, tile_rows=64) for block_n, stages in high]
        return configs

    def estimate_ms(self, config: FlashDecodeConfig, problem: "Problem", hardware: "Hardware") -> float:
        return 1e3 * cost.seconds(config, problem, self.floors(problem), hardware)

    def plain_words_of(self, problem: "Problem") -> tuple[str, str]:
        words = _PATH_WORDS[path_of_problem(problem)]
        if problem.world_size == 1:
            return words, words
        return f"{words}, then an all-gather", f"{words} and all-gather"

    def floors(self, problem: "Problem") -> Floors:
        batch, queries, heads, kv_heads, d, dv, keys = problem.shape
        shape, ranks = shape_of_problem(problem), problem.world_size
        of_key = shape.cache_bytes * (d if shape.value_is_key else d + dv)
        if shape.rope_bytes:
            of_key += (shape.rope_bytes - shape.cache_bytes) * (d - shape.parts_of_d[0])
        # Lower bound: a reduce-scatter of the peers' partial outputs, then an all-gather of the merged outputs.
        wire = 2 * (ranks - 1) * batch * queries * heads * dv * problem.torch_dtype.itemsize // ranks
        return Floors(2 * batch * queries * heads * keys * (d + dv), wire, batch * keys * kv_heads * of_key)

    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator
    ) -> tuple[torch.Tensor, ...]:
        batch, queries, heads, kv_heads, d, dv, keys = problem.shape
        dtype, shape = problem.torch_dtype, shape_of_problem(problem)
        same = torch.Generator(device).manual_seed(0)  # q is the same on all ranks
        q = torch.randn(batch, queries, heads, d, generator=same, dtype=dtype, device=device)
        page = page_of_problem(problem)
        pages = cdiv(keys, page)
        rows = (batch * pages, page) if shape.paged else (batch, keys)

        def draw(width, into=FP8 if shape.cache_bytes == 1 else dtype):
            return torch.randn(*rows, kv_heads, width, generator=generator, dtype=dtype, device=device).to(into)

        k = draw(shape.parts_of_d[0] if shape.rope_bytes else d)
        v = k[..., :dv] if shape.value_is_key else draw(dv)
        operands = [q, k, v, torch.full((batch,), keys, dtype=torch.int32, device=device)]
        if shape.paged:
            table = torch.randperm(batch * pages, generator=generator, device=device)
            operands.append(table.to(torch.int32).view(batch, pages))
        if shape.rope_bytes:
            operands.append(draw(d - k.shape[3], dtype))
        return tuple(operands)

    def reference_bytes(self, problem: "Problem") -> int:
        batch, queries, heads, kv_heads, d, dv, keys = problem.shape
        wide = 8 if problem.dtype == "float32" else 4
        # The operands in a wider dtype, the same again for the torch baseline, which converts them to fp32, and scores.
        return batch * keys * (2 * wide * kv_heads * (d + dv) + 12 * queries * heads) + 2 * _AT_ONCE_BYTES

    def reference(
        self, operands: Sequence[torch.Tensor], problem: "Problem", group: "dist.ProcessGroup"
    ) -> torch.Tensor:
        q, k, v, lens, table, *_, rope = _as_operands(operands, problem)
        _, queries, heads, kv_heads, d, dv, keys = problem.shape
        of_entry = 8 * keys * (2 * kv_heads * (d + dv) + 3 * queries * heads)
        at_once = max(1, _AT_ONCE_BYTES // of_entry)
        outputs = []
        for part in range(0, len(q), at_once):
            of = slice(part, part + at_once)
            caches = of if table is None else slice(None)  # pages belong to any sequence
            outputs.append(flash_decode_ref(
                q[of], k[caches], v[caches], lens[of], block_table=None if table is None else table[of],
                k_rope=None if rope is None else rope[caches], group=group,
            ))
        return torch.cat(outputs)  # type: ignore[arg-type]

    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        """Return a copy that reads and writes together as many bytes as the keys and values have."""
        _, k, v, *_, rope = _as_operands(operands, problem)
        caches = [k] if shape_of_problem(problem).value_is_key else [k, v]
        caches += [] if rope is None else [rope]
        halves = [cache.view(torch.uint8).flatten() for cache in caches]
        halves = [cache[: cache.numel() // 2] for cache in halves]
        copies = [torch.empty_like(half) for half in halves]
        return lambda: [copy.copy_(half) for copy, half in zip(copies, halves, strict=True)]

    def run(
        self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: FlashDecodeConfig | None
    ) -> torch.Tensor:
        others = group if problem.world_size > 1 else None
        return op.forward(_as_operands(operands, problem), _options(problem), others, config)[0]

    def compiled(self, config: FlashDecodeConfig) -> tuple | None:
        compiled = config.block_n, config.num_warps, config.num_stages, config.chunk_keys, config.tile_rows
        return None if config.method == "torch" else (config.method, *compiled)

    def compile(self, operands: Any, problem: "Problem", config: FlashDecodeConfig) -> None:
        call = _as_operands(operands, problem), _options(problem)
        if config.method == "split":
            launch_split.compile(*call, config)
        else:
            launcher.compile(*call, problem.world_size, problem.num_nodes, config)


_PATH_WORDS = {
    torch_attention.FLASH: "torch's flash attention",
    torch_attention.FLASH_PAGED: "torch's flash attention over pages",
    torch_attention.FLASH_COPIED: "a copy of the pages, torch's flash attention",
    torch_attention.PLAIN: "attention in fp32 with torch",
}


def _stages(shape):
    """Return numbers of stages to try: those with which one, two and three blocks of keys are in flight."""
    return (3, 5, 7) if shape.paged else (2, 3, 4)


def _split_space(shape, device):
    """Return candidates of method "split". Only one for wide heads, whose kernel in Gluon uses no other field."""
    if shape.is_wide:
        return [replace(fused_config(shape, device), method="split")]
    sizes = itertools.product((32, 64, 128), (4, 8), _stages(shape))
    return [FlashDecodeConfig("split", block_n, num_warps, num_stages) for block_n, num_warps, num_stages in sizes]


def _as_operands(operands, problem):
    """Return the Operands for a tuple from ``FlashDecodeTunable.operands``, which contains no None."""
    q, k, v, lens, *others = operands
    table = others.pop(0) if "paged" in problem.layout else None
    return Operands(q, k, v, lens, table, k_rope=others[0] if others else None)


def _options(problem):
    """Return (scale, soft_cap, window) of a problem's calls."""
    return problem.shape[4] ** -0.5, None, None


register(FlashDecodeTunable())
