"""Problem sizes by name: M, N and K of the full product, before anything is divided between ranks.

AG-GEMM divides M of its input and N; GEMM-RS divides K, and M of its output. `Shape.parse("8192x4096x12288")` names
any other size.
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    m: int
    n: int
    k: int
    name: str = ""

    def __str__(self):
        return f"{self.m}x{self.n}x{self.k}"

    @classmethod
    def parse(cls, text):
        return cls(*map(int, text.split("x")))


_TOKENS = 8192

_SEED = [
    Shape(_TOKENS, n, k)
    for n, k in ((4096, 12288), (4096, 14336), (3584, 14336), (4608, 36864), (8192, 28672), (8192, 30720))
]
_HEADLINE = [Shape(_TOKENS, 8192, 28672)]


def _model(model, **layers):
    return [Shape(_TOKENS, n, k, f"{model} {layer.replace('_', '-')}") for layer, (n, k) in layers.items()]


GROUPS = {
    "headline": {"ag_gemm": _HEADLINE, "gemm_rs": _HEADLINE},
    "seed": {"ag_gemm": _SEED, "gemm_rs": _SEED},
    "llama-8b": {
        "ag_gemm": _model("llama-8b", qkv=(6144, 4096), gate_up=(28672, 4096)),
        "gemm_rs": _model("llama-8b", o=(4096, 4096), down=(4096, 14336)),
    },
    "llama-70b": {
        "ag_gemm": _model("llama-70b", qkv=(10240, 8192), gate_up=(57344, 8192)),
        "gemm_rs": _model("llama-70b", o=(8192, 8192), down=(8192, 28672)),
    },
    "llama-405b": {
        "ag_gemm": _model("llama-405b", gate_up=(106496, 16384)),
        "gemm_rs": _model("llama-405b", down=(16384, 53248)),
    },
    "gpt-3": {
        "ag_gemm": _model("gpt-3", up=(49152, 12288)),
        "gemm_rs": _model("gpt-3", down=(12288, 49152)),
    },
}


def select(names, operator):
    """The shapes of the named groups, or sizes as MxNxK, for an operator; no size twice."""
    found = {}
    for name in names:
        for shape in GROUPS[name][operator] if name in GROUPS else [Shape.parse(name)]:
            known = found.get(str(shape))
            found[str(shape)] = shape if known is None or not known.name else known
    return list(found.values())
