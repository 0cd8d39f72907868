"""Tensor parallelism written by hand with plain collectives: the unfused baseline.

With sequence parallelism the input of an attention or MLP is gathered once for all its column-parallel layers, and the
output of its row-parallel layer is reduce-scattered. Without it, that output is all-reduced. The gathered input is
saved for the backward.
"""

import torch.distributed as dist

from bench.core.linear_function import LinearFunction
from tdkernels.ops.common.torch_collectives import all_gather_rows, reduce_scatter_rows


def _gather(x):
    """Return [B, S, H] for x [B, S / W, H]. With B = 1 nothing is copied."""
    return all_gather_rows(x[None]).transpose(0, 1).flatten(1, 2)


def _reduce_scatter(x):
    """Return this rank's part [B, S / W, H] of the sum of x [B, S, H] over the ranks. With B = 1 nothing is copied."""
    return reduce_scatter_rows(x.unflatten(1, (dist.get_world_size(), -1)).transpose(0, 1))[0]


def _gather_input(module, args):
    return LinearFunction.apply(*args, _gather, _reduce_scatter)


def _scatter_output(module, args, output):
    return LinearFunction.apply(output, _reduce_scatter, _gather)


def _sum_output(module, args, output):
    dist.all_reduce(output)
    return output


def add_collectives(model, sequence_parallel):
    """Add the collectives to a Llama with sharded weights. Without ``sequence_parallel`` it has no backward."""
    for layer in model.layers:
        for module in (layer.attention, layer.feed_forward):
            if sequence_parallel:
                module.register_forward_pre_hook(_gather_input)
                module.register_forward_hook(_scatter_output)
            else:
                module.register_forward_hook(_sum_output)
