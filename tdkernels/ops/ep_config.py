"""How all_to_all, ep_dispatch and ep_combine run: the config, and the default for a device."""

from dataclasses import dataclass

from tdkernels.ops import _device

COMBINES = ("per_rank", "per_expert")


@dataclass(frozen=True)
class EpConfig:
    """How ``all_to_all``, ``ep_dispatch`` or ``ep_combine`` runs.

    combine:        what crosses the wire on the way back: "per_rank", one sum for each token and rank that has experts
                    of it, rounded to the rows' dtype; "per_expert", all rows, added up where the token is and rounded
                    once: more bytes, fewer roundings
    num_senders:    programs that send, at most
    num_receivers:  programs that receive, at most
    chunk_tokens:   tokens under one signal, at least; a rank's tokens are at most 1024 chunks. What goes by a handle
                    has that of the dispatch which made it
    block_bytes:    what a program moves at a time
    num_warps:      of a program
    """

    combine: str = "per_rank"
    num_senders: int = 512
    num_receivers: int = 512
    chunk_tokens: int = 1
    block_bytes: int = 8192
    num_warps: int = 4

    method = "fused"  # no field, for there is no other; configs of all operators can be asked for it

    def illegal(self, device, dtype=None):
        """Why this config cannot run; None when it can."""
        if self.combine not in COMBINES:
            return f'combine must be "per_rank" or "per_expert", not {self.combine!r}'
        for name in ("num_senders", "num_receivers", "chunk_tokens"):
            value = getattr(self, name)
            if type(value) is not int or value < 1:
                return f"{name} must be an integer of at least 1, not {value!r}"
        if self.block_bytes not in (1 << exponent for exponent in range(8, 17)):
            return f"block_bytes must be a power of two from 256 to 65536, not {self.block_bytes!r}"
        if self.num_warps not in (1, 2, 4, 8, 16):
            return f"num_warps must be 1, 2, 4, 8 or 16, not {self.num_warps!r}"
        return None


def default_config(device):
    """The config for what nobody has tuned."""
    if device.type == "cpu":  # each program takes the interpreter long
        return EpConfig(num_senders=2, num_receivers=2, chunk_tokens=8, block_bytes=65536, num_warps=1)
    most = _device.num_sms(device)
    return EpConfig(num_senders=4 * most, num_receivers=4 * most)
