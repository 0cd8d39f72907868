"""Problem sizes by name: M, N and K of the full product, before anything is divided between ranks.

AG-GEMM divides M of its input and N; GEMM-RS divides K, and M of its output. `Shape.parse("8192x4096x12288")` names
any other size.
"""

from dataclasses import dataclass

from tdkernels.models import MODELS


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


def _model(name):
    """{operator: shapes} of a model's layers."""
    shapes = {}
    for layer, (operator, n, k) in MODELS[name].layers().items():
        shapes.setdefault(operator, []).append(Shape(_TOKENS, n, k, f"{name} {layer}"))
    return shapes


GROUPS = {
    "headline": {"ag_gemm": _HEADLINE, "gemm_rs": _HEADLINE},
    "seed": {"ag_gemm": _SEED, "gemm_rs": _SEED},
    **{name.replace("-3.1", ""): _model(name) for name in MODELS},
}


def select(names, operator):
    """The shapes of the named groups, or sizes as MxNxK, for an operator; no size twice."""
    found = {}
    for name in names:
        for shape in GROUPS[name][operator] if name in GROUPS else [Shape.parse(name)]:
            known = found.get(str(shape))
            found[str(shape)] = shape if known is None or not known.name else known
    return list(found.values())
