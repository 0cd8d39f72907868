"""Calls without gradients that have been made before: what ran then runs again, and nothing is checked a second time.

Checks, torch.library's way to an operator and the look-up of its config take the host longer than a small kernel takes
the GPU. For tensors of which all is as it was, but for what they hold, they come to the same; so the group keeps what
a call came to. Whoever would see the operator itself, such as a compiler, a profiler or autograd, still does.
"""

import torch
from torch.autograd import profiler

from tdkernels.runtime.autograd import DEVICES, may_be_differentiated
from tdkernels.runtime.launch_shortcut import watched
from tdkernels.symm.group import group_state

_MAX_KEPT = 1024  # calls of a group; shapes may go on changing for ever
_PLAIN = (torch.Tensor, torch.nn.Parameter, type(None))


def find(operator, group, tensors, settings):
    """The function (group, *tensors) that a call like this was before, or None.

    Args:     group: resolved; tensors: the operands as they were given, None among them; settings: a tuple of all else
              that decides what runs: the config as it was given, and the tuning mode
    """
    if not are_plain(tensors):
        return None
    state = group_state(group)
    try:
        known = state.known_calls.get(_key(operator, tensors, settings))
    except TypeError:  # no config can be hashed that is none; the call will say so
        return None
    if known is None:
        return None
    run, problem, choice = known
    if choice is not None and state.choices.get(problem) is not choice:
        return None  # somebody has tuned it since
    return run


def keep(operator, group, tensors, settings, run, chosen):
    """Let ``find`` find what a call of tensors that ``are_plain`` has come to.

    Args:     run: it must not hold the group, with which it is kept
              chosen: the (problem, Choice) of a call without a config, see ``autotune.selection.known_choice``
    """
    known = group_state(group).known_calls
    if len(known) >= _MAX_KEPT:
        known.clear()
    known[_key(operator, tensors, settings)] = _Known(run, tensors), *(chosen or (None, None))


class _Known:
    """What a call has come to: ``run``, and once it has run again the one launch that it is, if it is one."""

    def __init__(self, run, tensors):
        self._run, self._shortcut = run, None
        # How fp32 is multiplied is a setting, and on AMD the size of what a tensor is a part of decides, too.
        exact = any(tensor is not None and tensor.dtype == torch.float32 for tensor in tensors)
        self._tries = 0 if exact or torch.version.hip else 3

    def __call__(self, group, *tensors):
        shortcut = self._shortcut
        if shortcut is not None:
            launch = shortcut.launch_for(tensors)
            if launch is not None:
                return shortcut.output_of(launch(tensors))
        if not self._tries:
            return self._run(group, *tensors)
        y, found = watched(lambda: self._run(group, *tensors), tensors)
        if found is None:
            self._tries -= 1
        else:
            self._shortcut = found
        return y


def _key(operator, tensors, settings):
    return operator, settings, *map(_place, tensors)


def _place(tensor):
    return None if tensor is None else (tensor.shape, tensor.stride(), tensor.dtype, tensor.device)


def are_plain(tensors):
    """Whether nobody but the kernels has to do with a call of these tensors."""
    if torch.compiler.is_compiling():
        return False
    for tensor in tensors:
        if type(tensor) not in _PLAIN or (tensor is not None and tensor.layout != torch.strided):
            return False
        if tensor is not None and (tensor.is_neg() or tensor.is_conj()):  # which the dispatcher resolves
            return False
    if profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack():
        return False
    given = [tensor for tensor in tensors if tensor is not None]
    if not given or given[0].device.type not in DEVICES:
        return False
    return not may_be_differentiated(given) and not torch.is_autocast_enabled(given[0].device.type)
