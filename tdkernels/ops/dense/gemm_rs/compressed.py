"""gemm_rs with wire compression: partials are sent in fp8, and their owner adds the dequantized partials in fp32.

The pipelined form (``pipelined``). torch's GEMM computes the partial of one peer at a time in the dtype of x. It is
quantized to packed rows, codes and scales, which the copy engine sends while the next partial is computed. The owner
adds the partials in rank order with one kernel. Its own partial is not quantized, so W - 1 of W partials have the error
of the compression.

The backward is that of the uncompressed operator: gradients are not quantized, nor is the data that it sends. Groups on
several nodes are not supported.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import reject_invariant, reject_max_ranks
from tdkernels.ops.collectives.async_reduce_scatter import AsyncReduceScatter
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, from_text, with_config
from tdkernels.ops.common.fp8_groups import packed_row_bytes
from tdkernels.ops.common.gemm_operands import rows_contiguous
from tdkernels.ops.dense.gemm_rs.config import GemmRsConfig
from tdkernels.ops.dense.gemm_rs.launch import segment_fields
from tdkernels.ops.dense.launch_wire import pack_rows
from tdkernels.ops.dense.layout import by_rank, check_dim, scattered, segment_rows_of
from tdkernels.ops.dense.local import linear
from tdkernels.ops.dense.vendor_gemm import cut, product_of
from tdkernels.ops.dense.weight_gradient import as_list, check_main_grad, returned_gradient
from tdkernels.ops.dense.wire import check_wire, check_wire_config
from tdkernels.runtime import autograd, call_cache, torch_op
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call
from tdkernels.symm.workspace import refuse_nodes

if TYPE_CHECKING:
    import torch.distributed as dist


@whole_call
def _run(x, weight, bias, group, config, fields):
    """Compute z for 2-D operands and a resolved config with method "parts"."""
    ranks, n = group.size(), weight.shape[0]
    x = rows_contiguous(x)
    by_owner = x.view(ranks, -1, x.shape[1])
    rows, row_bytes = by_owner.shape[1], packed_row_bytes(n)
    chunks = cut(rows, config.pieces)
    scatter = AsyncReduceScatter(
        "gemm_rs", fields, rows * row_bytes, group, x.device, len(chunks), passes_on=False
    )
    with scatter:
        for step in range(1, ranks):
            owner = (scatter.rank + step) % ranks
            for number, (first, count) in enumerate(chunks):
                part = pack_rows(product_of(by_owner[owner, first : first + count], weight))
                scatter.send(owner, part, number, offset=first * row_bytes)
        return scatter.add_quantized_to(product_of(by_owner[scatter.rank], weight), bias)


# ---- torch.library operator ----


def _fields(x, weight, wire, segment_rows, config):
    """Return the properties of a call that must be equal on all ranks."""
    fields = {"M": x.shape[0], "K/W": x.shape[1], "N": weight.shape[0], "dtype": str(x.dtype), "wire": wire}
    return with_config({**fields, **segment_fields(segment_rows)}, config)


def _resolved(text):
    return from_text(GemmRsConfig, text) if text else GemmRsConfig(method="parts")


def _forward(x, weight, bias, wire, segment_rows, group, config):
    reject_max_ranks("gemm_rs", f'wire="{wire}"')  # on one rank, too: it quantizes nothing
    group = torch_op.group_by_name(group)
    if group.size() == 1:
        return linear(x, weight, bias)
    reject_invariant("gemm_rs", f'wire="{wire}"')
    refuse_nodes(f'gemm_rs with wire="{wire}"', group_state(group))
    config = _resolved(config)
    fields = _fields(x, weight, wire, segment_rows, config)
    if not x.shape[0]:
        group_state(group).check_consensus_cached("gemm_rs", fields)
        return x.new_empty(0, weight.shape[0])
    return _run(x, weight, bias, group, config, fields)


def _fake(x, weight, bias, wire, segment_rows, group, config):
    return x.new_empty(x.shape[0] // torch_op.world_size_by_name(group), weight.shape[0])


torch_op.register(
    "gemm_rs_wire(Tensor x, Tensor weight, Tensor? bias, str wire, SymInt segment_rows, str group, str config)"
    " -> Tensor",
    _forward,
    _fake,
)


class _GemmRsWire(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, wire, segment_rows, group, config, main_grads):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.config, ctx.main_grads = group, config, main_grads
        return torch.ops.tdkernels.gemm_rs_wire(x, weight, bias, wire, segment_rows, group, config)

    @staticmethod
    def backward(ctx, dz):
        autograd.reject_second_derivatives("gemm_rs")
        x, weight = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        dx, dweight, dbias = torch.ops.tdkernels.gemm_rs_backward(
            dz, x, weight, ctx.main_grads, *need, ctx.group, ctx.config
        )
        if need[1]:
            dweight = returned_gradient(dweight, weight, len(ctx.main_grads) > 0)
        gradients = (grad if needed else None for grad, needed in zip((dx, dweight, dbias), need, strict=True))
        return *gradients, None, None, None, None, None


# ---- calls ----


def call(
    x: Any, weight: Any, bias: Any, dim: int, main_grad: Any, scaling: tuple[Any, ...], wire: Any,
    group: "dist.ProcessGroup", config: Any, check_divisible: Callable[[Any, int, int], None],
) -> torch.Tensor:
    """Execute ``gemm_rs`` with wire compression. Arguments and result as for ``gemm_rs``.

    Args:
        x: See ``gemm_rs``.
        weight: See ``gemm_rs``.
        bias: See ``gemm_rs``.
        dim: See ``gemm_rs``.
        main_grad: See ``gemm_rs``.
        scaling: (scale_x, scale_w, out_dtype, use_fast_accum), which must not be given.
        wire: See ``gemm_rs``.
        group: The resolved group.
        config: See ``gemm_rs``.
        check_divisible: (x, dim, W) -> None, raises an error if the ranks cannot divide x.
    """
    check_wire("gemm_rs", wire, x, scaling)
    known, key = call_cache.lookup_run("gemm_rs, wire", group, (x, weight, bias), (wire, config, dim))
    if known is not None:
        return known(group, x, weight, bias)
    x, weight, bias = autograd.apply_autocast(x, weight, bias)
    validation.check_operands("gemm_rs", x, weight, bias)
    check_main_grad("gemm_rs", weight, main_grad)
    check_dim("gemm_rs", "x", x, dim)
    world_size = group.size()
    check_divisible(x, dim, world_size)
    check_wire_config("gemm_rs", config, GemmRsConfig, x)
    segment_rows = segment_rows_of(x, dim, world_size)
    operands, text = (_rows_by_owner(x, segment_rows, world_size), weight, bias), as_argument(config)
    z = autograd.apply(
        _GemmRsWire, torch.ops.tdkernels.gemm_rs_wire, *operands, wire, segment_rows, group.group_name, text,
        for_backward=(as_list(main_grad),),
    )
    z = z.view(*scattered(x.shape, dim, world_size), weight.shape[0])
    _keep_call(key, group, operands[0], weight, segment_rows, wire, text, z.shape)
    return z


def _rows_by_owner(x, segment_rows, world_size):
    """Return x as [M, K / W], with the rows of rank 0 first. If dim is 1, this is a pass of its own."""
    rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    return by_rank(rows, segment_rows, world_size) if rows.shape[0] else rows


def _keep_call(key, group, rows, weight, segment_rows, wire, text, shape):
    """Insert a call into the call cache, see ``runtime.call_cache.lookup_run``."""
    if not call_cache.is_current(group, key) or group.size() == 1 or not rows.shape[0]:
        return
    config = _resolved(text)
    fields = _fields(rows, weight, wire, segment_rows, config)

    def again(group, x, weight, bias):
        rows = _rows_by_owner(x, segment_rows, group.size())
        return _run(rows, weight, bias, group, config, fields).view(shape)

    call_cache.insert(group, key, call_cache.CachedCall(again, None, shape))
