"""Methods of the tp_moe benchmark, for each stage and for the whole layer.

    grouped       torch._grouped_mm alone, on already permuted rows: the floor of the compute
    collective    NCCL alone: the all-gather, the reduce-scatter, or all collectives that a pass needs
    sequence      the unfused baseline: NCCL, torch._grouped_mm, and permutes (``permute_baseline``)
    tdkernels     the operator with its default arguments

The baseline overlaps what is possible without custom kernels: tokens are sorted while x is gathered, and the top-k
weights are gathered during the grouped GEMM. It saves the gathered rows for the backward; tdkernels saves shards and
gathers them again.
"""

from typing import NamedTuple

import torch

import tdkernels
from bench.core.linear_function import LinearFunction
from bench.experts import permute_baseline
from bench.experts.dispatch_methods import Method
from tdkernels.ops.common import torch_collectives
from tdkernels.ops.common.torch_collectives import all_gather_rows, reduce_scatter_rows
from tdkernels.ops.experts.grouped_gemm.dispatch import swiglu_ref
from tdkernels.ops.experts.grouped_gemm.op import group_gemm_ref

FORWARDS = ("ag_gemm", "gemm_rs", "forward")
BOTH = "forward+backward"
LEAVES = ("x", "weights", "w_gate_up", "w_down")  # operands with gradients


class Routing(NamedTuple):
    """order: top-k assignments of all tokens sorted by expert; places: its inverse; ends: end offset per expert."""

    order: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor


# ---- NCCL and permutes ----


def routed(ids, experts):
    """Return the Routing of ids [M, k]."""
    values, order = permute_baseline.sort(ids.flatten(), experts)
    every = torch.arange(experts, dtype=values.dtype, device=ids.device)
    ends = torch.searchsorted(values, every, right=True, out_int32=True)
    return Routing(order, permute_baseline.inverse(order), ends)


class _Gathered(torch.autograd.Function):
    """Asynchronous all-gather of x. The handle is appended to ``works``; wait for it before using the result."""

    @staticmethod
    def forward(ctx, x, works):
        full = x.new_empty(torch.distributed.get_world_size() * x.shape[0], *x.shape[1:])
        works.append(torch_collectives._all_gather(full, x, async_op=True))
        return full

    @staticmethod
    def backward(ctx, dfull):
        return reduce_scatter_rows(dfull), None


def grouped(rows, w, ends):
    """Compute rows @ w[e].T per expert with torch's grouped GEMM."""
    return torch._grouped_mm(rows, w.transpose(1, 2), offs=ends)


def loop_over_experts(rows, w, ends):
    """Compute rows @ w[e].T with one GEMM per expert, in any dtype."""
    return group_gemm_ref(rows, w, ends.diff(prepend=ends.new_zeros(1)))


def gate_up_stage(s, gemm=grouped):
    """Return (h ordered by expert, Routing)."""
    works, choices = [], s.ids.shape[1]
    ids = all_gather_rows(s.ids)
    full = _Gathered.apply(s.x, works)
    routing = routed(ids, s.w_gate_up.shape[0])
    works[0].wait()
    rows = permute_baseline.Expanded.apply(full, routing.order, routing.places, choices)
    return swiglu_ref(gemm(rows, s.w_gate_up, routing.ends), "swiglu"), routing


def down_stage(s, h, routing, add_up, gemm=grouped):
    """Compute y [M / W, H] from h ordered by expert."""
    works = []
    weights = _Gathered.apply(s.weights, works)
    out = gemm(h, s.w_down, routing.ends)
    works[0].wait()
    partial = permute_baseline.WeightedSum.apply(out, weights, routing.order, routing.places, add_up)
    return LinearFunction.apply(partial, reduce_scatter_rows, all_gather_rows)


def layer(s, add_up, gemm=grouped):
    return down_stage(s, *gate_up_stage(s, gemm), add_up, gemm)


def sequences(add_up, gemm=grouped):
    """Return {part: Method} of the unfused baseline; with ``loop_over_experts`` in fp32 it is the reference."""
    return {
        "ag_gemm": Method(lambda s: gate_up_stage(s, gemm), _by_assignment),
        "gemm_rs": Method(lambda s: down_stage(s, s.h, s.routing, add_up, gemm), _identity),
        "forward": Method(lambda s: layer(s, add_up, gemm), _identity),
        BOTH: Method(lambda s: forward_backward(lambda leaves: layer(leaves, add_up, gemm), s), _identity),
    }


def _by_assignment(outputs):
    """Permute h from expert order to the order of the top-k assignments."""
    h, routing = outputs
    return permute_baseline.take_rows(h, routing.places)


def _identity(outputs):
    return outputs


def in_fp32(s):
    """Return the operands in fp32."""
    floats = {name: value.float() for name, value in vars(s).items() if name in (*LEAVES, "dy", "h")}
    return type(s)(**{**vars(s), **floats})


def forward_backward(forward, s):
    """Return y and the gradients of ``LEAVES``."""
    leaves = {name: getattr(s, name).detach().requires_grad_() for name in LEAVES}
    with torch.enable_grad():
        y = forward(type(s)(**{**vars(s), **leaves}))
        return y.detach(), *torch.autograd.grad(y, list(leaves.values()), s.dy)


# ---- compute or communication alone ----


def add_alone(s):
    """Add to an operand set the inputs of the down stage, of the GEMMs alone and of the collectives alone."""
    works = []
    s.h, s.routing = gate_up_stage(s)
    full = _Gathered.apply(s.x, works)
    works[0].wait()
    s.rows = permute_baseline.take_rows(full, s.routing.order // s.ids.shape[1])
    s.pre = grouped(s.rows, s.w_gate_up, s.routing.ends)
    s.partial = torch.randn_like(full)


def _gate_up(s):
    return grouped(s.rows, s.w_gate_up, s.routing.ends)


def _down(s):
    return grouped(s.h, s.w_down, s.routing.ends)


def _gemms(s):
    return _gate_up(s), _down(s)


def _gemms_and_gradients(s):
    ends = s.routing.ends
    dh = torch._grouped_mm(s.rows, s.w_down, offs=ends)
    dw_down = torch._grouped_mm(s.rows.t(), s.h, offs=ends)
    drows = torch._grouped_mm(s.pre, s.w_gate_up, offs=ends)
    dw_gate_up = torch._grouped_mm(s.pre.t(), s.rows, offs=ends)
    return *_gemms(s), dh, dw_down, drows, dw_gate_up


def _gather(s):
    return all_gather_rows(s.x)


def _scatter(s):
    return reduce_scatter_rows(s.partial)


def _gather_and_scatter(s):
    return _gather(s), _scatter(s)


ALONE = {  # {part: {name: call}}
    "ag_gemm": {"grouped": _gate_up, "collective": _gather},
    "gemm_rs": {"grouped": _down, "collective": _scatter},
    "forward": {"grouped": _gemms, "collective": _gather_and_scatter},
    BOTH: {
        "grouped": _gemms_and_gradients,
        "collective": lambda s: (*_gather_and_scatter(s), *_gather_and_scatter(s)),
    },
}


# ---- tdkernels ----


def ours(part, sets, config):
    """Return the Method of tdkernels; ``config`` None uses the selected config."""
    if part == "ag_gemm":
        return Method(lambda s: _moe_ag_gemm(s, config), _by_assignment_of_routing, config=config)
    if part == "gemm_rs":
        return Method(_moe_gemm_rs(sets, config), _identity, config=config)
    if part == "forward":
        return Method(lambda s: _layer(s, config), _identity, config=config)
    return Method(lambda s: forward_backward(lambda leaves: _layer(leaves, config), s), _identity, config=config)


def _moe_ag_gemm(s, config):
    return tdkernels.moe_ag_gemm(s.x, s.ids, s.w_gate_up, activation="swiglu", config=config)


def _by_assignment_of_routing(outputs):
    """Permute the h of tdkernels to the order of the top-k assignments."""
    h, routing = outputs
    return permute_baseline.take_rows(h, routing.rows.flatten())


def _moe_gemm_rs(sets, config):
    """Return the call of the down stage on permuted inputs. The row order of tdkernels depends on the config."""
    rows = {}
    for s in sets:
        _, routing = _moe_ag_gemm(s, config)
        rows[id(s)] = permute_baseline.take_rows(_by_assignment((s.h, s.routing)), routing.choices), routing
    return lambda s: tdkernels.moe_gemm_rs(*rows[id(s)], s.weights, s.w_down, config=config)


def _layer(s, config):
    return tdkernels.tp_moe(s.x, s.ids, s.weights, s.w_gate_up, s.w_down, config=config)

