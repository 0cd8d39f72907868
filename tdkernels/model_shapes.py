"""GEMM shapes of well-known models, for `tune --model` and the benchmarks.

With tensor and sequence parallelism, a transformer layer has four GEMMs. The QKV projection and the MLP's up
projection gather their input (AG-GEMM). The attention output projection and the MLP's down projection reduce-scatter
their product (GEMM-RS). Without sequence parallelism, as in decoding, these two all-reduce it instead (GEMM-AR).
"""

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """Sizes of a transformer layer.

    Attributes:
        hidden: The hidden size.
        intermediate: The hidden size of the MLP.
        q_heads: The number of query heads.
        kv_heads: The number of key and value heads.
        head: The head dimension.
        gated: Whether the MLP has a gate and an up projection. They are one GEMM here.
    """

    hidden: int
    intermediate: int
    q_heads: int
    kv_heads: int
    head: int = 128
    gated: bool = True

    def layers(self) -> dict[str, tuple[str, int, int]]:
        """Return (operator, N, K) of each GEMM, by layer name. Sizes are not divided by the number of ranks."""
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


def problems(model: str, tokens: Iterable[int]) -> list[tuple[str, tuple[int, int, int]]]:
    """Return (operator, (M, N, K)) of each layer of a model for each number of tokens M.

    The list has the shapes with sequence parallelism and those without it.
    """
    layers = list(MODELS[model].layers().values())
    layers += [("gemm_ar", n, k) for operator, n, k in layers if operator == "gemm_rs"]
    return [(operator, (m, n, k)) for operator, n, k in layers for m in tokens]
