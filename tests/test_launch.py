"""RankPool, and the helpers over it in tests/support/ranks.py.

The suite forks its CPU ranks (tests/support/forked_ranks.py). Some tests of the pool itself spawn them, as users do.
They use device="cpu". They run no operator, so they do not count as multi-rank runs for the rule in
conftest.py.
"""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist

from tdkernels import launch
from tdkernels.launch import RankError, RankPool, pick_device, rank_device, run_ranks
from tests import conftest
from tests.support import host_collectives, ranks
from tests.support.simulated_nodes import thorough

REPO = Path(__file__).parent.parent


def running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def gone(pids, within_s=10.0):
    deadline = time.monotonic() + within_s
    while any(map(running, pids)) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(map(running, pids))


def listening():
    """Return {socket: (address, port)} of the listening sockets of this process, from /proc/net/tcp and tcp6."""
    own = set()
    for fd in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the listing itself
            own.add(os.readlink(f"/proc/self/fd/{fd}"))
    found = {}
    for table in ("tcp", "tcp6"):
        for line in Path("/proc/self/net", table).read_text().splitlines()[1:]:
            fields = line.split()
            if fields[3] == "0A" and f"socket:[{fields[9]}]" in own:
                address, port = fields[1].split(":")
                found[fields[9]] = address, int(port, 16)
    return found


# ---- functions that the ranks run ----


def rank_info(a, *, b):
    return dist.get_rank(), dist.get_world_size(), os.getpid(), a, b


def rank_environment():
    env = {name: os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE")}
    return str(rank_device()), torch.get_num_threads(), os.environ.get("NCCL_NVLS_ENABLE"), env


def all_reduced(x):
    x = x * (dist.get_rank() + 1)
    dist.all_reduce(x)
    return x


def raise_on(bad, error):
    if dist.get_rank() in bad:
        raise error
    return dist.get_rank()


class TwoArgumentError(Exception):
    def __init__(self, one, two):
        super().__init__(f"{one} and {two}")


def raise_unpicklable():
    raise TwoArgumentError("this", "that")


def return_unpicklable():
    return lambda: None


def raise_instead_of_a_collective():
    if dist.get_rank() == 1:
        raise KeyError("injected error")
    dist.barrier()


def raise_after_starting_a_collective():
    if dist.get_rank() == 1:
        raise KeyError("injected error")
    dist.all_reduce(torch.ones(2), async_op=True)


def die(bad, die_with):
    if dist.get_rank() == bad:
        die_with(os.getpid())
    return dist.get_rank()


def kill_self(pid):
    os.kill(pid, signal.SIGKILL)


def exit_self(pid):
    os._exit(3)


def fork_and_die(bad, flag):
    """The child holds the rank's end of the pipe open for as long as the file is there."""
    if dist.get_rank() == bad:
        if os.fork() == 0:
            deadline = time.monotonic() + 60
            while flag.exists() and time.monotonic() < deadline:
                time.sleep(0.1)
            os._exit(0)
        os.kill(os.getpid(), signal.SIGKILL)


def sleep_on(bad, seconds):
    if dist.get_rank() == bad:
        time.sleep(seconds)
    return dist.get_rank()


def print_and_exit(text):
    print(text)
    sys.exit(text)


# ---- a pool that stays whole ----


@pytest.fixture
def spawned(monkeypatch):
    """Spawn the ranks, as RankPool does outside this suite."""
    monkeypatch.setattr(launch, "new_process", launch._spawned_process)


@pytest.fixture(scope="module")
def pool():
    with pytest.MonkeyPatch.context() as env:
        env.setattr(launch, "new_process", launch._spawned_process)
        env.setenv("NCCL_NVLS_ENABLE", "0")
        env.setenv("RANK", "7")  # as if the caller were a rank of torchrun
        pool = RankPool(2, "cpu", timeout_s=60)
    with pool:
        yield pool


def test_results_are_in_rank_order(pool):
    assert pool.run(rank_info, 1, b=[2]) == [(0, 2, pool.pids[0], 1, [2]), (1, 2, pool.pids[1], 1, [2])]


def test_ranks_are_reused_between_runs(pool):
    assert pool.run(rank_info, None, b=None) == pool.run(rank_info, None, b=None)


def test_tensors_are_copied_and_the_group_works(pool):
    x = torch.arange(5.0)
    for y in pool.run(all_reduced, x):
        assert torch.equal(y, 3 * x)
    assert torch.equal(x, torch.arange(5.0))


def test_large_arguments_and_results(pool):
    x = torch.randn(1 << 20)
    assert all(torch.equal(y, 3 * x) for y in pool.run(all_reduced, x))


def test_environment_is_inherited_except_torchrun_variables(pool):
    for rank, (device, threads, nvls, env) in enumerate(pool.run(rank_environment)):
        assert (device, threads, nvls) == ("cpu", 1, "0")
        assert env == {"RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}


def test_exception_keeps_rank_type_and_traceback(pool):
    with pytest.raises(RankError) as info:
        pool.run(raise_on, [1], ValueError("odd shape"))
    error = info.value
    assert error.rank == 1
    assert error.exceptions[0] is None and error.results == [0, None]
    assert type(error.exceptions[1]) is ValueError and error.exceptions[1].args == ("odd shape",)
    assert error.__cause__ is error.exceptions[1]
    assert "[rank 1] Traceback" in str(error) and "in raise_on" in str(error) and "odd shape" in str(error)
    assert pool.run(raise_on, [], None) == [0, 1]


def test_equal_tracebacks_are_merged(pool):
    with pytest.raises(RankError, match=r"(?s)2 of 2 ranks failed.*\[rank 0, 1\] Traceback") as info:
        pool.run(raise_on, [0, 1], ValueError("odd shape"))
    assert str(info.value).count("Traceback") == 1
    assert [type(e) for e in info.value.exceptions] == [ValueError, ValueError]


def test_unpicklable_exception(pool):
    with pytest.raises(RankError, match="TwoArgumentError: this and that") as info:
        pool.run(raise_unpicklable)
    assert type(info.value.exceptions[0]) is RuntimeError and "TwoArgumentError" in str(info.value.exceptions[0])
    assert pool.run(raise_on, [], None) == [0, 1]


def test_unpicklable_result(pool):
    with pytest.raises(RankError, match="lambda"):
        pool.run(return_unpicklable)
    assert pool.run(raise_on, [], None) == [0, 1]


def test_exit_is_reported_as_an_exception(pool):
    with pytest.raises(RankError) as info:
        pool.run(print_and_exit, "enough")
    assert [type(e) for e in info.value.exceptions] == [SystemExit, SystemExit]
    assert pool.usable


def test_unpicklable_function_is_rejected_before_the_run(pool):
    with pytest.raises(Exception, match="pickle|local object"):
        pool.run(lambda: None)
    assert pool.run(raise_on, [], None) == [0, 1]


def test_two_pools_at_once(pool):
    assert run_ranks(1, rank_info, 5, b=6, device="cpu")[0][3:] == (5, 6)
    assert pool.run(raise_on, [], None) == [0, 1]


def test_the_store_listens_on_loopback_only(pool):
    """Each pool has one listening socket, on 127.0.0.1, which is closed with the pool."""
    before = listening()
    with RankPool(2, "cpu", timeout_s=60) as other:
        added = {socket: at for socket, at in listening().items() if socket not in before}
        assert [*added.values()] == [("0100007F", other._store.port)]
        assert [t.item() for t in other.run(all_reduced, torch.ones(()))] == [3, 3]
    deadline = time.monotonic() + 10
    while listening() != before and time.monotonic() < deadline:
        time.sleep(0.05)
    assert listening() == before
    assert (("0100007F", pool._store.port)) in before.values()


# ---- pools that break ----


@pytest.fixture
def start():
    pools = []

    def start(*args, **kwargs):
        pools.append(RankPool(*args, **kwargs))
        return pools[-1]

    yield start
    for pool in pools:
        pool.close()
        assert gone(pool.pids), "a rank outlived its pool"


def assert_unusable(pool, why):
    assert not pool.usable
    assert gone(pool.pids)
    with pytest.raises(RuntimeError, match=f"cannot be used any more: .*{why}"):
        pool.run(rank_info, 1, b=2)


@pytest.mark.parametrize("die_with, message", [(kill_self, "was killed by SIGKILL"), (exit_self, "exited with code 3")])
def test_dead_rank(spawned, start, die_with, message):
    pool = start(2, "cpu", timeout_s=60)
    began = time.monotonic()
    with pytest.raises(RankError, match=message) as info:
        pool.run(die, 1, die_with)
    assert time.monotonic() - began < 15
    assert info.value.rank == 1
    assert type(info.value.exceptions[1]) is ChildProcessError
    assert info.value.exceptions[0] is None and info.value.results == [0, None]  # a survivor's result is kept
    assert_unusable(pool, message)


def test_rank_that_died_between_two_runs(start):
    pool = start(2, "cpu", timeout_s=60)
    os.kill(pool.pids[0], signal.SIGKILL)
    with pytest.raises(RankError, match="rank 0 .*SIGKILL"):
        pool.run(raise_on, [], None)
    assert_unusable(pool, "SIGKILL")


def test_dead_rank_whose_pipe_stays_open(start, tmp_path):
    pool = start(2, "cpu", timeout_s=60)
    flag = tmp_path / "flag"
    flag.touch()
    began = time.monotonic()
    with pytest.raises(RankError, match="SIGKILL"):
        pool.run(fork_and_die, 0, flag)
    assert time.monotonic() - began < 15
    flag.unlink()


def test_timeout(spawned, start, capfd):
    pool = start(2, "cpu", timeout_s=60)
    pool.run(sleep_on, 1, 0)  # the first call imports this module
    pool.timeout_s = 1.5
    with pytest.raises(RankError, match=r"rank 1 had not returned within 1\.5 s") as info:
        pool.run(sleep_on, 1, 600)
    assert info.value.rank == 1 and info.value.results == [0, None]
    assert type(info.value.exceptions[1]) is TimeoutError
    assert "in sleep_on" in capfd.readouterr().err  # the stack of the hang
    assert_unusable(pool, "rank 1 had not returned")


def test_rank_waiting_for_one_that_raised(start):
    pool = start(2, "cpu", timeout_s=60, grace_s=1)
    began = time.monotonic()
    with pytest.raises(RankError, match="injected error") as info:
        pool.run(raise_instead_of_a_collective)
    assert time.monotonic() - began < 15
    assert info.value.rank == 1  # the cause, not the rank that waited for it
    assert [type(e) for e in info.value.exceptions] == [TimeoutError, KeyError]
    assert_unusable(pool, "after rank 1 failed")


def test_ranks_out_of_step_are_not_used_again(start, monkeypatch):
    monkeypatch.setattr("tdkernels.launch._CHECK_TIMEOUT_S", 2.0)  # the check runs into this timeout
    pool = start(2, "cpu", timeout_s=60)
    with pytest.raises(RankError, match="injected error"):
        pool.run(raise_after_starting_a_collective)
    assert_unusable(pool, "out of step")


def test_interrupted_run(start):
    pool = start(1, "cpu", timeout_s=60)

    def interrupt(*_):
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    left = signal.alarm(0)  # the alarm of pytest-timeout
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.5)
        with pytest.raises(KeyboardInterrupt):
            pool.run(sleep_on, 0, 600)
    finally:
        signal.signal(signal.SIGALRM, before)
        signal.alarm(left)
    assert_unusable(pool, "KeyboardInterrupt")


def test_close_frees_everything_and_is_idempotent():
    with RankPool(2, "cpu", timeout_s=60) as pool:
        assert all(map(running, pool.pids))
    assert_unusable(pool, "it is closed")
    pool.close()
    descriptors = len(os.listdir("/proc/self/fd"))
    with RankPool(1, "cpu"):
        pass
    del pool
    assert len(os.listdir("/proc/self/fd")) <= descriptors


def test_ranks_die_with_the_process_that_started_them(tmp_path):
    script = tmp_path / "parent.py"
    script.write_text(
        "import time\n"
        "from tdkernels.launch import RankPool\n"
        "if __name__ == '__main__':\n"
        "    pool = RankPool(2, 'cpu')\n"
        "    print(*pool.pids, flush=True)\n"
        "    pool.run(time.sleep, 600)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO)}
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True, env=env) as parent:
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(map(running, pids))
        time.sleep(0.3)  # until the ranks have started to run
        parent.kill()
    assert gone(pids)


def test_bad_arguments():
    with pytest.raises(ValueError, match="at least 1"):
        RankPool(0)
    with pytest.raises(ValueError, match="'tpu'"):
        RankPool(1, "tpu")
    with pytest.raises(ValueError, match="10000 ranks need 10000 GPUs"):
        RankPool(10000, "cuda")
    if torch.cuda.device_count():
        assert pick_device("shared", 10000) == "shared"
    else:
        with pytest.raises(ValueError, match="share GPUs need one"):
            RankPool(2, "shared")
    assert pick_device("auto", 10000) == "cpu"
    with pytest.raises(RuntimeError, match="not one of its ranks"):
        rank_device()


# ---- tests/support/ranks.py and tests/conftest.py ----


def my_device():
    x = torch.ones(1, device=ranks.device())
    dist.all_reduce(x)
    return x.item(), x.device.type


def test_on_ranks_keeps_its_pool_until_it_breaks(monkeypatch):
    monkeypatch.setattr(ranks, "multi_rank_runs", 0)
    monkeypatch.setattr(ranks, "_pools", {})
    try:
        first = ranks.on_ranks(2, rank_info, 1, b=2)
        assert ranks.multi_rank_runs == 1
        assert ranks.on_ranks(2, rank_info, 1, b=2) == first
        assert ranks.on_ranks(2, my_device) == [(2.0, "cpu" if pick_device(ranks.ASKED, 2) == "cpu" else "cuda")] * 2
        with pytest.raises(RankError):
            ranks.on_ranks(2, die, 0, exit_self)
        assert ranks.on_ranks(2, rank_info, 1, b=2) != first
    finally:
        ranks.close_all()


class PoolWithoutRanks:
    """Stand-in for RankPool without ranks."""

    def __init__(self, world_size, *_, **__):
        self.world_size, self.usable = world_size, True

    def run(self, *_):
        return self

    def close(self):
        self.usable = False


def test_on_ranks_closes_the_least_recently_used_pools(monkeypatch):
    monkeypatch.setattr(ranks, "multi_rank_runs", 0)
    monkeypatch.setattr(ranks, "RankPool", PoolWithoutRanks)
    for max_pools, kept in ((sys.maxsize, [1, 2, 3, 4]), (2, [3, 4])):
        monkeypatch.setattr(ranks, "_pools", {})
        monkeypatch.setattr(ranks, "_MAX_POOLS", max_pools)
        pools = [ranks.on_ranks(size, rank_info) for size in (1, 2, 3, 1, 3, 4)]
        assert list(ranks._pools) == sorted(kept, key=[2, 1, 3, 4].index)
        assert {pool.world_size for pool in pools if pool.usable} == set(kept)
        assert pools[4] is pools[2], "the pool was among the last two"
        assert (pools[3] is pools[0]) == (max_pools > 2)


def test_collectives_of_host_tensors_are_unchanged():
    """Collectives of host tensors are unchanged, even if those of GPU tensors go through the host."""

    def collective(*args, **kwargs):
        return args, kwargs

    x = torch.ones(2)
    through_host = host_collectives._through_host(collective)
    for args, kwargs in (((x,), {"async_op": True}), (([x, x],), {"tensor": x, "group": None})):
        assert through_host(*args, **kwargs) == (args, kwargs)


def test_too_few_gpus_skips_without_counting(monkeypatch):
    monkeypatch.setattr(ranks, "multi_rank_runs", 0)
    monkeypatch.setattr(ranks, "ASKED", "cuda")
    with pytest.raises(pytest.skip.Exception, match="10000 GPUs"):
        ranks.on_ranks(10000, rank_info)
    assert ranks.multi_rank_runs == 0


@pytest.mark.parametrize(
    "world_size, args, ci, passes",
    [
        (1, [], "", False),
        (2, [], "", True),
        pytest.param(0, ["tests"], "", False, marks=thorough),
        pytest.param(0, ["tests/test_one.py"], "", True, marks=thorough),  # a single file need not run several ranks
        pytest.param(0, ["-k", "one"], "true", False, marks=thorough),  # in CI the rule always applies
    ],
)
def test_suite_without_several_ranks_fails(tmp_path, world_size, args, ci, passes):
    (tmp_path / "tests" / "support").mkdir(parents=True)
    support = (
        "__init__", "forked_ranks", "host_collectives", "ranks", "selection", "sharing", "simulated_nodes", "subset",
    )
    for name in ("__init__", "conftest", *(f"support/{name}" for name in support)):
        shutil.copy(REPO / "tests" / f"{name}.py", tmp_path / "tests" / f"{name}.py")
    (tmp_path / "pytest.ini").write_text("[pytest]\ntestpaths = tests\n")
    (tmp_path / "tests" / "test_one.py").write_text(
        "from tests.support.ranks import on_ranks\n"
        f"def test_one():\n    {world_size} and on_ranks({world_size}, print)\n"
    )
    env = {**os.environ, "PYTHONPATH": str(REPO), "CI": ci, "TDKERNELS_TEST_DEVICE": "cpu"}
    command = [sys.executable, "-m", "pytest", "-q", *args]
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True)
    assert (done.returncode == 0) == passes, done.stdout + done.stderr
    assert ("no test ran on two ranks or more" in done.stdout) != passes
    assert "1 passed" in done.stdout


@pytest.mark.parametrize("ci", [False, True])
def test_rule_applies_to_whole_suites_and_in_ci(ci, monkeypatch):
    monkeypatch.setenv("CI", "true" if ci else "")
    names = "collectonly", "keyword", "markexpr", "deselect", "ignore"
    for narrowed, args in (({}, ["tests"]), ({"keyword": "one"}, ["tests"]), ({}, ["tests/test_one.py"])):
        option = SimpleNamespace(**dict.fromkeys(names, None) | narrowed)
        config = SimpleNamespace(option=option, rootpath=Path.cwd(), args=args, getini=lambda name: ["tests"])
        assert conftest._whole_suite(config) == (ci or not narrowed and args == ["tests"])


def test_lambda_is_rejected():
    with RankPool(1, "cpu") as pool, pytest.raises(TypeError, match="must be a function of a module, not a lambda"):
        pool.run(lambda: 1)
