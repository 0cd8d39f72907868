"""A launch of which everything is decided but its operands, kept for the next call with operands like those.

What a call works out before it can launch is how large things are, what the ranks have agreed on, how tiles lie in
memory and which of the kernel's compiled forms it is. Together that takes the host several times as long as the launch,
and a fused call of few rows is then slower than torch's sequence. All of it follows from the config and from how the
operands lie; a call with the same ones fills in their addresses, makes its outputs, and launches.
"""

import functools

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.caches import RecentCache
from tdkernels.lang.kernel import pointer_kind
from tdkernels.runtime import recorder
from tdkernels.runtime.triton_launcher import BoundLaunch

MAX_LAUNCHES = 4096  # that are kept where no workspace keeps them
CALL_NUMBER = object()  # among a Launch's args: the workspace's ``note_call``, which is another one in every call


# Both keys are made in one function, without a call for each tensor: a launch has up to a dozen of them.


def pointer_signature(operands):
    """How operands lie of which a kernel takes no more than where each begins."""
    kinds = []
    for tensor in operands:
        kind = None if tensor is None else (tensor.dtype, tensor.data_ptr() % 16 == 0)
        kinds.append(pointer_kind(tensor) if _ON_AMD and kind else kind)
    return tuple(kinds)


def operand_signature(operands):
    """How operands lie in memory, as far as launches may differ by it."""
    kinds = []
    for tensor in operands:
        kind = None
        if tensor is not None:
            kind = tensor.shape, tensor.stride(), tensor.dtype, tensor.data_ptr() % 16 == 0
        kinds.append((*kind, pointer_kind(tensor)) if _ON_AMD and kind else kind)
    return tuple(kinds)


_ON_AMD = torch.version.hip is not None  # where the compiler asks more of a pointer


def launch_cached(workspace, key, operands, prepare, ready=None, signature=operand_signature):
    """Launch on operands; what was made for that, outputs first.

    Args:
        workspace: in which the kernel runs, or ``local_workspace_of``
        key: all that the launch follows from, beside how the operands lie
        operands: tensors or None
        prepare: (*operands) -> Launch; called where none is kept, with other tensors of the same memory
        ready: (*operands) -> operands that a kernel can take, copied if need be; None: these can be taken
        signature: of the operands: ``operand_signature`` or ``pointer_signature``
    """
    if recorder.active is not None:
        operands = operands if ready is None else ready(*operands)
        return _prepared(operands, prepare)(operands)
    launch = workspace.launches[(*key, *signature(operands))]
    if launch is None:
        launch, operands = bind(workspace, key, operands, prepare, ready, signature)
    return launch(operands)


def bind(workspace, key, operands, prepare, ready=None, signature=operand_signature):
    """(the Launch of ``launch_cached``, the operands that it takes); not while launches are recorded."""
    if ready is not None:
        operands = ready(*operands)
    whole_key = *key, *signature(operands)
    launch = workspace.launches[whole_key]
    if launch is None:
        launch = _prepared(operands, prepare)
        workspace.launches[whole_key] = launch  # of a buffer that may have come to be just now
    return launch, operands


def bind_uncopied(given, *call):
    """The Launch of ``launch_cached(*call)``, or None if it takes a copy of one of the operands that were ``given``."""
    launch, taken = bind(*call)
    return launch if all(one is other for one, other in zip(given, taken, strict=True)) else None


def _prepared(operands, prepare):
    return prepare(*[None if operand is None else operand.detach() for operand in operands])


def output_spec(like, *shape, dtype=None):
    """A tensor that stands for one which each call makes anew; it takes no memory."""
    return torch.empty(shape, dtype=dtype or like.dtype, device="meta")


class _LocalWorkspace:
    """In the place of a workspace, for what a rank launches by itself."""

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


@functools.cache
def _local_workspace_of_stream(device, stream):
    return _LocalWorkspace()


def local_workspace_of(device):
    """Where launches without peers are kept: for each stream, and none of a CUDA graph (``local_workspace``)."""
    if device.type == "cpu":
        return _local_workspace_of_stream(device, None)
    if torch.cuda.is_current_stream_capturing():
        return _LocalWorkspace()
    return _local_workspace_of_stream(device, torch.cuda.current_stream(device).cuda_stream)


class Launch:
    """What ``prepare`` has found out.

    Args:
        workspace: as of ``launch_cached``
        kernel, grid, args, constants: as for ``kernel[grid](*args, **constants)``
        operands: of which args were made, each another object, so that they can be told apart there
        made: from ``output_spec``, what each call makes
        fixed: tensors of the workspace's in args, and bases of descriptors: the same in every call
        checks_errors: whether a call raises errors that earlier launches have reported. Not in the middle of an
            operator: a rank that raises an error of this very call there leaves its peers waiting

    Raises:
        AssertionError: for a tensor in args that is none of these, say a copy of an operand: a later call would read it
            again
    """

    def __init__(self, workspace, kernel, grid, args, constants, operands, made, fixed, checks_errors=True):
        self._workspace, self._kernel, self._looks = workspace, kernel, checks_errors
        self._ctx = None if workspace is None else workspace.ctx
        self._made = [(tuple(tensor.shape), tensor.dtype) for tensor in made]
        numbers = {id(tensor): number for number, tensor in enumerate((*operands, *made)) if tensor is not None}
        call_at = next((at for at, arg in enumerate(args) if arg is CALL_NUMBER), None)
        self._tells_call = call_at is not None
        places, self._numbers = [], []  # of the tensors that differ: among args, and among operands and what is made
        for at, arg in enumerate(args):
            tensor = arg.base if isinstance(arg, TensorDescriptor) else arg
            if id(tensor) in numbers:
                places.append(at)
                self._numbers.append(numbers[id(tensor)])
            else:
                known = not isinstance(tensor, torch.Tensor) or any(tensor is one for one in fixed)
                assert known, f"argument {at} of {kernel} is a tensor that no call gives or makes"
        if self._tells_call:
            places.append(call_at)
        self._alike = BoundLaunch((*grid, 1, 1)[:3], args, places, constants)

    def __call__(self, operands):
        workspace = self._workspace
        if self._looks:
            workspace.check()
        made, values = [], []
        for shape, dtype in self._made:
            made.append(operands[0].new_empty(shape, dtype=dtype))
        tensors = (*operands, *made)
        for number in self._numbers:
            values.append(tensors[number])
        if self._tells_call:
            values.append(workspace.note_call)
        stream = workspace.before_launch()
        try:
            self._kernel.launch_bound(self._alike, values, stream)
        except BaseException as error:
            workspace.break_off(error)
            raise
        workspace.after_launch(stream)
        return made

    def is_current(self):
        """Whether the workspace has the buffer still that the launch is for."""
        return self._workspace.ctx is self._ctx
