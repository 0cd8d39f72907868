"""The errors that tdkernels adds to Python's own."""


class PeerTimeoutError(RuntimeError):
    """A peer did not raise a signal in time.

    Attributes name what was being waited for: ``operator``, ``rank`` (who waited), ``peer`` (for whom), ``signal``
    (which word of the signal area), ``expected`` and ``seen`` (epochs), ``timeout_s``.
    """

    def __init__(self, operator, rank, peer, signal, expected, seen, timeout_s):
        self.operator, self.rank, self.peer, self.signal = operator, rank, peer, signal
        self.expected, self.seen, self.timeout_s = expected, seen, timeout_s
        super().__init__(
            f"{operator}: rank {rank} waited {timeout_s:g} s for rank {peer}: signal {signal} should have reached "
            f"epoch {expected}, it stands at {seen}. Either rank {peer} died, or it did not make the same call, or it "
            f"is later than the timeout (TDKERNELS_TIMEOUT_S or tdkernels.set_timeout)."
        )

    def __reduce__(self):
        fields = (self.operator, self.rank, self.peer, self.signal, self.expected, self.seen, self.timeout_s)
        return type(self), fields


class PlanMismatchError(ValueError):
    """A peer made the same collective call with another shape, dtype or config."""
