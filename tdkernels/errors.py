"""Exception classes of tdkernels for failures of collective calls."""

from collections.abc import Mapping


class PeerTimeoutError(RuntimeError):
    """A peer did not send a signal within the timeout.

    The group is unusable afterwards: every later call of it raises on this rank.

    Attributes:
        operator (str): The operator or workspace that waited.
        rank (int): The rank that waited.
        peer (int): The rank whose signal is missing. Equal to ``rank`` if one program waited for another on this rank.
        signal (str): The word of the signal area, such as "2 of half 0" or "ready[1]", or "agreement" if the host
            waited in a consensus check.
        expected (int): The epoch that the signal should have reached.
        seen (int): The epoch that it had reached.
        timeout_s (float): The timeout in seconds.
        hint (str): Further explanation, or "".
    """

    def __init__(
        self, operator: str, rank: int, peer: int, signal: str, expected: int, seen: int, timeout_s: float,
        hint: str = "",
    ):
        self.hint = hint
        self.operator, self.rank, self.peer, self.signal = operator, rank, peer, signal
        self.expected, self.seen, self.timeout_s = expected, seen, timeout_s
        text = self._text(f"signal {signal} should have reached epoch {expected}, it stands at {seen}")
        super().__init__(f"{operator}: {text}." + (f" {hint}" if hint else ""))

    def _text(self, stands):
        """Return the message without the operator and the hint. ``stands`` describes the signal."""
        rank, peer, timeout_s = self.rank, self.peer, self.timeout_s
        if peer == rank:
            return (
                f"rank {rank} waited for several times {timeout_s:g} s for another program of its own: {stands}. No "
                "peer caused this: either this GPU has stopped, or the kernel has a bug"
            )
        return (
            f"rank {rank} waited {timeout_s:g} s for rank {peer}: {stands}. Either rank {peer} died, or it did not "
            "make the same call, or it is later than the timeout (TDKERNELS_TIMEOUT_S or tdkernels.set_timeout)"
        )

    def asking(self, fields: Mapping[str, object]) -> "PeerTimeoutError":
        """Return a copy of this error whose hint names a call that waited in the consensus check.

        Args:
            fields: The properties of the call that all ranks must agree on, by name.
        """
        what = ", ".join(f"{name} {value}" for name, value in fields.items())
        hint = (
            f"Rank {self.rank} waited in the consensus check of a new call ({what}); rank {self.peer} may be in a "
            "known call with other shapes."
        )
        return type(self)(*self._fields()[:-1], hint)

    def _fields(self) -> tuple[str, int, int, str, int, int, float, str]:
        """Return the arguments of the constructor."""
        return (
            self.operator, self.rank, self.peer, self.signal, self.expected, self.seen, self.timeout_s, self.hint
        )

    def __reduce__(self):
        return type(self), self._fields()


class PeerFailedError(PeerTimeoutError):
    """A peer has failed and has notified this rank, so this rank did not wait for the timeout.

    It is raised if the peer can no longer send data that this rank waits for, or may have overwritten data that this
    rank was still reading. It has the attributes of ``PeerTimeoutError``. The error on rank ``peer`` gives the cause.
    """

    def _text(self, stands):
        return (
            f"rank {self.peer} has failed in this group, so rank {self.rank} has no valid result of this call ({stands}"
            f"). The error of rank {self.peer} says why"
        )


class PlanMismatchError(ValueError):
    """A peer made the same collective call with another shape, dtype or config."""
