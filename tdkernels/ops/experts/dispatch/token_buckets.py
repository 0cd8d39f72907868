"""Config selection for calls of ep_dispatch, ep_combine and all_to_all without a config.

The tuning tables are indexed by the number of tokens of all ranks. Ranks may have different numbers of tokens, so all
ranks must derive that number from something that they all know:

- Without max_tokens: the maximum number of tokens that any rank stages. ``tokens_of`` returns the number of tokens that
  would give this maximum with even routing.
- With max_tokens, where the host does not know the routing: the number of tokens for which max_tokens suffices with
  any routing.
- With max_tokens_per_rank: the number of tokens that it allows.
"""

import functools
import math
from typing import TYPE_CHECKING

import torch

from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.tunable_base import select
from tdkernels.ops.experts.dispatch.config import default_config

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.experts.dispatch.config import EpConfig
    from tdkernels.ops.experts.dispatch.request import RoutingShape

_IMBALANCE = 0.2  # assumed excess of the fullest rank over its even share, in octaves


def config_to_route(
    config: "EpConfig | None", group: "dist.ProcessGroup", device: torch.device
) -> "EpConfig | None":
    """Return the given config, the default if there is no other for the group, or None if one must be selected."""
    if config is None and (group.size() == 1 or spans_nodes(group)):
        return default_config(device)
    return config


def choose_config(
    operator: str, shape: "RoutingShape", staged: int, group: "dist.ProcessGroup", x: torch.Tensor,
    quantized: bool = False,
) -> "EpConfig":
    """Select the config for rows like x, the same on all ranks. The first call with a problem is collective.

    Args:
        operator: Name of the operator.
        shape: Sizes of the routing.
        staged: Number of tokens on the rank that stages the most, see ``Routing``.
        group: The group.
        x: Tensor with the width, dtype and device of the rows.
        quantized: Whether rows are sent as float8_e4m3fn with scales.
    """
    experts, choices = shape.num_experts, shape.choices
    tokens, width, layout = problem_tokens(shape, staged), x.shape[1], _layout_of(operator, shape)
    # No table exists for 1-byte dtypes. ep_dispatch uses the "_fp8" layout, others use bf16 with half the width.
    are_codes = x.dtype.itemsize == 1

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


def problem_tokens(shape: "RoutingShape", staged: int) -> int:
    """Return the number of tokens of the tuning problem of a routing. ``staged``: as for ``choose_config``"""
    if shape.max_tokens_per_rank is not None:
        return bucket(shape.world_size * shape.max_tokens_per_rank)
    return tokens_of(staged, shape.max_tokens, shape.world_size, shape.num_experts, shape.choices)


def crossing_share(world_size: int, num_experts: int, choices: int) -> float:
    """Return the probability that a token has an expert on a given rank, if all experts are equally likely."""
    elsewhere = num_experts - num_experts // world_size
    return 1.0 - math.comb(elsewhere, choices) / math.comb(num_experts, choices)


def sure_capacity(tokens: int, world_size: int, num_experts: int, choices: int) -> int:
    """Return the max_tokens that suffices for ``tokens`` tokens of all ranks with any routing."""
    return tokens * min(choices, num_experts // world_size)


def with_capacity(shape: "RoutingShape") -> "RoutingShape":
    """Return the shape with max_tokens set to suffice for max_tokens_per_rank, if only the latter is given."""
    if shape.max_tokens_per_rank is None or shape.max_tokens is not None:
        return shape
    tokens = shape.world_size * shape.max_tokens_per_rank
    return shape._replace(max_tokens=sure_capacity(tokens, shape.world_size, shape.num_experts, shape.choices))


@functools.lru_cache(maxsize=4096)
def tokens_of(staged: int, max_tokens: int | None, world_size: int, num_experts: int, choices: int) -> int:
    """Estimate the tokens of all ranks, as a power of two. The result is the same on all ranks."""
    if max_tokens is not None:
        return bucket(max(max_tokens // sure_capacity(1, world_size, num_experts, choices), 1))
    if world_size == 1:  # it stages nothing
        return 1
    each = (world_size - 1) * crossing_share(world_size, num_experts, choices) / world_size
    return 1 << max(math.ceil(math.log2(max(staged, 1) / each) - _IMBALANCE), 0)


def bucket(tokens: int) -> int:
    """Return the smallest power of two that is at least ``tokens``."""
    return 1 << (tokens - 1).bit_length()
