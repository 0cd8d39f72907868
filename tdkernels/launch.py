"""Start ranks as processes on this machine and run functions on them.

    def total(x):
        t = torch.tensor(x * (dist.get_rank() + 1))
        dist.all_reduce(t)
        return t.item()

    if __name__ == "__main__":  # required: each rank imports this file and must not start ranks itself
        with RankPool(4) as pool:
            print(pool.run(total, 10))  # [100, 100, 100, 100]

`torchrun` starts a program once per rank; use it for jobs. A RankPool is for tests, notebooks, demos and benchmarks,
where one program controls the ranks. In each rank, torch.distributed is initialized, the current CUDA device is that of
the rank, and `rank_device()` returns the device for its tensors.

Arguments and results of `run` are pickled: functions by name, tensors by value. Return CPU tensors from a rank: with a
CUDA tensor, the calling process also takes memory of that GPU.
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
from collections.abc import Callable

import torch
import torch.distributed as dist

__all__ = ["RankError", "RankPool", "pick_device", "rank_device", "run_ranks"]

_START_TIMEOUT_S = 300.0  # to import torch and initialize NCCL on a busy machine
_STOP_TIMEOUT_S = 10.0
_CHECK_TIMEOUT_S = 10.0


class RankError(RuntimeError):
    """At least one rank did not return. The message contains the tracebacks of all ranks that failed.

    Attributes:
        rank (int): The rank that failed first. Others may have failed as a consequence.
        exceptions (list): For each rank, its exception or None. ChildProcessError if the rank died, TimeoutError if it
            did not return in time, a RuntimeError that names the type if the exception cannot be pickled.
        results (list): For each rank, the value that it returned, or None.
    """

    def __init__(self, message: str, rank: int, exceptions: list[BaseException | None], results: list):
        super().__init__(message)
        self.rank = rank
        self.exceptions = exceptions
        self.results = results


def pick_device(device: str, world_size: int) -> str:
    """Return the kind of device, "cpu", "cuda" or "shared", on which ``world_size`` ranks would run.

    "cuda" gives each rank its own GPU. With "shared", for tests, any number of ranks share the GPUs. A GPU runs one
    rank's kernels at a time, so nothing overlaps, and torch's collectives use gloo, which supports few on GPU tensors.

    Args:
        device: "cpu", "cuda", "shared", or "auto": "cuda" if every rank can have its own GPU, otherwise "cpu".
        world_size: The number of ranks.

    Raises:
        ValueError: If ``device`` is none of these, or if torch sees too few GPUs for it.
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
    """A pool of rank processes that are started together and reused for any number of runs.

    If a rank dies or does not return in time, the pool kills all ranks and becomes unusable. If a rank raises, the pool
    stays usable, provided that all ranks then reach a barrier. Only one thread may use a pool at a time. The ranks end
    when the process that started them ends, even if it is killed. The class is a context manager.

    Args:
        world_size: The number of ranks, at least 1.
        device: "auto", "cpu", "cuda" or "shared", see ``pick_device``.
        timeout_s: The maximum duration of one run in seconds.
        grace_s: Seconds that the other ranks have to return after one has failed. They often wait for that rank.

    Raises:
        ValueError, RankError: If ``world_size`` is below 1, if torch sees too few GPUs, or if a rank does not start.
    """

    def __init__(self, world_size: int, device: str = "auto", *, timeout_s: float = 300.0, grace_s: float = 20.0):
        if world_size < 1:
            raise ValueError(f"world_size must be at least 1, not {world_size}")
        self.world_size, self.device = world_size, pick_device(device, world_size)
        self.timeout_s, self.grace_s = timeout_s, grace_s
        self.pids: list[int] = []
        self._unusable: str | None = None  # the reason, if the pool is unusable
        self._procs: list[multiprocessing.process.BaseProcess] = []
        self._conns: list[multiprocessing.connection.Connection] = []
        self._store: dist.TCPStore | None = _loopback_store()  # for the rendezvous of the ranks
        try:
            for rank in range(world_size):
                ours, theirs = multiprocessing.Pipe()
                args = rank, world_size, self.device, self._store.port, theirs
                proc = new_process(_rank_main, args, f"tdkernels rank {rank}")
                proc.start()
                theirs.close()  # only the rank keeps that end open, so its death closes the pipe
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
        """Whether the pool can run functions: False after it was closed or has lost a rank."""
        return self._unusable is None

    def run(self, fn: Callable, /, *args: object, **kwargs: object) -> list:
        """Call ``fn(*args, **kwargs)`` on every rank and return the results in rank order.

        Args:
            fn: A function of a module, not a lambda or one defined inside another. Its arguments must be picklable.

        Raises:
            RankError: If a rank raises, dies or does not return in time.
            RuntimeError, TypeError: If the pool is unusable; if the call cannot be pickled.
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
        except BaseException as err:  # such as Ctrl-C: a late reply would be mistaken for one of the next run
            self._kill(f"a run was cut short by {type(err).__name__}")
            raise

    def close(self) -> None:
        """Stop the ranks and wait until they have ended. It does nothing if the pool is already unusable."""
        if not self.usable:
            return
        self._send(b"")
        deadline = time.monotonic() + _STOP_TIMEOUT_S
        for proc in self._procs:
            proc.join(max(0.0, deadline - time.monotonic()))
        self._kill("it is closed")

    def __enter__(self) -> "RankPool":
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _send(self, message: bytes) -> None:
        for conn in self._conns:
            try:
                conn.send_bytes(message)
            except OSError:
                pass  # the rank is dead; _gather reports it with more detail

    def _gather(self, timeout_s: float, grace_s: float) -> list:
        """Return one result of every rank, or raise RankError. If a rank sent no reply, kill the pool first."""
        results: list = [None] * self.world_size
        failed: dict[int, tuple[BaseException, str]] = {}  # exception and text by rank, in order of arrival
        lost: list[str] = []
        waiting = dict(enumerate(self._conns))
        deadline, allowed = time.monotonic() + timeout_s, f"{timeout_s:g} s"

        while waiting and (left := deadline - time.monotonic()) > 0:
            # At most one second: if a rank dies, a child process of it may keep the pipe open.
            multiprocessing.connection.wait(waiting.values(), min(left, 1.0))
            for rank, conn in list(waiting.items()):
                alive = self._procs[rank].is_alive()  # read before poll: a reply sent before the death still counts
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
                except Exception as err:  # such as a class that only the rank can import
                    ok, value, text = False, err, f"its reply cannot be unpickled: {type(err).__name__}: {err}"
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
            time.sleep(0.5)  # to let the ranks print their stacks
        if lost:
            self._kill("; ".join(lost))
        if not failed:
            return results
        first = next(iter(failed))
        ranks_by_text: dict[str, list[int]] = {}  # ranks often fail with the same text
        for rank, (_, text) in failed.items():
            ranks_by_text.setdefault(text, []).append(rank)
        message = f"{len(failed)} of {self.world_size} ranks failed, rank {first} first"
        for text, ranks in ranks_by_text.items():
            message += f"\n\n[rank {', '.join(map(str, sorted(ranks)))}] {text.rstrip()}"
        exceptions = [failed[rank][0] if rank in failed else None for rank in range(self.world_size)]
        raise RankError(message, first, exceptions, results) from exceptions[first]

    def _how_it_died(self, rank: int) -> str:
        proc = self._procs[rank]
        proc.join(5.0)  # the pipe of a process closes shortly before its exit code is available
        code = proc.exitcode
        if code is None:
            return "closed its connection"
        if code < 0:
            return f"(pid {proc.pid}) was killed by {signal.Signals(-code).name}"
        return f"(pid {proc.pid}) exited with code {code}"

    def _check(self) -> None:
        """After a failure, run a barrier. If it fails, as after an exception between two collectives, kill the pool."""
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
        self._store = None  # last: the ranks use it until they have ended
        self._unusable = self._unusable or why


def _pickled(fn, args, kwargs) -> bytes:
    """Pickle a call. Raise TypeError if the function is a lambda or nested, or if an argument cannot be pickled."""
    try:
        return pickle.dumps((fn, args, kwargs))
    except (AttributeError, TypeError, pickle.PicklingError) as error:
        raise TypeError(
            f"a call is sent to the ranks by pickle: {getattr(fn, '__qualname__', fn)} must be a function of a module, "
            f"not a lambda or one defined inside another, and its arguments must be picklable ({error})"
        ) from error


def run_ranks(
    world_size: int, fn: Callable, /, *args: object, device: str = "auto", timeout_s: float = 300.0, **kwargs: object
) -> list:
    """Start ranks, call ``fn(*args, **kwargs)`` on each, stop them, and return the results in rank order.

    Args:
        world_size: The number of ranks.
        fn: A function of a module, not a lambda or one defined inside another. Its arguments must be picklable.
        device: "auto", "cpu", "cuda" or "shared", see ``pick_device``.
        timeout_s: The maximum duration of the call in seconds.

    Raises:
        RankError, TypeError, ValueError: As ``RankPool`` and ``RankPool.run``.
    """
    with RankPool(world_size, device, timeout_s=timeout_s) as pool:
        return pool.run(fn, *args, **kwargs)


def _loopback_store() -> dist.TCPStore:
    """Return a store that this process serves on a free port of the loopback interface."""
    # A TCPStore listens on all interfaces, regardless of its host name, unless it receives a bound socket.
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(socket.SOMAXCONN)
        port = listener.getsockname()[1]
        return dist.TCPStore(  # it owns the descriptor from now on, and closes it with its server
            "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
        )


def _spawned_process(target: Callable, args: tuple, name: str) -> multiprocessing.process.BaseProcess:
    """Return a process, not started yet, that imports everything anew: CUDA and torch's threads survive no fork."""
    return multiprocessing.get_context("spawn").Process(target=target, args=args, name=name, daemon=True)


new_process = _spawned_process  # the test suite replaces it
_rank_device: torch.device | None = None  # in a rank: its device
around_runs = contextlib.nullcontext  # context manager around each run in each rank; the race checker replaces it


def rank_device() -> torch.device:
    """Return the device of the calling rank, or raise RuntimeError if this process is not a rank of a RankPool."""
    if _rank_device is None:
        raise RuntimeError("rank_device() is for functions that a RankPool runs; this process is not one of its ranks")
    return _rank_device


def _rank_main(rank: int, world_size: int, device: str, port: int, conn) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the calling process handles Ctrl-C and ends the ranks
    faulthandler.register(signal.SIGUSR1)  # the calling process sends it to a hanging rank, to see its stacks
    threading.Thread(target=_die_with_parent, daemon=True).start()
    _reply(conn, _join_group, rank, world_size, device, port)
    while True:
        try:
            task = conn.recv_bytes()
        except EOFError:  # the calling process has ended
            os._exit(1)
        if not task:
            break
        _reply(conn, _call, task)
    dist.destroy_process_group()


def _die_with_parent() -> None:
    parent = multiprocessing.parent_process()  # not prctl(PR_SET_PDEATHSIG): it also fires if the pool's thread ends
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)


def _join_group(rank: int, world_size: int, device: str, port: int) -> None:
    global _rank_device
    # Set as by torchrun. If the calling process is a rank itself, the inherited values are its own.
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
    """Call ``fn`` and send (True, pickled result, "") or (False, pickled exception, traceback)."""
    try:
        reply = True, pickle.dumps(fn(*args)), ""
    except BaseException as err:  # also SystemExit: only a signal or os._exit ends a rank
        text = traceback.format_exc()
        try:
            payload = pickle.dumps(err)
            pickle.loads(payload)  # a class with its own constructor may fail only here
        except Exception:
            payload = pickle.dumps(RuntimeError(traceback.format_exception_only(err)[-1].strip()))
        reply = False, payload, text
    sys.stdout.flush()  # if this rank is killed later, unflushed output is lost
    sys.stderr.flush()
    conn.send_bytes(pickle.dumps(reply))
