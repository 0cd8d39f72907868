"""Methods of the benchmark of layers of experts with weights in fp8.

    sequence            the unfused baseline in bf16: NCCL, torch._grouped_mm and permutes
    bf16                the operator with weights in bf16
    block               with weights in fp8 and a scale for each 128 x 128 elements
    row                 with weights in fp8 and a scale for each output channel
    row, fast           with fast accumulation, too
    ..., portable       tp_moe only: without warp specialization, which is the default for large experts on Hopper
    ..., sent           ep_moe only: tokens are also sent in fp8

ep_moe has a capacity, so the host does not wait. Other configs are the defaults.
"""

import functools

import torch

import tdkernels
from bench.experts import ep_moe_methods, permute_baseline
from bench.experts.dispatch import capacity
from bench.experts.tp_moe_methods import sequences
from tdkernels.launch import rank_device
from tdkernels.runtime import gpu

SEQUENCE, BF16, SENT, PORTABLE = "sequence", "bf16", ", sent", ", portable"
SCALINGS = ("block", "row")
# Kinds of fp8 weights: scaling and further options of the operator.
KINDS = {"block": ("block", {}), "row": ("row", {}), "row, fast": ("row", {"use_fast_accum": True})}


def of(case, sets):
    """Return ({method: function of a set}, function of a grouped GEMM that returns the unfused baseline).

    Adds to each set what the methods need.
    """
    layer, options, unfused = (_tp_moe if case.operator == "tp_moe" else _ep_moe)(case, sets)
    _add_fp8(sets)
    calls = {SEQUENCE: unfused(), BF16: lambda s: layer(s, s.w_gate_up, s.w_down)}
    for kind, (scaling, accumulation) in KINDS.items():
        for suffix, more in options.items():
            calls[kind + suffix] = functools.partial(_with_fp8, layer, scaling, accumulation | more)
    return calls, unfused


@functools.cache
def _format():
    return gpu.e4m3_dtype(rank_device())


def quantized(w, scaling):
    """Return (codes, scale) of weights [E, N, K]."""
    pairs = [tdkernels.quantize_fp8(one, scaling, dtype=_format(), weight=scaling == "block") for one in w]
    codes = torch.stack([one.view(torch.uint8) for one, _ in pairs]).view(_format())
    return codes, torch.stack([scale for _, scale in pairs])


def _add_fp8(sets):
    """Add the weights in fp8 to each set: {scaling: ((codes, scale) of w_gate_up, of w_down)}."""
    fp8 = {}  # by the weights, which several sets may share
    for s in sets:
        if id(s.w_down) not in fp8:
            fp8[id(s.w_down)] = {
                scaling: (quantized(s.w_gate_up, scaling), quantized(s.w_down, scaling)) for scaling in SCALINGS
            }
        s.fp8 = fp8[id(s.w_down)]


def _with_fp8(layer, scaling, options, s):
    (gate_up, scale_gate_up), (down, scale_down) = s.fp8[scaling]
    return layer(s, gate_up, down, scale_gate_up=scale_gate_up, scale_down=scale_down, **options)


def _tp_moe(case, sets):
    """Return (function of a set and the weights, {suffix of a method: options}, function of a grouped GEMM)."""
    add_up = permute_baseline.fastest_sum(case.shape.tokens, case.shape.hidden, sets[0].weights.repeat(case.ranks, 1))

    def layer(s, *weights, **options):
        return tdkernels.tp_moe(s.x, s.ids, s.weights, *weights, **options)

    options = {"": {}, PORTABLE: {"config": tdkernels.MoeTpConfig()}}
    return layer, options, lambda *gemm: sequences(add_up, *gemm)["forward"].call


def _ep_moe(case, sets):
    """As ``_tp_moe``."""
    for s in sets:
        ep_moe_methods.add_known_sizes(s, case.experts)
    add_up = permute_baseline.fastest_sum(case.tokens, case.shape.hidden, sets[0].weights)
    bound = {"num_experts": case.experts, "max_tokens": capacity(case, max(s.most_rows for s in sets))}

    def layer(s, *weights, **options):
        return tdkernels.ep_moe(s.x, s.ids, s.weights, *weights, **bound, **options)

    def unfused(*gemm):
        return ep_moe_methods.sequence(ep_moe_methods.FORWARD, case.experts, add_up, *gemm).call

    return layer, {"": {}, SENT: {"quantize": "fp8"}}, unfused
