"""Problem sizes of the sequence-parallel operators: ag_attention and the Ulysses projections."""

import re
from dataclasses import dataclass

from bench.dense.shapes import Shape


@dataclass(frozen=True)
class AttentionShape:
    """Causal attention over one sequence; ``tokens`` is the total over all ranks."""

    tokens: int
    heads: int
    kv_heads: int
    dim: int
    name: str = ""

    def __str__(self):
        return f"{self.tokens}x{self.heads}x{self.kv_heads}x{self.dim}"


ATTENTION_TOKENS = (8192, 32768, 65536, 131072)
ULYSSES_TOKENS = (8192, 32768)
_HEADS = {"h32-kv8": (32, 8), "h32-kv32": (32, 32)}
# {operator: {name: (N, K)}}: 32 / 8 and 64 / 8 heads of 128.
_GEMMS = {
    "ulysses_qkv": {"hidden-4096": (6144, 4096), "hidden-8192": (10240, 8192)},
    "ulysses_out": {"hidden-4096": (4096, 4096), "hidden-8192": (8192, 8192)},
}
_FORMS = {"ag_attention": "SxHqxHkvxD", **dict.fromkeys(_GEMMS, "MxNxK")}
REHEARSAL = {
    "ag_attention": [AttentionShape(32, 4, 2, 16, "rehearsal")],
    **{operator: [Shape(32, 32, 64, "rehearsal")] for operator in _GEMMS},
}


def parse(text, tokens, operators):
    """Parse comma-separated names and sizes. Return {operator: shapes}; without text all shapes of the operators.

    Args:
        tokens: token counts for the named shapes, or None for their default counts.
    """
    words = text.split(",") if text else [*_HEADS, *_GEMMS["ulysses_qkv"]]
    found = {operator: [] for operator in operators}
    for word in words:
        chosen = {operator: _parse_word(operator, word, tokens) for operator in operators}
        if text and not any(chosen.values()):
            raise ValueError(
                f"--shapes of {', '.join(operators)}: {word!r} is neither "
                f"{' nor '.join(dict.fromkeys(_FORMS[operator] for operator in operators))} nor one of "
                f"{', '.join(dict.fromkeys(name for operator in operators for name in _names(operator)))}"
            )
        for operator, shapes in chosen.items():
            found[operator] += shapes
    return {operator: list(dict.fromkeys(shapes)) for operator, shapes in found.items()}


def _names(operator):
    return _HEADS if operator == "ag_attention" else _GEMMS[operator]


def _parse_word(operator, word, tokens):
    """Return the shapes of an operator for a name or a size; empty if there are none."""
    sizes = _names(operator).get(word)
    given = [int(size) for size in word.split("x")] if re.fullmatch(r"([1-9]\d*x)+[1-9]\d*", word) else []
    if operator == "ag_attention":
        if sizes:
            return [AttentionShape(count, *sizes, 128, word) for count in tokens or ATTENTION_TOKENS]
        return [AttentionShape(*given)] if len(given) == 4 else []
    if sizes:
        return [Shape(count, *sizes, word) for count in tokens or ULYSSES_TOKENS]
    return [Shape(*given)] if len(given) == 3 else []
