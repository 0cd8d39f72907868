"""Symmetric memory made ready for one family of collective kernels: signals, an epoch, and two halves of data.

What a symmetric buffer holds, in this order (``lang.context`` reads it):

    ready words [128]   one 64-bit word for each peer: "I have come to this barrier"
    status words [128]  one for each peer: not zero if it cannot serve later calls
    signals     [2, half_signals]   64-bit words that only grow
    data        [halves, half_bytes]   two, or one for what gathers behind a barrier into a fixed place

A kernel uses the half of its epoch's parity. The sizes of the halves belong to the buffer, not to the call, so that two
calls of different shapes never overlap. Beside it, private to the rank: the epoch and the number of finished programs
(the state), and a note to the host. What a wait leaves when it gives up is the group's (``failure``).
"""

import copy
import itertools
import weakref
from collections import OrderedDict

import torch

from tdkernels.caches import RecentCache
from tdkernels.lang import context as words
from tdkernels.lang import emulation as networks
from tdkernels.rounding import round_up
from tdkernels.symm import timeout
from tdkernels.symm.factory import make_buffer
from tdkernels.symm.failure import host_words
from tdkernels.symm.group import group_state, in_step, live_states, states
from tdkernels.symm.record import Table

_WORD = 8
_ALIGN = 256
_NOTE_WORDS = 5  # see lang.host_error
_PLANS = 1 << words.PLAN_BITS.value  # a plan's id is the low part of a signal
_MAX_LAUNCHES = 4096  # shapes may go on changing for ever
_MAX_CALLS = 64  # that a note may belong to: far more than a host runs ahead of its GPU
_table_ids = itertools.count(1)


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
    ``launches`` a cache for the launches and whatever else is made of the buffer once, ``pending`` for what is sent and
    not received yet; both are emptied when another buffer takes its place. ``error_of_note`` makes an exception of a
    kernel's note: of the workspace's name, its kind, three numbers; for notes of calls that ``explain_notes`` was not
    told of.
    """

    max_plans = _PLANS

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
        self._forget_launches()
        self.error_of_note = None
        self.note = None
        self.note_call = 0
        self._notes_of_calls = OrderedDict()
        self._plans = {}  # fields of a plan -> its number
        self._retired = []
        self._captured = False
        self._broken = None
        self._is_open = False
        self._copies = False
        self._failure = None  # of the group on this device, once there is a buffer
        self._on_cpu = device.type == "cpu"

    # ---- before the first launch of a plan ----

    def prepare(self, operator, fields, half_bytes, half_signals, num_flags=0):
        """Agree with all ranks on a plan, make room for it, and return its number; collective the first time.

        Args:
            operator: name, for errors
            fields: dict of what must be the same on all ranks; half_bytes,
            half_signals: what the kernel needs in a half
            num_flags: private words that it needs

        Raises:
            ValueError: when the ranks disagree
            PeerTimeoutError
            RuntimeError: while a CUDA graph is captured
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
        self.group.check_consensus(operator, fields)
        if len(self._plans) >= self.max_plans:
            # All ranks come here together, since they agree on the same plans. In a new buffer no signal of an old
            # plan is left, and every shape is agreed upon anew.
            self._allocate(max(half_bytes, self.half_bytes), max(half_signals, self.half_signals), self.num_flags)
            self._plans.clear()
        if half_bytes > self.half_bytes or half_signals > self.half_signals or num_flags > self.num_flags:
            # Twice what is asked for would spare growing again, but the data is too large to waste.
            half_bytes = max(round_up(half_bytes, _ALIGN), self.half_bytes)
            half_signals = max(round_up(half_signals, 128), self.half_signals)
            self._allocate(half_bytes, half_signals, max(round_up(num_flags, 128), self.num_flags))
        return len(self._plans)

    def _allocate(self, half_bytes, half_signals, num_flags):
        """Replace the buffer; all ranks come here together, since they grow by the same agreed plans."""
        grows = self.buffer is not None
        if grows:
            self._end_use()
            self._forget_launches()
            if self._captured:
                self._retired.append((self.buffer, self.ctx, self.state))  # a graph may be replayed on it
            else:
                self.buffer.close()
            # Ranks wait for each other while they allocate, and after a while post a notice in every workspace.
            self.buffer = None
        try:
            with torch.inference_mode(False):  # the tables are written to later, whatever mode this call is in
                self._make(half_bytes, half_signals, num_flags)
        except Exception as error:
            self.buffer = None  # tables and plans refer to the old buffer, so the workspace cannot be used any more
            self.half_bytes = self.half_signals = self.num_flags = 0  # what is asked for next is still to be made
            if grows:
                self._broken = RuntimeError(f"{self.name}: its buffer could not grow: {type(error).__name__}: {error}")
            raise

    def _end_use(self):
        """Return when no rank uses the buffer any more, unless a rank has an error to report; collective.

        The kernels that ran until now may have recorded one since ``prepare`` has looked, and all ranks have to hear
        of it: they would wait in vain for the rank that raises.
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
        data_offset = round_up((words.SIGNALS_BEGIN.value + 2 * half_signals) * _WORD, _ALIGN)
        self.buffer = make_buffer(self.group, data_offset + self.halves * half_bytes, self.device)
        self.half_bytes, self.half_signals, self.num_flags = half_bytes, half_signals, num_flags
        self._forget_launches()
        self.data_offset = data_offset
        self._captured = False
        self.state = torch.zeros(words.STATE_FLAGS.value + num_flags, dtype=torch.int64, device=self.device)
        if self.note is None:  # one for all buffers, so that no note is lost with a buffer
            self.note = host_words(_NOTE_WORDS, self.device)
            self._note_words = self.note.numpy()
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

    # ---- for transports that copy a signal instead of raising it from a kernel ----

    def signal_word(self, peer, index):
        """Signal number ``index`` of half 0 in the memory of ``peer``, as eight bytes."""
        first = (words.SIGNALS_BEGIN.value + index) * _WORD
        return self.buffer.tensor(peer)[first : first + _WORD]

    def signal_value(self):
        """The eight bytes that ``lang.keep_signal`` has left."""
        return self.state[words.STATE_SIGNAL.value : words.STATE_SIGNAL.value + 1].view(torch.uint8)

    # ---- for transports by which the host copies to peers: a copy cannot look whether this rank has failed ----

    def expect_copies(self):
        """Prepare for copies by the host; collective the first time.

        Calls until then close without a look at their peers (``may_be_overwritten``), so they have to be over.
        """
        if not self._copies:
            self._end_use()
            self._copies = True

    def may_be_overwritten(self):
        """Whether a peer that has failed may overwrite what a call reads, now or when a graph is replayed."""
        return self._copies or self._capturing()

    # ---- around each launch ----

    def before_launch(self):
        """Bring the timeout up to date and order this launch after those on other streams; the stream, if any."""
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

    def after_launch(self, stream=None):
        """Remember where the launch went. On the CPU it has ended: raise what it recorded.

        Args:
            stream: the one that it went to, if the caller knows it
        """
        if self._on_cpu:
            self._is_open = False
            self.check()
            return
        self.group.count_launch()
        if not torch.cuda.is_current_stream_capturing():
            self.group.stream_order(self.device).after(stream)

    def _refuse_to_go_on(self):
        """Raise on the CPU, where an exception can end a kernel after it has sent a part."""
        self.group.break_off(
            RuntimeError(f"{self.name}: an earlier call of rank {self.rank} ended in the middle of its kernel")
        )
        self.check()

    def break_off(self, error):
        """Let every later call of the group raise: an exception has ended a kernel after it may have sent a part.

        On a GPU an exception of a launch comes before the kernel runs.
        """
        if self.device.type == "cpu":
            self.group.end_abruptly(self.name, error)

    def _capturing(self):
        return self.device.type == "cuda" and torch.cuda.is_current_stream_capturing()

    # ---- what went wrong ----

    def check(self, in_call=True):
        """Raise the error that a kernel of the group has recorded, if any, now and at every later call.

        Args:
            in_call: whether an error takes the place of a call; False between two calls, on all ranks
        """
        # Most calls find nothing, by looking at five words here.
        group, failure = self.group, self._failure
        broken = self._broken or group.interrupted or group.refusal
        if broken or failure is None or failure.error is not None or failure.device.word[0]:
            broken = self._broken or group.error_on(self.device)
        if broken is not None:
            raise copy.copy(broken)  # a raised error keeps the frames that it went through, and what they hold
        if self.note is not None and self._note_words[0]:
            self._raise_note(in_call)

    def expect_note(self, error_of_note):
        """Begin a call whose kernel may leave a note, of which ``error_of_note`` makes an exception.

        On a GPU the note of a call comes after later calls were made, so those of the last calls are kept. The kernel
        is given ``note_call``, and leaves it in its note. Raises the note of an earlier call, if there is one by now.
        """
        self.note_call += 1
        self._notes_of_calls[self.note_call] = error_of_note
        # What a CUDA graph has captured may be replayed at any time.
        if len(self._notes_of_calls) > _MAX_CALLS and not self._captured:
            self._notes_of_calls.popitem(last=False)
        self.check()

    def _raise_note(self, in_call):
        """Raise, once, what a kernel has left to tell (``lang.host_error``).

        If all ranks raise it in the call that it belongs to, or between two calls, the group can be used afterwards. A
        rank that raises the note of an earlier call does not make its current call. Its peers may have made it, and
        would pair it with this rank's next call, so the group is broken.
        """
        kind, *numbers, number = self._note_words.tolist()
        self._note_words[0] = 0
        error_of_note = self._notes_of_calls.get(number, self.error_of_note)
        error = in_step(error_of_note(self.name, kind, *numbers))
        if in_call and number != self.note_call and self.world_size > 1:
            self.group.break_off(
                RuntimeError(
                    f"{error}; rank {self.rank} raised that in place of a later call, which its peers may have made. "
                    "Destroy the process group and make a new one. tdkernels.synchronize() raises such an error "
                    "between two calls, after which the group can be used"
                )
            )
        raise error

    # ---- for a host that waits for an agreement, see ``group`` ----

    def post_status(self, is_waiting):
        """Tell the peers of this node which call this rank does not make while its host waits, or that it goes on.

        The device must be idle.
        """
        if self.buffer is None:
            return
        number = int(self.state[words.STATE_EPOCH.value]) + 1 if is_waiting else 0
        value = torch.tensor([number * _PLANS], dtype=torch.int64).view(torch.uint8)
        first = (words.MAX_RANKS.value + self.rank) * _WORD
        for peer in range(self.world_size):
            if peer != self.rank and self.buffer.topology.is_local(peer):
                self.buffer.tensor(peer)[first : first + _WORD].copy_(value)

    def status_of(self, peer):
        """The status word of ``peer`` in our memory, see ``lang.context``."""
        first = (words.MAX_RANKS.value + peer) * _WORD
        return int(self.buffer.tensor(self.rank)[first : first + _WORD].view(torch.int64))

    def plan_key(self, plan):
        """(operator, (name, value) of each field) of the plan with this id; (name of the workspace,) if none has it."""
        for key, number in self._plans.items():
            if number == plan:
                return key
        return (self.name,)

    def close(self):
        """Give the memory back; local, when the group goes."""
        if self.buffer is not None:
            self.buffer.close()
        self.buffer, self._retired = None, []
        self._forget_launches()

    def _forget_launches(self):
        self.launches, self.pending = RecentCache(_MAX_LAUNCHES), None


def get_workspace(group, device, name, halves=2, across_nodes=False):
    """The workspace ``name`` of a resolved group on a device; made on first use, kept with the group.

    ``across_nodes``: the kernels that use it know that they reach some ranks by the network only.

    Raises:
        NotImplementedError: for a group on several nodes, unless ``across_nodes``
    """
    state = states.get(group) or group_state(group)
    workspace = state.workspaces.get((name, device))
    if workspace is None:
        workspace = state.workspaces[name, device] = Workspace(state, device, name, halves, across_nodes)
    return workspace


def synchronize() -> None:
    """Wait for the current GPU to finish and raise the first error that a kernel of any live group has recorded.

    Raises:
        PeerTimeoutError, PlanMismatchError
    """
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        torch.cuda.synchronize()
    for state in live_states():
        state.check()
