"""Pipelined ag_gemm: torch's GEMM multiplies one chunk of a shard at a time while the copy engine brings the next ones.

This rank's shard comes first, because it is local. The shards of rank - 1, rank - 2, ... follow; in each step all ranks
send at the same time, each to another rank. The GEMM has all SMs and the speed of the vendor's library. On the other
hand the GEMM of a chunk cannot start before the whole chunk has arrived, and the last chunk overlaps with nothing. If
the transfers take much less time than the GEMM, several shards are multiplied at a time.
"""

import itertools
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.scaling import row_major, scaled_linear
from tdkernels.ops.dense.scaled_gather import gathered_scales
from tdkernels.ops.dense.vendor_gemm import cut, gemm_over_transfers, product, rows_of
from tdkernels.symm.whole_call import whole_call

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from tdkernels.ops.common.scaling import Scales
    from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig


# Least ratio of the times of the GEMM and the transfers for GEMMs of 1, 1, 2, 4, ... shards. From 2 on, all shards of a
# group have arrived when the previous group has been multiplied. With a little less, a group waits less than the host
# saves (estimate; at 1.8, the backward of gemm_rs 8192 x 8192 x 28672 took 1.61 ms on 8 H200, and the GEMMs 1.40).
_GROUPS_FROM = 1.75


@whole_call
def launch(
    x: "torch.Tensor", weights: "Sequence[torch.Tensor]", biases: "Sequence[torch.Tensor | None]",
    group: "dist.ProcessGroup", config: "AgGemmConfig", fields: Mapping[str, Any], keep_gathered: bool,
    into: "torch.Tensor | None" = None, scales: "Sequence[Scales] | None" = None,
) -> "tuple[list[torch.Tensor], AsyncAllGather | None]":
    """Run ag_gemm with method "parts" for each weight; return (outputs, gather).

    Args:
        x: This rank's rows [M / W, K].
        weights: List of [N_i, K].
        biases: List of [N_i] or None.
        group: The resolved group.
        config: The config.
        fields: Properties of the call that must be equal on all ranks.
        keep_gathered: As for ``ag_gemm.launch.launch``, and so is ``gather``.
        scales: The scales of scaled operands, one for each weight; the scales of x are the same.
        into: [W, ..., K] with the elements of x per rank, or None. Each shard is copied to it while later ones arrive.
    """
    if scales is not None:
        all_scales = gathered_scales(x, scales[0], group)
        scales = [one._replace(x=all_scales.x) for one in scales]
        weights = [row_major(weight) for weight in weights]
    x = gemm_operands.rows_contiguous(x)
    rows = x.shape[0]
    pieces = cut(rows, config.pieces)
    gather = AsyncAllGather("ag_gemm", fields, x, group, pieces[0][1], copies=True)
    dtype = x.dtype if scales is None else scales[0].out_dtype
    ys = [x.new_empty(gather.world_size, rows, weight.shape[0], dtype=dtype) for weight in weights]
    outs = [y.unbind() for y in ys]

    def multiply(part, source, first=0):
        for number, (weight, bias) in enumerate(zip(weights, biases, strict=True)):
            out = rows_of(outs[number][source], first, part.shape[0])
            if scales is None:
                product(part, weight, bias, out)
            else:
                of_part = scales[number].of_rows(source * rows + first, part.shape[0])
                scaled_linear(part, weight, bias, of_part, out)

    with ExitStack() as closing:
        closing.enter_context(gather)
        gather.copy(own=keep_gathered)
        if into is not None:
            gather.copy_out(into, gather.rank)
        multiply(x, gather.rank)
        if config.pieces == 1 and scales is None and into is None and _arrive_early(gather, weights):
            _multiply_groups(gather, weights, biases, ys)
        else:
            shards = gather.gathered.unbind()
            for step, (number, (first, count)) in itertools.product(range(1, gather.world_size), enumerate(pieces)):
                source = gather.source(step)
                gather.wait(step, number)
                if into is not None and number == len(pieces) - 1:
                    gather.copy_out(into, source)
                multiply(rows_of(shards[source], first, count), source, first)
        if keep_gathered:
            gather.mark_received()
            closing.pop_all()
    return [y.view(-1, y.shape[2]) for y in ys], gather if keep_gathered else None


def _arrive_early(gather, weights):
    """Return whether several shards arrive while the previous ones are multiplied. Not known for several nodes."""
    if gather.spans_nodes:
        return False
    flops = 2 * gather.world_size * gather.rows * gather.width * sum(weight.shape[0] for weight in weights)
    return gemm_over_transfers(flops, (gather.world_size - 1) * gather.x.nbytes) >= _GROUPS_FROM


def _multiply_groups(gather, weights, biases, ys):
    """Multiply the shards of the peers: 1, 2, 4, ... at a time, in the order in which they arrive.

    With fewer waits and GEMMs the host takes less time, and larger GEMMs are faster.
    """
    first = 1
    while first < gather.world_size:
        last = min(2 * first, gather.world_size)
        gather.wait(first, until=last)
        sources = [gather.source(step) for step in range(first, last)]
        for begin, end in _ranges(sources, gather.rows == gather.slot_rows):
            part = gather.gathered[begin:end].reshape(-1, gather.width)
            for weight, bias, y in zip(weights, biases, ys, strict=True):
                product(part, weight, bias, y[begin:end].view(-1, y.shape[2]))
        first = last


def _ranges(sources, adjacent):
    """Divide ranks into ranges [begin, end). ``adjacent``: ranges may have more than one rank."""
    ranges = []
    for source in sorted(sources):
        if adjacent and ranges and ranges[-1][1] == source:
            ranges[-1] = ranges[-1][0], source + 1
        else:
            ranges.append((source, source + 1))
    return ranges
