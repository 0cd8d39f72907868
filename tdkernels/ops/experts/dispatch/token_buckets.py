"""Which config an ep_dispatch, ep_combine or all_to_all runs with that was given none.

Ranks may have different numbers of tokens, so that none of them is what a config can be looked up by. What all ranks
know of a routing is how many tokens the rank stages that stages most. ``tokens_of`` makes of that the tokens of all
ranks which, routed evenly, would be as many. With max_tokens nobody waits for a routing: then they are those for which
max_tokens is enough, whatever the routing; or as many as max_tokens_per_rank allows.
"""

import functools
import math

import torch

from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.tunable_base import select
from tdkernels.ops.experts.dispatch.config import default_config

_UNEVEN = 0.2  # octaves by which the fullest rank is taken to have more than its share


def config_to_route(config, group, device):
    """The config of a call: that which it was given, or the default where there is no other; None: to be chosen."""
    if config is None and (group.size() == 1 or spans_nodes(group)):
        return default_config(device)
    return config


def choose_config(operator, shape, staged, group, x, quantized=False):
    """The config that the group has chosen for rows like x of a routing; collective at the first call with a problem.

    Args:
        shape: RoutingShape
        staged: tokens on the rank that stages the most, see ``Routing``
        quantized: whether they travel as codes with scales
    """
    experts, choices = shape.num_experts, shape.choices
    tokens, width, layout = _tokens_of(shape, staged), x.shape[1], _layout_of(operator, shape)
    are_codes = x.dtype.itemsize == 1  # which nothing is tuned for: what counts are the bytes

    def describe():
        fields = {
            "max_tokens_per_rank": shape.max_tokens_per_rank, "tokens": tokens, "width": width, "dtype": str(x.dtype),
            "k": choices, "num_experts": experts,
        }
        columns, scaled = width, quantized
        if are_codes:
            scaled, columns = operator == "ep_dispatch", width if operator == "ep_dispatch" else max(width // 2, 1)
        sizes = (tokens, columns, experts) if operator == "all_to_all" else (tokens, columns, experts, choices)
        return sizes, layout + "_fp8" * scaled, fields | {"quantize": scaled}

    call = tokens, width, experts, choices, layout, quantized
    dtype = torch.bfloat16 if are_codes else None
    return select(operator, x, group, call, describe, dtype).config


def _layout_of(operator, shape):
    if shape.max_tokens is None:
        return "exact"
    return "bounded" if operator != "ep_combine" and shape.max_tokens_per_rank is not None else "static"


def _tokens_of(shape, staged):
    if shape.max_tokens_per_rank is not None:
        return bucket(shape.world_size * shape.max_tokens_per_rank)
    return tokens_of(staged, shape.max_tokens, shape.world_size, shape.num_experts, shape.choices)


def crossing_share(world_size, num_experts, choices):
    """How likely a token of another rank has an expert here, if all experts are as likely."""
    elsewhere = num_experts - num_experts // world_size
    return 1.0 - math.comb(elsewhere, choices) / math.comb(num_experts, choices)


def sure_capacity(tokens, world_size, num_experts, choices):
    """The max_tokens that are enough for so many tokens of all ranks, whatever the routing."""
    return tokens * min(choices, num_experts // world_size)


def with_capacity(shape):
    """A RoutingShape with the max_tokens that are enough for its max_tokens_per_rank, if only the latter is given."""
    if shape.max_tokens_per_rank is None or shape.max_tokens is not None:
        return shape
    tokens = shape.world_size * shape.max_tokens_per_rank
    return shape._replace(max_tokens=sure_capacity(tokens, shape.world_size, shape.num_experts, shape.choices))


@functools.lru_cache(maxsize=4096)
def tokens_of(staged, max_tokens, world_size, num_experts, choices):
    """About how many tokens all ranks have, a power of two: the same on all of them."""
    if max_tokens is not None:
        return bucket(max(max_tokens // sure_capacity(1, world_size, num_experts, choices), 1))
    each = (world_size - 1) * crossing_share(world_size, num_experts, choices) / world_size
    return 1 << max(math.ceil(math.log2(max(staged, 1) / each) - _UNEVEN), 0)


def bucket(tokens):
    """The power of two that tokens go by, that many or the next."""
    return 1 << (tokens - 1).bit_length()
