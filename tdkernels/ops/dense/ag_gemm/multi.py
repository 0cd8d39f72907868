"""ag_gemm of several weights, and ag_gemm that also returns the gathered x: one gather serves all of them.

    x [M / W, K] on each rank, weights [N_i / W, K]  ->  y_i [M, N_i / W], and x [M, K]

The rows of the outputs are ordered in segments: [M / W / segment_rows, W, segment_rows, N_i / W]. With one segment per
rank they are [M, N_i / W]. For x [B, S / W, K] and a segment per sequence they are [B, S, N_i / W].

    method       forward
    "fused"      the kernel of ag_gemm, with up to three weights. It stores tiles where their rows belong.
    "parts"      torch's GEMM (cuBLAS) multiplies each chunk that arrives by all weights (``pipelined``)
    "torch"      all-gather, then one GEMM per weight

With transport "one_shot", for small M, and on several nodes, each weight is a call of its own. The other methods order
the rows in a pass of their own. On Hopper "one_shot" is not selected for more than 256 rows if one launch of the
warp-specialized kernel can multiply by all weights.

If the gathered x is returned, the default for large problems is "parts" instead of "fused": the kernel gathers more
slowly if it must keep all of x. For small M it is an all-gather, then one GEMM per weight.

Backward. The gradients of the outputs are concatenated, and so are the weights. So dx is one GEMM-RS and dweight is one
GEMM (with main_grad one per weight), at the cost of one pass over the gradients and the weights. The same pass orders
the rows. The gradient of the gathered x is reduce-scattered and added to dx.
"""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import is_batch_invariant, reject_invariant
from tdkernels.ops.collectives import op as _collectives  # noqa: F401  registers the ops used below
from tdkernels.ops.common.config import as_argument, with_config
from tdkernels.ops.common.gemm_operands import is_stored_kn
from tdkernels.ops.common.gemm_tunable import config_for, explicit_config
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.dense.ag_gemm import launch, pipelined
from tdkernels.ops.dense.ag_gemm.config import MAX_WEIGHTS, AgGemmConfig, of_several_weights
from tdkernels.ops.dense.ag_gemm.output import has_whole_tiles
from tdkernels.ops.dense.layout import by_segment
from tdkernels.ops.dense.local import linear, linear_of_call
from tdkernels.ops.dense.operand_lists import bias_gradients, divided, joined, without_none
from tdkernels.ops.dense.vendor_gemm import is_worth_its_launches
from tdkernels.runtime import autograd, call_cache, torch_op
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call

if TYPE_CHECKING:
    import torch.distributed as dist


# 2 H200. In eager mode the host takes 0.4 to 0.5 ms to launch "parts" that returns x. Problems with an expected time of
# 0.105 and 0.38 ms took the GPU 0.153 and 0.449 ms with the kernel, in CUDA graphs. So the kernel should be faster in
# eager mode well below 0.4 ms. In CUDA graphs "parts" is faster, but both kinds of call have the same config.
_PARTS_LEAST_S = 0.3e-3


def _joined_on_meta(weights):
    """Return a meta tensor with the shape and the memory layout of the concatenated weights."""
    rows, k = sum(weight.shape[0] for weight in weights), weights[0].shape[1]
    if is_stored_kn(weights[0]):
        return torch.empty(k, rows, dtype=weights[0].dtype, device="meta").t()
    return torch.empty(rows, k, dtype=weights[0].dtype, device="meta")


def _products(full, weights, biases):
    return [linear(full, weight, bias) for weight, bias in zip(weights, biases, strict=True)]


def _resolved(text, x, weights, biases, segment_rows, return_gathered, group, fields):
    """Return the config of a call: the one given as ``text``, or the selected one."""
    config = config_for("ag_gemm", text, x, _joined_on_meta(weights), group, fields)
    if not text and config.method == "fused" and config.transport == "one_shot" and not return_gathered:
        config = _in_one_launch(config, x, weights, biases, segment_rows, group)
    if is_batch_invariant():
        if return_gathered and not _is_one_launch(weights, biases, group, config):
            reject_invariant("ag_gemm", "return_gathered with a call that is not one launch of the fused kernel")
        return config
    if return_gathered and not text and config.method == "fused" and config.transport != "one_shot":
        if not _is_one_launch(weights, biases, group, config) or _is_large(x, weights, group):
            return AgGemmConfig(method="parts")
    return config


def _in_one_launch(config, x, weights, biases, segment_rows, group):
    """Return a config that multiplies by all weights in one launch instead of ``config``, if there is one."""
    other = of_several_weights(x, weights, group.size())
    if other is None or not has_whole_tiles(x.shape[0], segment_rows, other.tiles.block_m):
        return config
    return other if _is_one_launch(weights, biases, group, other) else config


def _is_large(x, weights, group):
    rows, n = x.shape[0] * group.size(), sum(weight.shape[0] for weight in weights)
    return is_worth_its_launches(2 * rows * n * x.shape[1], (group.size() - 1) * x.nbytes, _PARTS_LEAST_S)


def _is_one_launch(weights, biases, group, config):
    """Return whether one launch of the kernel serves all weights."""
    if config.method != "fused" or config.transport == "one_shot":
        return False
    same_layout = len({is_stored_kn(weight) for weight in weights}) == 1
    same_biases = len({bias is None for bias in biases}) == 1
    return len(weights) <= MAX_WEIGHTS and same_layout and same_biases and not spans_nodes(group)


@whole_call
def _run(x, weights, biases, segment_rows, return_gathered, group, config, fields):
    """Return the outputs, and the gathered x if ``return_gathered``, for a resolved config."""
    if _is_one_launch(weights, biases, group, config):
        ys, gather = launch.launch_several(x, weights, biases, group, config, return_gathered, segment_rows)
        return ys + _kept(gather, x, segment_rows)
    one_shot = config.method == "fused" and config.transport == "one_shot"
    if config.method == "torch" or (one_shot and return_gathered):
        full = torch.ops.tdkernels.all_gather(x, group.group_name, "") if one_shot else all_gather_rows(x, group)
        results = [*_products(full, weights, biases), *[full] * return_gathered]
    elif config.method == "fused" and not return_gathered:
        results = [launch.launch(x, *one, group, config)[0] for one in zip(weights, biases, strict=True)]
    else:
        config = AgGemmConfig(method="parts") if config.method == "fused" else config
        full = x.new_empty(group.size() * x.shape[0], x.shape[1]) if return_gathered else None
        into = None if full is None else full.view(-1, group.size(), segment_rows, x.shape[1]).transpose(0, 1)
        results, _ = pipelined.launch(x, weights, biases, group, config, fields, keep_gathered=False, into=into)
        results = [by_segment(rows, segment_rows, group.size()) for rows in results]
        return results if full is None else [*results, full]
    return [by_segment(rows, segment_rows, group.size()) for rows in results]


def _kept(gather, x, segment_rows):
    """Return [a copy of the gathered x] and close the gather; an empty list for None."""
    if gather is None:
        return []
    gather.finish()
    full = gather.gathered.unflatten(1, (-1, segment_rows)).transpose(0, 1)
    full = full.clone(memory_format=torch.contiguous_format).view(-1, x.shape[1])
    gather.close()
    return [full]


# ---- torch.library operator ----


def _fields(x, weights, segment_rows, return_gathered):
    """Return the properties of a call that must be equal on all ranks, before a config is selected."""
    sizes = ", ".join(str(weight.shape[0]) for weight in weights)
    fields = {"M/W": x.shape[0], "K": x.shape[1], "N/W": sizes, "dtype": str(x.dtype)}
    return {**fields, "rows of a segment": segment_rows, "return_gathered": return_gathered}


def _forward(x, weights, biases, segment_rows, return_gathered, group, config):
    group = torch_op.group_by_name(group)
    if group.size() == 1:
        given = explicit_config("ag_gemm", config) if config else None
        ys = [linear_of_call("ag_gemm", x, *one, given) for one in zip(weights, biases, strict=True)]
        return [*ys, *[x.clone(memory_format=torch.contiguous_format)] * return_gathered]
    fields = _fields(x, weights, segment_rows, return_gathered)
    if not x.shape[0]:
        group_state(group).check_consensus_cached("ag_gemm", fields)
        return [x.new_empty(0, weight.shape[0]) for weight in weights] + [x.new_empty(x.shape)] * return_gathered
    config = _resolved(config, x, weights, biases, segment_rows, return_gathered, group, lambda: fields)
    fields = with_config(fields, config)
    group_state(group).check_consensus_cached("ag_gemm", fields)
    return _run(x, weights, biases, segment_rows, return_gathered, group, config, fields)


def _fake(x, weights, biases, segment_rows, return_gathered, group, config):
    rows = torch_op.world_size_by_name(group) * x.shape[0]
    ys = [x.new_empty(rows, weight.shape[0]) for weight in weights]
    return [*ys, *[x.new_empty(rows, x.shape[1])] * return_gathered]


torch_op.register(
    "ag_gemm_multi(Tensor x, Tensor[] weights, Tensor?[] biases, SymInt segment_rows, bool return_gathered, str group,"
    " str config) -> Tensor[]",
    _forward,
    _fake,
)


def save_for_backward(
    ctx: Any, x: torch.Tensor, weights: Any, segment_rows: int, group: str, config: str, main_grads: Any
) -> None:
    """Save in the context of an autograd Function what ``backward`` needs."""
    ctx.save_for_backward(x, *weights)
    ctx.segment_rows, ctx.group, ctx.config, ctx.number = segment_rows, group, config, len(weights)
    ctx.main_grads = main_grads
    ctx.set_materialize_grads(False)


def backward(ctx: Any, need_dx: bool, needed: Any, gradients: Any) -> tuple[Any, list[Any], list[Any]]:
    """Compute the gradients of x, of the weights and of the biases, None for those that are not needed.

    Args:
        ctx: The context, after ``save_for_backward``.
        need_dx: Whether the gradient of x is needed.
        needed: The same for each weight, then for each bias.
        gradients: The gradients of the outputs, and last of the gathered x if it was returned.
    """
    autograd.reject_second_derivatives("ag_gemm")
    x, *weights = ctx.saved_tensors
    number = ctx.number
    need_dweights, need_dbiases = needed[:number], needed[number:]
    dys, dgathered = gradients[:number], gradients[number] if len(gradients) > number else None
    dx: torch.Tensor | None = None
    dweights: list[Any] = [None] * number
    dbiases: list[Any] = [None] * number
    dys = without_none(dys, x, weights)
    if dys:
        if need_dx or any(need_dweights):
            dy, weight = _rows_joined(dys, ctx.segment_rows, x.shape[0]), joined(weights, 0)
            dx, dweight = torch.ops.tdkernels.ag_gemm_backward(
                dy, x, weight, ctx.main_grads, need_dx, any(need_dweights), ctx.group, ctx.config
            )
            dweights = divided(dweight, weights, need_dweights, ctx.main_grads)
        dbiases = bias_gradients(dys, need_dbiases)
    if need_dx and dgathered is not None:
        rows = _rows_joined([dgathered], ctx.segment_rows, x.shape[0])
        own = torch.ops.tdkernels.reduce_scatter_of_gradient(rows, ctx.group, "")
        dx = own if dx is None else dx + own
    return dx if need_dx else None, dweights, dbiases


class _AgGemmMulti(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, segment_rows, return_gathered, group, config, main_grads, number, *weights_and_biases):
        weights, biases = weights_and_biases[:number], weights_and_biases[number:]
        save_for_backward(ctx, x, weights, segment_rows, group, config, main_grads)
        options = segment_rows, return_gathered, group, config
        return tuple(torch.ops.tdkernels.ag_gemm_multi(x, weights, biases, *options))

    @staticmethod
    def backward(ctx, *gradients):
        dx, dweights, dbiases = backward(ctx, ctx.needs_input_grad[0], ctx.needs_input_grad[7:], gradients)
        return dx, *[None] * 6, *dweights, *dbiases


def _rows_joined(gradients, segment_rows, shard_rows):
    """Concatenate gradients of outputs [shard_rows / segment_rows, W, segment_rows, N_i] as [W * shard_rows, N]."""
    if segment_rows != shard_rows:
        batch = shard_rows // segment_rows
        gradients = [dy.unflatten(0, (batch, -1, segment_rows)).transpose(0, 1) for dy in gradients]
        return joined(gradients, -1).flatten(0, 2)
    return joined(gradients, -1)


def ag_gemm_multi(
    x: torch.Tensor, weights: list[torch.Tensor], biases: list[torch.Tensor | None], segment_rows: int,
    return_gathered: bool, group: str, config: str, main_grads: list[torch.Tensor],
) -> list[torch.Tensor]:
    """Return the outputs, and last the gathered x if ``return_gathered``, for validated 2-D operands.

    Args:
        x: [M / W, K].
        weights: List of [N_i / W, K].
        biases: List of [N_i / W] or None, as long as ``weights``.
        segment_rows: See ``launch.launch_several``. The outputs and the gathered x have this order of rows.
        return_gathered: Whether the gathered x is returned.
        group: Name of the process group.
        config: The config as text.
        main_grads: The accumulators of the gradients of the weights, or an empty list.
    """
    if autograd.may_be_differentiated((x, *weights, *biases)):
        settings = segment_rows, return_gathered, group, config, main_grads, len(weights)
        results = _AgGemmMulti.apply(x, *settings, *weights, *biases)
    else:
        results = torch.ops.tdkernels.ag_gemm_multi(x, weights, biases, segment_rows, return_gathered, group, config)
    return list(results)


def keep_call(
    key: Any, group: "dist.ProcessGroup", rows: torch.Tensor, weights: list[torch.Tensor],
    biases: list[torch.Tensor | None], segment_rows: int, return_gathered: bool, config: Any, shapes: list[Any],
) -> None:
    """Insert a call into the call cache under ``key``, see ``runtime.call_cache.lookup_run``.

    The tensors of the call are x, the weights and the biases. ``rows`` is x as [M / W, K], ``shapes`` are those of the
    outputs.
    """
    if not call_cache.is_current(group, key) or group.size() == 1 or not rows.shape[0]:
        return
    config = _resolved(as_argument(config), rows, weights, biases, segment_rows, return_gathered, group, dict)
    fields = with_config(_fields(rows, weights, segment_rows, return_gathered), config)
    shape, number = rows.shape, len(weights)

    def again(group, x, *others):
        call = x.reshape(shape), list(others[:number]), list(others[number:]), segment_rows, return_gathered
        results = _run(*call, group, config, fields)
        return [result.view(to) for result, to in zip(results, shapes, strict=True)]

    def bind(group, x, *others):
        given = x.reshape(shape)
        if given.data_ptr() != x.data_ptr():
            return None
        return launch.bind_several(given, others[:number], others[number:], group, config, segment_rows)

    is_one_launch = _is_one_launch(weights, biases, group, config) and not return_gathered
    call_cache.insert(group, key, call_cache.CachedCall(again, bind if is_one_launch else None, shapes))
