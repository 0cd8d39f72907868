"""How all_to_all, ep_dispatch and ep_combine run: the config, and the default for a device."""

from dataclasses import dataclass

from tdkernels.runtime import gpu

COMBINES = ("per_rank", "per_expert")
METHODS = ("fused", "torch")


@dataclass(frozen=True)
class EpConfig:
    """How ``all_to_all``, ``ep_dispatch`` or ``ep_combine`` runs.

    Attributes:
        combine: what crosses the wire on the way back: "per_rank", one sum for each token and rank that has experts of
            it, rounded to the rows' dtype; "per_expert", all rows, added up where the token is and rounded once: more
            bytes, fewer roundings
        num_senders: programs that send, at most
        num_receivers: programs that receive, at most
        chunk_tokens: tokens under one signal, at least; a rank's tokens are at most 1024 chunks. What goes by a handle
            has that of the dispatch which made it
        block_bytes: what a program moves at a time
        num_warps: of a program
        direct_tokens: with a max_tokens_per_rank up to this many, at most 1024, a dispatch is one launch: each token is
            a chunk, and leaves for a slot of its own before anything has been counted; 0: never
        method: "fused", our kernels; or "torch": torch's all-to-all between sorts, of which the host waits for the
            counts whatever max_tokens says, so that no CUDA graph captures it; the first of its halves does it all, it
            sums as "per_expert" and takes nothing of the above. What goes by a handle goes as its dispatch went
    """

    combine: str = "per_rank"
    num_senders: int = 512
    num_receivers: int = 512
    chunk_tokens: int = 1
    block_bytes: int = 8192
    num_warps: int = 4
    direct_tokens: int = 256
    method: str = "fused"

    def illegal(self, device, dtype=None):
        """Why this config cannot run; None when it can."""
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


def default_config(device, operator="ep_dispatch", bounded=False, tokens=None):
    """The config for what nobody has tuned.

    Args:
        bounded: whether there is a max_tokens_per_rank
        tokens: about how many a rank has, or None: many
    """
    if device.type == "cpu":  # each program takes the interpreter long
        return EpConfig(num_senders=2, num_receivers=2, chunk_tokens=8, block_bytes=65536, num_warps=1)
    most = gpu.num_sms(device)
    if operator == "ep_combine":
        # Few senders, so that receivers have room beside them and the memory is busy while the wire is; but of few
        # tokens as many as can be at the same time.
        few = tokens is not None and tokens <= 2 * most
        return EpConfig(num_senders=4 * most if few else most, num_receivers=8 * most, num_warps=8)
    if bounded:
        return EpConfig(num_senders=4 * most, num_receivers=4 * most, block_bytes=16384)
    return EpConfig(num_senders=3 * most, num_receivers=4 * most)
