"""Workspace of one family of collective kernels: symmetric memory with signals, an epoch and double-buffered data.

Layout of the symmetric buffer, in this order (``lang.context`` uses the same):

    ready words [128]   one 64-bit word for each peer: the peer has reached a barrier
    status words [128]  one 64-bit word for each peer: nonzero if the peer cannot serve later calls
    signals     [2, half_signals]   64-bit words whose values only grow
    data        [halves, half_bytes]   two halves, or one for a gather to a fixed place behind a barrier

A kernel uses the half given by the parity of its epoch. The sizes of the halves belong to the buffer, not to the call,
so that two calls of different shapes never overlap. Each rank also has private words: the state, which is the epoch and
the number of finished programs, and the note, which is the host error mailbox. The failure record belongs to the group,
see ``failure``.
"""

import copy
import itertools
import weakref
from collections.abc import Mapping

import torch

from tdkernels.caches import RecentCache
from tdkernels.lang import context as words
from tdkernels.lang import emulation as networks
from tdkernels.rounding import round_up
from tdkernels.symm import shared_settings, timeout
from tdkernels.symm.factory import make_buffer
from tdkernels.symm.group import group_state, live_states, states
from tdkernels.symm.mailbox import Mailbox
from tdkernels.symm.record import Table

_WORD = 8
_ALIGN = 256
_PLANS = 1 << words.PLAN_BITS.value  # a plan id is the low part of a signal
_MAX_LAUNCHES = 4096  # a bound, because shapes may change without end
_table_ids = itertools.count(1)


def refuse_nodes(name, state):
    """Raise NotImplementedError if the group is on several nodes."""
    if state.topology.num_nodes > 1:
        raise NotImplementedError(
            f"{name}: runs on one node, and the group's {state.world_size} ranks are on {state.topology.num_nodes} "
            f"nodes of {state.local_world_size}; use a group of one node"
        )


def words_bytes(half_signals: int) -> int:
    """Return the bytes of the words before the data area, rounded up to its alignment."""
    return round_up((words.SIGNALS_BEGIN.value + 2 * half_signals) * _WORD, _ALIGN)


class Workspace(Mailbox):
    """Symmetric buffer of one group on one device, for the launches of one family of kernels. See ``get_workspace``.

    Attributes:
        ctx: The context table, which is the first argument of a kernel. It changes when the buffer grows.
        buffer: The SymmetricBuffer, or None before the first ``prepare``.
        launches: A cache for launches and other objects derived from the buffer. It is cleared when the buffer grows.
        pending: Data that was sent and not yet received, or None. It is also cleared.
    """

    max_plans = _PLANS

    def __init__(self, state, device, name, halves=2, across_nodes=False):
        if not across_nodes:
            refuse_nodes(name, state)
        super().__init__(state, device, name)
        self.halves = halves
        if self.world_size > words.MAX_RANKS.value:
            raise ValueError(f"group: {self.world_size} ranks, at most {words.MAX_RANKS.value} are supported")
        self.buffer = None
        self.half_bytes = self.half_signals = self.num_flags = 0
        self._make_caches()
        self._plans = {}  # (operator, fields) of a plan -> its id
        self._retired = []
        self._broken = None
        self._is_open = False
        self._copies = False
        self._failure = None  # of the group on this device, set with the buffer
        self._on_cpu = device.type == "cpu"

    def prepare(
        self, operator: str, fields: Mapping, half_bytes: int, half_signals: int, num_flags: int = 0,
        sent_bytes: int | None = None, slot_bytes: int | None = None,
    ) -> int:
        """Return the id of a launch plan. The first call with a plan is collective: it runs a consensus check.

        It also grows the buffer if needed, which replaces ``ctx``. Later calls cost a lookup.

        Args:
            operator: The operator, for errors.
            fields: The properties of the call that must be equal on all ranks, by name.
            half_bytes: The bytes of data that the kernel needs in a half.
            half_signals: The signals that the kernel needs in a half.
            num_flags: The private words that the kernel needs.
            sent_bytes: The bytes of a half that are written, if not all of them. Only solo mode uses this and
                ``slot_bytes``, those of the first call with a plan.
            slot_bytes: The distance between the slots of consecutive ranks, if it is not ``half_bytes`` / W.

        Raises:
            ValueError: If the fields differ between the ranks.
            PeerTimeoutError: If a rank does not make the same call within the timeout.
            RuntimeError: If the plan is new while a CUDA graph is captured.
        """
        self.check()
        key = (operator, *fields.items(), *shared_settings.shared_fields().items())
        plan = self._plans.get(key)
        if plan is None:
            plan = self._new_plan(operator, fields, half_bytes, half_signals, num_flags)
            self._plans[key] = plan
        elif half_bytes > self.half_bytes or half_signals > self.half_signals or num_flags > self.num_flags:
            # The kernel would access memory past its part of the buffer.
            raise AssertionError(
                f"{operator}: a bug in tdkernels: the fields of a plan do not determine its buffer sizes: {fields}"
            )
        return plan

    def _new_plan(self, operator, fields, half_bytes, half_signals, num_flags):
        if self._capturing():
            raise RuntimeError(
                f"{operator}: the first call with a shape or config allocates and compiles, which a CUDA graph cannot "
                f"capture; make the call once before capture ({fields})"
            )
        self.group.check_consensus(operator, fields)
        if len(self._plans) >= self.max_plans:
            # Collective, since all ranks have the same plans. The new buffer contains no signals of old plans, and
            # every shape needs a new consensus check.
            self._allocate(max(half_bytes, self.half_bytes), max(half_signals, self.half_signals), self.num_flags)
            self._plans.clear()
        if half_bytes > self.half_bytes or half_signals > self.half_signals or num_flags > self.num_flags:
            # Growing to twice the requested size would avoid later growth, but the data is too large to waste.
            half_bytes = max(round_up(half_bytes, _ALIGN), self.half_bytes)
            half_signals = max(round_up(half_signals, 128), self.half_signals)
            self._allocate(half_bytes, half_signals, max(round_up(num_flags, 128), self.num_flags))
        return len(self._plans)

    def _allocate(self, half_bytes, half_signals, num_flags):
        """Replace the buffer. Collective: all ranks grow with the same plans."""
        grows = self.buffer is not None
        if grows:
            self._end_use()
            self._forget_launches()
            if self._captured:
                self._retired.append((self.buffer, self.ctx, self.state))  # a graph may be replayed on it
            else:
                self.buffer.close()
            self.buffer = None  # a rank that waits in the allocation posts notices in all workspaces with a buffer
        try:
            with torch.inference_mode(False):  # the tables are written to later, outside this mode
                self._make(half_bytes, half_signals, num_flags)
        except Exception as error:
            self.buffer = None  # tables and plans refer to the old buffer, so the workspace is unusable
            self.half_bytes = self.half_signals = self.num_flags = 0  # the next request must allocate
            if grows:
                self._broken = RuntimeError(f"{self.name}: its buffer could not grow: {type(error).__name__}: {error}")
            raise

    def _end_use(self):
        """Wait until no rank uses the buffer, and raise on all ranks if one rank has an error. Collective.

        A kernel may have recorded an error since the check in ``prepare``. If only its rank raised, the other ranks
        would wait for it until the timeout.
        """
        error = None
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)
        try:
            self.check(in_call=False)
        except Exception as found:
            error = found
        texts = self.group.exchange(self.name, "" if error is None else f"{type(error).__name__}: {error}")
        if error is not None:
            raise error
        for rank, text in enumerate(texts):
            if text:
                self.group.break_off(error := RuntimeError(f"{self.name}: rank {rank} has failed: {text}"))
                raise error

    def _make(self, half_bytes, half_signals, num_flags):
        self.buffer, data_offset = self._make_buffer(half_bytes, half_signals)
        self.half_bytes, self.half_signals, self.num_flags = half_bytes, half_signals, num_flags
        self._forget_launches()
        self.data_offset = data_offset
        self._captured = False
        self.state = torch.zeros(words.STATE_FLAGS.value + num_flags, dtype=torch.int64, device=self.device)
        self._make_note()
        self.timeout_s = timeout.get_timeout()
        table = [0] * words.CTX_BASES.value
        table[words.CTX_RANK.value] = self.rank
        table[words.CTX_NUM_RANKS.value] = self.world_size
        table[words.CTX_TIMEOUT_NS.value] = int(self.timeout_s * 1e9)
        table[words.CTX_STATE.value] = self.state.data_ptr()
        self._failure = failure = self.group.failure(self.device)
        table[words.CTX_FAILED.value] = failure.flags.data_ptr()
        table[words.CTX_RECORD.value] = failure.record.data_ptr()
        table[words.CTX_DEVICE_FAILED.value] = failure.device.flag.data_ptr()
        table[words.CTX_ID.value] = number = next(_table_ids)
        table[words.CTX_NOTE.value] = self.note.data_ptr()
        table[words.CTX_HALF_SIGNALS.value] = half_signals
        table[words.CTX_DATA.value] = data_offset
        table[words.CTX_HALF_DATA.value] = half_bytes
        table[words.CTX_LOCAL_RANKS.value] = self.group.local_world_size
        table[words.CTX_BASES.value :] = [*self.buffer.addresses, *self.buffer.pes]
        self.ctx = torch.tensor(table, dtype=torch.int64, device=self.device)
        base = self.buffer.addresses[self.rank]
        self.group.tables[number] = Table(weakref.ref(self), self.name, base, half_signals)
        networks.name(self.state.data_ptr(), self.buffer.network)

    def _make_buffer(self, half_bytes, half_signals):
        """Return a new buffer and the offset of its data area in bytes."""
        data_offset = words_bytes(half_signals)
        return make_buffer(self.group, data_offset + self.halves * half_bytes, self.device), data_offset

    def signal_word(self, peer: int, index: int) -> torch.Tensor:
        """Return signal ``index`` of half 0 in the memory of ``peer`` as eight bytes, to copy ``signal_value`` into."""
        first = (words.SIGNALS_BEGIN.value + index) * _WORD
        return self.buffer.tensor(peer)[first : first + _WORD]

    def signal_value(self) -> torch.Tensor:
        """Return the eight bytes that ``lang.keep_signal`` has stored."""
        return self.state[words.STATE_SIGNAL.value : words.STATE_SIGNAL.value + 1].view(torch.uint8)

    def expect_copies(self) -> None:
        """Prepare for copies by the host to peers, which cannot check whether this rank has failed.

        The first call is collective, and waits for earlier calls: they do not check their peers when they end.
        """
        if not self._copies:
            self._end_use()
            self._copies = True

    def may_be_overwritten(self) -> bool:
        """Return whether a failed peer may overwrite data that a call reads, now or when a CUDA graph is replayed."""
        return self._copies or self._capturing()

    def before_launch(self) -> torch.cuda.Stream | None:
        """Update the timeout, order this launch after those on other streams, and return a GPU's current stream."""
        capturing = not self._on_cpu and torch.cuda.is_current_stream_capturing()
        timeout_s = timeout.in_force_s or timeout.find_timeout()
        if self.timeout_s != timeout_s and not capturing:
            self.timeout_s = timeout_s
            self.ctx[words.CTX_TIMEOUT_NS.value] = int(timeout_s * 1e9)
        if self._on_cpu:
            if self._is_open:
                self._refuse_to_go_on()
            self._is_open = True
            self.group.count_launch()
            return None
        self._captured |= capturing
        return self.group.stream_order(self.device).before(capturing)

    def after_launch(self, stream: torch.cuda.Stream | None = None) -> None:
        """Record the stream of a launch, by default the current one. On the CPU, raise the error that it recorded."""
        if self._on_cpu:
            self._is_open = False
            self.check()
            return
        self.group.count_launch()
        if not torch.cuda.is_current_stream_capturing():
            self.group.stream_order(self.device).after(stream)

    def extend_launch(self) -> None:
        """Order later launches on other streams after all kernels that the current stream has launched so far.

        Call this after a kernel that reads the buffer but is not a launch of the workspace.
        """
        if not self._on_cpu and not torch.cuda.is_current_stream_capturing():
            self.group.stream_order(self.device).after(None)

    def _refuse_to_go_on(self):
        """Raise the error of an earlier call that an exception ended in the middle of its kernel, on the CPU."""
        self.group.break_off(
            RuntimeError(f"{self.name}: an earlier call of rank {self.rank} ended in the middle of its kernel")
        )
        self.check()

    def break_off(self, error: BaseException) -> None:
        """Make every later call of the group raise after an exception in a launch, which may have sent some data.

        It does nothing on a GPU, where a launch raises before the kernel runs.
        """
        if self.device.type == "cpu":
            self.group.end_abruptly(self.name, error)

    def _capturing(self):
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    def check(self, in_call: bool = True) -> None:
        """Raise the error that a kernel of the group has recorded, if any, now and at every later call.

        Args:
            in_call: Whether a raised error replaces a call. False between two calls, on all ranks.
        """
        # Usually there is no error, and checking these five values finds that out.
        group, failure = self.group, self._failure
        broken = self._broken or group.interrupted or group.refusal
        if broken or failure is None or failure.error is not None or failure.device.word[0]:
            broken = self._broken or group.error_on(self.device)
        if broken is not None:
            raise copy.copy(broken)  # a raised error keeps the frames that it passes through, and their objects
        if self.note is not None and self._note_words[0]:
            self._raise_note(self.note_call if in_call else None)

    def post_status(self, is_waiting: bool) -> None:
        """Post or withdraw a notice at the peers on this node, see ``agreement``. The device must be idle."""
        if self.buffer is None:
            return
        number = int(self.state[words.STATE_EPOCH.value]) + 1 if is_waiting else 0
        value = torch.tensor([number * _PLANS], dtype=torch.int64).view(torch.uint8)
        first = (words.MAX_RANKS.value + self.rank) * _WORD
        for peer in range(self.world_size):
            if peer != self.rank and self.buffer.topology.is_local(peer):
                self.buffer.tensor(peer)[first : first + _WORD].copy_(value)

    def status_of(self, peer: int) -> int:
        """Return the status word of ``peer`` in this rank's memory, see ``lang.context``."""
        first = (words.MAX_RANKS.value + peer) * _WORD
        return int(self.buffer.tensor(self.rank)[first : first + _WORD].view(torch.int64))

    def plan_key(self, plan: int) -> tuple:
        """Return (operator, (name, value) of each field) of a plan id, or (workspace name,) if the id is unknown."""
        for key, number in self._plans.items():
            if number == plan:
                return key
        return (self.name,)

    def close(self) -> None:
        """Free the memory when the group is freed. It is a local operation."""
        if self.buffer is not None:
            self.buffer.close()
        self.buffer, self._retired = None, []
        self._forget_launches()

    def _make_caches(self):
        self.launches, self.pending = RecentCache(_MAX_LAUNCHES), None

    def _forget_launches(self):
        self.launches.clear()  # WithinCall refers to this cache, which refers to the buffer: a reference cycle
        self._make_caches()


def get_workspace(
    group: torch.distributed.ProcessGroup, device: torch.device, name: str, halves: int = 2, across_nodes: bool = False
) -> Workspace:
    """Return the workspace ``name`` of a group on a device. The first call creates it; it is kept with the group.

    Args:
        group: A group from ``resolve_group``.
        device: The device.
        name: A name for the family of kernels that share the workspace.
        halves: The number of halves of data, 2 or 1.
        across_nodes: Whether the kernels support ranks that they can only access through the network.

    Raises:
        NotImplementedError: If the group is on several nodes and ``across_nodes`` is False.
    """
    state = states.get(group) or group_state(group)
    workspace = state.workspaces.get((name, device))
    if workspace is None:
        kind = state.workspace_class or Workspace
        workspace = state.workspaces[name, device] = kind(state, device, name, halves, across_nodes)
    return workspace


def synchronize() -> None:
    """Wait for the current GPU, and raise the first error that a kernel of any group has recorded.

    On a GPU, a kernel may fail after its call has returned. Call this before a decision depends on a result.

    Raises:
        PeerTimeoutError: If a wait for a peer timed out. It is a PeerFailedError if the peer has failed.
        PlanMismatchError: If a peer made the call with another shape, dtype or config.
        ValueError: If a kernel found invalid values in its inputs, such as expert ids out of range.
        RuntimeError: If a launch did not run because another group had failed, or if the group is unusable.
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for state in live_states():
        state.check()
