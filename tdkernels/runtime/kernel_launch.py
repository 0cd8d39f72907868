"""Cached launches: a kernel launch in which everything but the operands is fixed, stored for later calls.

Before a call can launch, it computes sizes, checks the consensus of the ranks, builds the kernel's arguments and finds
the compiled kernel. Together this takes the host several times as long as the launch, and a fused call with few rows
would be slower than the unfused baseline. All of it follows from the config and from the memory layout of the operands.
A later call with the same config and layout fills in the addresses, allocates its outputs, and launches.
"""

import functools
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch
from triton.runtime import driver

from tdkernels.caches import RecentCache
from tdkernels.lang.kernel import pointer_kind
from tdkernels.rounding import rounded_rows
from tdkernels.runtime import recorder
from tdkernels.runtime.triton_launcher import DESCRIPTORS, BoundLaunch, Rows, without_rows
from tdkernels.symm.shared_settings import batch_invariance

if TYPE_CHECKING:
    from tdkernels.symm.workspace import Workspace

MAX_LAUNCHES = 4096  # cached per stream for launches without a workspace
CALL_NUMBER = object()  # placeholder in a Launch's args for the workspace's ``note_call``, which differs in every call


# Each signature is computed in one function, without a call per tensor: a launch has up to a dozen tensors.


def pointer_signature(operands: Iterable[Any]) -> tuple[Any, ...]:
    """Return the signature of operands whose shape and strides the kernel does not use: dtype and 16-byte alignment.

    ``operands`` are tensors or None. On AMD the signature also depends on the size of the storage (``pointer_kind``).
    """
    kinds = []
    for tensor in operands:
        kind = None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0)
        kinds.append(pointer_kind(tensor) if _ON_AMD and kind else kind)
    return tuple(kinds)


def operand_signature(operands: Iterable[Any]) -> tuple[Any, ...]:
    """Return the signature of operands whose memory layout matters: shape, strides, dtype and 16-byte alignment.

    ``operands`` are tensors or None. On AMD the signature also depends on the size of the storage (``pointer_kind``).
    """
    kinds = []
    for tensor in operands:
        kind = None
        if tensor is not None:
            kind = tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16 == 0
        kinds.append((*kind, pointer_kind(tensor)) if _ON_AMD and kind else kind)
    return tuple(kinds)


@functools.cache
def rows_signature(*numbers: int) -> Callable[[Sequence[torch.Tensor | None]], tuple[Any, ...]]:
    """Return a function like ``operand_signature`` for launches of any number of rows R, see ``Launch``.

    R is the first dimension of the first operand. A launch is used for all R with the same ``rounded_rows(R)``. So
    ``prepare`` may use that number for the config and the grid, but not R.

    Args:
        numbers: Indices of the operands whose first dimension is R, as for ``without_rows``.
    """
    if _ON_AMD:  # a compiled kernel depends on the sizes of the outputs there, see ``pointer_kind``
        return operand_signature

    def signature(operands):
        kinds = [*operand_signature(operands)]
        without_rows(kinds, numbers)
        return rounded_rows(operands[0].shape[0]), *kinds

    return signature


_ON_AMD = torch.version.hip is not None  # there the compiler specializes for more properties of a pointer


def launch_cached(
    workspace: "Workspace | _LocalWorkspace",
    key: tuple[Any, ...],
    operands: Sequence[torch.Tensor | None],
    prepare: Callable[..., "Launch"],
    ready: Callable[..., Sequence[torch.Tensor | None]] | None = None,
    signature: Callable[[Sequence[torch.Tensor | None]], tuple[Any, ...]] = operand_signature,
) -> list[torch.Tensor]:
    """Launch a kernel on operands; reuse the cached launch if there is one for this key and signature.

    Args:
        workspace: the workspace of the kernel, or ``local_workspace_of(device)``.
        key: everything that the launch depends on besides the signature of the operands.
        operands: tensors or None.
        prepare: ``(*operands) -> Launch``. Called if there is no cached launch, with detached operands of the same
            memory.
        ready: ``(*operands) -> operands`` that the kernel supports, copied if necessary. None: the operands are
            supported.
        signature: ``operand_signature``, ``pointer_signature`` or a result of ``rows_signature``.

    Returns:
        The tensors that the launch allocated, outputs first.
    """
    if recorder.active is not None:
        operands = operands if ready is None else ready(*operands)
        return _prepared(operands, prepare)(operands)
    launch = workspace.launches[(*key, batch_invariance(), *signature(operands))]
    if launch is None:
        launch, operands = bind(workspace, key, operands, prepare, ready, signature)
    return launch(operands)


def bind(
    workspace: "Workspace | _LocalWorkspace",
    key: tuple[Any, ...],
    operands: Sequence[torch.Tensor | None],
    prepare: Callable[..., "Launch"],
    ready: Callable[..., Sequence[torch.Tensor | None]] | None = None,
    signature: Callable[[Sequence[torch.Tensor | None]], tuple[Any, ...]] = operand_signature,
) -> tuple["Launch", Sequence[torch.Tensor | None]]:
    """Return the cached launch for operands, prepared if necessary, and the operands that it takes.

    Arguments as for ``launch_cached``. Not to be used while a trace is recorded.
    """
    if ready is not None:
        operands = ready(*operands)
    whole_key = *key, batch_invariance(), *signature(operands)
    launch = workspace.launches[whole_key]
    if launch is None:
        launch = _prepared(operands, prepare)
        workspace.launches[whole_key] = launch  # in the current cache: ``prepare`` may have replaced the buffer
    return launch, operands


def bind_uncopied(given: Sequence[torch.Tensor | None], *call: Any) -> "Launch | None":
    """Return the launch of ``launch_cached(*call)``, or None if it takes a copy of one of the operands ``given``."""
    launch, taken = bind(*call)
    return launch if all(one is other for one, other in zip(given, taken, strict=True)) else None


def _prepared(operands, prepare):
    """Call ``prepare`` with detached operands."""
    return prepare(*[None if operand is None else operand.detach() for operand in operands])


def output_spec(
    like: torch.Tensor, *shape: int, dtype: torch.dtype | None = None, zeros: bool = False
) -> torch.Tensor:
    """Return a placeholder for a tensor that each call allocates: a meta tensor, which takes no memory.

    ``zeros``: whether the tensor is initialized with zeros, by a further launch.
    """
    spec = torch.empty(shape, dtype=dtype or like.dtype, device="meta")
    spec.is_zeros, spec.sizes = zeros, shape  # type: ignore[attr-defined]
    return spec


class _LocalWorkspace:
    """Local workspace: takes the place of a workspace for launches without communication."""

    ctx = None

    def __init__(self):
        self.launches = RecentCache(MAX_LAUNCHES)

    def check(self):
        pass

    def before_launch(self):
        pass

    def after_launch(self, stream):
        pass

    def break_off(self, error):
        pass


class WithinCall(_LocalWorkspace):
    """Takes the place of a workspace for a launch in the middle of a call that has checked and ordered it already.

    The launch is cached with those of the workspace, because it depends on the same buffer.
    """

    def __init__(self, workspace: "Workspace") -> None:
        self.launches, self.ctx = workspace.launches, workspace.ctx


@functools.cache
def _local_workspace_of_stream(device, stream):
    return _LocalWorkspace()


def local_workspace_of(device: torch.device) -> _LocalWorkspace:
    """Return the local workspace, which caches launches without communication: one per stream.

    Launches captured in a CUDA graph are not cached (see ``local_workspace``).
    """
    if device.type == "cpu":
        return _local_workspace_of_stream(device, None)
    if torch.cuda.is_current_stream_capturing():
        return _LocalWorkspace()
    return _local_workspace_of_stream(device, driver.active.get_current_stream(device.index))


class Launch:
    """A kernel launch in which everything but the operands is fixed; returned by ``prepare``.

    Args:
        workspace: as for ``launch_cached``.
        kernel: as in ``kernel[grid](*args, **constants)``.
        grid: as in ``kernel[grid](*args, **constants)``.
        args: as in ``kernel[grid](*args, **constants)``.
        constants: as in ``kernel[grid](*args, **constants)``.
        operands: the tensors from which ``args`` was built. They must be distinct objects, so that they can be found in
            ``args``. Integers of type ``Rows`` among the arguments, in the sizes of descriptors and as the first size
            of ``output_specs`` become the number of rows of each call: the first dimension of the first operand, or of
            the tensor of the descriptor.
        output_specs: from ``output_spec``, the tensors that each call allocates.
        fixed: tensors of the workspace in ``args``, and bases of descriptors, which are the same in every call. With a
            local workspace they are from ``local_flags``.
        checks_errors: whether a call raises errors that earlier launches reported. False in the middle of an operator:
            a rank that raised an error of the same call there would leave its peers waiting.

    Raises:
        AssertionError: if a tensor in ``args`` is none of these, such as a copy of an operand: a later call would read
            the same copy again.
    """

    def __init__(
        self,
        workspace: "Workspace | _LocalWorkspace",
        kernel: Any,
        grid: tuple[int, ...],
        args: Sequence[Any],
        constants: Mapping[str, Any],
        operands: Sequence[torch.Tensor | None],
        output_specs: Sequence[torch.Tensor],
        fixed: Sequence[torch.Tensor | None],
        checks_errors: bool = True,
    ) -> None:
        self._workspace, self._kernel, self._checks_errors = workspace, kernel, checks_errors
        self._ctx = None if workspace is None else workspace.ctx
        words = next((tensor for tensor in fixed if tensor is not None), None) if self._ctx is None else None
        self._device_of_words = None if words is None else words.device  # of a local workspace
        self._output_specs = [
            (spec.sizes, spec.dtype, spec.is_zeros, Rows in map(type, spec.sizes[:1]))  # type: ignore[attr-defined]
            for spec in output_specs
        ]
        numbers = {id(tensor): number for number, tensor in enumerate((*operands, *output_specs)) if tensor is not None}
        call_at = next((at for at, arg in enumerate(args) if arg is CALL_NUMBER), None)
        self._passes_call_number = call_at is not None
        places, self._numbers = [], []  # of the variable tensors: indices in args; in operands + outputs
        for at, arg in enumerate(args):
            tensor = arg.base if isinstance(arg, DESCRIPTORS) else arg
            if id(tensor) in numbers:
                places.append(at)
                self._numbers.append(numbers[id(tensor)])
            else:
                known = not isinstance(tensor, torch.Tensor) or any(tensor is one for one in fixed)
                assert known, f"argument {at} of {kernel} is neither an operand, an output nor a fixed tensor"
        if self._passes_call_number:
            places.append(call_at)  # type: ignore[arg-type]
        rows_at = [at for at, arg in enumerate(args) if type(arg) is Rows]
        for at in rows_at:
            assert kernel.params[at].do_not_specialize, f"{kernel} is compiled for the number of rows, argument {at}"
        places += rows_at
        self._num_rows_args = len(rows_at)
        self._bound_launch = BoundLaunch((*grid, 1, 1)[:3], args, places, constants)

    def __call__(self, operands: Sequence[Any]) -> list[torch.Tensor]:
        """Launch on other operands of the same signature; return the allocated tensors, outputs first."""
        workspace = self._workspace
        if self._checks_errors:
            workspace.check()
        outputs, values, first = [], [], operands[0]
        for shape, dtype, zeros, has_rows in self._output_specs:
            if has_rows:
                shape = first.shape[0], *shape[1:]
            outputs.append(first.new_zeros(shape, dtype=dtype) if zeros else first.new_empty(shape, dtype=dtype))
        tensors = (*operands, *outputs)
        for number in self._numbers:
            values.append(tensors[number])
        if self._passes_call_number:
            values.append(workspace.note_call)  # type: ignore[union-attr]
        if self._num_rows_args:
            values += [first.shape[0]] * self._num_rows_args
        stream = workspace.before_launch()
        try:
            self._kernel.launch_bound(self._bound_launch, values, stream)
        except BaseException as error:
            workspace.break_off(error)
            raise
        workspace.after_launch(stream)
        return outputs

    def is_current(self) -> bool:
        """Return whether the workspace still has the buffer that this launch was prepared for.

        A launch with private words of a local workspace is current on its stream only, outside of captured graphs.
        """
        if self._device_of_words is not None:
            return local_workspace_of(self._device_of_words) is self._workspace
        return self._workspace.ctx is self._ctx
