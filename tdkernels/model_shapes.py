"""Layer sizes of well-known models, as problems for the dense operators: what `tune --model` and the benchmarks take.

A transformer layer under tensor parallelism with sequence parallelism is four products: the projections to q, k and v
and to the MLP's inside gather their input (AG-GEMM), those back to the hidden size scatter their sum (GEMM-RS). Without
sequence parallelism, as in decoding, the latter keep the whole sum on every rank (GEMM-AR).
"""

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer's layer. ``gated``: the MLP has two projections inwards, which are one product here."""

    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head: int = 128
    gated: bool = True

    def layers(self):
        """{layer: (operator, N, K)}"""
        attention = self.q_heads * self.head
        return {
            "qkv": ("ag_gemm", attention + 2 * self.kv_heads * self.head, self.hidden),
            "gate-up" if self.gated else "up": ("ag_gemm", (1 + self.gated) * self.intermediate, self.hidden),
            "o": ("gemm_rs", self.hidden, attention),
            "down": ("gemm_rs", self.hidden, self.intermediate),
        }


MODELS = {
    "llama-7b": Model(4096, 11008, 32, 32),
    "llama-3.1-8b": Model(4096, 14336, 32, 8),
    "llama-3.1-70b": Model(8192, 28672, 64, 8),
    "llama-3.1-405b": Model(16384, 53248, 128, 8),
    "qwen2-72b": Model(8192, 29568, 64, 8),
    "gpt-3": Model(12288, 49152, 96, 96, gated=False),
}


def problems(model, tokens):
    """[(operator, (M, N, K))] of a model's layers for each number of tokens, with and without sequence parallelism."""
    layers = list(MODELS[model].layers().values())
    layers += [("gemm_ar", n, k) for operator, n, k in layers if operator == "gemm_rs"]
    return [(operator, (m, n, k)) for operator, n, k in layers for m in tokens]
