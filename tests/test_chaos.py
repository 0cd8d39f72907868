"""A few cases of the fault campaign (tests/chaos), and tests that it detects each kind of bad outcome."""

import contextlib
import dataclasses
import threading
import time

import pytest
import torch
import torch.distributed as dist

from tdkernels import AgGemmConfig, GemmArConfig, GemmRsConfig, PeerTimeoutError
from tdkernels import lang as td
from tdkernels.lang.gluon_kernel import GluonKernel
from tdkernels.lang.kernel import Kernel
from tdkernels.ops.common.specialized import launch_split_k
from tdkernels.ops.dense.ag_gemm import launch_specialized as launch_ag_gemm
from tdkernels.ops.dense.gemm_ar import launch_specialized as launch_gemm_ar
from tdkernels.ops.dense.gemm_rs import launch_specialized as launch_gemm_rs
from tdkernels.ops.experts.tp_moe import launch_specialized as launch_tp_moe
from tdkernels.rounding import round_up
from tests.chaos import campaign, problems, specialized, specialized_problems
from tests.chaos import plan as chaos_plan
from tests.chaos.__main__ import parse
from tests.chaos.plan import FAULTS, LATE_SEEDS, plan_of
from tests.chaos.play import BAD, Moments, Player, _names_its_call, play
from tests.chaos.problems import TABLE, specialized_table
from tests.ops.dense.specialized_support import pretend_hopper
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


@pytest.mark.parametrize("cold", [False, True])  # cold: the number of launches of a call is not known
def test_stop_after_the_last_launch_delays_the_next_call(ranks, cold):
    changes = dict(fault="stop", faulty=1, at=1, moment=0.999, counted_in="launches", pause=0.6, backward=False)
    plan = dataclasses.replace(_control("all_reduce one_shot", **changes), cold=cold, timeouts=(10.0, 10.0))
    case = campaign.play_case(ranks[2], plan)
    outcomes = [[outcome for _, outcome, _, _ in report["log"]] for report in case["ranks"]]
    assert outcomes == [["correct"] * 3] * 2 and campaign.fault_happened(case), campaign.describe(case)
    assert case["ranks"][0]["log"][2][2] > 0.4, "the healthy rank waits for the stopped rank"


@pytest.mark.parametrize("fault, outcome, stop_time, happened", [
    ("kill", "correct", None, False), ("kill", "PeerTimeoutError", None, True), ("kill", "not reported", None, True),
    ("stop", "correct", None, False), ("stop", "correct", 4.0, True), ("stop", "correct", 6.0, False),
    ("stop", "PeerTimeoutError", 4.0, True),
])
def test_faults_after_the_last_healthy_call_are_not_counted(fault, outcome, stop_time, happened):
    plan = dataclasses.replace(_control("all_reduce one_shot"), fault=fault, faulty=1)
    healthy = {"rank": 0, "log": [(0, outcome, 0.1, "")], "faulty": False, "triggered": False, "end_time": 5.0,
               "timeout": 1.0, "allowance": 0.0, "stop_time": None}
    faulty = {"rank": 1, "log": [(0, "correct", 0.1, "")], "faulty": True, "triggered": True, "stop_time": stop_time}
    summary = campaign.summarize([{"plan": plan, "ranks": [healthy, faulty]}])
    assert summary["cases_in_which_the_fault_happened"] == {fault: happened}


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


def play_specialized(plan, function):
    """Play a case of a problem for Hopper GPUs, with the portable kernel."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(problems, "TABLE", TABLE | specialized_table())
        return function(plan)


def play_specialized_with_stale_data(plan):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(specialized_problems.Specialized, "_check_kernels", lambda problem: None)
        return play_specialized(plan, play_with_stale_data)


def play_portable_kernels(plan):
    return play_specialized(plan, play)


def test_specialized_problems_detect_wrong_data_and_other_kernels(ranks):
    changes = dict(name="gemm_ar specialized", backward=False)
    plan = dataclasses.replace(_control("gemm_ar two_shot"), **changes)
    case = campaign.play_case(ranks[2], plan, play_specialized_with_stale_data)
    outcomes = [outcome for _, outcome, _, _ in case["ranks"][0]["log"]]
    assert outcomes == ["correct", "WRONG", "correct"], campaign.describe(case)
    case = campaign.play_case(ranks[2], dataclasses.replace(plan, cold=True), play_portable_kernels)
    assert len(campaign.bad_outcomes(case)) == 2 * plan.calls, campaign.describe(case)
    assert all("kernels and whether they split K: set(), not" in text for text in campaign.bad_outcomes(case))


def test_specialized_problems_exist_on_hopper_only(monkeypatch):
    assert not specialized.on_hopper() and not TABLE.keys() & specialized_table().keys()
    with pytest.raises(ValueError, match="unknown operators: specialized"):
        chaos_plan.names_of(["specialized"])
    monkeypatch.setattr(chaos_plan, "TABLE", TABLE | specialized_table())
    assert chaos_plan.names_of(["specialized"]) == list(specialized_table())
    assert {"gemm_rs direct", "gemm_rs specialized"} <= set(chaos_plan.names_of(["gemm_rs"]))
    assert chaos_plan.names_of([]) == [*TABLE, *specialized_table()]


@pytest.mark.parametrize("world_size", [2, 3, 4, 8])
@pytest.mark.parametrize("name", specialized.DENSE)
def test_shapes_of_specialized_problems(monkeypatch, name, world_size):
    """The warp-specialized kernels support the shapes, and split tiles along K where they should."""
    pretend_hopper(monkeypatch)
    operator, fields, splits = specialized.DENSE[name]
    config_class = {"ag_gemm": AgGemmConfig, "gemm_rs": GemmRsConfig, "gemm_ar": GemmArConfig}[operator]
    config = config_class(**fields)
    for number in range(4):
        rows, n, k = specialized.shape_of(operator, splits, number, world_size)
        rows_of_x = rows * world_size if operator == "gemm_rs" else rows
        x, weight = (torch.empty(size, k, dtype=torch.bfloat16, device="meta") for size in (rows_of_x, n))
        if operator == "ag_gemm":
            assert launch_ag_gemm.supports(x, [weight], config, rows)
            continue
        launch = launch_gemm_rs if operator == "gemm_rs" else launch_gemm_ar
        assert launch.supports(x, weight, config, world_size)
        count = config.tiles.count(rows, n)
        tiles = count * world_size if operator == "gemm_rs" else round_up(count, world_size)
        last_wave = launch_split_k.splits_of(x, tiles, 0).last_wave
        assert (last_wave.num_splits > 1) == splits, (number, last_wave)
        assert (tiles > 132) == (number == 3) and (not splits or (last_wave.whole_tiles > 0) == (number == 3))


def test_shapes_of_specialized_experts(monkeypatch):
    pretend_hopper(monkeypatch)
    for tokens, width, hidden in specialized.EXPERTS_SHAPES:
        sizes = [(2 * tokens, width), (3, 2 * hidden, width), (4 * tokens, hidden), (3, width, hidden)]
        x, w_gate_up, h, w_down = (torch.empty(size, dtype=torch.bfloat16, device="meta") for size in sizes)
        assert launch_tp_moe.supports(x, w_gate_up, "swiglu", specialized.EXPERTS_CONFIG)
        assert launch_tp_moe.supports_gemm_rs(h, w_down, 2, specialized.EXPERTS_CONFIG)


def test_faults_at_launches_count_kernels_in_gluon(monkeypatch):
    launched, moments = [], Moments()
    for kind in (Kernel, GluonKernel):
        monkeypatch.setattr(kind, "launch_bound", lambda kernel: launched.append(kernel))
    moments.at_launch, moments.act = 2, lambda: launched.append("fault")
    with moments.counted():
        Kernel.launch_bound("triton")
        GluonKernel.launch_bound("gluon")
    Kernel.launch_bound("after")
    assert launched == ["triton", "fault", "gluon", "after"] and moments.launches == 2


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
    case = campaign.play_case(ranks[2], _control("ag_gemm push"), play_and_hang, timeout_s=9.0)
    assert [outcome for _, outcome, _, _ in case["ranks"][1]["log"]] == ["HANG"], campaign.describe(case)
    assert campaign.summarize([case])["hangs"] == 1


def test_errors_without_names_are_detected():
    assert not _names_its_call(RuntimeError("connection closed by peer"), 0)
    assert not _names_its_call(KeyError("ag_gemm"), 0)
    assert not _names_its_call(PeerTimeoutError("ag_gemm", 0, 0, "1", 2, 1, 1.0), 0)
    assert _names_its_call(PeerTimeoutError("ag_gemm", 0, 1, "1", 2, 1, 1.0), 0)
    assert _names_its_call(RuntimeError("scatter: rank 1 has failed"), 0)
    assert {"WRONG", "HANG", "UNNAMED", "LATE", "SILENT", "SPURIOUS"} <= BAD


def test_options():
    args = parse([])
    assert (args.device, args.ranks, args.ops) == ("cpu", (2, 3), ())
    args = parse(["--device", "cuda", "--ranks", "4,8", "--ops", "gemm_ar,ep_moe", "--warm-up-seconds", "30"])
    assert (args.device, args.ranks, args.ops, args.warm_up_seconds) == ("cuda", (4, 8), ("gemm_ar", "ep_moe"), 30.0)
    assert parse(["--ops", "gemm_ar ep_moe"]).ops == args.ops
    for ranks in ("1", "2,1", "two"):
        with pytest.raises(SystemExit):
            parse(["--ranks", ranks])


def test_invalid_options_are_reported(capsys):
    assert campaign.run_and_report(parse(["--ops", "gemm_ar,nothing"])) == 2
    assert "chaos: unknown operators: nothing; known: ag_attention, " in capsys.readouterr().err
    assert campaign.run_and_report(parse(["--device", "cuda", "--ranks", "4,999"])) == 2
    assert "chaos: 999 ranks need 999 GPUs" in capsys.readouterr().err


# Of seeds 0 to 5. They change with the number of entries of TABLE.
FIRST_PLANS = [
    ("kill", 3, 7, 0.5), ("known shape", 2, 6, 0.88), ("kill", 3, 6, 0.96), ("stop", 3, 4, 2.58),
    ("known shape", 2, 5, 0.9), ("delay", 3, 8, 0.72),
]


def test_options_change_plans_and_defaults_do_not():
    plans = [plan_of(seed) for seed in range(6)]
    assert [(plan.fault, plan.world_size, plan.calls, plan.timeouts[0]) for plan in plans] == FIRST_PLANS
    every = {operator for _, operator, _ in TABLE.values()}
    for seed in (*range(100), *range(LATE_SEEDS, LATE_SEEDS + 20)):
        assert plan_of(seed) == plan_of(seed, "cpu", (2, 3), every)
        plan = plan_of(seed, "cuda", (4, 8), ("gemm_ar", "all_reduce"))
        assert plan.world_size in (4, 8) and plan.operator in ("gemm_ar", "all_reduce") and plan.fault != "raise"
        assert len(plan.timeouts) == plan.world_size > max(plan.faulty, plan.ahead or 0)
        assert plan.fault != "ids", "these operators have no ids"
        assert plan.fault not in ("kill", "stop") or plan.counted_in == "launches"
    assert {plan_of(seed, "cuda", (4, 8)).world_size for seed in (*range(9), LATE_SEEDS, LATE_SEEDS + 3)} == {4, 8}
    with pytest.raises(ValueError, match="three ranks"):
        plan_of(LATE_SEEDS, world_sizes=(2,))


class KillsAtLaunches(campaign.Campaign):
    """A campaign whose kills come before the first launch of a call, as they can on GPUs."""

    def plan(self, seed):
        return dataclasses.replace(super().plan(seed), counted_in="launches", moment=0.0, ahead=None)


def test_campaign_on_four_ranks(ranks, tmp_path):  # the fixture makes the ranks fork
    played = KillsAtLaunches("cpu", (4,), ("all_reduce",))
    plans = map(played.plan, range(1000))
    first = next(plan.seed for plan in plans if plan.fault == "none" and played.plan(plan.seed + 1).fault == "kill")
    args = parse(["--device", "cuda", "--ranks", "4", "--seed", str(first), "--out", str(tmp_path), "--add"])
    saved = campaign.Summary(args, played)
    assert not played.run(first, 2, seconds=0.0)
    played.warm_up(first, 2, jobs=1)
    assert len(played.run(first, 2, seconds=None, save=saved.write)) == 2
    summary = saved.write()
    assert saved.path.name == "chaos-cuda.json" and summary["cases_by_world_size"] == {"4": 2}
    assert not summary["bad"] and not summary["skipped"], summary
    assert summary["calls_by_fault"]["kill, faulty rank"] == {"killed": 1}
    assert summary["calls_by_fault"]["kill, healthy ranks"]["PeerTimeoutError"] == 3  # ranks
    assert summary["cases_in_which_the_fault_happened"] == {"none": 1, "kill": 1}
    total = campaign.Summary(args, played).write()  # --add
    assert total["cases_by_world_size"] == {"4": 4} and total["revisions"] == summary["revisions"]


def test_cases_without_kernels_are_skipped():
    played = campaign.Campaign("cuda", (2, 4), ("all_reduce", "gemm_ar"))
    played.warm_up(0, 20, seconds=0.0)  # too short to start a rank
    assert not played.run(0, 20, seconds=None) and played.skipped == 20


def test_every_operator_is_played():
    plans = [plan_of(seed) for seed in range(4000)]
    assert {plan.name for plan in plans} == set(TABLE)
    for operator in {plan.operator for plan in plans}:
        faults = {plan.fault for plan in plans if plan.operator == operator}
        assert faults >= {"kill", "stop", "delay", "known shape", "raise"}, operator
