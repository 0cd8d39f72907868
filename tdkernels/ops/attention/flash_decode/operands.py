"""The tensors of a call of flash_decode, after ``op`` has normalized them."""

from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    import torch


def capacity_of(k_cache: "torch.Tensor", block_table: "torch.Tensor | None" = None) -> int:
    """Return the number of keys per sequence that a cache can hold."""
    return k_cache.shape[1] * (1 if block_table is None else block_table.shape[1])


class Operands(NamedTuple):
    """The tensors of a call: contiguous, except for the caches.

    Attributes:
        q: Queries [B, Tq, Hq, D].
        k_cache: Keys, as for ``flash_decode``; with ``k_rope`` their first columns.
        v_cache: Values, as for ``flash_decode``.
        kv_lens: Number of keys of each sequence on this rank, [B].
        block_table: Blocks of each sequence, for paged caches.
        k_scale: Dequantization factor of k_cache, or None.
        v_scale: The same for v_cache, with as many elements. Both are None, or neither is.
        k_rope: The other columns of the keys, or None.
    """

    q: "torch.Tensor"
    k_cache: "torch.Tensor"
    v_cache: "torch.Tensor"
    kv_lens: "torch.Tensor"
    block_table: "torch.Tensor | None" = None
    k_scale: "torch.Tensor | None" = None
    v_scale: "torch.Tensor | None" = None
    k_rope: "torch.Tensor | None" = None

    def capacity(self) -> int:
        """Return the number of keys per sequence that the caches can hold."""
        return capacity_of(self.k_cache, self.block_table)
