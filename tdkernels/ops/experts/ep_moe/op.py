"""ep_moe: a layer of experts that are divided between the ranks, from each rank's tokens to their weighted sums.

    x [T, H], topk_ids [T, k], topk_weights [T, k]  ->  y [T, H]
    y[t] = the sum over j of topk_weights[t, j] * expert(topk_ids[t, j])(x[t])
    expert(e)(x) = swiglu(x @ w_gate_up[e].T) @ w_down[e].T

Rank r has experts r * E / W to (r + 1) * E / W - 1. T may be another on each rank, and 0. Schedule: three steps, one
after the other. ``receive`` brings the tokens to the ranks of their experts (``ep_dispatch``), ``experts`` is two
products by group (``group_gemm``) with SwiGLU in between, ``ep_combine`` weighs the rows and adds them up at home. The
host waits for nothing but the number of rows, and with max_tokens or max_tokens_per_rank not for that either.

Backward: that of the three, in turn. It sends two things, the gradient of y to the experts and that of x back.

With ``EpMoeConfig(method="fused")`` the products overlap what is sent, forward and backward: ``ep_moe_fused``.

Example:
    weights, ids = torch.topk(torch.softmax(x @ router, -1), 8)
    y = tdkernels.ep_moe(x, ids, weights, w_gate_up, w_down, num_experts=64)
"""

import torch

from tdkernels.ops.common.config import as_argument, check_config
from tdkernels.ops.common.validation import check_tensor
from tdkernels.ops.experts.dispatch.op import ep_combine, ep_combine_ref, ep_dispatch_ref
from tdkernels.ops.experts.dispatch.request import DispatchRequest
from tdkernels.ops.experts.dispatch.token_buckets import with_capacity
from tdkernels.ops.experts.dispatch.validation import check_dispatch, check_most_tokens
from tdkernels.ops.experts.ep_moe.config import SEQUENCE, EpMoeConfig, choose_config, handle_for, layout_of
from tdkernels.ops.experts.ep_moe.fused import ep_moe_fused, why_not
from tdkernels.ops.experts.ep_moe.steps import experts, receive
from tdkernels.ops.experts.ep_moe.torch_op import ep_moe_compiled
from tdkernels.ops.experts.grouped_gemm.op import check_activation, check_experts, group_gemm_ref
from tdkernels.ops.experts.grouped_gemm.swiglu import ACTIVATIONS
from tdkernels.runtime import autograd, call_cache
from tdkernels.runtime.torch_op import outside_graphs
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.whole_call import whole_call


@torch.no_grad()
def ep_moe_ref(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    *, num_experts: int, activation: str | None = "swiglu", group: GroupLike = None,
) -> torch.Tensor:
    """The specification of ``ep_moe``, in plain torch and torch.distributed."""
    group = resolve_group(group)
    recv, state = ep_dispatch_ref(x, topk_ids, topk_weights, num_experts=num_experts, group=group)
    hidden = group_gemm_ref(recv.x, w_gate_up, recv.splits, activation=activation)
    return ep_combine_ref(group_gemm_ref(hidden, w_down, recv.splits), state, group=group)


# ---- checks ----


def _check(request, topk_weights, w_gate_up, w_down, activation, config):
    """Raise TypeError or ValueError, naming the argument and its shape, unless the layer makes sense on this rank."""
    operator, x, num_experts, world_size = request.operator, request.x, request.num_experts, request.group.size()
    check_experts(operator, x, w_gate_up, "w_gate_up")
    for name, tensor in (("topk_weights", topk_weights), ("w_down", w_down)):
        check_tensor(operator, name, tensor, None, x)
    check_dispatch(request, topk_weights, None)
    check_most_tokens(operator, request.max_tokens_per_rank, request.ids.shape[1], world_size)
    if activation is None:
        raise ValueError(f"{operator}: activation must be one of {ACTIVATIONS[1:]}, not None")
    check_activation(operator, activation, w_gate_up, "w_gate_up")
    if w_down.dtype != x.dtype:
        raise TypeError(f"{operator}: x is {x.dtype} but w_down is {w_down.dtype}")
    mine = num_experts // world_size
    if w_gate_up.shape[0] != mine:
        raise ValueError(
            f"{operator}: w_gate_up must have the {mine} experts of this rank (of {num_experts}, on {world_size} "
            f"ranks), its shape is {list(w_gate_up.shape)}"
        )
    expected = [mine, x.shape[1], w_gate_up.shape[1] // 2]
    if list(w_down.shape) != expected:
        raise ValueError(
            f"{operator}: w_down must be [E / W, H, I] = {expected} for x {list(x.shape)} and w_gate_up "
            f"{list(w_gate_up.shape)}, its shape is {list(w_down.shape)}"
        )
    check_config(operator, config, EpMoeConfig, x)


# ---- the public function ----


def ep_moe(
    x: torch.Tensor, topk_ids: torch.Tensor, topk_weights: torch.Tensor, w_gate_up: torch.Tensor, w_down: torch.Tensor,
    *, num_experts: int, activation: str | None = "swiglu", quantize: str | None = None, max_tokens: int | None = None,
    max_tokens_per_rank: int | None = None, group: GroupLike = None, config: EpMoeConfig | None = None,
) -> torch.Tensor:
    """A mixture of experts, divided between ranks: rank r has experts r * E / W to (r + 1) * E / W - 1.

    Args:
        x: [T, H] bf16, fp16 or fp32, this rank's tokens; T may differ between ranks and be 0
        topk_ids: [T, k] int32 or int64, the experts of each token, -1 for none (dropped)
        topk_weights: [T, k] floats, what each choice weighs in the sum
        w_gate_up: [E / W, 2 * I, H], this rank's experts' first weights, in the layout of torch.nn.Linear; dtype of x
        w_down: [E / W, H, I], their second; dtype of x
        num_experts: E, divisible by W
        activation: "swiglu": the first I rows of an expert of w_gate_up are for the gate, the rest for up;
            "swiglu_interleaved": gate and up by turns
        quantize: None, or "fp8": tokens travel as float8_e4m3fn with an fp32 scale for 128 channels, and are multiplied
            in x's dtype again. x then has no gradient, all else has
        max_tokens: as in ep_dispatch: how many rows any rank may receive or stage; the host does not wait then. With
            method "fused" any rank's choices T * k have to fit, too
        max_tokens_per_rank: as in ep_dispatch: a bound B on the T of all ranks, the same on all of them. Few tokens
            then go in one launch, and max_tokens need not be given: it is W * B * min(k, E / W). With method "fused"
            symmetric memory is for so many rows, and for B * k choices; for large bounds that is much
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world (W ranks)
        config: EpMoeConfig; None takes the best one known of each part, see tdkernels.autotune, and that of the layer
            first where the host waits for the number of rows, or max_tokens_per_rank is given and max_tokens, if given
            too, is no less than B * k and B * (W - 1)

    Returns:
        y: [T, H], dtype of x. Products are summed in fp32, their results rounded to x's dtype; the sum over a token's
        choices is that of ep_combine. 0 for a token all of whose choices are dropped

    Gradient:
        of x, topk_weights, w_gate_up and w_down; w's are complete, of all ranks' tokens, and zeros for an expert
        without any. All ranks take part in the backward, also those without tokens

    Raises:
        TypeError or ValueError: for operands that do not fit, with their shapes, before anything is launched
        ValueError: on every rank as in ep_dispatch: when the ranks disagree, for ids out of range, for more rows than
            max_tokens or tokens than max_tokens_per_rank
        PeerTimeoutError
        RuntimeError: in a backward with create_graph=True

    Contract:
        collective over group; host sync: without max_tokens and max_tokens_per_rank; CUDA graph: with one of them,
        after one call outside; the caller owns the output

    Source:
        ep_dispatch, group_gemm and ep_combine in a row, as in DeepEP (https://github.com/deepseek-ai/DeepEP)
    """
    group = resolve_group(group)
    x, w_gate_up, w_down = autograd.apply_autocast(x, w_gate_up, w_down)
    layer = x, topk_ids, topk_weights, w_gate_up, w_down
    known, key = call_cache.lookup(
        "ep_moe", group, layer, (num_experts, activation, quantize, max_tokens, max_tokens_per_rank, config)
    )
    request = DispatchRequest(
        "ep_moe", group, x, topk_ids, num_experts, None, quantize, max_tokens, max_tokens_per_rank
    )
    if known is None:
        _check(request, topk_weights, w_gate_up, w_down, activation, config)
        fused = config is not None and _is_fused(config, quantize, group)
        max_tokens = with_capacity(request.shape).max_tokens
        layout = None  # a compiler sees the sequence always
        if config is None and not torch.compiler.is_compiling():
            layout = layout_of(quantize, max_tokens, max_tokens_per_rank, topk_ids.shape[1], group)
        known = fused, max_tokens, layout
        call_cache.insert(group, key, known)
    fused, max_tokens, layout = known
    if quantize is not None and torch.is_grad_enabled() and x.requires_grad:
        raise ValueError('ep_moe: quantize="fp8" has no gradient, and x requires one: detach it, or no_grad')
    if max_tokens is not None and torch.compiler.is_compiling():
        settings = num_experts, activation, quantize, max_tokens, max_tokens_per_rank
        texts = map(as_argument, (config or SEQUENCE).parts(x))
        return ep_moe_compiled(*layer, *settings, group.group_name, *texts)
    request = request._replace(max_tokens=max_tokens)
    return _run(request, topk_weights, w_gate_up, w_down, activation, config, fused, layout)


def _is_fused(config, quantize, group):
    """Whether a call overlaps its steps. Raises ValueError if it cannot and is told to."""
    if config.method != "fused":
        return False
    reason = why_not(group, quantize)
    if reason is not None:
        raise ValueError(f'ep_moe: config cannot run: method "fused" does not go here: {reason}')
    return True


@outside_graphs
@whole_call
def _run(request, topk_weights, w_gate_up, w_down, activation, config, fused, layout):
    x, ids, group, counted = request.x, request.ids, request.group, None
    if config is None:
        config = SEQUENCE
        if layout is not None:
            config, counted = choose_config(layout, request, w_down)
        fused = config.method == "fused"
    if fused:
        return ep_moe_fused(request, topk_weights, w_gate_up, w_down, activation, config, counted)
    if counted is not None:
        ids = handle_for(config, counted, request)
    ep, gemm = config.parts(x)
    rows, splits, handle = receive(
        x, ids, topk_weights, request.num_experts, request.quantize, request.max_tokens, request.max_tokens_per_rank,
        group, ep,
    )
    made = experts(rows, splits, w_gate_up, w_down, activation, gemm)
    return ep_combine(made, handle, group=group)
