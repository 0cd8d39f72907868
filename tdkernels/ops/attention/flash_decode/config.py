"""How flash_decode runs: its config, the default for a device, and what a config needs of shared memory."""

from dataclasses import dataclass

from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu

_MAX_ROWS, _MAX_WIDE_ROWS = 64, 32  # query rows of a tile; of heads of more than 256
_FEW_BLOCKS = 16  # of keys, for a multiprocessor
MAX_PROGRAMS = 8192  # more than any GPU holds at a time: what there are private words for


@dataclass(frozen=True)
class FlashDecodeConfig:
    """How ``flash_decode`` runs.

    Attributes:
        method: "fused", or "torch": attention of this rank's keys in plain torch, then a plain all-gather
        block_n: keys that a program takes at a time
        num_warps: of a program
        num_stages: blocks of keys that are on their way to a program at the same time
        num_programs: that share the keys; 0 takes as many as fit the device at a time
    """

    method: str = "fused"
    block_n: int = 64
    num_warps: int = 4
    num_stages: int = 3
    num_programs: int = 0

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # takes none of the rest
        if self.block_n < 16 or self.block_n & (self.block_n - 1):
            return f"block_n must be a power of two of at least 16, not {self.block_n}"
        if self.num_warps not in (1, 2, 4, 8, 16):
            return f"num_warps must be 1, 2, 4, 8 or 16, not {self.num_warps}"
        if self.num_stages < 1:
            return f"num_stages must be at least 1, not {self.num_stages}"
        if not 0 <= self.num_programs <= MAX_PROGRAMS:
            return f"num_programs must be from 0 to {MAX_PROGRAMS}, not {self.num_programs}"
        return None

    def shared_memory_bytes(self, shape):
        """What the stages of a main loop take, the last of which waits in registers, and the query rows beside them.

        With a paged cache, whose blocks are looked up first, another stage is spent on that.
        """
        stages = max(self.num_stages - 1 - shape.paged, 1)
        return stages * self.block_n * shape.bytes_of_key + 2 * shape.block_m * shape.bytes_of_query


@dataclass(frozen=True)
class DecodeShape:
    """The sizes of a call, and what a kernel makes of them; q [batch, queries, heads * group, d].

    Attributes:
        group: query heads of a cache's head; value_is_key: the values are the first columns of the keys' memory
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

    @property
    def rows(self):
        return self.queries * self.group

    @property
    def rows_of_tile(self):
        return min(next_power_of_2(self.rows), _MAX_WIDE_ROWS if self.is_wide else _MAX_ROWS)

    @property
    def is_wide(self):
        return max(self.d, self.dv) > 256

    @property
    def block_m(self):
        """Rows that a product computes; tensor cores take no fewer than 16."""
        return max(self.rows_of_tile, 16)

    @property
    def tiles(self):
        return self.batch * self.heads * cdiv(self.rows, self.rows_of_tile)

    @property
    def parts_of_d(self):
        """The columns of keys, cut in two parts, powers of two: 576 is 512 and 64. The second may be none, 0."""
        first = 1 << (self.d.bit_length() - 1)
        if first < 16:
            return 16, 0
        return first, max(next_power_of_2(self.d - first), 16) if self.d > first else 0

    @property
    def padded_dv(self):
        return max(next_power_of_2(self.dv), 16)

    @property
    def bytes_of_key(self):
        return (sum(self.parts_of_d) + (0 if self.value_is_key else self.padded_dv)) * self.cache_bytes

    @property
    def bytes_of_query(self):
        return sum(self.parts_of_d) * max(self.cache_bytes, 2)


def layout_of(paged, value_is_key, fp8):
    """How a cache lies, in the words of the tuner."""
    return " ".join(filter(None, ("paged" if paged else "dense", value_is_key and "latent", fp8 and "fp8")))


def default_config(shape, device):
    """The config for a shape that nobody has tuned."""
    if device.type == "cpu":
        return FlashDecodeConfig(block_n=16, num_warps=1, num_stages=1)
    warps = 8 if shape.block_m * shape.padded_dv >= 8192 else 4
    # Two programs a multiprocessor, so that one reads while the other is between two tiles.
    room = gpu.shared_memory_bytes(device) // 2 - 1024
    if shape.is_wide and shape.cache_bytes == 2:
        # Fewer programs of eight warps were slower, of any tile, but for 64K keys of one sequence.
        warps = 4
        candidates = ((32, 3 + shape.paged), (32, 2 + shape.paged), (16, 2 + shape.paged))
    elif shape.paged:
        candidates = ((128, 3), (64, 3), (32, 3), (16, 3))
    elif shape.cache_bytes == 1:
        candidates = ((128, 3), (64, 4), (64, 3), (32, 3), (64, 2), (32, 2), (16, 2))
    else:
        candidates = ((64, 3), (32, 3), (64, 2), (32, 2), (16, 2))
    for block_n, stages in candidates:
        config = FlashDecodeConfig(block_n=block_n, num_warps=warps, num_stages=stages)
        if config.shared_memory_bytes(shape) <= room:
            break
    return config


def num_programs(config, shape, capacity, device):
    """How many programs share the keys: as many as fit the device at a time, if the config does not say.

    Of a short cache, of ``capacity`` keys an entry, one a multiprocessor: more of them give more parts to merge.
    """
    if config.num_programs:
        return config.num_programs
    if device.type == "cpu":
        return gpu.num_sms(device)
    blocks = shape.batch * shape.heads * cdiv(capacity, config.block_n)
    if blocks < _FEW_BLOCKS * gpu.num_sms(device):
        return gpu.num_sms(device)
    of_multiprocessor = gpu.shared_memory_bytes(device) // (config.shared_memory_bytes(shape) + 1024)
    # More than eight warps find no registers on a multiprocessor at this many a thread.
    return gpu.num_sms(device) * max(1, min(of_multiprocessor, 8 // config.num_warps))
