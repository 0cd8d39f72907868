"""The relay of solo mode delivers signals to the mirror images of their senders, at the rate of the link."""

import threading
import time
from types import SimpleNamespace

import pytest
import torch

from tdkernels.lang import context as words
from tdkernels.solo import SoloState, SoloWorkspace
from tdkernels.solo.relay import gate_kernel, relay_kernel

RANKS, PER_SOURCE, HALF_SIGNALS = 4, 5, 128
BEGIN = words.SIGNALS_BEGIN.value


def signal(call, plan):
    return (call << words.PLAN_BITS.value) + plan


class Words:
    """The words of four ranks, and a context table of rank 0."""

    def __init__(self, epoch=0):
        self.of_rank = torch.zeros(RANKS, BEGIN + 2 * HALF_SIGNALS, dtype=torch.int64)
        self.state = torch.zeros(words.STATE_FLAGS.value, dtype=torch.int64)
        self.state[words.STATE_EPOCH.value] = epoch
        self.failed = torch.zeros(8, dtype=torch.int64)
        self.ctx = torch.zeros(words.CTX_BASES.value + 2 * RANKS, dtype=torch.int64)
        self.ctx[words.CTX_NUM_RANKS.value] = RANKS
        self.ctx[words.CTX_STATE.value] = self.state.data_ptr()
        self.ctx[words.CTX_FAILED.value] = self.failed.data_ptr()
        self.ctx[words.CTX_DEVICE_FAILED.value] = self.failed[4:].data_ptr()
        self.ctx[words.CTX_HALF_SIGNALS.value] = HALF_SIGNALS
        bases = [self.of_rank[rank].data_ptr() for rank in range(RANKS)]
        self.ctx[words.CTX_BASES.value :][:RANKS] = torch.tensor(bases)

    def signals(self, rank, half):
        return self.of_rank[rank, BEGIN + half * HALF_SIGNALS :][:HALF_SIGNALS]

    def relay(self, picoseconds=0, limit=10**4, block=16, halves=2, signals_last=False):
        calls = torch.tensor([int(self.state[words.STATE_EPOCH.value]), 0])
        relay_kernel[(1,)](
            self.ctx, calls, PER_SOURCE, picoseconds, limit, RANKS=RANKS, HALVES=halves, BLOCK=block,
            SIGNALS_LAST=signals_last, num_warps=1,
        )
        assert calls.tolist() == [int(self.state[words.STATE_EPOCH.value]) + 1] * 2


@pytest.mark.parametrize("epoch, halves, half", [(0, 2, 1), (1, 2, 0), (2, 1, 0)])
@pytest.mark.parametrize("block", [4, 16])
def test_signals_arrive_from_the_mirror_images(epoch, halves, half, block):
    held = Words(epoch)
    for peer in range(1, RANKS):
        held.signals(peer, half)[:PER_SOURCE] = signal(epoch + 1, 100 * peer + torch.arange(PER_SOURCE))
    held.relay(block=block, halves=halves)
    own = held.signals(0, half)
    assert own[:PER_SOURCE].tolist() == [0] * PER_SOURCE, "the signals of rank 0 are its own"
    for source in range(1, RANKS):
        expected = [signal(epoch + 1, 100 * (RANKS - source) + i) for i in range(PER_SOURCE)]
        assert own[source * PER_SOURCE :][:PER_SOURCE].tolist() == expected
    assert not own[RANKS * PER_SOURCE :].any()
    assert not held.signals(0, 1 - half).any()
    assert not held.of_rank[0, :BEGIN].any()


def test_signals_are_paced():
    held = Words()
    for peer in range(1, RANKS):
        held.signals(peer, 1)[:PER_SOURCE] = signal(1, 7)
    begin = time.perf_counter()
    held.relay(picoseconds=10**10, limit=10**6)
    assert time.perf_counter() - begin > (RANKS - 1) * PER_SOURCE * 0.01
    assert (held.signals(0, 1)[PER_SOURCE : RANKS * PER_SOURCE] == signal(1, 7)).all()


@pytest.mark.parametrize("signals_last", [False, True])
def test_the_link_is_idle_until_a_signal_is_set_unless_signals_come_last(signals_last):
    held = Words()
    late = held.signals(1, 1)

    def signal_all(after_s):
        time.sleep(after_s)
        for peer in range(1, RANKS):
            held.signals(peer, 1)[:PER_SOURCE] = signal(1, 7)

    count = (RANKS - 1) * PER_SOURCE
    sender = threading.Thread(target=signal_all, args=(1.0,))
    begin = time.perf_counter()
    sender.start()
    held.relay(picoseconds=10**12 // count, limit=10**6, signals_last=signals_last)  # 1 s for all data
    took = time.perf_counter() - begin
    sender.join()
    assert late[0] == signal(1, 7)
    assert 1.0 <= took < 1.9 if signals_last else took >= 1.95


def test_the_relay_ends_without_signals():
    held = Words()
    held.signals(1, 1)[0] = signal(1, 7)
    held.relay(limit=3)
    assert held.signals(0, 1)[(RANKS - 1) * PER_SOURCE] == signal(1, 7)
    assert int((held.signals(0, 1) != 0).sum()) == 1


def test_the_relay_ends_if_the_rank_has_failed():
    held = Words()
    held.failed[0] = 1
    held.signals(1, 1)[0] = signal(1, 7)
    held.relay(limit=10**9)
    assert not held.signals(0, 1).any()


def test_signals_of_other_calls_are_not_delivered():
    held = Words(epoch=4)
    for call, peer in ((3, 1), (7, 2)):
        held.signals(peer, 1)[0] = signal(call, 7)
    held.relay(limit=3)
    assert not held.signals(0, 1).any()


def test_the_gate_opens_when_the_relay_has_begun():
    gate_kernel[(1,)](torch.tensor([4, 5]), 10**9, num_warps=1)
    gate_kernel[(1,)](torch.tensor([4, 4]), 3, num_warps=1)  # not begun: it gives up after its scans


def test_a_launch_with_a_new_kernel_has_no_relay():
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(SoloWorkspace, "__init__", lambda self, name: None)
        sends, local = SoloWorkspace("gemm_rs"), SoloWorkspace("moe_route")
    for workspace, name in ((sends, "gemm_rs"), (local, "moe_route")):
        relays = [SimpleNamespace(is_ready=True) for _ in range(2)]
        workspace.name, workspace._views = name, {plan: (None, None, None, relay) for plan, relay in enumerate(relays)}
    state = SimpleNamespace(workspaces={"one": sends, "two": local})
    SoloState.expect_new_kernels(state)
    assert not any(relay.is_ready for *_, relay in sends._views.values())
    assert all(relay.is_ready for *_, relay in local._views.values()), "it never has a relay"
