"""Steps of tp_moe, forward and backward, by the overlapping kernels or by torch, and the selection of their configs.

"First" is the gate-up stage (``moe_ag_gemm``), "second" the down stage (``moe_gemm_rs``).
"""

from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from tdkernels.autotune.invariance import check_invariant, is_batch_invariant, reject_invariant, reject_max_ranks
from tdkernels.autotune.selection import DEFAULT
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.collectives.op import all_gather, reduce_scatter
from tdkernels.ops.common.config import as_argument
from tdkernels.ops.common.multinode import spans_nodes, torch_across_nodes
from tdkernels.ops.common.torch_collectives import all_gather_rows, reduce_scatter_rows
from tdkernels.ops.common.tunable_base import select
from tdkernels.ops.experts.grouped_gemm.dispatch import by_torch, product_by_torch, weight_gradient
from tdkernels.ops.experts.grouped_gemm.launch_weighted_rows import weighted_gradients
from tdkernels.ops.experts.tp_moe import config as tp_moe_config
from tdkernels.ops.experts.tp_moe import launch_ag_gemm, launch_gemm_rs, launch_unfused
from tdkernels.ops.experts.tp_moe.config import MoeTpConfig
from tdkernels.ops.experts.tp_moe.routing import route
from tdkernels.ops.experts.tp_moe.stages import best_stages
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.experts.tp_moe.routing import MoeRouting

# ---- configs and the routing ----


class Configs(NamedTuple):
    """Configs of a call.

    Attributes:
        first: Config of the gate-up stage, with tiles.
        second: Config of the down stage, with tiles.
        backward: Config of the backward. None: ``config_of_gradient`` selects one for each GEMM.
    """

    first: MoeTpConfig | None
    second: MoeTpConfig | None
    backward: MoeTpConfig | None


def choose_configs(
    operator: str, config: MoeTpConfig | None, sizes: tuple[int, ...], layout: str, w: torch.Tensor,
    group: "dist.ProcessGroup", fields: dict[str, Any], first: torch.Tensor | None = None,
    second: torch.Tensor | None = None,
) -> Configs:
    """Return the Configs of a call: from the config it was given, or else as selected for the group.

    Args:
        sizes: Sizes of the tuning problem, see ``tuning``.
        layout: Layout of the tuning problem.
        w: The operand that gives device and dtype.
        fields: Properties of the call that must be the same on all ranks.
        first: Weight of the gate-up stage, if the call has one.
        second: Weight of the down stage, if the call has one.
    """
    config, backward = _choose_config(operator, config, sizes, layout, w, group, fields)
    of_first = None if first is None else _complete(config, sizes[0], sizes[-1], first, fields["activation"])
    return Configs(of_first, None if second is None else _complete(config, sizes[0], sizes[-1], second), backward)


def _choose_config(operator, config, sizes, layout, w, group, fields):
    """Return (config of the forward or None for the default, config of the backward or None)."""
    reject_max_ranks(operator)
    if spans_nodes(group):
        reject_invariant(operator, "a group on several nodes")
    check_invariant(operator, config)
    config = torch_across_nodes(config, MoeTpConfig, group)
    if config is None and group.size() > 1 and sizes[0]:
        call = sizes, layout, *fields.values()
        choice = select(operator, w, group, call, lambda: (sizes, layout, fields))
        best = None if choice.source == DEFAULT else choice.config  # each stage has its own default
        # Tuned tiles of the forward say nothing about the gradients, which select their own config. Only method "torch"
        # carries over.
        return best, best if _is_torch(best) else None
    group_state(group).check_consensus_cached(operator, {**fields, "config": as_argument(config)})
    return config, config


def config_of_gradient(
    operator: str, back: torch.Tensor, routing: "MoeRouting", config: MoeTpConfig | None,
) -> MoeTpConfig:
    """Return the config of a dgrad: the config of the backward, or else as selected for the group. Collective.

    Its chunks and stages are not used. Launches take these from the routing.

    Args:
        operator: The operator whose kernel computes the gradient, "moe_gemm_rs" or "moe_ag_gemm". It is the gradient of
            the other one.
        back: The weight of that GEMM, [E, N, K] of this rank.
        config: Config of the backward, or None.
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
    return _complete(config, routing.world_size * routing.tokens, routing.num_choices, back, is_kn=True)


def routing_of(
    operator: str, topk_ids: torch.Tensor, w: torch.Tensor, group: "dist.ProcessGroup", config: Any,
    topk_weights: torch.Tensor | None = None, scale_x: torch.Tensor | None = None,
) -> "MoeRouting":
    """Return the MoeRouting of this rank's ids for experts w, with the chunks and stages of a MoeTpConfig or None.

    It includes the routing weights and the scales of tokens of all ranks if those of this rank are given.
    """
    tokens, choices = topk_ids.shape
    config = _complete(config, group.size() * tokens, choices, w)
    stages = config.stages or best_stages(group.size(), tokens, choices, *w.shape, w.dtype, w.device)
    sizes = config.chunk_rows, config.tiles.block_m, stages
    return route(operator, topk_ids, w.shape[0], group, *sizes, topk_weights, scale_x)


def first_fields(
    x: torch.Tensor, topk_ids: torch.Tensor, w: torch.Tensor, activation: str | None,
) -> dict[str, Any]:
    """Return the properties of a call that must be the same on all ranks, including the number of tokens per rank."""
    return {
        "M/W": x.shape[0], "k": topk_ids.shape[1], "H": x.shape[1], "w": tuple(w.shape), "dtype": str(x.dtype),
        "activation": activation,
    }


def tp_moe_configs(
    x: torch.Tensor, topk_ids: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor, activation: str | None,
    group: "dist.ProcessGroup", config: MoeTpConfig | None,
) -> Configs:
    """Return the Configs of a call of tp_moe."""
    (tokens, choices), ranks = topk_ids.shape, group.size()
    sizes = ranks * tokens, x.shape[1], ranks * w_down.shape[2], w_down.shape[0], choices
    fields = first_fields(x, topk_ids, w_gate_up, activation)
    return choose_configs("tp_moe", config, sizes, activation or "none", w_down, group, fields, w_gate_up, w_down)


def _complete(config, tokens, choices, w, activation=None, is_kn=False):
    """Return the config with tiles for a GEMM with w. All ranks together have ``tokens`` tokens.

    ``is_kn``: whether weights are stored as [K, N]. It does not follow from the strides of w, which may differ between
    ranks. The config may not.
    """
    if is_batch_invariant():
        return tp_moe_config.completed_invariant(config, w.dtype, w.device)
    sizes = tokens, choices, *w.shape, w.dtype, w.device
    return tp_moe_config.completed(config, *sizes, activation=activation, is_kn=is_kn)


def _is_torch(config):
    return config is not None and config.method == "torch"


# ---- forward and backward of both stages ----


def _all_rows(x, routing):
    """Return the token of every row, [R, K], gathered by torch's all-gather."""
    return rows_of_tokens(all_gather_rows(x, routing.group), routing)


def rows_of_tokens(full: torch.Tensor, routing: "MoeRouting") -> torch.Tensor:
    """Return the entry of ``full`` [M, ·], a tensor with the tokens of all ranks, for every row: [R, ·]."""
    return full.index_select(0, torch.div(routing.choices, routing.num_choices, rounding_mode="floor"))


def sums_of_rows(rows: torch.Tensor, routing: "MoeRouting", weights: torch.Tensor | None) -> torch.Tensor:
    """Return the weighted sums of this rank's tokens, summed over ranks by torch's reduce-scatter."""
    return reduce_scatter_rows(launch_unfused.sums(rows, routing.rows, weights), routing.group)


def first_forward(
    x: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", activation: str | None, config: MoeTpConfig | None,
    keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Run the gate-up stage, and return (h, pre).

    ``pre`` is the input of SwiGLU if there is an activation and ``keep`` is true, else None. The backward needs it.
    """
    if _is_torch(config):
        return product_by_torch(_all_rows(x, routing), w, routing.splits, activation, keep)
    launched = launch_ag_gemm.launch(x, w, routing, config, activation, keep)
    return launched.y, launched.pre


@whole_call
def gate_up_backward(
    dpre: torch.Tensor, x: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", config: MoeTpConfig | None,
    need_dx: bool, need_dw: bool,
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients (dx, dw) of the gate-up stage, each None if it is not needed.

    Args:
        dpre: Gradient of the products, before an activation.
        config: Config of the whole backward. None selects a config for dx; a selected method "torch" then applies to
            dx only.
    """
    dx = dw = gather = None
    back = w.transpose(1, 2)
    # This may tune, so it comes before any communication is started.
    of_dx = config_of_gradient("moe_gemm_rs", back, routing, config) if need_dx else None
    gathers = need_dw and not _is_torch(config)
    if gathers and routing.world_size > 1:
        gather = AsyncAllGather.start("moe_ag_gemm backward", x, routing.group)
    if need_dx:
        dx = sums_by_token(dpre, back, routing, None, of_dx)
    if need_dw:
        rows = _gathered_rows(gather, x, routing) if gathers else _all_rows(x, routing)
        dw = weight_gradient(dpre, rows, routing.splits, w.shape[0])
    return dx, dw


def second_forward(
    h: torch.Tensor, w: torch.Tensor, topk_weights: torch.Tensor, routing: "MoeRouting", config: MoeTpConfig | None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Run the down stage, and return (y, the routing weights [M, k] of all ranks in fp32)."""
    weights = weights_of_ranks(topk_weights, routing)
    return sums_by_token(h, w, routing, weights, config), weights


def weights_of_ranks(topk_weights: torch.Tensor, routing: "MoeRouting") -> torch.Tensor:
    """Return the routing weights [M, k] of all ranks in fp32."""
    if routing.weights is not None:
        return routing.weights
    weights = topk_weights.float().contiguous()
    return all_gather(weights, group=routing.group) if routing.world_size > 1 else weights


def sums_by_token(
    rows: torch.Tensor, w: torch.Tensor, routing: "MoeRouting", weights: torch.Tensor | None,
    config: MoeTpConfig | None,
) -> torch.Tensor:
    """Return the sums [M / W, N] of this rank's tokens: of weight * rows @ w[expert].T over assignments and ranks.

    ``weights`` are the routing weights [M, k] of all ranks, or None for 1.
    """
    if _is_torch(config):
        return sums_of_rows(by_torch(rows, w, routing.splits), routing, weights)
    return launch_gemm_rs.launch(rows, w, routing, weights, config)


@whole_call
def down_backward(
    dy: torch.Tensor, inner: torch.Tensor, w: torch.Tensor, weights: torch.Tensor, routing: "MoeRouting",
    activation: str | None, config: MoeTpConfig | None, need_dw: bool, need_dweights: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]:
    """Return the gradients of the down stage: (of ``inner``, of w, of the routing weights in fp32).

    The first one is always computed. The others are None if they are not needed.

    Args:
        dy: Gradient of y.
        inner: The input h of the stage, or with an activation its input, from which h is computed again.
        weights: Routing weights [M, k] of all ranks.
        activation: The activation between ``inner`` and h, or None.
        config: Config of the whole backward. None selects a config for the GEMM with dy; a selected method "torch" then
            applies to this GEMM only.
    """
    back = w.transpose(1, 2)
    of_dy = config_of_gradient("moe_ag_gemm", back, routing, config)
    unweighted, rows = product_of_gradients(dy, back, routing, of_dy, keep_rows=need_dw)
    dinner, weighted, dweights = weighted_gradients(
        unweighted, inner, routing.splits, routing.choices, weights, activation
    )
    dw = weight_gradient(rows, weighted, routing.splits, w.shape[0]) if need_dw else None  # type: ignore[arg-type]
    return dinner, dw, _summed_over_ranks(dweights, routing, _is_torch(config)) if need_dweights else None


def product_of_gradients(
    dy: torch.Tensor, back: torch.Tensor, routing: "MoeRouting", config: MoeTpConfig | None, keep_rows: bool = True,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Return (product [R, N] of the gradients of rows with the weights of their experts, gradients of rows [R, K]).

    The gradient of a row is that of its token, without the routing weight.

    Args:
        dy: Gradients [M / W, K] of this rank's tokens.
        back: The transposed weight [E, N, K] of the down stage.
        keep_rows: Whether the gradients of rows are needed. Without it they may be None.
    """
    if _is_torch(config):
        rows = _all_rows(dy, routing)
        return by_torch(rows, back, routing.splits), rows
    launched = launch_ag_gemm.launch(dy, back, routing, config, keep_rows=keep_rows)
    return launched.y, launched.rows


@whole_call
def layer_backward(
    dy: torch.Tensor, x: torch.Tensor, inner: torch.Tensor, weights: torch.Tensor, w_gate_up: torch.Tensor,
    w_down: torch.Tensor, routing: "MoeRouting", activation: str | None, config: MoeTpConfig | None,
    needs: tuple[bool, bool, bool, bool],
) -> tuple[torch.Tensor | None, ...]:
    """Return the gradients (dx, dtopk_weights in fp32, dw_gate_up, dw_down) of tp_moe, each None if it is not needed.

    Args:
        inner: As for ``down_backward``.
    """
    need_dx, need_dtopk, need_dgate_up, need_ddown = needs
    dpre, ddown, dtopk = down_backward(dy, inner, w_down, weights, routing, activation, config, need_ddown, need_dtopk)
    dx, dgate_up = gate_up_backward(dpre, x, w_gate_up, routing, config, need_dx, need_dgate_up)
    return dx, dtopk, dgate_up, ddown


def _gathered_rows(gather, x, routing):
    """Return the token of every row, [R, K], from an AsyncAllGather, or from x if there is one rank."""
    if gather is None:
        return x.index_select(0, routing.slots)
    gather.finish()
    rows = gather.storage.view(-1, x.shape[1]).index_select(0, routing.slots)
    gather.close()
    return rows


def _summed_over_ranks(dweights, routing, use_torch):
    """Reduce-scatter the contributions [M, k], and return the gradients [M / W, k] of this rank's routing weights."""
    if use_torch:
        return reduce_scatter_rows(dweights, routing.group)
    return reduce_scatter(dweights, group=routing.group) if routing.world_size > 1 else dweights
