"""The workspace of solo mode: one local buffer that also serves as the memory of all peers."""

from collections.abc import Mapping

import torch

from tdkernels.lang import context as words
from tdkernels.solo.relay import NoRelay, Relay
from tdkernels.symm.buffer import SymmetricBuffer
from tdkernels.symm.workspace import Workspace, words_bytes

# Workspaces whose data and signals consist of W equal slots; scales of ag_gemm follow them.
NAMES = (
    "ag_gemm", "ag_gemm one shot", "gemm_rs", "gemm_ar direct", "gemm_ar one shot", "gather", "scatter", "all_gather",
    "moe_ag_gemm", "moe_gemm_rs",
)
# These have W equal slots, too. But a signal does not cover the rows of mirror images, which belong to other tiles.
_INEXACT = ("gemm_rs one shot",)
# Workspaces of kernels that neither send nor wait.
_LOCAL = ("moe_route",)

# What is sent does not have to be computed first.
_SENT_FROM_THE_BEGINNING = "ag_gemm", "ag_gemm one shot", "gather", "all_gather", "moe_ag_gemm"

_ARRIVED = 1 << 60  # above every signal


class SoloBuffer(SymmetricBuffer):
    """A buffer of ``nbytes`` bytes for each rank, rank q's ``(W - q) * shift`` bytes after this rank's.

    Args:
        memory: uint8, [nbytes + (W - 1) * shift].
    """

    def __init__(self, state, memory, nbytes, shift):
        super().__init__(state, nbytes, memory.device)
        self._memory, self._shift = memory, shift

    def _begin(self, peer):
        return (self.world_size - peer) % self.world_size * self._shift

    @property
    def addresses(self) -> list[int]:
        return [self._memory.data_ptr() + self._begin(peer) for peer in range(self.world_size)]

    def tensor(self, peer: int) -> torch.Tensor:
        begin = self._begin(peer)
        return self._memory[begin : begin + self.nbytes]

    def close(self) -> None:
        self._memory = None


class SoloWorkspace(Workspace):
    """Workspace whose peers are mirror images of this rank.

    Memory: this rank's words, then a gap with the words of the peers, then the data. The shift is the size of a slot,
    which differs between plans. So every plan has its own context table, buffer and cached launches; ``prepare``
    selects them. To a caller, a change of plan looks as if the buffer had been replaced.

    The scales of scaled operands of ag_gemm follow the slots. Those of mirror images do not arrive, so their rows of
    the result are undefined.
    """

    def __init__(self, state, device, name, halves=2, across_nodes=False):
        supported = NAMES + (_INEXACT if state.inexact else ())
        if name not in supported and name not in _LOCAL:
            raise NotImplementedError(f"{name}: not in solo mode, which supports {', '.join(supported)}")
        super().__init__(state, device, name, halves, across_nodes)
        self._views, self._captured_views = {}, []

    def _make_buffer(self, half_bytes, half_signals):
        own = words_bytes(half_signals)
        # The words of the peers are between own and own + half_bytes. The end takes stores to the slots of other peers.
        data_offset = 2 * own + half_bytes
        nbytes = data_offset + self.halves * half_bytes
        memory = torch.zeros(nbytes + half_bytes, dtype=torch.uint8, device=self.device)
        # Random, because the power consumption of a GEMM, and with it the clock rate, depends on its operands.
        values = memory[data_offset:nbytes].view(torch.bfloat16)
        values.normal_(generator=torch.Generator(self.device).manual_seed(0))
        if self._captured:  # a CUDA graph may be replayed with the relays of the buffer before
            self._captured_views.append(self._views)
        self._memory, self._nbytes, self._views = memory, nbytes, {}
        self._calls = torch.zeros(2, dtype=torch.int64, device=self.device)
        self._words(memory, 0, words.MAX_RANKS.value).fill_(_ARRIVED)  # ready words: all peers reach every barrier
        return SoloBuffer(self.group, memory, nbytes, own), data_offset

    def prepare(
        self, operator: str, fields: Mapping, half_bytes: int, half_signals: int, num_flags: int = 0,
        sent_bytes: int | None = None, slot_bytes: int | None = None,
    ) -> int:
        plan = super().prepare(operator, fields, half_bytes, half_signals, num_flags)
        if plan not in self._views:
            slot_bytes = slot_bytes or half_bytes // self.world_size
            self._views[plan] = self._view(operator, half_bytes, half_signals, sent_bytes or half_bytes, slot_bytes)
        self.buffer, self.ctx, self.launches, self._relay = self._views[plan]
        return plan

    def _view(self, operator, half_bytes, half_signals, sent_bytes, shift):
        """Return (buffer, context table, cached launches, relay) of a plan."""
        if self.name in _LOCAL:  # all plans have those of the workspace; a relay would wait for signals until a timeout
            return self.buffer, self.ctx, self.launches, NoRelay()
        ranks = self.world_size
        smallest = words_bytes(self.half_signals)
        if half_bytes % ranks or half_signals % ranks or shift % 16 or shift < smallest:
            raise ValueError(
                f"{operator}: solo mode needs {ranks} equal slots of at least {smallest} bytes, not slots of {shift} "
                f"bytes in {half_bytes} bytes, and {half_signals} signals"
            )
        buffer = SoloBuffer(self.group, self._memory, self._nbytes, shift)
        ctx = self.ctx.clone()
        ctx[words.CTX_BASES.value :][:ranks] = torch.tensor(buffer.addresses, device=ctx.device)
        self._make_caches()  # those of other plans remain
        relay = Relay(
            self.name, ctx, self._calls, ranks, half_signals // ranks, self.halves, sent_bytes // ranks,
            self.group.link_rate, signals_last=self.name in _SENT_FROM_THE_BEGINNING,
        )
        return buffer, ctx, self.launches, relay

    def before_launch(self) -> torch.cuda.Stream | None:
        stream = super().before_launch()
        if self._relay.is_ready:
            self._relay.start()
        else:  # the peers' signals have arrived before the kernel runs
            self._signals().fill_(_ARRIVED)
        return stream

    def after_launch(self, stream: torch.cuda.Stream | None = None) -> None:
        if self._relay.is_ready:
            self._relay.join()
        else:
            self._signals().zero_()
            self._calls[0].copy_(self.state[words.STATE_EPOCH.value])
        super().after_launch(stream)
        if not self._on_cpu:
            # The first call of a plan, which loads all its kernels, has run without a relay, see ``SoloState``.
            self._relay.is_ready = True

    def expect_new_kernels(self) -> None:
        """Run the next launch of each plan without a relay, see ``SoloState``."""
        for *_, relay in self._views.values():
            relay.is_ready = self.name in _LOCAL

    def _signals(self):
        return self._words(self._memory, words.SIGNALS_BEGIN.value, 2 * self.half_signals)

    @staticmethod
    def _words(memory, first, count):
        return memory[8 * first : 8 * (first + count)].view(torch.int64)
