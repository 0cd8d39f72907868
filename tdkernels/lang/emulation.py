"""What stands for the network where a kernel is interpreted; ``tdkernels.symm`` names it by the kernel's context."""

from tdkernels.lang.targets import _builtin

_networks: dict = {}  # by the address of the private words of a workspace


def name(state, network):
    """Let kernels with these private words find a network; None takes it away."""
    _networks.pop(state, None)
    if network is not None:
        _networks[state] = network


@_builtin
def interpreter_put(state, dst, src, num_bytes, signal, value, peer, _semantic=None):
    """Hand a put to the network; with an address of a signal other than 0 one with signal. Interpreter only."""
    network = _networks[int(state)]
    if int(signal):
        network.put(int(dst), int(src), int(num_bytes), int(peer), int(signal), int(value))
    else:
        network.put(int(dst), int(src), int(num_bytes), int(peer))


@_builtin
def interpreter_signal(state, signal, value, peer, _semantic=None):
    """Hand a signal to the network; interpreter only."""
    _networks[int(state)].set_signal(int(signal), int(value), int(peer))


@_builtin
def interpreter_fence(state, _semantic=None):
    """Interpreter only."""
    _networks[int(state)].fence()


@_builtin
def interpreter_quiet(state, _semantic=None):
    """Interpreter only."""
    _networks[int(state)].quiet()
