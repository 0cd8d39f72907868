"""SharedGather: one collective for several column-parallel linear layers of a module."""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from tdkernels.nn.parallel.styles import column_product, local_parameters


class SharedGather:
    """One collective for several ColwiseParallel linears of a parent module: the all-gather of x, or without sequence
    parallelism the all-reduce of its gradient.

    During a forward of the parent, the first member that is called computes the outputs of all members. Each other
    member takes its output if it gets the same tensor object; otherwise it computes its own. Outputs are used once.
    None is kept after the forward of the parent.

    A modification of x in place between two members is noticed by its version counter, except under torch.compile and
    for inference tensors, which have none.

    Attributes:
        members: The linears, to which ColwiseParallel was applied with the same dimension and mesh.
    """

    def __init__(self) -> None:
        self.members: list[Any] = []
        self.active = False
        self.clear()

    def join(self, members: list[Any]) -> None:
        """Set the members."""
        self.members = members
        for slot, member in enumerate(members):
            member.tdkernels_style.gather, member.tdkernels_style.slot = self, slot

    def clear(self) -> None:
        self.x: torch.Tensor | None = None
        self.context: tuple[Any, ...] = ()
        self.outputs: dict[int, torch.Tensor] = {}

    def begin(self, *_: Any) -> None:
        """Begin a forward of the parent. A forward pre-hook."""
        self.active = True
        self.clear()

    def end(self, *_: Any) -> None:
        """End a forward of the parent, also if it raises. A forward hook."""
        self.active = False
        self.clear()

    def take(self, slot: int, x: torch.Tensor) -> torch.Tensor | None:
        """Return the output of the member ``slot`` for x; None if the member must compute it itself."""
        if not self.active:
            return None
        if self.x is None:
            outputs = self._compute(x)
            if outputs is None:
                return None
            self.x, self.context, self.outputs = x, _context_of(x), dict(enumerate(outputs))
        elif x is not self.x or _context_of(x) != self.context:
            return None
        y = self.outputs.pop(slot, None)
        if not self.outputs:
            self.clear()
        return y

    def _compute(self, x):
        """Return the outputs of all members; None if FSDP2 divides a parameter of a member at the moment."""
        style = self.members[0].tdkernels_style
        if any(isinstance(one.weight, DTensor) and one.weight.device_mesh.ndim != 1 for one in self.members):
            return None
        weights, biases = zip(*(self.parameters_of(member) for member in self.members), strict=True)
        configs = [member.tdkernels_style.config for member in self.members]
        config = configs[0] if all(other == configs[0] for other in configs) else None
        return column_product(x, style, list(weights), list(biases), config)

    def parameters_of(self, member: Any) -> tuple[Any, Any]:
        """Return the weight and the bias that this rank multiplies with."""
        return local_parameters(member)


def _context_of(x):
    """Return what must be equal for an output computed earlier to be valid for the tensor x."""
    known = not torch.compiler.is_compiling() and not x.is_inference()  # torch.compile cannot compare versions
    version = x._version if known else None
    return version, torch.is_grad_enabled(), torch.is_autocast_enabled(x.device.type)
