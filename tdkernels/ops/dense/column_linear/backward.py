"""Backward of column_linear: dx = all_reduce(dy @ weight), and dweight = dy.T @ x, which needs no communication.

A gemm_ar overlaps its all-reduce with the GEMM of dx only. If dweight is needed, too, and the GEMMs are large, the
all-reduce is divided. The copy engine sends the parts of dx to their owners during the GEMM of dx, and the sums to all
ranks during the GEMM of dweight. In each of the two, a rank sends (W - 1) / W of dx.
"""

import torch

from tdkernels.autotune.invariance import without_invariance
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.dense.gemm_ar import op as _gemm_ar_op  # noqa: F401  registers torch.ops.tdkernels.gemm_ar
from tdkernels.ops.dense.gemm_rs import pipelined
from tdkernels.ops.dense.vendor_gemm import host_s_of_backward, is_worth_its_launches
from tdkernels.ops.dense.weight_gradient import weight_gradient
from tdkernels.runtime import torch_op
from tdkernels.runtime.autograd import fake_gradients
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call

_PIECES = 1  # chunks per owner of dx: the last ones are sent before the sums


def _in_parts(dy, x, config, group):
    """Return whether the all-reduce of dx is divided. The result is equal on all ranks."""
    if config or spans_nodes(group) or not x.shape[0] or x.shape[0] % group.size():
        return False
    wire_bytes = 2 * (group.size() - 1) * x.nbytes // group.size()
    least_s = host_s_of_backward("column_linear", group.size())
    return is_worth_its_launches(4 * dy.numel() * x.shape[1], wire_bytes, least_s)


@whole_call
@without_invariance
def _backward(dy, x, weight, main_grads, need_dx, need_dweight, group, config):
    """Return (dx, dweight): the body of the torch.library op. Gradients not needed are empty tensors."""
    name, group = group, torch_op.group_by_name(group)
    dx, dweight = x.new_empty(0), x.new_empty(0)
    if need_dx and group.size() > 1:
        fields = {"M": x.shape[0], "N/W": weight.shape[0], "K": x.shape[1], "dtype": str(x.dtype)}
        group_state(group).check_consensus_cached("column_linear backward", fields)
        if need_dweight and _in_parts(dy, x, config, group):
            return _backward_in_parts(dy, x, weight, main_grads, fields, group)
        dx = torch.ops.tdkernels.gemm_ar(dy, weight.t(), None, name, config)
    elif need_dx:
        dx = dy @ weight
    if need_dweight:
        dweight = weight_gradient(dy, x, main_grads)
    return dx, dweight


@whole_call
def _backward_in_parts(dy, x, weight, main_grads, fields, group):
    """Return (dx, dweight), computed by two GEMMs of torch, each of which hides half of the all-reduce."""
    back = weight.t()
    with pipelined.start("column_linear backward", fields, dy, back, group, _PIECES) as scatter:
        own = scatter.add_to(pipelined.send_products(scatter, dy, back, _PIECES))
    with AsyncAllGather("column_linear backward", fields, own, group, own.shape[0], copies=True) as gather:
        gather.copy(in_order=False)
        dweight = weight_gradient(dy, x, main_grads)
        gather.finish()
        dx = torch.empty_like(x, memory_format=torch.contiguous_format)
        dx.view(gather.gathered.shape).copy_(gather.gathered)
    return dx, dweight


def _fake_backward(dy, x, weight, main_grads, need_dx, need_dweight, group, config):
    return fake_gradients((x, weight), (need_dx, need_dweight and not main_grads))


torch_op.register(
    "column_linear_backward(Tensor dy, Tensor x, Tensor weight, Tensor(a!)[] main_grads, bool need_dx,"
    " bool need_dweight, str group, str config) -> (Tensor, Tensor)",
    _backward,
    _fake_backward,
)
