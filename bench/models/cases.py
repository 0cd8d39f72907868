"""The cases of the model benchmark: sizes, phases, and the methods of each framework."""

from dataclasses import dataclass

import torch

PHASES = "prefill", "train", "decode"
FRAMEWORKS = "torch", "transformers", "megatron"
OWN = {"torch": "nccl", "transformers": "transformers", "megatron": "megatron"}  # the baseline of each framework
NO_COMMUNICATION, DTENSOR, PARALLELIZE = "no communication", "DTensor", "tdkernels.nn.parallelize"
ASYNC_TP, SYMM_MEM, INDUCTOR = "compile + async TP", "compile + symm_mem.install", "compile + inductor.install"
COMPILED = ASYNC_TP, SYMM_MEM, INDUCTOR
METHODS = {
    "torch": (NO_COMMUNICATION, "nccl", DTENSOR, PARALLELIZE),
    "transformers": ("transformers", "install", "parallelize"),
    "megatron": ("megatron", "tdkernels"),
}
OURS = PARALLELIZE, "install", "parallelize", "tdkernels"  # without torch.compile
OURS_COMPILED = SYMM_MEM, INDUCTOR


@dataclass(frozen=True)
class Size:
    """Sizes of a Llama model. The vocabulary is used by transformers only; it is small."""

    hidden: int
    intermediate: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int = 4096


SIZES = {
    "8b": Size(4096, 14336, 32, 8, 128), "70b": Size(8192, 28672, 64, 8, 128),
    "rehearsal": Size(64, 128, 4, 2, 16, vocabulary=64),
}


@dataclass(frozen=True)
class Case:
    """A phase of a model in a framework, on ``ranks`` ranks.

    tokens:         number of tokens in prefill and train; not used in decode
    sequences:      number of sequences of equal length that the tokens are divided into; not used in decode
    batch, context: number of sequences and of their keys, including the new token, in decode; not used otherwise
    compiled:       whether the methods with torch.compile are measured, too
    """

    framework: str
    phase: str
    size: str
    layers: int
    tokens: int
    batch: int
    context: int
    ranks: int
    dtype: torch.dtype = torch.bfloat16
    compiled: bool = False
    sequences: int = 1

    def __str__(self):
        what = f"{self.batch} x {self.context} keys" if self.is_decode else f"{self.tokens} tokens"
        return f"{self.framework} {self.size} {self.phase}, {what}"

    @property
    def is_decode(self):
        return self.phase == "decode"

    @property
    def sizes(self):
        return SIZES[self.size]

    @property
    def methods(self):
        compiled = COMPILED if self.compiled and self.framework == "torch" and not self.is_decode else ()
        return METHODS[self.framework] + compiled

    @property
    def positions(self):
        """Positions of the tokens of a forward in their sequence."""
        return slice(self.context - 1, self.context) if self.is_decode else slice(0, self.tokens // self.sequences)

    @property
    def shape(self):
        """(number of sequences, number of tokens in each of them) of a forward."""
        return (self.batch, 1) if self.is_decode else (self.sequences, self.tokens // self.sequences)

    def why_not(self):
        """Return the reason why the case cannot be measured, or None."""
        if self.framework == "megatron" and self.is_decode:
            return "decode is not measured with Megatron"
        for name in ("heads", "kv_heads", "intermediate", "vocabulary"):
            if getattr(self.sizes, name) % self.ranks:
                return f"{name} {getattr(self.sizes, name)} are not divisible by {self.ranks} ranks"
        if not self.is_decode and self.tokens % (self.sequences * self.ranks):
            return f"{self.tokens} tokens are not divisible by {self.sequences} sequences x {self.ranks} ranks"
        return None

    def fields(self):
        """Return the fields of the rows that describe the case."""
        sizes = {"tokens": self.tokens, "batch": self.sequences, "context": None}
        if self.is_decode:
            sizes = {"tokens": 1, "batch": self.batch, "context": self.context}
        return {
            "op": "model", "what": "model", "framework": self.framework, "phase": self.phase, "size": self.size,
            "layers": self.layers, **sizes, "dtype": str(self.dtype).removeprefix("torch."),
        }


def cases(frameworks, phases, **sizes):
    """Return the cases of a run."""
    return [Case(framework, phase, **sizes) for framework in frameworks for phase in phases]
