"""Named problem sizes of the MoE layers: tensor-parallel (tp_moe) and expert-parallel (ep_moe)."""

import re
from dataclasses import dataclass


@dataclass(frozen=True)
class TpShape:
    """Shape of tp_moe: total tokens, experts of ``inner`` x ``hidden``, and ``choices`` experts per token (top-k)."""

    tokens: int
    inner: int
    hidden: int
    experts: int
    choices: int
    name: str = ""

    def __str__(self):
        return f"{self.tokens}x{self.inner}x{self.hidden}x{self.experts}x{self.choices}"


@dataclass(frozen=True)
class EpShape:
    """Shape of ep_moe. The number of tokens per rank is a field of the case."""

    hidden: int
    inner: int
    experts: int
    choices: int
    name: str = ""

    def __str__(self):
        return f"{self.hidden}x{self.inner}x{self.experts}x{self.choices}"


TP_SHAPES = [
    TpShape(8192, 8192, 8192, 32, 4, "8k-e32"),
    TpShape(8192, 8192, 8192, 8, 2, "8k-e8"),
    TpShape(2048, 1408, 2048, 60, 4, "qwen1.5-moe"),
    TpShape(2048, 14336, 4096, 8, 2, "mixtral-8x7b"),
    TpShape(2048, 16384, 6144, 8, 2, "mixtral-8x22b"),
    TpShape(2048, 1408, 2048, 64, 6, "deepseek-lite"),
]
EP_SHAPES = [EpShape(4096, 2048, 256, 6, "h4096-e256"), EpShape(7168, 2048, 256, 8, "deepseek-v3")]
EP_TOKENS = (4096, 1024, 128)  # per rank; the largest first, so that workspaces never grow
TP_REHEARSAL = [TpShape(16, 32, 32, 4, 2, "rehearsal")]
EP_REHEARSAL = [EpShape(32, 16, 4, 2, "rehearsal")]


def parse(text, operators):
    """Parse comma-separated names and sizes into (TpShapes, EpShapes); without text all shapes of the operators."""
    known = {"tp_moe": TP_SHAPES, "ep_moe": EP_SHAPES}
    named = {shape.name: shape for operator in operators for shape in known[operator]}
    chosen = [_parsed(word, named, operators) for word in (text.split(",") if text else named)]
    return tuple([shape for shape in chosen if isinstance(shape, kind)] for kind in (TpShape, EpShape))


def _parsed(word, named, operators):
    if word in named:
        return named[word]
    sizes = [int(size) for size in word.split("x")] if re.fullmatch(r"([1-9]\d*x)*[1-9]\d*", word) else []
    for operator, kind, count in (("tp_moe", TpShape, 5), ("ep_moe", EpShape, 4)):
        if operator in operators and len(sizes) == count:
            return kind(*sizes)
    forms = {"tp_moe": "TxIxHxExk", "ep_moe": "HxIxExk"}
    raise ValueError(
        f"--shapes of {', '.join(operators)}: {word!r} is neither {' nor '.join(forms[name] for name in operators)} "
        f"nor one of {', '.join(named)}"
    )
