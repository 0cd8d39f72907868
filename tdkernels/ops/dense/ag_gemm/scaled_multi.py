"""ag_gemm of scaled fp8 operands with all its options: several weights, dim=1 and the gathered x.

One weight with dim=0 goes to ``dense.scaled``. For the other calls x and its scales are gathered once, and torch's GEMM
multiplies each shard that arrives by all weights (method "parts"). On several nodes the GEMMs follow the gather.
"""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import reject_invariant
from tdkernels.ops.common.config import check_config, with_config
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.scaling import Scales, check_scaled_call, check_scaled_operands, scaled_linear
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.dense import scaled
from tdkernels.ops.dense.ag_gemm import pipelined
from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig
from tdkernels.ops.dense.layout import by_segment, check_dim, gathered, segment_rows_of
from tdkernels.ops.dense.local import linear_of_scaled
from tdkernels.ops.dense.operand_lists import LISTS, as_lists
from tdkernels.ops.dense.scaled_gather import gathered_scales
from tdkernels.runtime import torch_op
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    import torch.distributed as dist


def _weight_scales(weight, scale_w, count):
    """Return scale_w as a list of ``count`` scales."""
    if isinstance(weight, LISTS) != isinstance(scale_w, LISTS):
        raise TypeError("ag_gemm: scale_w must be a list if weight is a list, and only then")
    scales = list(scale_w) if isinstance(scale_w, LISTS) else [scale_w]
    if len(scales) != count:
        raise ValueError(f"ag_gemm: there are {count} weights but {len(scales)} tensors in scale_w")
    return scales


def call(
    x: Any, weight: Any, bias: Any, dim: int, return_gathered: bool, main_grad: Any, scale_x: Any, scale_w: Any,
    out_dtype: Any, use_fast_accum: Any, group: "dist.ProcessGroup", config: Any,
) -> Any:
    """Execute ``ag_gemm`` of scaled operands. Arguments and result as for ``ag_gemm``."""
    check_scaled_call("ag_gemm", x, main_grad, scale_x, scale_w, out_dtype, use_fast_accum)
    several = isinstance(weight, LISTS) or isinstance(bias, LISTS)
    if not (return_gathered or dim != 0 or several):
        y = scaled.call("ag_gemm", x, weight, bias, scale_x, scale_w, out_dtype, use_fast_accum, group, config)
        return y.view(group.size() * x.shape[0], *x.shape[1:-1], weight.shape[0])
    weights, biases = as_lists("ag_gemm", weight, bias)
    scales_w = _weight_scales(weight, scale_w, len(weights))
    each = [
        check_scaled_operands("ag_gemm", x, one, its_bias, scale_x, its_scale, out_dtype, use_fast_accum)
        for one, its_bias, its_scale in zip(weights, biases, scales_w, strict=True)
    ]
    check_dim("ag_gemm", "x", x, dim)
    check_config("ag_gemm", config, AgGemmConfig, x)
    scaled.reject_nodes("ag_gemm", config, group)
    x_rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    method = "parts" if config is None or config.method == "fused" else config.method
    rows = torch.ops.tdkernels.ag_gemm_scaled_multi(
        x_rows, weights, biases, each[0].x, [one.weight for one in each], [one.kind for one in each],
        each[0].out_dtype, each[0].use_fast_accum, segment_rows_of(x, dim, 1), return_gathered, group.group_name,
        method, 1 if config is None else config.pieces,
    )
    lead = gathered(x.shape, dim, group.size())
    results = [result.view(*lead, result.shape[1]) for result in rows]
    ys = results[: len(weights)]
    outputs = ys if isinstance(weight, LISTS) else ys[0]
    return (outputs, results[-1]) if return_gathered else outputs


def _run(x, weights, biases, each, segment_rows, return_gathered, group, config, fields):
    """Return the outputs, and the gathered x if ``return_gathered``."""
    if config.method == "torch":
        full = all_gather_rows(x.view(torch.uint8), group).view(x.dtype)
        of_all = gathered_scales(x, each[0], group, by_torch=True).x
        results = [
            scaled_linear(full, weight, bias, scales._replace(x=of_all))
            for weight, bias, scales in zip(weights, biases, each, strict=True)
        ]
        results += [full] * return_gathered
        return [_ordered(rows, segment_rows, group.size()) for rows in results]
    full = x.new_empty(group.size() * x.shape[0], x.shape[1]) if return_gathered else None
    into = None if full is None else full.view(-1, group.size(), segment_rows, x.shape[1]).transpose(0, 1)
    ys, _ = pipelined.launch(
        x, weights, biases, group, config, fields, keep_gathered=False, into=into, scales=each
    )
    ys = [by_segment(rows, segment_rows, group.size()) for rows in ys]
    return ys if full is None else [*ys, full]


def _ordered(rows, segment_rows, world_size):
    """Return ``by_segment`` of rows in any dtype."""
    return by_segment(rows.view(torch.uint8), segment_rows, world_size).view(rows.dtype)


def _forward(
    x, weights, biases, scale_x, scales_w, scalings, out_dtype, use_fast_accum, segment_rows, return_gathered, group,
    method, pieces,
):
    group = torch_op.group_by_name(group)
    each = [
        Scales(scale_x, scale_w, scaling, out_dtype, use_fast_accum)
        for scale_w, scaling in zip(scales_w, scalings, strict=True)
    ]
    if group.size() == 1:
        ys = [linear_of_scaled(x, *one) for one in zip(weights, biases, each, strict=True)]
        return [*ys, *[x.clone(memory_format=torch.contiguous_format)] * return_gathered]
    reject_invariant("ag_gemm", "float8 with a list of weights, dim=1 or return_gathered")
    sizes = ", ".join(str(weight.shape[0]) for weight in weights)
    fields = {"M/W": x.shape[0], "K": x.shape[1], "N/W": sizes, "dtype": str(x.dtype), **each[0].fields}
    fields |= {"rows of a segment": segment_rows, "return_gathered": return_gathered}
    if not x.shape[0]:
        group_state(group).check_consensus_cached("ag_gemm", fields)
        ys = [x.new_empty(0, weight.shape[0], dtype=out_dtype) for weight in weights]
        return ys + [x.new_empty(x.shape)] * return_gathered
    config = AgGemmConfig(method="torch" if spans_nodes(group) else method, pieces=pieces)
    fields = with_config(fields, config)
    group_state(group).check_consensus_cached("ag_gemm", fields)
    return _run(x, weights, biases, each, segment_rows, return_gathered, group, config, fields)


def _fake(
    x, weights, biases, scale_x, scales_w, scalings, out_dtype, use_fast_accum, segment_rows, return_gathered, group,
    method, pieces,
):
    rows = torch_op.world_size_by_name(group) * x.shape[0]
    ys = [x.new_empty(rows, weight.shape[0], dtype=out_dtype) for weight in weights]
    return [*ys, *[x.new_empty(rows, x.shape[1])] * return_gathered]


torch_op.register(
    "ag_gemm_scaled_multi(Tensor x, Tensor[] weights, Tensor?[] biases, Tensor scale_x, Tensor[] scales_w,"
    " str[] scalings, ScalarType out_dtype, bool use_fast_accum, SymInt segment_rows, bool return_gathered, str group,"
    " str method, int pieces) -> Tensor[]",
    _forward,
    _fake,
)
