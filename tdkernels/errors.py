"""The errors that tdkernels adds to Python's own."""


class PeerTimeoutError(RuntimeError):
    """A peer did not raise a signal in time.

    Attributes name what was being waited for: ``operator``, ``rank`` (who waited), ``peer`` (for whom), ``signal``
    (which word of the signal area, or "agreement"), ``expected`` and ``seen`` (epochs), ``timeout_s``; ``hint``, what
    else there is to say, or "".
    """

    def __init__(self, operator, rank, peer, signal, expected, seen, timeout_s, hint=""):
        self.hint = hint
        self.operator, self.rank, self.peer, self.signal = operator, rank, peer, signal
        self.expected, self.seen, self.timeout_s = expected, seen, timeout_s
        text = self._text(f"signal {signal} should have reached epoch {expected}, it stands at {seen}")
        super().__init__(f"{operator}: {text}." + (f" {hint}" if hint else ""))

    def _text(self, stands):
        rank, peer, timeout_s = self.rank, self.peer, self.timeout_s
        if peer == rank:
            return (
                f"rank {rank} waited for several times {timeout_s:g} s for another program of its own: {stands}. No "
                "peer is to blame: either this GPU has stopped, or it is a fault of the kernel"
            )
        return (
            f"rank {rank} waited {timeout_s:g} s for rank {peer}: {stands}. Either rank {peer} died, or it did not "
            "make the same call, or it is later than the timeout (TDKERNELS_TIMEOUT_S or tdkernels.set_timeout)"
        )

    def asking(self, fields):
        """The same, of a rank that waited for all others to agree on a call with these fields."""
        what = ", ".join(f"{name} {value}" for name, value in fields.items())
        hint = (
            f"Rank {self.rank} waited for the agreement on a call that is new to it ({what}); rank {self.peer} may be "
            "in one that it knows, with other shapes."
        )
        return type(self)(*self._fields()[:-1], hint)

    def _fields(self):
        return (
            self.operator, self.rank, self.peer, self.signal, self.expected, self.seen, self.timeout_s, self.hint
        )

    def __reduce__(self):
        return type(self), self._fields()


class PeerFailedError(PeerTimeoutError):
    """A peer gave up and told this rank, which therefore did not wait for the timeout.

    Raised if the peer can no longer send what this rank waits for, or may have overwritten what this rank was still
    reading. The attributes are those of ``PeerTimeoutError``. The error of rank ``peer`` says why it gave up.
    """

    def _text(self, stands):
        return (
            f"rank {self.peer} has failed in this group, so rank {self.rank} has no valid result of this call ({stands}"
            f"). The error of rank {self.peer} says why"
        )


class PlanMismatchError(ValueError):
    """A peer made the same collective call with another shape, dtype or config."""
