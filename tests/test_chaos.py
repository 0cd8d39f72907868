"""A few cases of the fault campaign (tests/chaos), and tests that it detects each kind of bad outcome."""

import contextlib
import dataclasses
import threading
import time

import pytest
import torch.distributed as dist

from tdkernels import PeerTimeoutError
from tdkernels import lang as td
from tests.chaos import campaign
from tests.chaos.plan import FAULTS, LATE_SEEDS, plan_of
from tests.chaos.play import BAD, Player, _names_its_call, play
from tests.chaos.problems import TABLE
from tests.support import forked_ranks
from tests.support.ranks import DEVICE
from tests.support.subset import THOROUGH

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="`make chaos DEVICE=shared` is for GPUs")
EACH = 2 if THOROUGH else 1  # cases per fault


@pytest.fixture(scope="module")
def ranks():
    """{W: ranks that run cases}"""
    # The suite forks its CPU ranks anyway, except on a machine with GPUs.
    with contextlib.nullcontext() if forked_ranks.is_installed() else campaign.use_forkserver():
        pools = {world_size: campaign.Ranks(world_size, "cpu") for world_size in (2, 3)}
        yield pools
        for pool in pools.values():
            pool.close()


def _plans():
    """Return the first plans of each fault, for different operators where possible."""
    chosen, operators = {fault: [] for fault in FAULTS}, set()
    for seed in range(2000):
        plan = plan_of(seed)
        if len(chosen[plan.fault]) < EACH and (plan.operator not in operators or seed > 500):
            chosen[plan.fault].append(plan)
            operators.add(plan.operator)
    return [plan for plans in chosen.values() for plan in plans]


def test_no_fault_gives_a_wrong_result_or_a_hang(ranks):
    plans = _plans()
    assert {plan.fault for plan in plans} == set(FAULTS)
    assert len({plan.operator for plan in plans}) >= min(11, len(plans))
    cases, lock = [], threading.Lock()

    def play_all(world_size, own_plans):
        for plan in own_plans:
            case = campaign.play_case(ranks[world_size], plan)
            with lock:
                cases.append(case)

    threads = [
        threading.Thread(target=play_all, args=(world_size, [plan for plan in plans if plan.world_size == world_size]))
        for world_size in (2, 3)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    summary = campaign.summarize(cases)
    assert summary["cases"] == len(plans) == EACH * len(FAULTS)
    assert not summary["bad"], "\n".join(line for case in cases for line in campaign.describe(case))
    assert (summary["wrong"], summary["hangs"]) == (0, 0)
    happened = summary["cases_in_which_the_fault_happened"]
    assert all(happened[fault] for fault in FAULTS if fault not in ("raise", "between")), happened


def _control(name, **changes):
    plan = next(plan for plan in map(plan_of, range(2000)) if plan.fault == "none" and plan.shape == 0)
    return dataclasses.replace(plan, name=name, operator=TABLE[name][1], world_size=2, calls=3, **changes)


# Bugs found by the campaign. A rank that raised between the launches of a backward of ep_moe continued as if it had
# succeeded. A rank that raised at the barrier of a copy, or whose peers had missed a consensus check, raised errors
# at the next call that named neither rank nor operator.
FOUND = [
    dict(name="ep_moe fused", fault="between", faulty=1, at=1, moment=0.79, backward=True),
    dict(name="all_gather copy_engine", fault="between", faulty=0, at=1, moment=0.8, backward=True, cold=True, shape=3),
    dict(name="ep two-phase", fault="delay", faulty=0, at=0, pause=4.0, cold=True, backward=False),
]


@pytest.mark.parametrize("changes", FOUND, ids=lambda changes: changes["name"])
def test_bugs_found_by_the_campaign(ranks, changes):
    plan = dataclasses.replace(_control(changes["name"]), **changes, timeouts=(2.5, 2.5))
    case = campaign.play_case(ranks[2], plan)
    assert not campaign.bad_outcomes(case) and case["ranks"][plan.faulty]["triggered"], campaign.describe(case)
    outcomes = {outcome for report in case["ranks"] for _, outcome, _, _ in report["log"]}
    assert "PeerTimeoutError" in outcomes, campaign.describe(case)


def play_with_stale_data(plan):
    """Give rank 1 the operands of call 2 in call 1, as if a peer had received the data of another call."""
    with pytest.MonkeyPatch.context() as patch:
        make = Player._problem

        def stale(player, shape, call):
            return make(player, shape, 2 if (dist.get_rank(), call) == (1, 1) else call)

        patch.setattr(Player, "_problem", stale)
        return play(plan)


@pytest.mark.parametrize(
    "name",
    ["ag_gemm push", "all_reduce one_shot", "all_to_all", "ep low-latency", "ep_moe fused", "tp_moe default",
     "flash_decode default", "ag_attention default", "ulysses_qkv pull"],
)
def test_data_of_another_call_is_detected(ranks, name):
    backward = name.startswith("ag_attention")  # in the causal forward the first rank needs no data of the other
    case = campaign.play_case(ranks[2], _control(name, backward=backward), play_with_stale_data)
    outcomes = [[outcome for _, outcome, _, _ in report["log"]] for report in case["ranks"]]
    assert outcomes[0] == ["correct", "WRONG", "correct"], campaign.describe(case)
    assert campaign.summarize([case])["wrong"] >= 1


def play_without_void_launches(plan):
    """Let launches after a failure store their results, as if there were no void launches."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("is_void", "is_void_for_all"):
            patch.setattr(td, name, lambda signal: signal == -1)
        return play(plan)


def test_overwriting_launches_after_a_failure_are_detected(ranks):
    plan = dataclasses.replace(
        plan_of(LATE_SEEDS), name="gemm_ar one_shot", operator="gemm_ar", backward=False, shape=0, at=2, faulty=2,
        ahead=1, timeouts=(4.5, 1.5, 4.5), pause=2.2,
    )
    case = campaign.play_case(ranks[3], plan, play_without_void_launches)
    assert "WRONG" in [outcome for _, outcome, _, _ in case["ranks"][0]["log"]], campaign.describe(case)
    assert not campaign.bad_outcomes(case := campaign.play_case(ranks[3], plan)), campaign.describe(case)


def play_and_hang(plan):
    report = play(plan)
    if dist.get_rank() == 1:
        time.sleep(600)
    return report


def test_hang_is_detected(ranks):
    case = campaign.play_case(ranks[2], _control("ag_gemm push"), play_and_hang, timeout_s=15.0)
    assert [outcome for _, outcome, _, _ in case["ranks"][1]["log"]] == ["HANG"], campaign.describe(case)
    assert campaign.summarize([case])["hangs"] == 1


def test_errors_without_names_are_detected():
    assert not _names_its_call(RuntimeError("connection closed by peer"), 0)
    assert not _names_its_call(KeyError("ag_gemm"), 0)
    assert not _names_its_call(PeerTimeoutError("ag_gemm", 0, 0, "1", 2, 1, 1.0), 0)
    assert _names_its_call(PeerTimeoutError("ag_gemm", 0, 1, "1", 2, 1, 1.0), 0)
    assert _names_its_call(RuntimeError("scatter: rank 1 has failed"), 0)
    assert {"WRONG", "HANG", "UNNAMED", "LATE", "SILENT", "SPURIOUS"} <= BAD


def test_every_operator_is_played():
    plans = [plan_of(seed) for seed in range(4000)]
    assert {plan.name for plan in plans} == set(TABLE)
    for operator in {plan.operator for plan in plans}:
        faults = {plan.fault for plan in plans if plan.operator == operator}
        assert faults >= {"kill", "stop", "delay", "known shape", "raise"}, operator
