"""Call cache: a repeated call skips validation and config selection.

Validation, dispatch through torch.library and config selection take more host time than a small kernel takes on the
GPU. For tensors of the same layout they have the same result. The group caches it under a key of everything that it
depends on: the operator, the layouts of its tensors, the settings of the call, and the version of the configs that the
group has selected.

``lookup`` and ``insert`` cache any decision that an operator makes before its launches. ``lookup_run`` and
``CachedCall`` cache whole calls without gradients, which also skip torch.library. They are bypassed if a compiler, a
profiler, a dispatch mode or autograd needs to see the operator itself.
"""

import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.autograd import forward_ad, profiler

from tdkernels.rounding import rounded_rows
from tdkernels.runtime import recorder
from tdkernels.runtime.autograd import DEVICES
from tdkernels.runtime.triton_launcher import without_rows
from tdkernels.symm.group import caches_of
from tdkernels.symm.shared_settings import batch_invariance

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.runtime.kernel_launch import Launch

_ON_AMD = torch.version.hip is not None  # there a launch also depends on the size of a tensor's storage
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def lookup(
    operator: str, group: "dist.ProcessGroup | None", tensors: Sequence[torch.Tensor | None],
    settings: tuple[Any, ...], with_rows: tuple[int, ...] = (),
) -> tuple[Any, tuple[Any, ...] | None]:
    """Look up a call in the cache.

    Args:
        operator: the name of the operator.
        group: a resolved ProcessGroup, or None for an operator without communication.
        tensors: the operands as given by the caller; entries may be None.
        settings: everything else that the result depends on, such as the config and the tuning mode.
        with_rows: indices of tensors whose first dimension is a number of rows, R, as for ``without_rows``. An outcome
            is used for all calls with the same ``rounded_rows(R)``, so it must not depend on R otherwise.

    Returns:
        (outcome, key): the outcome that ``insert`` stored for an equal call, or None; the key for ``insert``, or None
        if the call must not be cached.
    """
    if torch.compiler.is_compiling() or torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return None, None
    caches = caches_of(group)
    key = _key(operator, caches.choices.version, tensors, settings, with_rows)
    if key is None:
        return None, None
    try:
        return caches.calls[key], key
    except TypeError:  # an unhashable setting; validation reports it
        return None, None


def insert(group: "dist.ProcessGroup | None", key: tuple[Any, ...] | None, outcome: Any) -> None:
    """Store ``outcome`` for later calls with the same key; does nothing if ``key`` is None.

    ``outcome`` must not hold tensors of the call, nor the group.
    """
    if key is not None:
        caches_of(group).calls[key] = outcome


def is_current(group: "dist.ProcessGroup | None", key: tuple[Any, ...] | None) -> bool:
    """Return whether decisions made since ``lookup`` returned ``key`` are valid for the next call.

    They are not if a config is to be selected again: this changes the version of the configs, and an entry under the
    old key is never found.
    """
    return key is not None and key[1] == caches_of(group).choices.version


def lookup_run(
    operator: str, group: "dist.ProcessGroup | None", tensors: Sequence[torch.Tensor | None],
    settings: tuple[Any, ...], with_rows: tuple[int, ...] = (),
) -> tuple[Any, tuple[Any, ...] | None]:
    """Look up a whole call; the outcome is a ``CachedCall``. Arguments as for ``lookup``.

    Returns:
        As ``lookup``, or (None, None) if autograd, autocast, a compiler, a profiler or a dispatch mode must see the
        call.
    """
    if torch.compiler.is_compiling() or profiler._is_profiler_enabled or torch._C._len_torch_dispatch_stack():
        return None, None
    for tensor in tensors:
        if tensor is not None and (type(tensor) not in _PLAIN or (tensor.requires_grad and torch.is_grad_enabled())):
            return None, None
    first = tensors[0]
    if first is None or first.device.type not in DEVICES or torch.is_autocast_enabled(first.device.type):
        return None, None
    return lookup(operator, group, tensors, settings, with_rows)


class CachedCall:
    """A whole call without gradients.

    If the call is a single kernel launch, that launch is stored: a hit then only checks that it is current.

    Args:
        run: ``(group, *tensors) -> output``, executes the call.
        bind: ``(group, *tensors) -> Launch``, or None if the call is not a single launch; this is then true for all
            calls with the same key. ``bind=None``: the call is known not to be a single launch.
        shape: shape of the output, for ``bind``. A list of shapes if there are several outputs; ``run`` then returns
            several outputs, too. A dtype instead of a shape in the list reinterprets the output. None: the shape that
            the launch gives it.
    """

    def __init__(
        self, run: Callable[..., Any], bind: "Callable[..., Launch | None] | None" = None, shape: Any = None
    ) -> None:
        self._run, self._bind, self._shape = run, bind, shape
        self._launch = _no_launch  # a weak reference: a launch lives as long as its workspace buffer

    def __call__(self, group: "dist.ProcessGroup | None", *tensors: torch.Tensor | None) -> Any:
        """Execute the call with other tensors of the same layout."""
        if self._bind is None or recorder.active is not None or _ON_AMD:
            return self._run(group, *tensors)
        launch = self._launch()
        if launch is None or not launch.is_current():
            launch = self._bind(group, *tensors)
            if launch is None:
                self._bind = None
                return self._run(group, *tensors)
            self._launch = weakref.ref(launch)
        outputs = launch(tensors)
        if type(self._shape) is list:
            return [output.view(shape) for output, shape in zip(outputs, self._shape)]
        y = outputs[0]
        return y if self._shape is None or y.shape == self._shape else y.view(self._shape)


def _no_launch():
    """Return None, like a weak reference to a launch that no longer exists."""
    return None


def _key(operator, version, tensors, settings, with_rows):
    """Return the key of a call, or None if it cannot be cached.

    It cannot be cached if a tensor is of a subclass, or if its memory does not hold its values (conj or neg bit).
    """
    layouts, precision = [], None
    for tensor in tensors:
        if tensor is None:
            layouts.append(None)
            continue
        if type(tensor) not in _PLAIN or tensor.layout is not torch.strided or tensor.is_neg() or tensor.is_conj():
            return None
        # A kernel is compiled separately for 16-byte aligned addresses and for others.
        dtype, aligned = tensor.dtype, tensor.data_ptr() % 16 == 0
        layouts.append((tensor.shape, tensor.stride(), dtype, tensor.device, aligned))
        if dtype is torch.float32:
            precision = torch.get_float32_matmul_precision()
    if with_rows and layouts[0] is not None and layouts[0][0]:
        rows = layouts[0][0][0]
        without_rows(layouts, with_rows)
        layouts.append(rounded_rows(rows))
    # The types, too: 4 and 4.0 are equal but different arguments.
    return operator, version, settings, *map(type, settings), precision, batch_invariance(), *layouts
