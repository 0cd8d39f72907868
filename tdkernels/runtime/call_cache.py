"""The call cache: a call like an earlier one is neither checked again, nor is its config looked up again.

Checks, torch.library's way to an operator and the look-up of its config take the host longer than a small kernel takes
the GPU. For tensors of the same layouts they have the same outcome. The group keeps it, under a key of all that it
follows from: the operator, the layouts of its tensors, the settings of the call, and the version of the configs that
the group has chosen.

``lookup`` and ``insert`` are for whatever an operator decides before it launches anything. ``lookup_run`` and
``CachedCall`` are for whole calls without gradients, which also skip torch.library; a compiler, a profiler, a dispatch
mode and autograd see the operator itself.
"""

import weakref

import torch
from torch.autograd import forward_ad, profiler

from tdkernels.runtime import recorder
from tdkernels.runtime.autograd import DEVICES
from tdkernels.symm.group import caches_of

_ON_AMD = torch.version.hip is not None  # a launch depends on the size of a tensor's storage, too
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def lookup(operator, group, tensors, settings):
    """Look a call up.

    Args:
        operator: its name.
        group: a resolved ProcessGroup, or None for an operator that needs no peers.
        tensors: the operands as they were given, None among them.
        settings: a tuple of everything else that decides what runs, such as the config and the tuning mode.

    Returns:
        (what ``insert`` was given for a call like this, or None; the key for ``insert``, or None if this call must not
        be kept)
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None, None
    caches = caches_of(group)
    key = _key(operator, caches.choices.version, tensors, settings)
    if key is None:
        return None, None
    try:
        return caches.calls[key], key
    except TypeError:  # an unhashable setting; the call will say what is wrong with it
        return None, None


def insert(group, key, outcome):
    """Let ``lookup`` return ``outcome`` for calls with the same key.

    ``outcome`` must not hold tensors of the call, nor the group.
    """
    if key is not None:
        caches_of(group).calls[key] = outcome


def is_current(group, key):
    """Whether what was decided since ``lookup`` gave a key holds for the next call.

    It does not if a config is to be chosen again: that changes the version of the configs. What is kept under such a
    key is never found.
    """
    return key is not None and key[1] == caches_of(group).choices.version


def lookup_run(operator, group, tensors, settings):
    """As ``lookup``, for a whole call: the outcome is a CachedCall. (None, None) unless only kernels are involved.

    That is the case if autograd or autocast has to see the call, or a compiler, a profiler or a dispatch mode.
    """
    if torch.compiler.is_compiling() or profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack():
        return None, None
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or (tensor.requires_grad and torch.is_grad_enabled())):
            return None, None
    first = tensors[0]
    if first is None or first.device.type not in DEVICES or torch.is_autocast_enabled(first.device.type):
        return None, None
    return lookup(operator, group, tensors, settings)


class CachedCall:
    """A whole call without gradients.

    Args:
        run: (group, *tensors) -> output.
        bind: (group, *tensors) -> the Launch that the call is, or None if it is something else, as all calls with the
            same key are then. None: it is known to be something else.
        shape: of the output, for ``bind``; a list of shapes if there are several outputs, which ``run`` gives as well.
    """

    def __init__(self, run, bind=None, shape=None):
        self._run, self._bind, self._shape = run, bind, shape
        self._launch = _no_launch  # a weak reference: a launch ends with the buffer that it is for

    def __call__(self, group, *tensors):
        if self._bind is None or recorder.active is not None or _ON_AMD:
            return self._run(group, *tensors)
        launch = self._launch()
        if launch is None or not launch.is_current():
            launch = self._bind(group, *tensors)
            if launch is None:
                self._bind = None
                return self._run(group, *tensors)
            self._launch = weakref.ref(launch)
        made = launch(tensors)
        if type(self._shape) is list:
            return [output.view(shape) for output, shape in zip(made, self._shape)]
        return made[0] if made[0].shape == self._shape else made[0].view(self._shape)


def _no_launch():
    return None


def _key(operator, version, tensors, settings):
    """The key of a call; None if its tensors are not torch's own, or their memory does not hold their values."""
    places, precision = [], None
    for tensor in tensors:
        if tensor is None:
            places.append(None)
            continue
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
            return None
        # Kernels are compiled for addresses of a multiple of 16 bytes, and for others.
        dtype, aligned = tensor.dtype, tensor.data_ptr() % 16 == 0
        places.append((tensor.shape, tensor.stride(), dtype, tensor.device, aligned))
        if dtype is torch.float32:
            precision = torch.get_float32_matmul_precision()
    # The types as well: 4 and 4.0 are equal, and not the same argument.
    return operator, version, settings, *map(type, settings), precision, *places
