"""The errors that tdkernels adds to Python's own."""


class PeerTimeoutError(RuntimeError):
    """A peer did not raise a signal in time.

    Attributes name what was being waited for: ``operator``, ``rank`` (who waited), ``peer`` (for whom), ``signal``
    (which word of the signal area), ``expected`` and ``seen`` (epochs), ``timeout_s``.
    """

    def __init__(self, operator, rank, peer, signal, expected, seen, timeout_s):
        self.operator, self.rank, self.peer, self.signal = operator, rank, peer, signal
        self.expected, self.seen, self.timeout_s = expected, seen, timeout_s
        stands = f"signal {signal} should have reached epoch {expected}, it stands at {seen}"
        if peer == rank:
            text = (
                f"rank {rank} waited for several times {timeout_s:g} s for another program of its own: {stands}. No "
                "peer is to blame: either this GPU has stopped, or it is a fault of the kernel"
            )
        else:
            text = (
                f"rank {rank} waited {timeout_s:g} s for rank {peer}: {stands}. Either rank {peer} died, or it did not "
                "make the same call, or it is later than the timeout (TDKERNELS_TIMEOUT_S or tdkernels.set_timeout)"
            )
        super().__init__(f"{operator}: {text}.")

    def __reduce__(self):
        fields = (self.operator, self.rank, self.peer, self.signal, self.expected, self.seen, self.timeout_s)
        return type(self), fields


class PlanMismatchError(ValueError):
    """A peer made the same collective call with another shape, dtype or config."""
