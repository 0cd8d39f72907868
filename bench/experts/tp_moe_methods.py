"""The ways to run tensor-parallel experts that are measured, half by half and as a whole layer.

    grouped       torch._grouped_mm alone, on rows that lie ready: the floor of the products
    collective    NCCL alone: the all-gather, the reduce-scatter, or all of them that a pass cannot do without
    sequence      NCCL, torch._grouped_mm, and the permutes that a user would write (``permute_baseline``)
    tdkernels     a call as it comes

The sequence hides what a user can hide without kernels of his own: tokens are sorted while x is gathered, and the
weights of the choices are gathered while the experts multiply. For its backward it saves the gathered rows; ours saves
shards, and gathers them again.
"""

from typing import NamedTuple

import torch

import tdkernels
from bench.experts import permute_baseline
from bench.experts.dispatch_methods import Method
from tdkernels.ops.common import torch_collectives
from tdkernels.ops.common.torch_collectives import all_gather_rows, reduce_scatter_rows
from tdkernels.ops.experts.grouped_gemm.dispatch import swiglu_ref
from tdkernels.ops.experts.grouped_gemm.op import group_gemm_ref

FORWARDS = ("ag_gemm", "gemm_rs", "forward")
BOTH = "forward+backward"
LEAVES = ("x", "weights", "w_gate_up", "w_down")  # what has a gradient


class Routing(NamedTuple):
    """order: the choices of all tokens by expert; places: where each of them lies then; ends: of each expert."""

    order: torch.Tensor
    places: torch.Tensor
    ends: torch.Tensor


# ---- NCCL and permutes ----


def routed(ids, experts):
    """The Routing of ids [M, k]."""
    values, order = permute_baseline.sort(ids.flatten(), experts)
    every = torch.arange(experts, dtype=values.dtype, device=ids.device)
    ends = torch.searchsorted(values, every, right=True, out_int32=True)
    return Routing(order, permute_baseline.inverse(order), ends)


class _Gathered(torch.autograd.Function):
    """x of all ranks, once the work that is appended has been waited for."""

    @staticmethod
    def forward(ctx, x, works):
        full = x.new_empty(torch.distributed.get_world_size() * x.shape[0], *x.shape[1:])
        works.append(torch_collectives._all_gather(full, x, async_op=True))
        return full

    @staticmethod
    def backward(ctx, dfull):
        return reduce_scatter_rows(dfull), None


class _Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, partial):
        return reduce_scatter_rows(partial)

    @staticmethod
    def backward(ctx, dy):
        return all_gather_rows(dy)


def grouped(rows, w, ends):
    """rows @ w[e].T, by torch's grouped product."""
    return torch._grouped_mm(rows, w.transpose(1, 2), offs=ends)


def one_by_one(rows, w, ends):
    """The same expert by expert, in any dtype."""
    return group_gemm_ref(rows, w, ends.diff(prepend=ends.new_zeros(1)))


def first_half(s, product=grouped):
    """(h by expert, Routing)."""
    works, choices = [], s.ids.shape[1]
    ids = all_gather_rows(s.ids)
    full = _Gathered.apply(s.x, works)
    routing = routed(ids, s.w_gate_up.shape[0])
    works[0].wait()
    rows = permute_baseline.Spread.apply(full, routing.order, routing.places, choices)
    return swiglu_ref(product(rows, s.w_gate_up, routing.ends), "swiglu"), routing


def second_half(s, h, routing, add_up, product=grouped):
    """y [M / W, H] of h by expert."""
    works = []
    weights = _Gathered.apply(s.weights, works)
    out = product(h, s.w_down, routing.ends)
    works[0].wait()
    return _Scattered.apply(permute_baseline.WeightedSum.apply(out, weights, routing.order, routing.places, add_up))


def layer(s, add_up, product=grouped):
    return second_half(s, *first_half(s, product), add_up, product)


def sequences(add_up, product=grouped):
    """{part: Method} of NCCL and torch; with ``one_by_one`` what is compared with."""
    return {
        "ag_gemm": Method(lambda s: first_half(s, product), _by_choice),
        "gemm_rs": Method(lambda s: second_half(s, s.h, s.routing, add_up, product), _as_it_is),
        "forward": Method(lambda s: layer(s, add_up, product), _as_it_is),
        BOTH: Method(lambda s: both_ways(lambda leaves: layer(leaves, add_up, product), s), _as_it_is),
    }


def _by_choice(outputs):
    """h in the order of choices, of rows by expert."""
    h, routing = outputs
    return permute_baseline.taken(h, routing.places)


def _as_it_is(outputs):
    return outputs


def in_fp32(s):
    """The same operands."""
    floats = {name: value.float() for name, value in vars(s).items() if name in (*LEAVES, "dy", "h")}
    return type(s)(**{**vars(s), **floats})


def both_ways(forward, s):
    """y and the gradients of ``LEAVES``."""
    leaves = {name: getattr(s, name).detach().requires_grad_() for name in LEAVES}
    with torch.enable_grad():
        y = forward(type(s)(**{**vars(s), **leaves}))
        return y.detach(), *torch.autograd.grad(y, list(leaves.values()), s.dy)


# ---- one of the two alone ----


def add_alone(s):
    """Add to a set of operands what one half, or a product or a collective alone, begins with."""
    works = []
    s.h, s.routing = first_half(s)
    full = _Gathered.apply(s.x, works)
    works[0].wait()
    s.rows = permute_baseline.taken(full, s.routing.order // s.ids.shape[1])
    s.pre = grouped(s.rows, s.w_gate_up, s.routing.ends)
    s.partial = torch.randn_like(full)


def _gate_up(s):
    return grouped(s.rows, s.w_gate_up, s.routing.ends)


def _down(s):
    return grouped(s.h, s.w_down, s.routing.ends)


def _products(s):
    return _gate_up(s), _down(s)


def _products_and_gradients(s):
    ends = s.routing.ends
    dh = torch._grouped_mm(s.rows, s.w_down, offs=ends)
    dw_down = torch._grouped_mm(s.rows.t(), s.h, offs=ends)
    drows = torch._grouped_mm(s.pre, s.w_gate_up, offs=ends)
    dw_gate_up = torch._grouped_mm(s.pre.t(), s.rows, offs=ends)
    return *_products(s), dh, dw_down, drows, dw_gate_up


def _gather(s):
    return all_gather_rows(s.x)


def _scatter(s):
    return reduce_scatter_rows(s.partial)


def _gather_and_scatter(s):
    return _gather(s), _scatter(s)


ALONE = {  # {part: {name: call}}
    "ag_gemm": {"grouped": _gate_up, "collective": _gather},
    "gemm_rs": {"grouped": _down, "collective": _scatter},
    "forward": {"grouped": _products, "collective": _gather_and_scatter},
    BOTH: {
        "grouped": _products_and_gradients,
        "collective": lambda s: (*_gather_and_scatter(s), *_gather_and_scatter(s)),
    },
}


# ---- ours ----


def ours(part, sets, config):
    """The Method of ours in a config, None for a call as it comes."""
    if part == "ag_gemm":
        return Method(lambda s: _first_half(s, config), _by_choice_of_ours, config=config)
    if part == "gemm_rs":
        return Method(_second_half(sets, config), _as_it_is, config=config)
    if part == "forward":
        return Method(lambda s: _layer(s, config), _as_it_is, config=config)
    return Method(lambda s: both_ways(lambda leaves: _layer(leaves, config), s), _as_it_is, config=config)


def _first_half(s, config):
    return tdkernels.moe_ag_gemm(s.x, s.ids, s.w_gate_up, activation="swiglu", config=config)


def _by_choice_of_ours(outputs):
    h, routing = outputs
    return permute_baseline.taken(h, routing.rows.flatten())


def _second_half(sets, config):
    """Rows lie in an order of our own, which is another one for another config."""
    rows = {}
    for s in sets:
        _, routing = _first_half(s, config)
        rows[id(s)] = permute_baseline.taken(_by_choice((s.h, s.routing)), routing.choices), routing
    return lambda s: tdkernels.moe_gemm_rs(*rows[id(s)], s.weights, s.w_down, config=config)


def _layer(s, config):
    return tdkernels.tp_moe(s.x, s.ids, s.weights, s.w_gate_up, s.w_down, config=config)

