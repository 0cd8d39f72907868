"""Emulated network for interpreted kernels.

``tdkernels.symm`` registers a network under the address of a workspace's private words, which a kernel's context holds.
"""

from typing import Any

from tdkernels.lang.targets import _builtin

_networks: dict[int, Any] = {}  # keyed by the address of a workspace's private words


def name(state: int, network: Any) -> None:
    """Register the network for kernels of a workspace.

    Args:
        state: the address of the workspace's private words.
        network: a ``symm.backends.emulated_network.EmulatedNetwork``; None removes the entry.
    """
    _networks.pop(state, None)
    if network is not None:
        _networks[state] = network


@_builtin
def interpreter_put(state, dst, src, num_bytes, signal, value, peer, _semantic=None):
    """Start a put in the emulated network; a put with a signal if the address ``signal`` is not 0. Interpreter only."""
    network = _networks[int(state)]
    if int(signal):
        network.put(int(dst), int(src), int(num_bytes), int(peer), int(signal), int(value))
    else:
        network.put(int(dst), int(src), int(num_bytes), int(peer))


@_builtin
def interpreter_signal(state, signal, value, peer, _semantic=None):
    """Set a signal through the emulated network. Interpreter only."""
    _networks[int(state)].set_signal(int(signal), int(value), int(peer))


@_builtin
def interpreter_fence(state, _semantic=None):
    """Order earlier puts before later ones in the emulated network. Interpreter only."""
    _networks[int(state)].fence()


@_builtin
def interpreter_quiet(state, _semantic=None):
    """Complete all puts of the emulated network. Interpreter only."""
    _networks[int(state)].quiet()
