"""Symmetric memory made ready for one family of collective kernels: signals, an epoch, and two halves of data.

What a symmetric buffer holds, in this order (``lang._context`` reads it):

    ready words [128]   one 64-bit word for each peer: "I have come to this barrier"
    signals     [2, half_signals]   64-bit words that only grow
    data        [halves, half_bytes]   two, or one for what gathers behind a barrier into a fixed place

A kernel uses the half of its epoch's parity. The sizes of the halves belong to the buffer, not to the call, so that two
calls of different shapes never overlap. Beside it, private to the rank: the epoch and the number of finished programs
(the state), and a note to the host. What a wait leaves when it gives up is the group's (``failure``).
"""

import copy

import torch
from triton.runtime import driver

from tdkernels.errors import PeerTimeoutError, PlanMismatchError
from tdkernels.lang import _context as words
from tdkernels.lang import _emulation as networks
from tdkernels.lang import _signal as records
from tdkernels.symm.buffer import make_buffer
from tdkernels.symm.failure import host_words
from tdkernels.symm.group import group_state, live_states
from tdkernels.symm.timeout import get_timeout

_WORD = 8
_ALIGN = 256
_NOTE_WORDS = 4  # see lang._note
_MAX_PLANS = 256  # a plan's number is the low byte of a signal


def _round_up(n, multiple):
    return -(-n // multiple) * multiple


def refuse_nodes(name, state):
    """Raise NotImplementedError for a group on several nodes, of what has no form for them."""
    if state.topology.num_nodes > 1:
        raise NotImplementedError(
            f"{name}: runs on one node, and the group's {state.world_size} ranks are on {state.topology.num_nodes} "
            f"nodes of {state.local_world_size}; use a group of one node"
        )


class Workspace:
    """One buffer of one group on one device, for the launches of one family of kernels.

    Attributes: ``ctx`` is the table that goes to a kernel as its first argument, ``buffer`` the symmetric memory,
    ``kept`` a dict for what launchers make of the buffer once, emptied when another takes its place, and
    ``error_of_note`` what makes an exception of a kernel's note: of the workspace's name, its kind, three numbers.
    ``launches`` is for ``ops._launch``, and emptied with ``kept``.
    """

    def __init__(self, state, device, name, halves=2, across_nodes=False):
        if not across_nodes:
            refuse_nodes(name, state)
        self.group = state
        self.device = device
        self.name = name
        self.halves = halves
        self.rank, self.world_size = state.rank, state.world_size
        if self.world_size > words.MAX_RANKS.value:
            raise ValueError(f"group: {self.world_size} ranks, at most {words.MAX_RANKS.value} are supported")
        self.buffer = None
        self.half_bytes = self.half_signals = self.num_flags = 0
        self.kept, self.launches = {}, {}
        self.error_of_note = None
        self._plans = {}  # fields of a plan -> its number
        self._retired = []
        self._captured = False
        self._broken = None
        self._last_stream = self._last_event = None

    # ---- before the first launch of a plan ----

    def prepare(self, operator, fields, half_bytes, half_signals, num_flags=0):
        """Agree with all ranks on a plan, make room for it, and return its number; collective the first time.

        Args:     operator: name, for errors; fields: dict of what must be the same on all ranks; half_bytes,
                  half_signals: what the kernel needs in a half; num_flags: private words that it needs
        Raises:   ValueError when the ranks disagree; PeerTimeoutError; RuntimeError while a CUDA graph is captured
        """
        self.check()
        key = (operator, *fields.items())
        plan = self._plans.get(key)
        if plan is None:
            plan = self._new_plan(operator, fields, half_bytes, half_signals, num_flags)
            self._plans[key] = plan
        return plan

    def _new_plan(self, operator, fields, half_bytes, half_signals, num_flags):
        if self._capturing():
            raise RuntimeError(
                f"{operator}: the first call with a shape or config allocates and compiles, which a CUDA graph cannot "
                f"capture; make the call once before capture ({fields})"
            )
        self.group.agree(operator, fields)
        if half_bytes > self.half_bytes or half_signals > self.half_signals or num_flags > self.num_flags:
            # Twice what is asked for would spare growing again, but the data is too large to waste.
            half_bytes = max(_round_up(half_bytes, _ALIGN), self.half_bytes)
            half_signals = max(_round_up(half_signals, 128), self.half_signals)
            self._allocate(half_bytes, half_signals, max(_round_up(num_flags, 128), self.num_flags))
        return len(self._plans) % _MAX_PLANS

    def _allocate(self, half_bytes, half_signals, num_flags):
        """Replace the buffer; all ranks come here together, since they grow by the same agreed plans."""
        grows = self.buffer is not None
        if grows:
            self.buffer.barrier()  # nobody may still be writing into the old one
            self.kept, self.launches = {}, {}
            if self._captured:
                self._retired.append((self.buffer, self.ctx, self.state, self.note))  # a graph may be replayed on it
            else:
                self.buffer.close()
        try:
            with torch.inference_mode(False):  # the tables are written to later, whatever mode this call is in
                self._make(half_bytes, half_signals, num_flags)
        except Exception as error:
            self.buffer = None  # the old one is gone, and tables and plans speak of it: nobody can go on from here
            self.half_bytes = self.half_signals = self.num_flags = 0  # what is asked for next is still to be made
            if grows:
                self._broken = RuntimeError(f"{self.name}: its buffer could not grow: {type(error).__name__}: {error}")
            raise

    def _make(self, half_bytes, half_signals, num_flags):
        data_offset = _round_up((words.MAX_RANKS.value + 2 * half_signals) * _WORD, _ALIGN)
        self.buffer = make_buffer(self.group, data_offset + self.halves * half_bytes, self.device)
        self.half_bytes, self.half_signals, self.num_flags = half_bytes, half_signals, num_flags
        self.kept, self.launches = {}, {}
        self.data_offset = data_offset
        self._captured = False
        self.state = torch.zeros(words.STATE_FLAGS.value + num_flags, dtype=torch.int64, device=self.device)
        self.note = host_words(_NOTE_WORDS, self.device)
        self._note_words = self.note.numpy()
        self._timeout_s = get_timeout()
        table = [0] * words.CTX_BASES.value
        table[words.CTX_RANK.value] = self.rank
        table[words.CTX_NUM_RANKS.value] = self.world_size
        table[words.CTX_TIMEOUT_NS.value] = int(self._timeout_s * 1e9)
        table[words.CTX_STATE.value] = self.state.data_ptr()
        failure = self.group.failure(self.device)
        table[words.CTX_FAILED.value] = failure.flags.data_ptr()
        table[words.CTX_RECORD.value] = failure.record.data_ptr()
        table[words.CTX_NOTE.value] = self.note.data_ptr()
        table[words.CTX_HALF_SIGNALS.value] = half_signals
        table[words.CTX_DATA.value] = data_offset
        table[words.CTX_HALF_DATA.value] = half_bytes
        table[words.CTX_LOCAL_RANKS.value] = self.group.local_world_size
        table[words.CTX_BASES.value :] = [*self.buffer.addresses, *self.buffer.pes]
        self.ctx = torch.tensor(table, dtype=torch.int64, device=self.device)
        networks.name(self.state.data_ptr(), self.buffer.network)

    # ---- for transports that copy a signal instead of raising it from a kernel ----

    def signal_word(self, peer, index):
        """Signal number ``index`` of half 0 in the memory of ``peer``, as eight bytes."""
        first = (words.MAX_RANKS.value + index) * _WORD
        return self.buffer.tensor(peer)[first : first + _WORD]

    def signal_value(self):
        """The eight bytes that ``lang.keep_signal`` has left."""
        return self.state[words.STATE_SIGNAL.value : words.STATE_SIGNAL.value + 1].view(torch.uint8)

    # ---- around each launch ----

    def before_launch(self):
        """Bring the timeout up to date and order this launch after those on other streams; the stream, if any."""
        capturing = self._capturing()
        timeout_s = get_timeout()
        if self._timeout_s != timeout_s and not capturing:
            self._timeout_s = timeout_s
            self.ctx[words.CTX_TIMEOUT_NS.value] = int(timeout_s * 1e9)
        if self.device.type == "cpu":
            return None
        self._captured |= capturing
        stream = self._current_stream()
        if self._last_event is not None and not capturing and stream != self._last_stream:
            stream.wait_event(self._last_event)
        return stream

    def _current_stream(self):
        """As torch's, which takes the host several microseconds to make: mostly it is the one of the last launch."""
        last = self._last_stream
        if last is not None and driver.active.get_current_stream(self.device.index) == last.cuda_stream:
            return last
        return torch.cuda.current_stream(self.device)

    def after_launch(self, stream=None):
        """Remember where the launch went. On the CPU it has ended: raise what it recorded.

        Args:     stream: the one that it went to, if the caller knows it
        """
        if self.device.type == "cpu":
            self.check()
        elif not self._capturing():
            self._last_stream = stream or torch.cuda.current_stream(self.device)
            if self._last_event is None:
                self._last_event = torch.cuda.Event()
            self._last_event.record(self._last_stream)

    def _capturing(self):
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # ---- what went wrong ----

    def check(self):
        """Raise the error that a kernel of the group has recorded, if any, now and at every later call."""
        broken = self._broken or self.group.error_on(self.device)
        if broken is not None:
            raise copy.copy(broken)  # a raised error keeps the frames that it went through, and what they hold
        if self.buffer is not None:
            self._raise_note()

    def _raise_note(self):
        """Raise, once, what a kernel has left to tell (``lang._note``); the workspace is as good as before."""
        if self._note_words[0]:
            kind, *numbers = self._note_words.tolist()
            self._note_words[0] = 0
            raise self.error_of_note(self.name, kind, *numbers)

    def error_of(self, words):
        """The error that a group's record means if it was left by a launch on this workspace, else None."""
        *record, address = words
        current = [(self.buffer, None, self.state)] if self.buffer is not None else []
        for buffer, _, state, *_ in current + self._retired:
            if state.data_ptr() == address:
                return self._read_record(buffer, *record)
        return None

    def _read_record(self, buffer, kind, peer, address, expected, seen):
        signal = self._signal_name(buffer, address)
        if kind == records.RECORD_TIMEOUT.value:
            return PeerTimeoutError(self.name, self.rank, peer, signal, expected, seen, self._timeout_s)
        operator = self._operator(expected % _MAX_PLANS)
        if kind == records.RECORD_PLAN_TIMEOUT.value:
            epochs = expected // _MAX_PLANS, seen // _MAX_PLANS
            return PeerTimeoutError(operator, self.rank, peer, signal, *epochs, self._timeout_s)
        return PlanMismatchError(
            f"{operator}: rank {peer} made call {expected // _MAX_PLANS} with another shape, dtype or config than rank "
            f"{self.rank}: {self._describe(seen % _MAX_PLANS)} there, {self._describe(expected % _MAX_PLANS)} here"
        )

    def _signal_name(self, buffer, address):
        """Which word an address in a record means."""
        index = (address - buffer.addresses[self.rank]) // _WORD
        if not 0 <= index < words.MAX_RANKS.value + 2 * self.half_signals:
            return "between programs of this rank"
        if index < words.MAX_RANKS.value:
            return f"ready[{index}]"
        half, number = divmod(index - words.MAX_RANKS.value, self.half_signals)
        return f"{number} of half {half}"

    def _operator(self, plan):
        return self._plan_key(plan)[0]

    def _describe(self, plan):
        operator, *fields = self._plan_key(plan)
        return f"{operator}({', '.join(f'{name}={value}' for name, value in fields)})"

    def _plan_key(self, plan):
        """The key of the plan with this number; numbers are used again after 256, so the youngest is meant."""
        for key, number in reversed(self._plans.items()):
            if number == plan:
                return key
        return (self.name,)

    def close(self):
        """Give the memory back; local, when the group goes."""
        if self.buffer is not None:
            self.buffer.close()
        self.buffer, self.kept, self.launches, self._retired = None, {}, {}, []


def get_workspace(group, device, name, halves=2, across_nodes=False):
    """The workspace ``name`` of a resolved group on a device; made on first use, kept with the group.

    ``across_nodes``: the kernels that use it know that they reach some ranks by the network only.

    Raises:   NotImplementedError for a group on several nodes, unless ``across_nodes``
    """
    state = group_state(group)
    key = (name, device)
    if key not in state.workspaces:
        state.workspaces[key] = Workspace(state, device, name, halves, across_nodes)
    return state.workspaces[key]


def synchronize():
    """Wait for the current GPU to finish and raise the first error that a kernel of any live group has recorded.

    Raises:   PeerTimeoutError, PlanMismatchError
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for state in live_states():
        state.check()
