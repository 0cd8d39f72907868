"""Start CPU ranks faster: fork them from a server process that has imported torch.

The suite starts hundreds of ranks, and importing torch takes most of a start. The server has no threads and has not
used torch, so its forks are as good as new processes. They get the environment variables and the standard streams of
the process that starts them, as spawned processes do.
"""

import multiprocessing
import os
from multiprocessing import reduction

from tdkernels import launch

_server = multiprocessing.get_context("forkserver")


class _StandardStreams:
    """The descriptors of stdout and stderr; an argument of a process."""

    def __reduce__(self):
        return _as_tuple, (reduction.DupFd(1), reduction.DupFd(2))


def _as_tuple(*streams):
    return streams


def _in_fork(environment, streams, target, *args):
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in zip((1, 2), streams, strict=True):
        received = stream.detach()
        os.dup2(received, number)
        os.close(received)
    target(*args)


def _forked_process(target, args, name):
    everything = dict(os.environ), _StandardStreams(), target, *args
    return _server.Process(target=_in_fork, args=everything, name=name, daemon=True)


def install():
    """Fork the ranks that this process starts from now on."""
    _server.set_forkserver_preload(["torch", "torch.distributed", "triton"])
    launch.new_process = _forked_process
