"""Config of all_reduce_rms_norm and all_reduce_layer_norm, and the heuristic that selects a config without tuning."""

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tdkernels.autotune.invariance import invariant_ranks
from tdkernels.ops.collectives.config import default_exchange, saved_by_two_shots
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch

_EXCHANGES = "one_shot", "two_shot"
ROW_PROGRAMS = 1, 2, 4, 8
WARPS = 1, 2, 4, 8, 16, 32
# Elements of a row per warp that stay in registers: 16 per thread. A longer row is read again from memory.
PER_WARP = 512
# Programs that share a row store at least this many columns each, 2 KiB of 16-bit elements. (Estimate.)
_LEAST_SHARE = 1024
# With "one_shot" a row is divided until this many programs receive. (Estimate.)
_PROGRAMS = 64
# Two ranks send the same bytes with both exchanges. With more rows than SMs, a program of "one_shot" adds several rows
# one after the other, and "two_shot" is faster: 27.2 instead of 29.5 us for 256 rows of 8192 elements, 49.7 instead of
# 51.9 for 512. For 128 rows it is slower, 19.1 instead of 18.5. (2 H100, bf16, CUDA graphs; longer rows were not
# measured with more than 128 rows.)
_TWO_RANKS_MOST_HIDDEN = 8192
# With more ranks, "two_shot" is selected if it sends fewer bytes by this times the number of ranks. For rows of 8192
# elements, "one_shot" and "two_shot" took 15.0 and 24.5 us for 16 rows on 8 H200, 32.3 and 25.8 for 64. On 4 H200 they
# took 18.9 and 19.3 us for 64 rows, 30.2 and 24.5 for 128 (bf16, CUDA graphs).
_SECOND_SHOT_BYTES_OF_RANK = 512 << 10
# With "one_shot", from _MANY_ROWS rows on, 16 warps that read a row again are faster than 32 that hold it: 26.1 instead
# of 28.8 us for 128 rows of 16384 elements. For 16 rows they are slower, 11.0 instead of 10.7. (2 H100, bf16, CUDA
# graphs; no number of rows in between was measured.)
_MANY_ROWS, _WARPS_OF_MANY_ROWS = 128, 16


@dataclass(frozen=True)
class AllReduceNormConfig:
    """Config of ``all_reduce_rms_norm`` and ``all_reduce_layer_norm``.

    Attributes:
        method: "fused" runs one kernel of this library, "torch" the all-reduce of torch.distributed, then an addition
            and torch's norm.
        exchange: With "one_shot" each rank receives all parts and adds them itself, for few rows. With "two_shot" the
            owner of a row adds its parts and sends the sum to all ranks, for many rows.
        row_programs: With "one_shot": number of programs that add and normalize a row. Each adds the whole row and
            stores its share of the columns. Not used for rows of more than 512 elements per warp.
        send_columns: With "one_shot": columns of a row that are sent with one signal.
        piece_rows: With "two_shot": consecutive rows that an owner receives with one signal.
        num_programs: Maximum number of programs; with "one_shot", of those that send and of those that receive.
        num_warps: Warps per program.
    """

    method: str = "fused"
    exchange: str = "one_shot"
    row_programs: int = 1
    send_columns: int = 1024
    piece_rows: int = 1
    num_programs: int = 128
    num_warps: int = 8

    def illegal(self, device: "torch.device", dtype: "torch.dtype") -> str | None:
        """Return why this config cannot run with a device and a dtype, or None if it can."""
        if self.method not in ("fused", "torch"):
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # uses no other field
        if self.exchange not in _EXCHANGES:
            return f'exchange must be "one_shot" or "two_shot", not {self.exchange!r}'
        if self.row_programs not in ROW_PROGRAMS:
            return f"row_programs must be 1, 2, 4 or 8, not {self.row_programs}"
        if not 16 <= self.send_columns <= 16384 or self.send_columns & (self.send_columns - 1):
            return f"send_columns must be a power of two from 16 to 16384, not {self.send_columns}"
        for name in ("piece_rows", "num_programs"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        if self.num_warps not in WARPS:
            return f"num_warps must be 1, 2, 4, 8, 16 or 32, not {self.num_warps}"
        if self.num_warps > gpu.max_warps(device):
            return f"num_warps must be at most {gpu.max_warps(device)} on this device, not {self.num_warps}"
        return None

    def variant_reason(self) -> str | None:
        """Return why a row depends on its place in the tensor with this config, or None if it does not."""
        if self.method != "fused":
            return f'method must be "fused", not {self.method!r}'
        if invariant_ranks() and self.exchange != "two_shot":  # the exchanges may add the elements of a row differently
            return f'with max_ranks, exchange must be "two_shot", not {self.exchange!r}'
        return None


def default_config(
    rows: int, hidden: int, dtype: "torch.dtype", world_size: int, device: "torch.device", exchange: str | None = None
) -> AllReduceNormConfig:
    """Return the heuristic config for x [rows, hidden]. ``exchange``: the one to use, or None for the heuristic one."""
    exchange = exchange or _default_exchange(rows, hidden, dtype, world_size, device)
    if device.type == "cpu":  # few programs, because the interpreter is slow
        return AllReduceNormConfig("fused", exchange, send_columns=4096, num_programs=4, num_warps=1)
    num_warps = warps_of_row(hidden, device)
    if exchange == "two_shot":
        return AllReduceNormConfig("fused", exchange, num_programs=2 * gpu.num_sms(device), num_warps=num_warps)
    row_programs = 1
    while 2 * row_programs * rows <= _PROGRAMS and cdiv(hidden, 2 * row_programs) >= _LEAST_SHARE and row_programs < 8:
        row_programs *= 2
    columns = wide_columns(num_warps, dtype, device)
    if rows >= _MANY_ROWS and hidden <= PER_WARP * num_warps:
        num_warps = min(num_warps, _WARPS_OF_MANY_ROWS)
    return AllReduceNormConfig(
        "fused", exchange, row_programs, columns, num_programs=gpu.num_sms(device), num_warps=num_warps
    )


def _default_exchange(rows, hidden, dtype, world_size, device):
    if world_size == 2 and device.type != "cpu" and hidden <= _TWO_RANKS_MOST_HIDDEN and rows > gpu.num_sms(device):
        return "two_shot"
    nbytes = rows * hidden * dtype.itemsize
    if device.type == "cpu":
        return default_exchange("all_reduce", nbytes, world_size, device)
    saved = saved_by_two_shots(nbytes, world_size)
    return "two_shot" if saved > world_size * _SECOND_SHOT_BYTES_OF_RANK else "one_shot"


def warps_of_row(hidden: int, device: "torch.device") -> int:
    """Return the number of warps that keep a row in registers: at least 4, at most as many as a program can have."""
    return min(max(next_power_of_2(hidden) // PER_WARP, 4), gpu.max_warps(device))


def wide_columns(num_warps: int, dtype: "torch.dtype", device: "torch.device") -> int:
    """Return the number of columns that a program sends at a time if each thread sends 16 bytes, at most 16384."""
    return min(16 // dtype.itemsize * num_warps * (1024 // gpu.max_warps(device)), 16384)
