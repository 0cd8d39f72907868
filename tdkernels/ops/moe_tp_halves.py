"""Both halves of tensor-parallel experts and their gradients, by our kernels or by torch."""

from dataclasses import replace

import torch

from tdkernels.autotune import operator as tunables
from tdkernels.autotune.choose import DEFAULT, choose
from tdkernels.ops import group_gemm_kernel as grouped
from tdkernels.ops import moe_ag_gemm_kernel as ag
from tdkernels.ops import moe_gemm_rs_kernel as rs
from tdkernels.ops._collectives import all_gather_rows, reduce_scatter_rows
from tdkernels.ops._config import as_argument
from tdkernels.ops._gather import Gather
from tdkernels.ops._nodes import torch_across_nodes
from tdkernels.ops._tuning import problem_of
from tdkernels.ops.collectives import all_gather, reduce_scatter
from tdkernels.ops.group_gemm_ways import by_torch, swiglu_ref
from tdkernels.ops.moe_ag_gemm_kernel import MoeTpConfig
from tdkernels.ops.moe_routing import route
from tdkernels.ops.moe_stages import best_stages
from tdkernels.symm.group import group_state

# ---- configs and the routing ----


def choose_configs(operator, config, sizes, layout, w, group, fields):
    """(the config of a call, that of its backward): the one that it was given, else what the group has chosen.

    Args:     fields: what must be the same on all ranks
    """
    config = torch_across_nodes(config, MoeTpConfig, group)
    if config is None and group.size() > 1 and sizes[0]:
        problem = problem_of(operator, sizes, layout, w, group)
        choice = choose(tunables.tunable(operator), problem, w.device, group, fields)
        best = None if choice.source == DEFAULT else choice.config  # each half has a default of its own
        # What is best forwards says nothing of the gradients, but that torch is the better one.
        return best, best if _is_torch(best) else None
    group_state(group).agree_once(operator, {**fields, "config": as_argument(config)})
    return config, config


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
    }  # fmt: skip


def tp_moe_configs(x, topk_ids, w_gate_up, w_down, activation, group, config):
    """The two configs of a tp_moe."""
    (tokens, choices), ranks = topk_ids.shape, group.size()
    sizes = ranks * tokens, x.shape[1], ranks * w_down.shape[2], w_down.shape[0], choices
    fields = first_fields(x, topk_ids, w_gate_up, activation)
    return choose_configs("tp_moe", config, sizes, activation or "none", w_down, group, fields)


def _complete(config, tokens, choices, w):
    """The config of a product with w, of all ranks' ``tokens`` of so many ``choices``."""
    if config is not None and config.tiles is not None:
        return config
    default = ag.default_config(tokens, choices, w.shape[0], w.shape[1], w.dtype, w.device)
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
    launched = ag.launch(x, w, routing, _config(config, routing, w), activation, keep)
    return launched.y, launched.pre


def first_backward(dh, x, w, pre, routing, activation, config, need_dx, need_dw):
    """(dx, dw), None for what nobody needs."""
    dpre = grouped.swiglu_backward(dh, pre, routing.splits, activation) if activation else dh
    dx = dw = None
    if _is_torch(config):
        if need_dw:
            dw = grouped.weight_gradient(dpre, _all_rows(x, routing), routing.splits, w.shape[0])
        if need_dx:
            dx = _by_token(by_torch(dpre, w.transpose(1, 2), routing.splits), routing, None)
        return dx, dw
    gather = None
    if need_dw and routing.world_size > 1:
        gather = Gather.start("moe_ag_gemm backward", x, routing.group)
    if need_dx:
        back = w.transpose(1, 2)
        dx = rs.launch(dpre, back, routing, None, _config(config, routing, back))
    if need_dw:
        rows = _gathered_rows(gather, x, routing)
        dw = grouped.weight_gradient(dpre, rows, routing.splits, w.shape[0])
    return dx, dw


def second_forward(h, w, topk_weights, routing, config):
    """(y, the weights [M, k] of all ranks' choices)."""
    weights = topk_weights.float().contiguous()
    weights = all_gather(weights, group=routing.group) if routing.world_size > 1 else weights
    if _is_torch(config):
        return _by_token(by_torch(h, w, routing.splits), routing, weights), weights
    return rs.launch(h, w, routing, weights, _config(config, routing, w)), weights


def second_backward(dy, h, w, weights, routing, config, need_dw, need_dweights):
    """(dh, dw, dtopk_weights in fp32), None for what nobody needs; dh is made at any rate."""
    if _is_torch(config):
        return _torch_gradients(dy, h, w, weights, routing)
    back = w.transpose(1, 2)
    gradients = ag.Gradients(h.contiguous(), weights)
    launched = ag.launch(dy, back, routing, _config(config, routing, back), gradients=gradients)
    dw = dweights = None
    if need_dw:
        dw = grouped.weight_gradient(launched.rows, gradients.weighted, routing.splits, w.shape[0])
    if need_dweights:
        dweights = _summed_over_ranks(gradients.dots.sum(0), routing)
    return launched.y, dw, dweights


def _gathered_rows(gather, x, routing):
    """The tokens of all ranks by rows, [R, K]."""
    if gather is None:
        return x.index_select(0, routing.slots)
    gather.finish()
    rows = gather.storage.view(-1, x.shape[1]).index_select(0, routing.slots)
    gather.close()
    return rows


def _summed_over_ranks(dots, routing):
    """The gradients [M / W, k] of this rank's weights, of each row's part here."""
    choices = torch.where(routing.rows >= 0, dots[routing.rows.clamp(min=0)], 0.0)
    return reduce_scatter(choices, group=routing.group) if routing.world_size > 1 else choices


def _torch_gradients(dy, h, w, weights, routing):
    """(dh, dw, dtopk_weights) by plain collectives and torch's grouped product."""
    of_rows = _all_rows(dy, routing)
    row_weights = weights.view(-1)[routing.choices].unsqueeze(-1)
    unweighted = by_torch(of_rows, w.transpose(1, 2), routing.splits)
    dots = (unweighted.float() * h.float()).sum(1)
    dh = (unweighted.float() * row_weights).to(h.dtype)
    dw = grouped.weight_gradient(of_rows, (h.float() * row_weights).to(h.dtype), routing.splits, w.shape[0])
    choices = torch.where(routing.rows >= 0, dots[routing.rows.clamp(min=0)], 0.0)
    return dh, dw, reduce_scatter_rows(choices, routing.group)
