"""Named problem sizes: M, N and K of the full GEMM, before sharding.

`Shape.parse("8192x4096x12288")` gives any other size. `operators.py` defines which dimension each operator shards.
"""

import dataclasses
from dataclasses import dataclass

from tdkernels.model_shapes import MODELS


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


TOKENS = 8192
DECODE_TOKENS = tuple(2**i for i in range(10))  # 1 … 512
SWEEP_TOKENS = tuple(2**i for i in range(16))  # 1 … 32768


def short(model):
    """Return the group name of a model: llama-70b for llama-3.1-70b."""
    return model.replace("-3.1", "")


_MODELS = {short(name): model for name, model in MODELS.items()}
_SWEPT = ("llama-8b", "llama-70b")


def _layers(model, tokens=(TOKENS,), operators=("ag_gemm", "gemm_rs", "gemm_ar")):
    """Return {operator: shapes} of a model's layers. gemm_ar replaces gemm_rs without sequence parallelism."""
    shapes = {operator: [] for operator in operators}
    for layer, (operator, n, k) in _MODELS[model].layers().items():
        for name in (operator, "gemm_ar") if operator == "gemm_rs" else (operator,):
            if name in shapes:
                shapes[name] += [Shape(m, n, k, f"{model} {layer}") for m in tokens]
    return shapes


def _both(sizes):
    shapes = [Shape(TOKENS, n, k) for n, k in sizes]
    return {"ag_gemm": shapes, "gemm_rs": shapes}


def _mlps():
    """Return the two MLP projections without gate-up fusion, the shapes that most papers measure."""
    shapes = {"ag_gemm": [], "gemm_rs": []}
    for name, model in _MODELS.items():
        shapes["ag_gemm"].append(Shape(TOKENS, model.intermediate, model.hidden, f"{name} mlp in"))
        shapes["gemm_rs"].append(Shape(TOKENS, model.hidden, model.intermediate, f"{name} mlp out"))
    return shapes


_AR = ((32, 5120, 25600), (2048, 5120, 25600), (28000, 7168, 4096), (8192, 8192, 28672))

GROUPS = {
    "headline": _both([(8192, 28672)]),
    "seed": _both([(4096, 12288), (4096, 14336), (3584, 14336), (4608, 36864), (8192, 28672), (8192, 30720)]),
    "mlp": _mlps(),
    "ar": {"gemm_ar": [Shape(*sizes) for sizes in _AR]},
    **{name: _layers(name) for name in _MODELS},
    "decode": _layers("llama-70b", DECODE_TOKENS, ["gemm_ar"]),
    "sweep-8b": _layers("llama-8b", SWEEP_TOKENS),
    "sweep-70b": _layers("llama-70b", SWEEP_TOKENS),
}
DEFAULT_GROUPS = [name for name in GROUPS if name != "decode" and not name.startswith("sweep-")]


def select(names, operator, tokens=None):
    """Return the shapes of groups, or of sizes as MxNxK, for an operator, without duplicates.

    Args:
        tokens: values of M for the layers of models, instead of 8192; other groups keep their M.
    """
    found = {}
    for name in names:
        for shape in _named(name, operator, tokens):
            known = found.get(str(shape))
            found[str(shape)] = shape if known is None or not known.name else known
    return list(found.values())


def _named(name, operator, tokens):
    if name not in GROUPS:
        return [Shape.parse(name)]
    shapes = GROUPS[name].get(operator, [])
    if tokens and takes_tokens(name):
        return [dataclasses.replace(shape, m=m) for shape in shapes for m in tokens]
    return shapes


def takes_tokens(name):
    """Whether a group consists of a model's layers, whose M can be chosen."""
    return name in _MODELS


def layer_names():
    """Return {(operator, N, K): name} of all layers of models. A size of two models is named after the first."""
    found = {}
    for name in (*_SWEPT, *_MODELS, "mlp"):
        for operator, shapes in GROUPS[name].items():
            for shape in shapes:
                found.setdefault((operator, shape.n, shape.k), shape.name)
    return found
