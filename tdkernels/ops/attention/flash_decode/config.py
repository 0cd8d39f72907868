"""Configs of flash_decode, their shared-memory use, and the heuristic that selects one."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu
from tdkernels.symm.shared_settings import invariant_ranks

if TYPE_CHECKING:
    import torch

_MAX_ROWS, _MAX_WIDE_ROWS = 64, 32  # query rows per tile; the second for heads with more than 256 elements
_FEW_BLOCKS = 16  # with fewer blocks of keys per SM, one program per SM is used
# Keys per chunk in the batch-invariant mode. With 512, five shapes of narrow heads take 1.09 times as long as without
# chunks (geometric mean), with 1024 1.13, with 256 1.15 (H200). Parts of wide heads take more memory; not measured.
_CHUNK_KEYS, _WIDE_CHUNK_KEYS = 512, 1024
LATENT_D, LATENT_DV = 576, 512  # of the caches that ``latent_kernel`` reads
LATENT_ROWS, LATENT_BLOCK = 64, 32  # query rows per tile and keys per block of ``latent_kernel``
_FEW_ROWS = 16  # of wide heads, up to which "fused" is as fast as "split", see ``_is_faster_split``
_LEAST_BUSY = 0.8  # share of the SMs that method "split" must use
# Bytes that a rank sends up to which method "split" is faster for narrow heads. It sends them at its end, "fused"
# during the call. On 4 H200 it took 1.06 times as long with 6.3 MB, on 2 H200 0.98 times with 2.1 MB.
_MOST_SENT = 4 << 20
MAX_PROGRAMS = 8192  # more than fit on any GPU at a time; flags are allocated for this many


@dataclass(frozen=True)
class FlashDecodeConfig:
    """Config of ``flash_decode``.

    Attributes:
        method: "fused" runs one kernel. "split" runs one kernel that computes parts of the keys and a second one that
            merges them and exchanges the results of the ranks; on Hopper the first one has a faster version for latent
            caches (576 columns, values of 512, pages of a multiple of 32 keys) in bf16 and fp16, and in fp8 with rotary
            columns in bf16 or fp16 (``k_rope``). Calls with a window, calls of several ranks with several query tokens,
            and groups on several nodes run "fused" with the other fields instead. "torch" runs torch's attention over
            this rank's keys (flash attention if it supports the caches), then torch's all-gather; it uses none of the
            other fields. The version for latent caches uses only ``num_programs`` and ``chunk_keys``.
        block_n: Keys per block of the main loop. A power of two of at least 16.
        num_warps: Warps per program: 1, 2, 4, 8 or 16.
        num_stages: Pipeline stages of the main loop, at least 1.
        num_programs: Programs that share the keys, at most 8192. 0 means as many as fit on the device at a time.
        chunk_keys: 0 divides the keys of all sequences equally among the programs, so the parts of a sequence that are
            merged depend on the whole batch. Otherwise they are chunks of this many keys, a multiple of block_n, and of
            more keys for a sequence that would have more than 64 chunks. They depend on its length alone. The version
            for latent caches rounds this down to a multiple of 64, and to at least 64.
        tile_rows: Maximum number of query rows that a program multiplies at a time, 16, 32 or 64. 0 means 64, or 32 for
            heads of more than 256 elements. With 64 rows Hopper uses wgmma, and keys are read for more rows at a time;
            for heads of 512 elements the accumulator then needs 8 warps.
    """

    method: str = "fused"
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    num_programs: int = 0
    chunk_keys: int = 0
    tile_rows: int = 0

    def illegal(self, device: "torch.device", dtype: "torch.dtype") -> str | None:
        """Check whether this config can run.

        Args:
            device: Device of the call.
            dtype: Dtype of q.

        Returns:
            Why the config cannot run, or None if it can.
        """
        if self.method not in ("fused", "split", "torch"):
            return f'method must be "fused", "split" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # the other fields are not used
        if self.block_n < 16 or self.block_n & (self.block_n - 1):
            return f"block_n must be a power of two of at least 16, not {self.block_n}"
        if self.num_warps not in (1, 2, 4, 8, 16):
            return f"num_warps must be 1, 2, 4, 8 or 16, not {self.num_warps}"
        if self.num_stages < 1:
            return f"num_stages must be at least 1, not {self.num_stages}"
        if not 0 <= self.num_programs <= MAX_PROGRAMS:
            return f"num_programs must be from 0 to {MAX_PROGRAMS}, not {self.num_programs}"
        if self.chunk_keys < 0 or self.chunk_keys % self.block_n:
            return f"chunk_keys must be a multiple of block_n = {self.block_n}, or 0, not {self.chunk_keys}"
        if self.tile_rows not in (0, 16, 32, 64):
            return f"tile_rows must be 0, 16, 32 or 64, not {self.tile_rows}"
        return None

    def variant_reason(self) -> str | None:
        """Return why the result of a sequence depends on the batch with this config, or None if it does not."""
        if self.method == "torch":
            return 'method must be "fused" or "split", not "torch"'
        return None if self.chunk_keys else "chunk_keys must not be 0"

    def tiled(self, shape: "DecodeShape") -> "DecodeShape":
        """Return the sizes of a call with the tiles of this config."""
        return replace(shape, tile_rows=self.tile_rows) if self.tile_rows else shape

    def blocks_in_flight(self, shape: "DecodeShape") -> int:
        """Return how many blocks of keys are loaded in advance. Half of the stages load the table of a paged cache."""
        return max((self.num_stages - 1) // (2 if shape.paged else 1), 1)

    def shared_memory_bytes(self, shape: "DecodeShape") -> int:
        """Return the shared memory of a program in bytes: the stages of the main loop, and the query rows.

        One stage is held in registers, except with tiles of 64 rows on Hopper, where the kernel needs a block more than
        this estimate.

        Args:
            shape: Sizes of the call, with any tiles.

        Returns:
            The estimate in bytes.
        """
        shape = self.tiled(shape)
        keys = self.blocks_in_flight(shape) * self.block_n
        return keys * shape.bytes_of_key + 2 * shape.block_m * shape.bytes_of_query


@dataclass(frozen=True)
class DecodeShape:
    """Sizes of a call and the tile sizes that follow from them, for q [batch, queries, heads * group, d].

    Attributes:
        batch: Number of sequences.
        queries: Query tokens per sequence, Tq.
        heads: Heads of the cache, Hkv.
        group: Query heads per head of the cache.
        d: Elements per head of the keys.
        dv: Elements per head of the values.
        cache_bytes: Bytes per element of the caches.
        value_is_key: Whether the values are the first columns of the keys' memory (MLA).
        paged: Whether the caches are paged.
        rope_bytes: Bytes per element of the second part of the keys if it has a cache of its own, else 0.
        tile_rows: Maximum number of query rows per tile; 0 for the default.
    """

    batch: int
    queries: int
    heads: int
    group: int
    d: int
    dv: int
    cache_bytes: int
    value_is_key: bool = False
    paged: bool = False
    rope_bytes: int = 0
    tile_rows: int = 0

    @property
    def rows(self) -> int:
        """Query rows that read the same head of the cache."""
        return self.queries * self.group

    @property
    def rows_of_tile(self) -> int:
        """Query rows per tile."""
        most = self.tile_rows or (_MAX_WIDE_ROWS if self.is_wide else _MAX_ROWS)
        return min(next_power_of_2(self.rows), most)

    @property
    def is_wide(self) -> bool:
        """Whether heads have more than 256 elements."""
        return max(self.d, self.dv) > 256

    @property
    def block_m(self) -> int:
        """Rows of a ``tl.dot``, at least 16 as required by tensor cores."""
        return max(self.rows_of_tile, 16)

    @property
    def tiles(self) -> int:
        """Number of tiles: batch entries times heads times blocks of query rows."""
        return self.batch * self.heads * cdiv(self.rows, self.rows_of_tile)

    @property
    def parts_of_d(self) -> tuple[int, int]:
        """The columns of keys as two powers of two: 576 is split into 512 and 64. The second is 0 if not needed."""
        first = 1 << (self.d.bit_length() - 1)
        if first < 16:
            return 16, 0
        return first, max(next_power_of_2(self.d - first), 16) if self.d > first else 0

    @property
    def padded_dv(self) -> int:
        """Elements per head of the values, padded to a power of two of at least 16."""
        return max(next_power_of_2(self.dv), 16)

    @property
    def bytes_of_key(self) -> int:
        """Bytes of one padded key and its value."""
        first, second = self.parts_of_d
        value = 0 if self.value_is_key else self.padded_dv
        return (first + value) * self.cache_bytes + second * (self.rope_bytes or self.cache_bytes)

    @property
    def bytes_of_query(self) -> int:
        """Bytes of one padded query row. For an fp8 cache, queries are converted to fp16."""
        first, second = self.parts_of_d
        return first * max(self.cache_bytes, 2) + second * max(self.rope_bytes or self.cache_bytes, 2)


def layout_of(paged: bool, value_is_key: bool, fp8: bool, rope: bool = False) -> str:
    """Return the ``layout`` of the tuner's Problem for a cache: "dense" or "paged", then "latent", "fp8" and "rope".

    The last one is for an fp8 cache with a cache of its own for the second part of the keys, which is not fp8.
    """
    words = "paged" if paged else "dense", value_is_key and "latent", fp8 and "fp8", rope and "rope"
    return " ".join(filter(None, words))  # type: ignore[arg-type]


def can_split(queries: int, ranks: int, nodes: int) -> bool:
    """Return whether calls can run method "split".

    Its kernels do not exchange lengths, which calls of several ranks need with several query tokens.
    """
    return ranks == 1 or (queries == 1 and nodes == 1)


def has_latent_kernel(shape: DecodeShape, device: "torch.device") -> bool:
    """Return whether the sizes of a call fit the kernel for latent caches on Hopper.

    Page size, strides and options are not checked, because they may differ between ranks. Calls that do not fit in
    these run the portable kernels of method "split", which were compared with "fused" for pages of 16 keys only: 237
    and 267 us for one sequence of 64K keys and 128 heads (H100, CUDA graphs).
    """
    return gpu.capability(device) == (9, 0) and has_latent_sizes(shape)


def has_latent_sizes(shape: DecodeShape) -> bool:
    """Return whether a cache has the sizes for which ``latent_kernel`` is written.

    An fp8 cache needs rotary columns in 16 bits.
    """
    forms = (2, 0), (2, 2), (1, 2)
    sizes = shape.d, shape.dv, shape.heads, (shape.cache_bytes, shape.rope_bytes) in forms
    return shape.value_is_key and sizes == (LATENT_D, LATENT_DV, 1, True)


def default_config(
    shape: DecodeShape, device: "torch.device", ranks: int = 1, nodes: int = 1
) -> FlashDecodeConfig:
    """Return the heuristic config of calls of ``ranks`` ranks on ``nodes`` nodes without tuned configs."""
    config = fused_config(shape, device)
    splits = can_split(shape.queries, ranks, nodes) and _is_faster_split(shape, device, ranks)
    return replace(config, method="split") if splits else config


def _is_faster_split(shape, device, ranks=1):
    """Return whether method "split" is faster than "fused".

    On one H200 it is faster than the default of "fused" in 23 of 23 shapes with heads of up to 256 elements, by 1.03 to
    1.96 times: programs that run at the same time read neighbouring heads of the same keys, and many programs merge the
    parts.
    """
    if device.type == "cpu":
        return False
    if shape.is_wide:
        # With 16 rows a tile of 64 rows is mostly padding, and "fused" is as fast (H100, 128 sequences of 4K keys).
        return shape.rows > _FEW_ROWS and has_latent_kernel(shape, device)
    if (ranks - 1) * shape.batch * shape.heads * shape.rows * shape.dv * 4 > _MOST_SENT:
        return False
    tiles, num_sms = shape.tiles // shape.batch, gpu.num_sms(device)
    return num_sms // tiles * tiles >= _LEAST_BUSY * num_sms  # each tile of an entry has the same number of programs


def fused_config(shape: DecodeShape, device: "torch.device") -> FlashDecodeConfig:
    """Return the heuristic config of method "fused"."""
    if device.type == "cpu":
        return FlashDecodeConfig(block_n=16, num_warps=1, num_stages=1)
    warps = 8 if shape.block_m * shape.padded_dv >= 16384 else 4
    # Two programs per SM: one reads keys while the other is between two tiles.
    room = gpu.shared_memory_bytes(device) // 2 - 1024
    if shape.is_wide and shape.cache_bytes == 2:
        # Fewer programs with 8 warps were slower with every tile size, except for one sequence of 64K keys.
        warps = 4
        candidates: tuple[tuple[int, int], ...] = ((32, 3), (16, 3)) if shape.paged else ((32, 3), (32, 2), (16, 2))
    elif shape.paged:
        # With 64 rows, blocks of 128 keys take 1.3 times as long (H200, 4 sequences of 40,000 keys, pages of 16).
        candidates = ((128, 3), (64, 3), (32, 3), (16, 3))[shape.block_m >= 64 :]
    elif shape.cache_bytes == 1:
        candidates = ((128, 3), (64, 4), (64, 3), (32, 3), (64, 2), (32, 2), (16, 2))
    else:
        candidates = ((64, 3), (32, 3), (64, 2), (32, 2), (16, 2))
    for block_n, stages in candidates:
        config = FlashDecodeConfig(block_n=block_n, num_warps=warps, num_stages=stages)
        if config.shared_memory_bytes(shape) <= room:
            break
    if shape.cache_bytes == 4 and config.shared_memory_bytes(shape) > gpu.shared_memory_bytes(device):
        # sm_89 has 99 KiB. Compiled for heads of 512, the kernel needs 65 KiB with one stage and 112 with two.
        config = replace(config, num_stages=1)
    return config


def invariant_config(shape: DecodeShape, device: "torch.device", ranks: int, nodes: int) -> FlashDecodeConfig:
    """Return the config of the batch-invariant mode for a shape. It does not depend on the batch.

    The ranks, and calls with the same key of the tuner, need not agree on whether values are keys, so a cache of the
    sizes of a latent one counts as latent.
    """
    config = fused_config(replace(shape, value_is_key=False), device)
    latent = replace(shape, value_is_key=shape.d > shape.dv)
    if invariant_ranks():
        # Tensor-parallel ranks may divide the heads, so their number must not select the method.
        latent = replace(latent, heads=1, value_is_key=False)
    if can_split(shape.queries, ranks, nodes) and _is_faster_split(latent, device):
        config = replace(config, method="split")
    return replace(config, chunk_keys=max(_WIDE_CHUNK_KEYS if shape.is_wide else _CHUNK_KEYS, config.block_n))


def num_programs(config: FlashDecodeConfig, shape: DecodeShape, capacity: int, device: "torch.device") -> int:
    """Return the number of programs that share the keys.

    If the config leaves it open, this is the number of programs that fit on the device at a time. For a short cache
    (``capacity`` is the number of keys per entry) it is one program per SM, because more programs leave more partial
    results to merge.
    """
    if config.num_programs:
        return config.num_programs
    if device.type == "cpu":
        return gpu.num_sms(device)
    blocks = shape.batch * shape.heads * cdiv(capacity, config.block_n)
    if blocks < _FEW_BLOCKS * gpu.num_sms(device):
        return gpu.num_sms(device)
    of_multiprocessor = gpu.shared_memory_bytes(device) // (config.shared_memory_bytes(shape) + 1024)
    # The kernel uses so many registers per thread that an SM holds at most 8 warps.
    return gpu.num_sms(device) * max(1, min(of_multiprocessor, 8 // config.num_warps))
