"""Start W ranks as processes of this machine and run functions on them.

    def total(x):
        t = torch.tensor(x * (dist.get_rank() + 1))
        dist.all_reduce(t)
        return t.item()

    if __name__ == "__main__":  # needed: a rank imports this file, and must not start ranks in turn
        with RankPool(4) as pool:
            print(pool.run(total, 10))  # [100, 100, 100, 100]

`torchrun` starts a program once per rank and is the right thing for a job. A RankPool is for where one program stays
in charge: tests, notebooks, demos and benchmarks. In a rank torch.distributed is initialised, torch.cuda's current
device is the rank's, and `rank_device()` says where its tensors belong.

What is handed to `run`, and what comes back, travels by pickle: functions by name, tensors by value. Let a rank return
CPU tensors, or reading its result takes up memory on its GPU in the calling process too.
"""

import contextlib
import faulthandler
import multiprocessing
import multiprocessing.connection
import os
import pickle
import signal
import socket
import sys
import threading
import time
import traceback

import torch
import torch.distributed as dist

__all__ = ["RankError", "RankPool", "pick_device", "rank_device", "run_ranks"]

_START_TIMEOUT_S = 300.0  # importing torch and initialising NCCL, on a machine that is busy with other things
_STOP_TIMEOUT_S = 10.0
_CHECK_TIMEOUT_S = 10.0


class RankError(RuntimeError):
    """Some rank did not return. The message holds the tracebacks of all that failed.

    Attributes:
        rank: the rank that failed first; others may have failed only because it did
        exceptions: per rank, None or what it raised; ChildProcessError if it died, TimeoutError if it did not return in
            time, a RuntimeError that names the type where the exception itself does not pickle
        results: per rank, what it returned, or None
    """

    def __init__(self, message, rank, exceptions, results):
        super().__init__(message)
        self.rank = rank
        self.exceptions = exceptions
        self.results = results


def pick_device(device: str, world_size: int) -> str:
    """Where world_size ranks would run, "cpu", "cuda" or "shared"; "auto" takes GPUs if every rank can have its own.

    "shared": any number of ranks on the GPUs that there are, which run the kernels of one rank at a time: for tests,
    since it takes long and hides nothing. torch's collectives on GPU tensors are gloo's then, which knows few of them.
    """
    if device not in ("auto", "cpu", "cuda", "shared"):
        raise ValueError(f"device must be 'auto', 'cpu', 'cuda' or 'shared', not {device!r}")
    if device == "cpu":
        return "cpu"
    gpus = torch.cuda.device_count()
    if device == "shared":
        if not gpus:
            raise ValueError("ranks that share GPUs need one, and torch sees none on this machine")
        return "shared"
    if gpus >= world_size:
        return "cuda"
    if device == "cuda":
        raise ValueError(f"{world_size} ranks need {world_size} GPUs, and torch sees {gpus} on this machine")
    return "cpu"


class RankPool:
    """world_size ranks, started together and kept for any number of runs.

    timeout_s bounds one run. Once a rank has failed, the others have grace_s to come to an end too: most often they
    wait for the rank that failed. A rank that is out of time, or dead, costs the pool: its ranks are killed, and `run`
    refuses from then on. A rank that merely raised does not, if the ranks can still meet at a barrier.

    One caller at a time. The ranks die with the process that started them, however it dies.
    """

    def __init__(self, world_size: int, device: str = "auto", *, timeout_s: float = 300.0, grace_s: float = 20.0):
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        self.world_size = world_size
        self.device = pick_device(device, world_size)
        self.timeout_s = timeout_s
        self.grace_s = grace_s
        self.pids: list[int] = []
        self._unusable: str | None = None  # why, once it is
        self._procs: list[multiprocessing.process.BaseProcess] = []
        self._conns: list[multiprocessing.connection.Connection] = []
        self._store: dist.TCPStore | None = _loopback_store()  # at which the ranks meet
        # Not fork: CUDA does not survive it, nor do the threads of torch.
        spawn, port = multiprocessing.get_context("spawn"), self._store.port
        try:
            for rank in range(world_size):
                ours, theirs = spawn.Pipe()
                proc = spawn.Process(
                    target=_rank_main,
                    args=(rank, world_size, self.device, port, theirs),
                    name=f"tdkernels rank {rank}",
                    daemon=True,
                )
                proc.start()
                theirs.close()  # only the rank holds that end, so its death closes the pipe
                self._procs.append(proc)
                self._conns.append(ours)
                assert proc.pid is not None  # it has started
                self.pids.append(proc.pid)
            self._gather(_START_TIMEOUT_S, grace_s=1.0)
        except BaseException:
            self._kill("it did not start")
            raise

    @property
    def usable(self) -> bool:
        """False once the pool is closed or has lost a rank."""
        return self._unusable is None

    def run(self, fn, /, *args, **kwargs) -> list:
        """Call fn(*args, **kwargs) on every rank; its results in rank order, or RankError.

        fn has to be a function of a module, not a lambda or one defined inside another.
        """
        if not self.usable:
            raise RuntimeError(f"this RankPool cannot be used any more: {self._unusable}")
        task = _pickled(fn, args, kwargs)
        try:
            self._send(task)
            return self._gather(self.timeout_s, self.grace_s)
        except RankError:
            self._check()
            raise
        except BaseException as err:  # Ctrl-C, say: some reply is still to come and would be taken for the next run's
            self._kill(f"a run was cut short by {type(err).__name__}")
            raise

    def close(self) -> None:
        """Stop the ranks and wait until they are gone. May be called twice, and on a pool that broke."""
        if not self.usable:
            return
        self._send(b"")
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for proc in self._procs:
            proc.join(max(0.0, deadline - time.monotonic()))
        self._kill("it is closed")

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc) -> None:
        self.close()

    def _send(self, message: bytes) -> None:
        for conn in self._conns:
            try:
                conn.send_bytes(message)
            except OSError:
                pass  # the rank is dead, which _gather reports better

    def _gather(self, timeout_s: float, grace_s: float) -> list:
        """One reply of every rank. Raises RankError, having killed the pool if some rank gave none."""
        results: list = [None] * self.world_size
        failed: dict[int, tuple[BaseException, str]] = {}  # exception and text, in order of arrival
        lost: list[str] = []
        waiting = dict(enumerate(self._conns))
        deadline, allowed = time.monotonic() + timeout_s, f"{timeout_s:g} s"

        while waiting and (left := deadline - time.monotonic()) > 0:
            # Looks up every second, for a rank whose own child keeps the pipe open after its death.
            multiprocessing.connection.wait(waiting.values(), min(left, 1.0))
            for rank, conn in list(waiting.items()):
                alive = self._procs[rank].is_alive()  # asked first: what a rank sent before it died still counts
                if alive and not conn.poll():
                    continue
                del waiting[rank]
                try:
                    if not conn.poll():
                        raise EOFError
                    ok, payload, text = pickle.loads(conn.recv_bytes())
                except (EOFError, OSError):
                    lost.append(f"rank {rank} {self._how_it_died(rank)}")
                    failed[rank] = ChildProcessError(lost[-1]), lost[-1]
                    continue
                try:
                    value = pickle.loads(payload)
                except Exception as err:  # of a class, say, that only the rank can import
                    ok, value, text = False, err, f"what it sent does not unpickle here: {type(err).__name__}: {err}"
                if ok:
                    results[rank] = value
                else:
                    failed[rank] = value, text
            if failed and deadline > time.monotonic() + grace_s:
                deadline, allowed = time.monotonic() + grace_s, f"{grace_s:g} s after rank {next(iter(failed))} failed"

        if waiting:
            for rank in waiting:
                lost.append(f"rank {rank} had not returned within {allowed}")
                failed[rank] = TimeoutError(lost[-1]), f"{lost[-1]}; its stacks are on stderr"
                if self._procs[rank].is_alive():
                    os.kill(self.pids[rank], signal.SIGUSR1)  # faulthandler, see _rank_main
            time.sleep(0.5)  # for the stacks
        if lost:
            self._kill("; ".join(lost))
        if not failed:
            return results

        first = next(iter(failed))
        ranks_by_text: dict[str, list[int]] = {}  # W ranks often fail in one and the same way
        for rank, (_, text) in failed.items():
            ranks_by_text.setdefault(text, []).append(rank)
        message = f"{len(failed)} of {self.world_size} ranks failed, rank {first} first"
        for text, ranks in ranks_by_text.items():
            message += f"\n\n[rank {', '.join(map(str, sorted(ranks)))}] {text.rstrip()}"
        exceptions = [failed[rank][0] if rank in failed else None for rank in range(self.world_size)]
        raise RankError(message, first, exceptions, results) from exceptions[first]

    def _how_it_died(self, rank: int) -> str:
        proc = self._procs[rank]
        proc.join(5.0)  # its pipe closes a moment before it can be reaped
        code = proc.exitcode
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"(pid {proc.pid}) was killed by {signal.Signals(-code).name}"
        return f"(pid {proc.pid}) exited with code {code}"

    def _check(self) -> None:
        """After a failure: are the ranks still in step? If one raised between two collectives, they may not be."""
        if not self.usable:
            return
        self._send(pickle.dumps((_meet, (), {})))
        try:
            self._gather(_CHECK_TIMEOUT_S, grace_s=1.0)
        except RankError as err:
            self._kill("")
            self._unusable = f"after a failure its ranks were out of step: {err}"

    def _kill(self, why: str) -> None:
        for proc in self._procs:
            proc.kill()
        for proc in self._procs:
            proc.join(_STOP_TIMEOUT_S)
        for conn in self._conns:
            conn.close()
        self._store = None  # last: the ranks talk to it until they are gone
        self._unusable = self._unusable or why


def _pickled(fn, args, kwargs) -> bytes:
    """Pickle a call.

    Raises:
        TypeError: if the function is a lambda or one defined inside another, or if an argument cannot be pickled.
    """
    try:
        return pickle.dumps((fn, args, kwargs))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"a call is sent to the ranks by pickle: {getattr(fn, '__qualname__', fn)} must be a function of a module, "
            f"not a lambda or one defined inside another, and its arguments must be picklable ({error})"
        ) from error


def run_ranks(world_size: int, fn, /, *args, device: str = "auto", timeout_s: float = 300.0, **kwargs) -> list:
    """Start world_size ranks, call fn(*args, **kwargs) on each, stop them; the results in rank order."""
    with RankPool(world_size, device, timeout_s=timeout_s) as pool:
        return pool.run(fn, *args, **kwargs)


def _loopback_store() -> dist.TCPStore:
    """Return a store that is served by this process, on a port that the system picks, to this machine only.

    A TCPStore listens on all interfaces, whatever its host name, unless it is given a socket that is bound already.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        # The store owns the descriptor from here on, and closes it with its server.
        return dist.TCPStore(
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


# ---- What follows runs in the ranks. ----

_rank_device: torch.device | None = None
around_runs = contextlib.nullcontext  # entered in each rank for each run; the race checker replaces it


def rank_device() -> torch.device:
    """The device of the rank that calls."""
    if _rank_device is None:
        raise RuntimeError("rank_device() is for functions that a RankPool runs; this process is not one of its ranks")
    return _rank_device


def _rank_main(rank: int, world_size: int, device: str, port: int, conn) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to the caller, who ends the ranks
    faulthandler.register(signal.SIGUSR1)  # the caller's way to ask where a rank hangs
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _reply(conn, _join_group, rank, world_size, device, port)
    while True:
        try:
            task = conn.recv_bytes()
        except EOFError:  # the caller is gone
            os._exit(1)
        if not task:
            break
        _reply(conn, _call, task)
    dist.destroy_process_group()


def _die_with_parent() -> None:
    # Not prctl(PR_SET_PDEATHSIG): that one fires when the thread that made the pool ends, too.
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _join_group(rank: int, world_size: int, device: str, port: int) -> None:
    global _rank_device
    # As torchrun sets them. The caller may be a rank itself, and then these would say which.
    os.environ.update({"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.environ.update({"WORLD_SIZE": str(world_size), "LOCAL_WORLD_SIZE": str(world_size)})
    store = dist.TCPStore("127.0.0.1", port, is_master=False, wait_for_workers=False)
    if device == "cuda":
        _rank_device = torch.device("cuda", rank)
        torch.cuda.set_device(_rank_device)
        backend, device_id = "cpu:gloo,cuda:nccl", _rank_device
    elif device == "shared":
        _rank_device = torch.device("cuda", rank % torch.cuda.device_count())
        torch.cuda.set_device(_rank_device)
        os.environ["TORCH_SYMM_MEM_ALLOW_OVERLAPPING_DEVICES"] = "1"
        backend, device_id = "cpu:gloo,cuda:gloo", None
    else:
        _rank_device = torch.device("cpu")
        torch.set_num_threads(1)  # the ranks share the cores
        backend, device_id = "gloo", None
    dist.init_process_group(backend, store=store, rank=rank, world_size=world_size, device_id=device_id)


def _call(task: bytes):
    fn, args, kwargs = pickle.loads(task)
    with around_runs():
        return fn(*args, **kwargs)


def _meet() -> None:
    dist.barrier()
    if rank_device().type == "cuda":
        torch.cuda.synchronize()


def _reply(conn, fn, *args) -> None:
    """Send (True, pickled result, "") or (False, pickled exception, traceback)."""
    try:
        reply = True, pickle.dumps(fn(*args)), ""
    except BaseException as err:  # SystemExit too: only a signal or os._exit ends a rank
        text = traceback.format_exc()
        try:
            payload = pickle.dumps(err)
            pickle.loads(payload)  # a class with a constructor of its own may fail only here
        except Exception:
            payload = pickle.dumps(RuntimeError(traceback.format_exception_only(err)[-1].strip()))
        reply = False, payload, text
    # A rank that is killed later would take with it what it has printed.
    sys.stdout.flush()
    sys.stderr.flush()
    conn.send_bytes(pickle.dumps(reply))
