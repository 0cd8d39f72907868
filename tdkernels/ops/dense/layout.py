"""Layout of operands whose second dimension is gathered or scattered, [B, S, ...].

Collectives gather and scatter one block of rows per rank. In [B, S, H] the rows of a rank, [B, S / W, H], consist of B
segments, each of S / W rows that follow one another: [B, W, segment_rows, H]. If B is 1, they are one block.
"""

import torch


def check_dim(operator: str, name: str, x: torch.Tensor, dim: int) -> None:
    """Raise ValueError unless ``dim`` is 0, or 1 and x has the dimensions [B, S, ..., K]."""
    if dim not in (0, 1):
        raise ValueError(f"{operator}: dim must be 0 or 1, not {dim!r}")
    if dim == 1 and x.dim() < 3:
        raise ValueError(f"{operator}: {name} {list(x.shape)} must have at least 3 dimensions if dim is 1")


def by_segment(rows: torch.Tensor, segment_rows: int, world_size: int) -> torch.Tensor:
    """Return gathered rows [W, B, segment_rows, H] as [B, W, segment_rows, H], both flattened to 2 dimensions."""
    if rows.shape[0] == world_size * segment_rows:
        return rows
    return rows.unflatten(0, (world_size, -1, segment_rows)).transpose(0, 1).reshape(rows.shape)


def segment_rows_of(x: torch.Tensor, dim: int, world_size: int) -> int:
    """Return the rows of a segment of x [..., K] whose dimension ``dim`` is divided between the ranks."""
    segments = world_size * (x.shape[0] if dim == 1 else 1)
    return x.shape[:-1].numel() // max(segments, 1)


def gathered(shape: torch.Size, dim: int, world_size: int) -> list[int]:
    """Return the leading sizes of a shard [..., K] with dimension ``dim`` as large as on all ranks together."""
    lead = [*shape[:-1]]
    lead[dim] *= world_size
    return lead


def scattered(shape: torch.Size, dim: int, world_size: int) -> list[int]:
    """Return the leading sizes of x [..., K] with dimension ``dim`` divided between the ranks."""
    lead = [*shape[:-1]]
    lead[dim] //= world_size
    return lead


def by_rank(rows: torch.Tensor, segment_rows: int, world_size: int) -> torch.Tensor:
    """Return rows [B, W, segment_rows, H] as [W, B, segment_rows, H], both flattened to 2 dimensions."""
    if rows.shape[0] == world_size * segment_rows:
        return rows
    return rows.unflatten(0, (-1, world_size, segment_rows)).transpose(0, 1).reshape(rows.shape)
