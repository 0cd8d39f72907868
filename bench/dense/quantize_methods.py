"""Cases of the benchmark of quantize_fp8 and of linear layers in fp8: inputs, methods and their errors."""

from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import torch
import torch.nn.functional as F

import tdkernels
from bench.core import harness
from bench.dense.operators import DTYPE
from tdkernels.launch import rank_device
from tdkernels.nn import ColumnParallelLinear
from tdkernels.ops.common.scaling import Scales, dequantize, scaled_linear
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu

OURS, TORCH, COMPILED, COPY = "tdkernels", "torch", "torch.compile", "copy"  # method names as stored in rows
BF16, DWEIGHT = "bf16", ", dweight"
RECIPES = {"rowwise": "row", "tensorwise": "tensor"}  # recipe of a layer: scaling of quantize_fp8
_BLOCK = 128
# Relative Frobenius errors of elements with a normal distribution. Rounding to e4m3 gives 0.026, to e5m2 0.053; a
# product of two rounded operands has the root of the sum of the squares.
_ROUNDED, _E4M3, _E5M2, _PLAIN = 0.03, 0.045, 0.07, 5e-3
_FAST = 2e-2  # of fast accumulation, with exact operands; as in bench.dense.scaled


@dataclass(frozen=True)
class Method:
    """A method of a case.

    Attributes:
        call: Function of the inputs.
        errors: Function of the inputs that makes a call and returns the relative error of each result, or None.
        limits: The largest permitted errors.
        is_ours: Whether it is a method of this library, whose failure stops the measurement of the case.
    """

    call: Callable
    errors: Callable | None = None
    limits: tuple[float, ...] = ()
    is_ours: bool = False


@dataclass(frozen=True)
class Quantize:
    """Quantization of x [rows, k] in bf16. ``given``: with a given tensor-wise scale."""

    rows: int
    k: int
    scaling: str
    weight: bool
    given: bool
    transpose: bool

    what, operator, backward = "quantize", "quantize_fp8", False

    def __str__(self):
        kind = self.scaling + ", weight" * self.weight + ", given" * self.given + ", transposed" * self.transpose
        return f"{self.rows}x{self.k} {kind}"

    @property
    def bytes(self):
        """Return the bytes that one pass reads and writes."""
        rows, k = (self.k, self.rows) if self.transpose else (self.rows, self.k)
        scales = {"tensor": 1, "row": rows, "block": (cdiv(rows, _BLOCK) if self.weight else rows) * cdiv(k, _BLOCK)}
        return 3 * rows * k + 4 * scales[self.scaling]

    def inputs(self, seed):
        """Return x, its scale if it is given, and the source and destination of the copy."""
        s = SimpleNamespace(x=_randn(seed, self.rows, self.k))
        s.scale = None
        if self.given:
            s.scale = (s.x.abs().amax().float() / torch.finfo(_format()).max).view(1, 1)
        s.source = torch.randint(256, (self.bytes // 2,), dtype=torch.uint8, device=s.x.device)
        s.copied = torch.empty_like(s.source)
        return s


@dataclass(frozen=True)
class Linear:
    """A linear layer of x [tokens, k] and a weight [n, k]. ``backward``: forward and backward together."""

    tokens: int
    n: int
    k: int
    backward: bool

    what, operator = "float8_linear", "linear"

    def __str__(self):
        return f"linear {self.tokens}x{self.n}x{self.k}, {'forward and backward' if self.backward else 'forward'}"

    @property
    def bytes(self):
        return 2 * self.tokens * self.k

    @property
    def flops(self):
        return 2 * self.tokens * self.n * self.k * (3 if self.backward else 1)

    def inputs(self, seed):
        """Return x, dy if there is a backward, and otherwise {scaling: (codes, scale)} of x."""
        s = SimpleNamespace(x=_randn(seed, self.tokens, self.k).requires_grad_(self.backward), dy=None, exact=None)
        if self.backward:
            s.dy = _randn(100 + seed, self.tokens, self.n)
        else:
            s.codes = {one: tdkernels.quantize_fp8(s.x, one, dtype=_format()) for one in RECIPES.values()}
        return s


def _randn(seed, *sizes):
    device = rank_device()
    return torch.randn(*sizes, generator=torch.Generator(device).manual_seed(seed), dtype=DTYPE, device=device)


def _format():
    return gpu.e4m3_dtype(rank_device())


def of(case, compiled):
    """Return ({name: Method}, {name: reason for absence}) of a case."""
    if isinstance(case, Linear):
        return _linear(case), {}
    found = _quantize(case, compiled)
    return found, {} if compiled else {COMPILED: "torch.compile was not measured"}


# ---- quantize_fp8 ----


def _quantize(case, compiled):
    options = {"dtype": _format(), "weight": case.weight, "transpose": case.transpose}

    def plain(x, scale):
        return tdkernels.quantize_fp8_ref(x, case.scaling, scale=scale, **options)

    functions = {
        OURS: lambda x, scale: tdkernels.quantize_fp8(x, case.scaling, scale=scale, **options), TORCH: plain,
    }
    if compiled:
        torch._dynamo.reset()  # cases share the code of ``plain``, which is compiled a limited number of times
        functions[COMPILED] = torch.compile(plain, dynamic=False, fullgraph=True)
    found = {}
    for name, function in functions.items():
        call = lambda s, function=function: function(s.x, s.scale)  # noqa: E731

        def errors(s, call=call):
            codes, scale = call(s)
            return harness.relative_errors(dequantize(codes, scale), (s.x.t() if case.transpose else s.x).float())

        found[name] = Method(call, errors, (_ROUNDED,), name == OURS)
    found[COPY] = Method(lambda s: s.copied.copy_(s.source))
    return found


# ---- linear layers ----


def _linear(case):
    weight = torch.nn.Parameter(_randn(1000, case.n, case.k) * case.k**-0.5)
    functions = {TORCH: lambda x: F.linear(x, weight), BF16: _layer(case, weight)}
    for recipe in RECIPES:
        functions[recipe] = _layer(case, weight, float8=recipe)
        if case.backward:
            functions[recipe + DWEIGHT] = _layer(case, weight, float8=recipe, float8_dweight=True)
    found = {}
    for name, function in functions.items():
        call = _with_backward(function, weight) if case.backward else _forward(function)
        found[name] = Method(call, _errors_of_linear(call, weight), _limits(name, case.backward), name != TORCH)
    if not case.backward:
        found |= {f"gemm {recipe}": _gemm(weight, scaling) for recipe, scaling in RECIPES.items()}
    return found


def _errors_of_linear(call, weight):
    def errors(s):
        if s.exact is None:
            s.exact = _exact(s, weight)
        return harness.relative_errors(call(s), s.exact)

    return errors


def _forward(function):
    """Return call(inputs), which returns (y,)."""
    return lambda s: (function(s.x),)


def _layer(case, weight, **options):
    layer = ColumnParallelLinear(case.k, case.n, bias=False, device=weight.device, dtype=DTYPE, **options)
    layer.weight = weight
    return layer


def _with_backward(function, weight):
    """Return call(inputs), which returns y and the gradients of x and of the weight."""

    def call(s):
        with torch.enable_grad():
            y = function(s.x)
            return y.detach(), *torch.autograd.grad(y, (s.x, weight), s.dy)

    return call


def _exact(s, weight):
    """Return y in fp32, and with a backward the gradients of x and of the weight."""
    x, w = s.x.detach().float(), weight.detach().float()
    y = x @ w.t()
    if s.dy is None:
        return (y,)
    dy = s.dy.float()
    return y, dy @ w, dy.t() @ x


def _limits(name, backward):
    """Return the largest permitted errors of y, and with a backward of the gradients of x and of the weight."""
    recipe = name.removesuffix(DWEIGHT)
    if recipe not in RECIPES:
        return (_PLAIN,) * (3 if backward else 1)
    of_gradient = _E5M2 if recipe == "tensorwise" else _E4M3  # tensor-wise scales: dy is in e5m2
    of_weight = of_gradient if name.endswith(DWEIGHT) else _PLAIN
    return (_E4M3, of_gradient, of_weight) if backward else (_E4M3,)


def _gemm(weight, scaling):
    """Return the Method of the GEMM alone, with operands that are quantized already."""
    codes_w, scale_w = tdkernels.quantize_fp8(weight, scaling, dtype=_format())

    def call(s):
        codes, scale = s.codes[scaling]
        return scaled_linear(codes, codes_w, None, Scales(scale, scale_w, "row", DTYPE, True))

    def errors(s):
        return harness.relative_errors(call(s), dequantize(*s.codes[scaling]) @ dequantize(codes_w, scale_w).t())

    return Method(call, errors, (_FAST,))
