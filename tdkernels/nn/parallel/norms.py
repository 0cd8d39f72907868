"""SequenceParallel of torch.distributed.tensor.parallel, whose norms compute with local tensors.

A norm of DTensors takes about 0.5 ms of host time for a forward and backward (2-core CPU), more than its kernels take
on a GPU. A norm along the last dimension of a tensor that is sharded along the sequence needs no communication.
"""

import copy
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch.distributed.tensor import DTensor, Partial, distribute_module
from torch.distributed.tensor import parallel as torch_parallel

from tdkernels.nn.parallel.dtensors import from_local, to_local

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import Shard


@dataclass(eq=False)
class NormStyle:
    """The style of a norm, its attribute ``tdkernels_norm``.

    Attributes:
        is_rms: Whether the norm is an RMSNorm; otherwise it is a LayerNorm. FSDP2 replaces the class of a module.
        mesh: The one-dimensional mesh.
        layout: Layout of the input and the output.
        use_local_output: Whether the output is a local tensor.
    """

    is_rms: bool
    mesh: "DeviceMesh"
    layout: "Shard"
    use_local_output: bool

    def __deepcopy__(self, memo):
        return copy.copy(self)  # a mesh cannot be copied


def _is_local_norm(module: Any, dim: int) -> bool:
    """Return whether a module is a norm of torch along the last dimension, and ``dim`` is an earlier one."""
    if type(module) not in (torch.nn.RMSNorm, torch.nn.LayerNorm) or "forward" in vars(module):
        return False
    return dim in (0, 1) and len(module.normalized_shape) == 1


def _norm_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of a norm under SequenceParallel."""
    style, shape = module.tdkernels_norm, None
    if isinstance(x, DTensor):
        if x.placements != (style.layout,):
            x = x.redistribute(style.mesh, (style.layout,))
        shape, x = x.shape, to_local(x, (style.layout,))
    if style.layout.dim >= x.dim() - 1:
        raise ValueError(
            f"SequenceParallel: x {list(x.shape)} must have another dimension after the sequence, {style.layout.dim}"
        )
    weight, bias = (_local(getattr(module, name, None)) for name in ("weight", "bias"))
    if style.is_rms:
        y = F.rms_norm(x, module.normalized_shape, weight, module.eps)
    else:
        y = F.layer_norm(x, module.normalized_shape, weight, bias, module.eps)
    return y if style.use_local_output else from_local(y, style.mesh, (style.layout,), shape)


def _local(parameter):
    """Return a local parameter. Its gradient is that of this rank's part of the sequence, as with torch's style."""
    return to_local(parameter, (Partial(),)) if isinstance(parameter, DTensor) else parameter


class SequenceParallel(torch_parallel.SequenceParallel):
    """torch's SequenceParallel, whose norms compute with local tensors.

    A drop-in replacement in a plan for ``parallelize_module``. Parameters, their gradients (DTensors with Partial(), as
    with torch's style), inputs and outputs are the same. torch.nn.RMSNorm and torch.nn.LayerNorm along one dimension
    take less time on the host. Other modules get torch's style.

    Args:
        sequence_dim: Dimension of the sequence.
        use_local_output: Whether the output is a local tensor instead of a DTensor.

    Raises:
        ValueError: In the forward, if x has no dimension after the sequence dimension.

    Example:
        >>> parallelize_module(model, mesh["tp"], {"layers.*.norm": SequenceParallel()})
    """

    def __init__(self, *, sequence_dim: int = 1, use_local_output: bool = False) -> None:
        super().__init__(sequence_dim=sequence_dim, use_local_output=use_local_output)

    def _apply(self, module: Any, device_mesh: "DeviceMesh") -> Any:
        layout = self.sequence_sharding[0]
        if device_mesh.ndim != 1 or not _is_local_norm(module, layout.dim):
            return super()._apply(module, device_mesh)
        is_rms = type(module) is torch.nn.RMSNorm
        module = distribute_module(module, device_mesh, self._replicate_module_fn)
        module.tdkernels_norm = NormStyle(is_rms, device_mesh, layout, self.use_local_output)
        module.forward = types.MethodType(_norm_forward, module)
        return module
