"""Start ranks faster: fork them from a server process that has imported torch.

The suite starts hundreds of ranks, and importing torch takes most of a start. The server has no threads and has not
used torch, so its forks are as good as new processes. They get the environment variables and the standard streams of
the process that starts them, as spawned processes do. This module does not import tdkernels, which reads environment
variables on import. In CI the server imports it (tests/support/preloaded.py). So if those variables have changed, a
rank is spawned.
"""

import multiprocessing
import os
import pickle
from multiprocessing import reduction

_server = multiprocessing.get_context("forkserver")
# Also what the first call of an operator imports: without it, that call takes 0.4 s longer on each rank.
_PRELOAD = (
    "torch", "torch.distributed", "triton", "triton.runtime.interpreter", "triton.experimental.gluon.language",
    "triton.experimental.gluon.nvidia.hopper", "torch.fx.experimental.symbolic_shapes", "pytest",
)
# Variables that tdkernels reads on import. Other variables are read later, so a fork sees its own values.
_READ_ON_IMPORT = "TDKERNELS_SANITIZE", "TDKERNELS_BATCH_INVARIANT"
_server_values: list = []


class _StandardStreams:
    """The descriptors of stdout and stderr; an argument of a process."""

    def __reduce__(self):
        return _as_tuple, (reduction.DupFd(1), reduction.DupFd(2))


class _Later:
    """A value that the process unpickles itself, after it has set the environment variables."""

    def __init__(self, value):
        self.value = value

    def __reduce__(self):
        return bytes, (bytes(reduction.ForkingPickler.dumps(self.value)),)


def _as_tuple(*streams):
    return streams


def _in_fork(environment, streams, call):
    os.environ.clear()
    os.environ.update(environment)
    for number, stream in zip((1, 2), streams, strict=True):
        received = stream.detach()
        os.dup2(received, number)
        os.close(received)
    target, args = pickle.loads(call)
    target(*args)


def _forked_process(target, args, name):
    if _values() != _server_values:
        from tdkernels import launch

        return launch._spawned_process(target, args, name)
    everything = dict(os.environ), _StandardStreams(), _Later((target, args))
    return _server.Process(target=_in_fork, args=everything, name=name, daemon=True)


def _values():
    return [os.environ.get(variable) for variable in _READ_ON_IMPORT]


def install(preload=()):
    """Fork the ranks that this process starts from now on. If no server runs yet, it also imports ``preload``."""
    global _server_values
    from tdkernels import launch

    _server_values = _values()
    _server.set_forkserver_preload([*_PRELOAD, *preload])
    launch.new_process = _forked_process


def is_installed():
    """Return whether this process forks the ranks that it starts."""
    from tdkernels import launch

    return launch.new_process is _forked_process
