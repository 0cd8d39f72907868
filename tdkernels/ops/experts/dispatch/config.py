"""Config of all_to_all, ep_dispatch and ep_combine, and the default config for a device."""

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from tdkernels.autotune.invariance import is_batch_invariant
from tdkernels.runtime import gpu

if TYPE_CHECKING:
    import torch

COMBINES = ("per_rank", "per_expert")
METHODS = ("fused", "torch")


@dataclass(frozen=True)
class EpConfig:
    """Config of ``all_to_all``, ``ep_dispatch`` or ``ep_combine``.

    Attributes:
        combine: What a combine sends. "per_rank": one sum per token and rank with experts of the token, rounded to the
            dtype of the rows. "per_expert": all rows; they are added up on the token's rank and rounded once. It sends
            more bytes and rounds less often.
        num_senders: Maximum number of programs that send.
        num_receivers: Maximum number of programs that receive.
        chunk_tokens: Minimum number of tokens per chunk; a chunk has one signal. The tokens of a rank are at most 1024
            chunks. A call with a handle uses the value of the dispatch that made the handle.
        block_bytes: Number of bytes that a program moves at a time, a power of two from 256 to 65536.
        num_warps: Number of warps of a program: 1, 2, 4, 8 or 16.
        direct_tokens: Maximum max_tokens_per_rank, from 0 to 1024, for which a dispatch is a single launch. Each token
            is then a chunk and is sent to its own slot before anything is counted. 0 disables this.
        method: "fused" uses the kernels of this library. "torch" sorts the rows, calls torch's all-to-all and sorts
            again. Then the host waits for the counts, even with max_tokens, so that a CUDA graph cannot capture it; the
            send phase does all of the work; it sums as "per_expert", and all other fields are ignored. A call with a
            handle uses the method of the dispatch that made the handle.
    """

    combine: str = "per_rank"
    num_senders: int = 512
    num_receivers: int = 512
    chunk_tokens: int = 1
    block_bytes: int = 8192
    num_warps: int = 4
    direct_tokens: int = 256
    method: str = "fused"

    def illegal(self, device: "torch.device", dtype: "torch.dtype | None" = None) -> str | None:
        """Return why this config cannot run with a device and a dtype, or None if it can."""
        if self.method not in METHODS:
            return f'method must be "fused" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None
        if self.combine not in COMBINES:
            return f'combine must be "per_rank" or "per_expert", not {self.combine!r}'
        for name in ("num_senders", "num_receivers", "chunk_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                return f"{name} must be an integer of at least 1, not {value!r}"
        if self.block_bytes not in (1 << exponent for exponent in range(8, 17)):
            return f"block_bytes must be a power of two from 256 to 65536, not {self.block_bytes!r}"
        if type(self.direct_tokens) is not int or not 0 <= self.direct_tokens <= 1024:
            return f"direct_tokens must be an integer from 0 to 1024, not {self.direct_tokens!r}"
        if self.num_warps not in (1, 2, 4, 8, 16):
            return f"num_warps must be 1, 2, 4, 8 or 16, not {self.num_warps!r}"
        return None

    def variant_reason(self) -> str | None:
        """Return why the result of a combine depends on the batch with this config, or None if it does not."""
        if self.method != "fused":
            return f'method must be "fused", not {self.method!r}'
        if self.combine != "per_expert":  # sums of other ranks are rounded, and those of the token's rank are not
            return f'combine must be "per_expert", not {self.combine!r}'
        return None


def default_config(
    device: "torch.device", operator: str = "ep_dispatch", bounded: bool = False, tokens: int | None = None
) -> EpConfig:
    """Return the config for calls that have neither a given nor a tuned config.

    In the batch-invariant mode it combines "per_expert".

    Args:
        device: The device of the operands.
        operator: Name of the operator.
        bounded: Whether the call has max_tokens_per_rank.
        tokens: Approximate number of tokens per rank. None means many.
    """
    if is_batch_invariant():
        return replace(_default_config(device, operator, bounded, tokens), combine="per_expert")
    return _default_config(device, operator, bounded, tokens)


def _default_config(device, operator, bounded, tokens):
    """Return ``default_config`` with the default of ``combine``."""
    if device.type == "cpu":  # the interpreter needs a long time per program
        return EpConfig(num_senders=2, num_receivers=2, chunk_tokens=8, block_bytes=65536, num_warps=1)
    most = gpu.num_sms(device)
    if operator == "ep_combine":
        # With few senders, receivers run concurrently with them, and memory is busy at the same time as the links. With
        # few tokens there are as many senders as can run at the same time.
        few = tokens is not None and tokens <= 2 * most
        return EpConfig(num_senders=4 * most if few else most, num_receivers=8 * most, num_warps=8)
    if bounded:
        return EpConfig(num_senders=4 * most, num_receivers=4 * most, block_bytes=16384)
    return EpConfig(num_senders=3 * most, num_receivers=4 * most)
