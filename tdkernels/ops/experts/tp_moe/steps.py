"""Both halves of tensor-parallel experts and their gradients, by our kernels or by torch."""

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from tdkernels.autotune.selection import DEFAULT
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.collectives.op import all_gather, reduce_scatter
from tdkernels.ops.common.config import as_argument
from tdkernels.ops.common.multinode import torch_across_nodes
from tdkernels.ops.common.torch_collectives import all_gather_rows, reduce_scatter_rows
from tdkernels.ops.common.tunable_base import select
from tdkernels.ops.experts.grouped_gemm import launch as grouped_gemm_launch
from tdkernels.ops.experts.grouped_gemm.dispatch import by_torch, swiglu_ref, weight_gradient
from tdkernels.ops.experts.tp_moe import config as tp_moe_config
from tdkernels.ops.experts.tp_moe import launch_ag_gemm, launch_gemm_rs
from tdkernels.ops.experts.tp_moe.config import MoeTpConfig
from tdkernels.ops.experts.tp_moe.routing import route
from tdkernels.ops.experts.tp_moe.stages import best_stages
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call

# ---- configs and the routing ----


class Configs(NamedTuple):
    """The configs of a call: of each half, with tiles, and of the backward.

    ``backward``: None for what ``config_of_gradient`` finds for each product.
    """

    first: MoeTpConfig | None
    second: MoeTpConfig | None
    backward: MoeTpConfig | None


def choose_configs(operator, config, sizes, layout, w, group, fields, first=None, second=None):
    """The Configs of a call: by the config that it was given, else by what the group has chosen.

    Args:
        fields: what must be the same on all ranks
        first, second: the weights of the halves, if the call has them
    """
    config, backward = _choose_config(operator, config, sizes, layout, w, group, fields)
    each = [None if one is None else _complete(config, sizes[0], sizes[-1], one) for one in (first, second)]
    return Configs(*each, backward)


def _choose_config(operator, config, sizes, layout, w, group, fields):
    """(the config of a call or None for the default, that of its backward)"""
    config = torch_across_nodes(config, MoeTpConfig, group)
    if config is None and group.size() > 1 and sizes[0]:
        call = sizes, layout, *fields.values()
        choice = select(operator, w, group, call, lambda: (sizes, layout, fields))
        best = None if choice.source == DEFAULT else choice.config  # each half has a default of its own
        # What is best forwards says nothing of the gradients, but that torch is the better one: they are looked up.
        return best, best if _is_torch(best) else None
    group_state(group).check_consensus_cached(operator, {**fields, "config": as_argument(config)})
    return config, config


def config_of_gradient(operator, back, routing, config):
    """The config of a gradient's product with ``back``: the backward's, else what the group has chosen; collective.

    It says nothing of chunks and stages: these are the routing's, with which the launches begin.

    Args:
        operator: the half whose kernel it is, "moe_gemm_rs" or "moe_ag_gemm", for the gradient of the other one
        back: its weight, [E, N, K] of this rank
    """
    group, ranks, (experts, n, k) = routing.group, routing.world_size, back.shape
    if config is None and ranks > 1:
        sums = operator == "moe_gemm_rs"
        n, k = (n, ranks * k) if sums else (ranks * n, k)
        sizes = ranks * routing.tokens, n, k, experts, routing.num_choices
        fields = {
            "backward of": "moe_ag_gemm" if sums else "moe_gemm_rs", "M/W": routing.tokens, "k": routing.num_choices,
            "w": tuple(back.shape), "dtype": str(back.dtype),
        }
        config = select(operator, back, group, (sizes, *fields.values()), lambda: (sizes, "kn", fields)).config
    return _config(config, routing, back)


def routing_of(operator, topk_ids, w, group, config):
    """The MoeRouting of this rank's ids for experts w, as a config says or the default does."""
    tokens, choices = topk_ids.shape
    config = _complete(config, group.size() * tokens, choices, w)
    stages = config.stages or best_stages(group.size(), tokens, choices, *w.shape, w.dtype, w.device)
    return route(operator, topk_ids, w.shape[0], group, config.chunk_rows, config.tiles.block_m, stages)


def first_fields(x, topk_ids, w, activation):
    """What must be the same on all ranks. All have as many tokens, or the rest would not fit together."""
    return {
        "M/W": x.shape[0], "k": topk_ids.shape[1], "H": x.shape[1], "w": tuple(w.shape), "dtype": str(x.dtype),
        "activation": activation,
    }


def tp_moe_configs(x, topk_ids, w_gate_up, w_down, activation, group, config):
    """The Configs of a tp_moe."""
    (tokens, choices), ranks = topk_ids.shape, group.size()
    sizes = ranks * tokens, x.shape[1], ranks * w_down.shape[2], w_down.shape[0], choices
    fields = first_fields(x, topk_ids, w_gate_up, activation)
    return choose_configs("tp_moe", config, sizes, activation or "none", w_down, group, fields, w_gate_up, w_down)


def _complete(config, tokens, choices, w):
    """The config of a product with w, of all ranks' ``tokens`` of so many ``choices``."""
    if config is not None and config.tiles is not None:
        return config
    default = tp_moe_config.default_config(tokens, choices, w.shape[0], w.shape[1], w.dtype, w.device)
    return with_tiles(config, default)


def with_tiles(config, default):
    """The config with the default's tiles; the default if there is none."""
    return default if config is None else replace(config, tiles=default.tiles)


def _config(config, routing, w):
    """The config of a product with w, of the tokens of a routing."""
    return _complete(config, routing.world_size * routing.tokens, routing.num_choices, w)


def _is_torch(config):
    return config is not None and config.method == "torch"


# ---- the halves ----


def _all_rows(x, routing):
    """Every row's token by a plain all-gather."""
    full = all_gather_rows(x, routing.group)
    return full[torch.div(routing.choices, routing.num_choices, rounding_mode="floor")]


def _by_token(rows, routing, weights):
    """This rank's tokens' sums of weighted rows, over ranks by a plain reduce-scatter."""
    choices = rows[routing.rows.clamp(min=0)].float()
    if weights is not None:
        choices = choices * weights.unsqueeze(-1)
    choices = torch.where((routing.rows >= 0).unsqueeze(-1), choices, 0.0)
    return reduce_scatter_rows(choices.sum(1).to(rows.dtype), routing.group)


def first_forward(x, w, routing, activation, config, keep):
    """(h, what SwiGLU was made of if there is one and a gradient is to ``keep`` it, or None)."""
    if _is_torch(config):
        pre = by_torch(_all_rows(x, routing), w, routing.splits)
        return swiglu_ref(pre, activation), pre if keep and activation else None
    launched = launch_ag_gemm.launch(x, w, routing, config, activation, keep)
    return launched.y, launched.pre


@whole_call
def gate_up_backward(dh, x, w, pre, routing, activation, config, need_dx, need_dw):
    """(dx, dw), None for what nobody needs.

    Args:
        config: of all of it; None to look up that of dx, whose method torch is then for dx alone
    """
    dx = dw = gather = None
    back = w.transpose(1, 2)
    # Before anything is on its way: it may tune.
    of_dx = config_of_gradient("moe_gemm_rs", back, routing, config) if need_dx else None
    dpre = grouped_gemm_launch.swiglu_backward(dh, pre, routing.splits, activation) if activation else dh
    gathers = need_dw and not _is_torch(config)
    if gathers and routing.world_size > 1:
        gather = AsyncAllGather.start("moe_ag_gemm backward", x, routing.group)
    if need_dx:
        dx = sums_by_token(dpre, back, routing, None, of_dx)
    if need_dw:
        rows = _gathered_rows(gather, x, routing) if gathers else _all_rows(x, routing)
        dw = weight_gradient(dpre, rows, routing.splits, w.shape[0])
    return dx, dw


def second_forward(h, w, topk_weights, routing, config):
    """(y, the weights [M, k] of all ranks' choices)."""
    weights = topk_weights.float().contiguous()
    weights = all_gather(weights, group=routing.group) if routing.world_size > 1 else weights
    return sums_by_token(h, w, routing, weights, config), weights


def sums_by_token(rows, w, routing, weights, config):
    """[M / W, N]: our tokens' sums, over choices and ranks, of weight * rows @ w[expert].T; weights None for 1."""
    if _is_torch(config):
        return _by_token(by_torch(rows, w, routing.splits), routing, weights)
    return launch_gemm_rs.launch(rows, w, routing, weights, config)


@whole_call
def down_backward(dy, h, w, weights, routing, config, need_dw, need_dweights):
    """(dh, dw, dtopk_weights in fp32), None for what nobody needs; dh is made at any rate.

    Args:
        config: of all of it; None to look up that of dh, whose method torch is then for dh alone
    """
    back = w.transpose(1, 2)
    made = gradients_of_rows(dy, h, back, weights, routing, config_of_gradient("moe_ag_gemm", back, routing, config))
    dw = dweights = None
    if need_dw:
        dw = weight_gradient(made.rows, made.weighted, routing.splits, w.shape[0])
    if need_dweights:
        dweights = _summed_over_ranks(made.dots.sum(0), routing, _is_torch(config))
    return made.dh, dw, dweights


@dataclass
class GradientsOfRows:
    """The gradient of rows h [R, N], and what those of w and of the choices' weights are made of.

    Attributes:
        dh, weighted: [R, N]: the gradient; the rows h times their weights
        rows: [R, K]: the tokens' gradients by rows
        dots: [·, R] fp32: parts of the product of each row of h with its gradient, weights aside
    """

    dh: torch.Tensor
    weighted: torch.Tensor
    rows: torch.Tensor
    dots: torch.Tensor


def gradients_of_rows(dy, h, back, weights, routing, config):
    """The GradientsOfRows for tokens' gradients dy [M / W, K], by the weight back [E, N, K]; weights [M, k] of all."""
    if _is_torch(config):
        return _torch_gradients(dy, h, back, weights, routing)
    gradients = launch_ag_gemm.Gradients(h.contiguous(), weights)
    launched = launch_ag_gemm.launch(dy, back, routing, config, gradients=gradients)
    return GradientsOfRows(launched.y, gradients.weighted, launched.rows, gradients.dots)


def _gathered_rows(gather, x, routing):
    """The tokens of all ranks by rows, [R, K]."""
    if gather is None:
        return x.index_select(0, routing.slots)
    gather.finish()
    rows = gather.storage.view(-1, x.shape[1]).index_select(0, routing.slots)
    gather.close()
    return rows


def _summed_over_ranks(dots, routing, plainly):
    """The gradients [M / W, k] of this rank's weights, of each row's part here; ``plainly``: by torch's collective."""
    choices = torch.where(routing.rows >= 0, dots[routing.rows.clamp(min=0)], 0.0)
    if plainly:
        return reduce_scatter_rows(choices, routing.group)
    return reduce_scatter(choices, group=routing.group) if routing.world_size > 1 else choices


def _torch_gradients(dy, h, back, weights, routing):
    """``gradients_of_rows`` by a plain all-gather and torch's grouped product."""
    rows = _all_rows(dy, routing)
    row_weights = weights.view(-1)[routing.choices].unsqueeze(-1)
    unweighted, h_wide = by_torch(rows, back, routing.splits).float(), h.float()
    dh, weighted = ((wide * row_weights).to(h.dtype) for wide in (unweighted, h_wide))
    return GradientsOfRows(dh, weighted, rows, (unweighted * h_wide).sum(1).unsqueeze(0))
