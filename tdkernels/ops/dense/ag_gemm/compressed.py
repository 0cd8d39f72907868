"""ag_gemm with wire compression: shards are sent in fp8, and torch's GEMM multiplies the dequantized shards.

The pipelined form (``pipelined``). Each rank quantizes its rows to packed rows: codes and scales, which one gather
sends. A chunk that arrives is dequantized to the dtype of x and multiplied while the next ones arrive. A rank
dequantizes its own rows, too. So all ranks multiply the same x, which model replicas need.

Options are those of the uncompressed operator. The gathered x that is returned is dequantized. The backward is that of
``multi``: it uses the exact x and sends uncompressed data. A group may span several nodes.
"""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import reject_invariant, reject_max_ranks
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, from_text, with_config
from tdkernels.ops.dense.ag_gemm import multi
from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig
from tdkernels.ops.dense.launch_wire import pack_rows, unpack_rows
from tdkernels.ops.dense.layout import by_segment, check_dim, gathered, segment_rows_of
from tdkernels.ops.dense.local import linear
from tdkernels.ops.dense.operand_lists import LISTS, as_lists, main_grads_of
from tdkernels.ops.dense.vendor_gemm import cut, product
from tdkernels.ops.dense.wire import check_wire, check_wire_config
from tdkernels.runtime import autograd, call_cache, torch_op
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call

if TYPE_CHECKING:
    import torch.distributed as dist


@whole_call
def _run(x, weights, biases, segment_rows, return_gathered, group, config, fields):
    """Return the outputs, and the gathered x if ``return_gathered``, for a resolved config with method "parts"."""
    rows, k = x.shape
    chunks = cut(rows, config.pieces)
    packed = pack_rows(x)
    gather = AsyncAllGather("ag_gemm", fields, packed, group, chunks[0][1], copies=True)
    ranks = gather.world_size
    ys = [x.new_empty(ranks, rows, weight.shape[0]) for weight in weights]
    # The rows of a chunk, in memory that the next chunk reuses unless all rows are returned.
    full = x.new_empty(ranks, rows, k) if return_gathered else None
    scratch = x.new_empty(chunks[0][1], k) if full is None else None
    with gather:
        gather.copy(own=False)
        for step in range(ranks):
            source = gather.source(step)
            for number, (first, count) in enumerate(chunks):
                if step > 0:
                    gather.wait(step, number)
                shard = packed if step == 0 else gather.gathered[source]
                part = scratch[:count] if full is None else full[source, first : first + count]
                unpack_rows(shard[first : first + count], part)
                for weight, bias, y in zip(weights, biases, ys, strict=True):
                    product(part, weight, bias, y[source, first : first + count])
    results = ys if full is None else [*ys, full]
    return [by_segment(each.view(ranks * rows, each.shape[2]), segment_rows, ranks) for each in results]


# ---- torch.library operator ----


def _fields(x, weights, segment_rows, return_gathered, wire, config):
    """Return the properties of a call that must be equal on all ranks."""
    sizes = [weight.shape[0] for weight in weights]
    n = sizes[0] if len(sizes) == 1 else ", ".join(map(str, sizes))
    fields = {"M/W": x.shape[0], "K": x.shape[1], "N/W": n, "dtype": str(x.dtype), "wire": wire}
    return with_config({**fields, "rows of a segment": segment_rows, "return_gathered": return_gathered}, config)


def _resolved(text):
    return from_text(AgGemmConfig, text) if text else AgGemmConfig(method="parts")


def _forward(x, weights, biases, segment_rows, return_gathered, wire, group, config):
    reject_max_ranks("ag_gemm", f'wire="{wire}"')  # on one rank, too: it quantizes nothing
    group = torch_op.group_by_name(group)
    if group.size() == 1:
        ys = [linear(x, weight, bias) for weight, bias in zip(weights, biases, strict=True)]
        return [*ys, *[x.clone(memory_format=torch.contiguous_format)] * return_gathered]
    reject_invariant("ag_gemm", f'wire="{wire}"')
    config = _resolved(config)
    fields = _fields(x, weights, segment_rows, return_gathered, wire, config)
    if not x.shape[0]:
        group_state(group).check_consensus_cached("ag_gemm", fields)
        return [x.new_empty(0, weight.shape[0]) for weight in weights] + [x.new_empty(x.shape)] * return_gathered
    return _run(x, weights, biases, segment_rows, return_gathered, group, config, fields)


def _fake(x, weights, biases, segment_rows, return_gathered, wire, group, config):
    rows = torch_op.world_size_by_name(group) * x.shape[0]
    ys = [x.new_empty(rows, weight.shape[0]) for weight in weights]
    return [*ys, *[x.new_empty(rows, x.shape[1])] * return_gathered]


torch_op.register(
    "ag_gemm_wire(Tensor x, Tensor[] weights, Tensor?[] biases, SymInt segment_rows, bool return_gathered, str wire,"
    " str group, str config) -> Tensor[]",
    _forward,
    _fake,
)


class _AgGemmWire(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, segment_rows, return_gathered, group, config, main_grads, number, wire, *weights_and_biases):
        weights, biases = weights_and_biases[:number], weights_and_biases[number:]
        multi.save_for_backward(ctx, x, weights, segment_rows, group, config, main_grads)
        return tuple(
            torch.ops.tdkernels.ag_gemm_wire(x, weights, biases, segment_rows, return_gathered, wire, group, config)
        )

    @staticmethod
    def backward(ctx, *gradients):
        dx, dweights, dbiases = multi.backward(ctx, ctx.needs_input_grad[0], ctx.needs_input_grad[8:], gradients)
        return dx, *[None] * 7, *dweights, *dbiases


# ---- calls ----


def call(
    x: Any, weight: Any, bias: Any, dim: int, return_gathered: bool, main_grad: Any, scaling: tuple[Any, ...],
    wire: Any, group: "dist.ProcessGroup", config: Any,
) -> Any:
    """Execute ``ag_gemm`` with wire compression. Arguments and result as for ``ag_gemm``.

    ``scaling`` is (scale_x, scale_w, out_dtype, use_fast_accum), which must not be given.
    """
    check_wire("ag_gemm", wire, x, scaling)
    weights, biases = as_lists("ag_gemm", weight, bias)
    given = x, *weights, *biases
    settings = wire, config, dim, return_gathered, len(weights)
    known, key = call_cache.lookup_run("ag_gemm, wire", group, given, settings)
    results = known(group, *given) if known is not None else _new_call(given, weight, main_grad, group, key, *settings)
    ys = results[: len(weights)]
    y = ys if isinstance(weight, LISTS) else ys[0]
    return (y, results[-1]) if return_gathered else y


def _new_call(given, weight, main_grad, group, key, wire, config, dim, return_gathered, number):
    """Validate and execute a call; return the outputs, and the gathered x if ``return_gathered``."""
    x, *others = autograd.apply_autocast(*given)
    weights, biases = others[:number], others[number:]
    for one, its_bias in zip(weights, biases, strict=True):
        validation.check_operands("ag_gemm", x, one, its_bias)
    main_grads = main_grads_of("ag_gemm", weight, main_grad, weights)
    check_dim("ag_gemm", "x", x, dim)
    check_wire_config("ag_gemm", config, AgGemmConfig, x)
    x_rows, text = x.reshape(x.shape[:-1].numel(), x.shape[-1]), as_argument(config)
    segment_rows = segment_rows_of(x, dim, 1)
    if autograd.may_be_differentiated((x_rows, *weights, *biases)):
        options = segment_rows, return_gathered, group.group_name, text, main_grads, number, wire
        results = _AgGemmWire.apply(x_rows, *options, *weights, *biases)
    else:
        options = segment_rows, return_gathered, wire, group.group_name, text
        results = torch.ops.tdkernels.ag_gemm_wire(x_rows, weights, biases, *options)
    lead = gathered(x.shape, dim, group.size())
    shapes = [(*lead, result.shape[1]) for result in results]
    _keep_call(key, group, x_rows, weights, segment_rows, return_gathered, wire, text, shapes)
    return [result.view(shape) for result, shape in zip(results, shapes, strict=True)]


def _keep_call(key, group, x_rows, weights, segment_rows, return_gathered, wire, text, shapes):
    """Insert a call into the call cache, see ``runtime.call_cache.lookup_run``."""
    if not call_cache.is_current(group, key) or group.size() == 1 or not x_rows.shape[0]:
        return
    config, rows, number = _resolved(text), x_rows.shape, len(weights)
    fields = _fields(x_rows, weights, segment_rows, return_gathered, wire, config)

    def again(group, x, *others):
        call = x.reshape(rows), list(others[:number]), list(others[number:]), segment_rows, return_gathered
        results = _run(*call, group, config, fields)
        return [result.view(shape) for result, shape in zip(results, shapes, strict=True)]

    call_cache.insert(group, key, call_cache.CachedCall(again, None, shapes))
