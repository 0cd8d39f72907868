"""Benchmark group_gemm with scaled fp8 operands on one GPU: ``python -m tdkernels bench group_gemm --shapes fp8``.

    bf16                  group_gemm in bf16 with its default arguments
    tdkernels LAYOUT      group_gemm of e4m3 operands with its default arguments
    torch LAYOUT          torch._scaled_grouped_mm, which has row-wise scales only
    dense LAYOUT          torch._scaled_mm of all rows and the weight of one expert

LAYOUT is "row" (scales [R, 1] and [E, N, 1]), "row fast" (the same with fast accumulation) or "block" (1 x 128 of x,
128 x 128 of w). SwiGLU is fused in tdkernels, a further torch operation in "torch", and left out in "dense". "dense"
is a bound for many rows. For few rows it is not one, because it reads one weight instead of E.

Every output is compared with the product of the dequantized operands in fp32 before it is timed. Operands with scales
have no gradient, so there is no backward. Overrides of the default config (``--config``) are measured per layout.
"""

from dataclasses import dataclass
from types import SimpleNamespace

import torch

import tdkernels
from bench.core import graphs, harness
from bench.core.measure import overridden, timed
from bench.dense.operators import DTYPE
from bench.experts import grouped_gemm
from bench.experts.grouped_gemm import Shape
from tdkernels.launch import rank_device
from tdkernels.ops.common.scaling import Scales, dequantize, multiplies_blocks, scaled_linear
from tdkernels.ops.experts.grouped_gemm import launch
from tdkernels.ops.experts.grouped_gemm.dispatch import swiglu_ref
from tdkernels.runtime import gpu

WHAT = "group_gemm_scaled"
BF16 = "bf16"
LAYOUTS = "row", "row fast", "block"
# Relative Frobenius errors, as in bench.dense.scaled. With SwiGLU, at least twice that of plain torch in bf16.
_LIMITS = {BF16: 4e-3, "row": 4e-3, "row fast": 2e-2, "block": 4e-3}
_COLD_BYTES = 256 << 20  # total size of the fp8 operands that calls cycle through: several times any L2 cache
_MAX_SETS = 8


@dataclass(frozen=True)
class Case:
    """One benchmark case: a shape, with all layouts of scales."""

    shape: Shape
    routing: str
    operator: str = "group_gemm"

    def __str__(self):
        return f"group_gemm fp8 {self.shape} {self.shape.name} {self.routing}"

    @property
    def flops(self):
        return 2 * self.shape.rows * self.shape.n * self.shape.k

    def inputs(self, seed):
        """Return the operands drawn with ``seed``: {"bf16", "row", "block": (x, w, scale_x, scale_w)}, and splits."""
        s = grouped_gemm.Case(self.shape, self.routing, "forward").inputs(seed)
        operands = {BF16: (s.x, s.w, None, None)}
        for scaling in ("row", "block"):
            x, scale_x = tdkernels.quantize_fp8(s.x, scaling, dtype=_format())
            w, scale_w = _quantize_experts(s.w, scaling)
            operands[scaling] = x, w, scale_x, scale_w
        return SimpleNamespace(splits=s.splits, offs=s.offs, ends=s.ends, operands=operands)


@dataclass(frozen=True)
class Method:
    """A method of a layout.

    Attributes:
        kind: "bf16", "tdkernels", "torch" or "dense".
        layout: "bf16", or one of LAYOUTS.
        call: Function of the inputs.
        config: The config of tdkernels, or None.
    """

    kind: str
    layout: str
    call: object
    config: object = None


def cases(operators, shapes, routing):
    """Return the cases of a run: those of the shapes with scaled operands."""
    return [Case(shape, routing) for _ in operators for shape in shapes if shape.fp8]


# ---- on the rank ----


def _format():
    return gpu.e4m3_dtype(rank_device())


def _quantize_experts(w, scaling):
    """Return (codes, scales) of w [E, N, K], quantized expert by expert."""
    pairs = [tdkernels.quantize_fp8(one, scaling, dtype=_format(), weight=scaling == "block") for one in w]
    codes = torch.empty(w.shape, dtype=_format(), device=w.device)
    for into, (one, _) in zip(codes, pairs, strict=True):
        into.copy_(one)
    return codes, torch.stack([scale for _, scale in pairs])


def _operands(layout, s):
    """Return x, w, scale_x, scale_w of a layout."""
    return s.operands[layout.removesuffix(" fast")]


@harness.measurement
def measure(case, plan):
    """Check and time all methods of a case. Returns the same as ``measure.measure``, with "error" in each entry."""
    first = case.inputs(0)
    x, w, *_ = _operands("row", first)
    count = max(2, min(_MAX_SETS, -(-_COLD_BYTES // (x.nbytes + w.nbytes))))
    sets = [first, *(case.inputs(seed) for seed in range(1, count))]
    methods, absent = _methods(case, plan, first)
    errors, captured, not_captured = {}, {}, {}
    for key in dict.fromkeys(map(_reference_key, methods.values())):  # one reference at a time, because they are large
        exact, plain = _references(case, sets[:2], key)
        for name in [name for name, method in methods.items() if _reference_key(method) == key]:
            method = methods[name]
            limit = max(_LIMITS[method.layout], 2 * plain)
            reason, errors[name] = _checked(method, sets[:2], exact, limit)
            if reason is not None:
                if method.kind in (BF16, "tdkernels") and "{" not in name:
                    raise RuntimeError(f"{name}: {reason}")
                absent[name] = reason
                del methods[name]
            elif plan.cuda_graph:
                reference = [(sets[0], exact[0], [limit / 2])]
                graph, reason = graphs.capture(method.call, sets, reference)
                (captured if reason is None else not_captured)[name] = reason or graph
        del exact
    calls = {name: method.call for name, method in methods.items()}
    configs = {name: method.config for name, method in methods.items()}
    found = timed(calls, captured, sets, plan, configs, absent, not_captured)
    return [(name, graph, {**times, "error": errors.get(name)}) for name, graph, times in found]


def _checked(method, sets, exact, limit):
    """Return (None or the reason why a method is not timed, its relative error or None)."""
    reason = harness.failure_reason(method.call, sets[0])
    if reason is not None:
        return reason, None
    error = max(harness.errors(method.call(s), right)[0] for s, right in zip(sets, exact, strict=True))
    return None if error <= limit else f"wrong: relative error {error:.4f}, the limit is {limit:.4f}", error


def _reference_key(method):
    """Return (operands, whether one expert multiplies all rows): what the exact result of a method depends on."""
    return method.layout.removesuffix(" fast"), method.kind == "dense"


def _references(case, sets, key):
    """Return the exact results, and the largest error of plain torch that rounds the product to bf16."""
    layout, dense = key
    exact, plain = [], 0.0
    for s in sets:
        x, w, scale_x, scale_w = s.operands[layout]
        ends = [x.shape[0]] if dense else s.ends
        product = torch.empty(x.shape[0], w.shape[1], device=x.device)
        for expert, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            part = slice(begin, end)
            left = x[part].float() if scale_x is None else dequantize(x[part], scale_x[part])
            right = w[expert].float() if scale_w is None else dequantize(w[expert], scale_w[expert])
            torch.mm(left, right.t(), out=product[part])
        activation = None if dense else case.shape.activation
        exact.append(swiglu_ref(product, activation))
        plain = max(plain, *harness.errors(swiglu_ref(product.to(DTYPE), activation), exact[-1]))
    return exact, plain


# ---- methods ----


def _methods(case, plan, first):
    """Return ({name: Method}, {name: reason for absence})."""
    activation, shape = case.shape.activation, case.shape
    selected = grouped_gemm.selected_config(grouped_gemm.Case(shape, case.routing, "forward"), first.operands[BF16][0])
    methods = {BF16: Method(BF16, BF16, lambda s: _bf16(s, activation), selected)}
    absent = {}
    for layout in LAYOUTS:
        default = _default(case, layout, first)
        configs, wrong = overridden(default, plan.overrides)
        absent |= {f"tdkernels {layout} {name}": reason for name, reason in wrong.items()}
        methods[f"tdkernels {layout}"] = Method("tdkernels", layout, _ours(layout, activation), default)
        for name, config in configs.items():
            call = _ours(layout, activation, config)
            methods[f"tdkernels {layout} {name}"] = Method("tdkernels", layout, call, config)
        if layout == "block":
            absent["torch block"] = "torch's grouped GEMM has no block-wise scales"
        elif not hasattr(torch, "_scaled_grouped_mm"):
            absent[f"torch {layout}"] = "this version of torch has no torch._scaled_grouped_mm"
        else:
            methods[f"torch {layout}"] = Method("torch", layout, _torch_grouped(layout, activation))
        if layout == "block" and not multiplies_blocks(shape.rows, shape.k, rank_device()):
            absent["dense block"] = (
                "torch._scaled_mm has block-wise scales on Hopper with CUDA 12.9 only, for K in multiples of 512"
            )
        else:
            methods[f"dense {layout}"] = Method("dense", layout, _dense(layout))
    return methods, absent


def _default(case, layout, first):
    """Return the config that a call with scales and without a config uses."""
    x, w, scale_x, scale_w = _operands(layout, first)
    kind, fast = layout.removesuffix(" fast"), layout.endswith(" fast")
    return launch.config_for(x, w, None, case.shape.activation, Scales(scale_x, scale_w, kind, DTYPE, fast))


def _bf16(s, activation):
    x, w, *_ = s.operands[BF16]
    return tdkernels.group_gemm(x, w, s.splits, activation=activation)


def _ours(layout, activation, config=None):
    fast = layout.endswith(" fast")

    def call(s):
        x, w, scale_x, scale_w = _operands(layout, s)
        return tdkernels.group_gemm(
            x, w, s.splits, activation=activation, scale_x=scale_x, scale_w=scale_w, use_fast_accum=fast, config=config
        )

    return call


def _torch_grouped(layout, activation):
    fast = layout.endswith(" fast")

    def call(s):
        x, w, scale_x, scale_w = _operands(layout, s)
        y = torch._scaled_grouped_mm(
            x, w.transpose(1, 2), scale_x.view(-1), scale_w.squeeze(2), offs=s.offs, out_dtype=DTYPE,
            use_fast_accum=fast,
        )
        return swiglu_ref(y, activation)

    return call


def _dense(layout):
    kind, fast = layout.removesuffix(" fast"), layout.endswith(" fast")

    def call(s):
        x, w, scale_x, scale_w = _operands(layout, s)
        return scaled_linear(x, w[0], None, Scales(scale_x, scale_w[0], kind, DTYPE, fast))

    return call


# ---- in the calling process ----


def rows(case, found, link_gbps):
    """Return one row per method, with the measured times and the derived values.

    "speedup" is over torch's grouped GEMM of the same layout, "over_bf16" over group_gemm in bf16, and "efficiency" the
    time of the dense GEMM of the same layout over that of the method.
    """
    ms_of = {(method, graph): times.get("ms") for method, graph, times in found}
    shape, table = case.shape, []
    for method, graph, times in found:
        kind, _, layout = method.partition(" c")[0].partition(" ")
        ms, is_ours = times.get("ms"), kind == "tdkernels"
        torch_ms, dense_ms = ms_of.get((f"torch {layout}", graph)), ms_of.get((f"dense {layout}", graph))
        bf16_ms = ms_of.get((BF16, graph))
        table.append({
            "op": case.operator, "what": WHAT, "pass": "forward", "shape": str(shape),
            "name": f"{shape.name} {case.routing}".strip(), "rows": shape.rows, "n": shape.n, "k": shape.k,
            "experts": shape.experts, "activation": shape.activation, "routing": case.routing,
            "dtype": BF16 if kind == BF16 else "float8_e4m3", "layout": layout or None, "method": method,
            "graph": graph, "absent": times.get("absent"), "ms": ms, "host_ms": times.get("host_ms"),
            "burst": times.get("burst"), "error": times.get("error"),
            "tflops": case.flops / ms / 1e9 if ms else None, "wire_gbps": None,
            "speedup": torch_ms / ms if ms and torch_ms and is_ours else None,
            "over_bf16": bf16_ms / ms if ms and bf16_ms and is_ours else None,
            "floor_ms": dense_ms, "efficiency": dense_ms / ms if ms and dense_ms and kind != "dense" else None,
            "link_gbps": link_gbps, "config": times.get("config"),
        })
    return table
