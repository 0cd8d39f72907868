"""Layout of the weights of experts in memory, and whether TMA can read it."""

import torch

from tdkernels.ops.common.tile_config import Tiles
from tdkernels.runtime import gpu

# (planes, N of a plane, strides of planes and rows, is_kn) of a weight that needs no copy, see ``weight_layout``.
MemoryLayout = tuple[int, int, list[int], bool]


def planes_of(w: torch.Tensor, activation: str | None) -> tuple[int, ...]:
    """Return (number of planes, N of a plane) for a weight [E, N, K].

    A plane is the weight of one expert. With activation "swiglu" an expert has two planes, gate and up.
    """
    return (2 * w.shape[0], w.shape[1] // 2) if activation == "swiglu" else tuple(w.shape[:2])


def _is_stored_nk(w, is_pair=False):
    """Return whether each plane is row-major and, with ``is_pair``, the planes are adjacent."""
    experts, n, k = w.shape
    return w.stride(2) == 1 and w.stride(1) >= k and (not is_pair or experts == 1 or w.stride(0) == n * w.stride(1))


def is_stored_kn(w: torch.Tensor) -> bool:
    """Return whether the planes of a weight [E, N, K] are stored as [K, N], as in a transposed weight."""
    return not _is_stored_nk(w) and w.stride(1) == 1 and w.stride(2) >= w.shape[1]


def weight_layout(w: torch.Tensor, activation: str | None = None) -> tuple[torch.Tensor, int, int, bool]:
    """Return (weight, plane stride, row stride, is_kn), where ``is_kn`` means that planes are stored as [K, N].

    The weight is copied unless its planes are row-major, or column-major without an activation and not in fp8: tensor
    cores read column-major planes in 16-bit types only. With activation "swiglu" gate and up are separate planes, and
    all planes must be adjacent. Strides are in elements.
    """
    is_pair = activation == "swiglu"
    if not is_pair and w.element_size() > 1 and is_stored_kn(w):
        return w, w.stride(0), w.stride(2), True
    if not _is_stored_nk(w, is_pair):
        w = w.contiguous()
    return w, w.shape[1] // 2 * w.stride(1) if is_pair else w.stride(0), w.stride(1), False


def memory_layout(w: torch.Tensor, activation: str | None) -> MemoryLayout:
    """Return (planes, N of a plane, strides of planes and rows, is_kn) of a weight that needs no copy."""
    _, *strides, is_kn = weight_layout(w, activation)
    planes, n = planes_of(w, activation)
    return planes, n, strides, is_kn


def tma_fits(x_k: int, w: torch.Tensor, stride_plane: int, stride_w: int, is_kn: bool, tiles: Tiles) -> bool:
    """Return whether rows of ``x_k`` elements and the weight can be read through tensor descriptors (TMA)."""
    size = w.element_size()
    if not gpu.has_tma(w.device) or size > 2 or w.data_ptr() % 16:
        return False
    if is_kn and x_k % tiles.block_k:
        return False  # a block past the last row of a plane would read the next plane, which may contain NaN
    return all(width * size % 16 == 0 for width in (x_k, stride_plane, stride_w)) and min(w.shape[1:]) > 1
