"""ColwiseParallel and RowwiseParallel of torch.distributed.tensor.parallel with the fused operators.

    style              input layout     output layout    operator
    ColwiseParallel    Shard(0 or 1)    Shard(-1)        ag_gemm
    ColwiseParallel    Replicate()      Shard(-1)        column_linear
    RowwiseParallel    Shard(-1)        Shard(0 or 1)    gemm_rs
    RowwiseParallel    Shard(-1)        Replicate()      gemm_ar

The parameters are the DTensors that torch's styles create. Only the forward of the module is replaced: it passes the
local tensors to the operator. It takes the local parameters in every call, because FSDP2 replaces the parameters.
"""

import copy
import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_module
from torch.distributed.tensor import parallel as torch_parallel

from tdkernels.nn.parallel.dtensors import from_local, to_local
from tdkernels.ops.dense.ag_gemm.op import AgGemmConfig, ag_gemm
from tdkernels.ops.dense.column_linear.op import column_linear
from tdkernels.ops.dense.gemm_ar.op import GemmArConfig, gemm_ar
from tdkernels.ops.dense.gemm_rs.op import GemmRsConfig, gemm_rs
from tdkernels.symm import resolve_group

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement

DTYPES = torch.bfloat16, torch.float16, torch.float32


# ---- state of a module with a style ----


@dataclass(eq=False)
class LinearStyle:
    """The style of a torch.nn.Linear, its attribute ``tdkernels_style``.

    Attributes:
        name: Name of the style.
        operator: Name of the operator that its forward runs.
        mesh: The one-dimensional mesh.
        group: The ranks of the mesh.
        input_layout: Layout of an input that is not a DTensor.
        dim: Dimension that the operator gathers or scatters; None if it does neither.
        use_local_output: Whether the output is a local tensor.
        config: Config of the operator.
        gather: The SharedGather of the module and others, or None.
        slot: Index of the module in ``gather.members``.
    """

    name: str
    operator: str
    mesh: "DeviceMesh"
    group: "dist.ProcessGroup"
    input_layout: "Placement"
    dim: int | None
    use_local_output: bool
    config: Any
    gather: Any = None
    slot: int = 0

    def why_torch(self, module: torch.nn.Module) -> str | None:
        """Return why ``module`` runs torch at present; None if it runs the operator."""
        return None

    def __deepcopy__(self, memo):
        memo[id(self)] = copied = copy.copy(self)  # meshes and groups cannot be copied
        copied.gather = copy.deepcopy(self.gather, memo)
        return copied


# ---- forward ----


class _Wait(torch.autograd.Function):
    """Wait for an AsyncCollectiveTensor. Its ``wait`` method drops the gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.wait()

    @staticmethod
    def backward(ctx, dy):
        return dy


def _waited(x):
    if not torch.compiler.is_compiling() and isinstance(x, AsyncCollectiveTensor):
        return _Wait.apply(x)
    return x


def local_input(x: torch.Tensor, style: LinearStyle, layout: "Placement") -> torch.Tensor:
    """Return the local tensor of x in ``layout``, redistributed if it has another one.

    The gradient of the result has the same layout. So for Replicate() it must be complete on every rank.
    """
    if not isinstance(x, DTensor):
        if _normalized(style.input_layout, x) == layout:
            return _waited(x)
        x = from_local(x, style.mesh, (style.input_layout,))
    if isinstance(layout, Shard) and x.shape[layout.dim] % style.group.size():
        raise ValueError(
            f"{style.name}: dimension {layout.dim} of x {list(x.shape)} must be divisible by the group's "
            f"{style.group.size()} ranks"
        )
    if tuple(_normalized(placement, x) for placement in x.placements) != (layout,):
        x = x.redistribute(style.mesh, (layout,))
    return _waited(to_local(x, (layout,)))


def _normalized(placement, x):
    """Return a placement of x with a dimension that is not negative."""
    return Shard(placement.dim % x.dim()) if type(placement) is Shard else placement


def local_parameters(module: torch.nn.Linear) -> tuple[Any, Any]:
    """Return the local weight and bias. Their gradients are complete: for the shard, or on every rank if replicated."""
    weight, bias = (
        to_local(one, one.placements) if isinstance(one, DTensor) else one
        for one in (module.weight, module.bias)
    )
    return weight, bias


def column_product(x: torch.Tensor, style: LinearStyle, weight: Any, bias: Any, config: Any) -> Any:
    """Return the outputs for a local weight and bias, or for lists of them."""
    dim = style.dim
    if dim is None or dim >= x.dim() - 1:
        return column_linear(local_input(x, style, Replicate()), weight, bias, group=style.group, config=config)
    return ag_gemm(local_input(x, style, Shard(dim)), weight, bias, dim=dim, group=style.group, config=config)


def column_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of a torch.nn.Linear under ColwiseParallel."""
    style = module.tdkernels_style
    y = style.gather.take(style.slot, x) if style.gather is not None else None
    if y is None:
        y = column_product(x, style, *local_parameters(module), style.config)
    return y if style.use_local_output else from_local(y, style.mesh, (Shard(-1),))


def row_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward of a torch.nn.Linear under RowwiseParallel."""
    style, dim = module.tdkernels_style, module.tdkernels_style.dim
    options = {"group": style.group, "config": style.config}
    if dim is not None and dim >= x.dim() - 1:
        raise ValueError(f"{style.name}: output layout Shard({dim}) needs an x with more dimensions than {x.dim()}")
    local = local_input(x, style, Shard(x.dim() - 1))
    w, b = local_parameters(module)
    z = gemm_ar(local, w, b, **options) if dim is None else gemm_rs(local, w, b, dim=dim, **options)
    layout = Replicate() if dim is None else Shard(dim)
    return z if style.use_local_output else from_local(z, style.mesh, (layout,))


# ---- styles ----


def sequence_dim(layout: "Placement | None") -> int | None:
    """Return the dimension of a Shard(0) or Shard(1), otherwise None."""
    return layout.dim if type(layout) is Shard and layout.dim in (0, 1) else None


def why_not_linear(module: torch.nn.Module) -> str | None:
    """Return why the forward of ``module`` cannot be replaced by that of a linear layer; None if it can."""
    if type(module) is not torch.nn.Linear:
        return f"class {type(module).__name__} is not torch.nn.Linear"
    if "forward" in vars(module):
        return "its forward was replaced by another library"
    if type(module.weight.data) is not torch.Tensor:
        return f"its weight is a {type(module.weight.data).__name__}"
    if module.weight.dtype not in DTYPES:
        return f"its weight is {module.weight.dtype}, which the operators do not support"
    return None


class _FusedLinear:
    """What the two styles share: a mix-in in front of torch's style."""

    input_layouts: Any  # tuples of one layout
    output_layouts: Any
    use_local_output: bool
    config: Any
    divided: str  # the size of the module that the ranks divide

    def operator(self) -> tuple[str, int | None]:
        """Return the name of the operator, and the dimension that it gathers or scatters."""
        raise NotImplementedError

    def why_not_layouts(self) -> str | None:
        """Return why no operator has the layouts; None if one has."""
        raise NotImplementedError

    def why_not(self, module: torch.nn.Module, world_size: int) -> str | None:
        """Return why the style cannot run a fused operator for ``module``; None if it can."""
        reason = why_not_linear(module) or self.why_not_layouts()
        size = getattr(module, self.divided, 0)
        if reason is None and size % world_size:
            return f"{self.divided} {size} must be divisible by the mesh's {world_size} ranks"
        return reason

    def _apply(self, module, device_mesh):
        if why_not_linear(module) is not None:
            return super()._apply(module, device_mesh)  # type: ignore[misc]
        name = type(self).__name__
        if device_mesh.ndim != 1:
            raise ValueError(f"{name}: the mesh must have one dimension, such as mesh['tp'], not {device_mesh.ndim}")
        group = resolve_group(device_mesh)
        reason = self.why_not(module, group.size())
        if reason is not None:
            raise ValueError(f"{name} of {module}: {reason}")
        module = distribute_module(module, device_mesh, self._partition_linear_fn)  # type: ignore[attr-defined]
        operator, dim = self.operator()
        module.tdkernels_style = LinearStyle(
            name, operator, device_mesh, group, self.input_layouts[0], dim, self.use_local_output, self.config
        )
        forward = column_forward if isinstance(self, ColwiseParallel) else row_forward
        module.forward = types.MethodType(forward, module)
        return module


class ColwiseParallel(_FusedLinear, torch_parallel.ColwiseParallel):
    """torch's ColwiseParallel, whose linear layers run ``ag_gemm`` or ``column_linear``.

    A drop-in replacement in a plan for ``parallelize_module``. The parameters are the same DTensors as with torch's
    style, so that checkpoints, optimizers, gradient clipping and FSDP2 are not affected. Modules other than
    torch.nn.Linear, such as torch.nn.Embedding and subclasses of torch.nn.Linear, get torch's style.

    With ``input_layouts=Shard(0)`` or ``Shard(1)``, ``ag_gemm`` gathers x while it is multiplied. A replicated x goes
    to ``column_linear``, which all-reduces the gradient of x while it is computed. An x with another layout is
    replicated by torch first.

    Do not use it below a PrepareModuleInput that gathers x for several layers: each layer would all-reduce its gradient
    of x, where torch's style needs one reduce-scatter. ``parallelize`` decides that for a whole plan.

    Args:
        input_layouts: Layout of x, if x is not a DTensor. A DTensor with another layout is redistributed. The default
            is Replicate().
        output_layouts: Layout of the output of a torch.nn.Linear: Shard(-1), the default.
        use_local_output: Whether the output is a local tensor instead of a DTensor.
        config: AgGemmConfig or GemmArConfig of the operator; None selects the best known config.

    Raises:
        ValueError: When it is applied to a torch.nn.Linear: if the mesh has several dimensions, its ranks do not divide
            out_features, or the output layout is not Shard(-1). In the forward: if they do not divide the sequence.

    Gradient:
        As with torch's style. The gradient of a replicated x is complete and equal on all ranks.

    Example:
        >>> plan = {"w1": ColwiseParallel(input_layouts=Shard(1)), "w2": RowwiseParallel(output_layouts=Shard(1))}
        >>> parallelize_module(feed_forward, mesh["tp"], plan)
    """

    divided = "out_features"

    def __init__(
        self, *, input_layouts: "Placement | None" = None, output_layouts: "Placement | None" = None,
        use_local_output: bool = True, config: AgGemmConfig | GemmArConfig | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.config = config

    def operator(self) -> tuple[str, int | None]:
        dim = sequence_dim(self.input_layouts[0])
        return ("column_linear" if dim is None else "ag_gemm"), dim

    def why_not_layouts(self) -> str | None:
        layout = self.output_layouts[0]
        return None if layout == Shard(-1) else f"output layout {layout!r} is not Shard(-1)"


class RowwiseParallel(_FusedLinear, torch_parallel.RowwiseParallel):
    """torch's RowwiseParallel, whose linear layers run ``gemm_rs`` or ``gemm_ar``.

    A drop-in replacement in a plan for ``parallelize_module``. The parameters are the same DTensors as with torch's
    style, so that checkpoints, optimizers, gradient clipping and FSDP2 are not affected. Modules other than
    torch.nn.Linear, such as torch.nn.Embedding and subclasses of torch.nn.Linear, get torch's style.

    With ``output_layouts=Shard(0)`` or ``Shard(1)``, ``gemm_rs`` reduce-scatters the product while it is computed. With
    Replicate(), ``gemm_ar`` all-reduces it.

    Args:
        input_layouts: Layout of x, if x is not a DTensor. The default is Shard(-1), the output of a ColwiseParallel
            layer. An x with another layout is redistributed by torch.
        output_layouts: Layout of the output of a torch.nn.Linear: Replicate(), the default, Shard(0) or Shard(1).
        use_local_output: Whether the output is a local tensor instead of a DTensor.
        config: GemmRsConfig or GemmArConfig of the operator; None selects the best known config.

    Raises:
        ValueError: When it is applied to a torch.nn.Linear: if the mesh has several dimensions, its ranks do not divide
            in_features, or no operator has the output layout. In the forward: if they do not divide the sequence.

    Gradient:
        As with torch's style. The gradient of the bias is complete on every rank.

    Example:
        >>> plan = {"wo": RowwiseParallel(output_layouts=Shard(1))}
        >>> parallelize_module(attention, mesh["tp"], plan)
    """

    divided = "in_features"

    def __init__(
        self, *, input_layouts: "Placement | None" = None, output_layouts: "Placement | None" = None,
        use_local_output: bool = True, config: GemmRsConfig | GemmArConfig | None = None,
    ) -> None:
        super().__init__(
            input_layouts=input_layouts, output_layouts=output_layouts, use_local_output=use_local_output
        )
        self.config = config

    def operator(self) -> tuple[str, int | None]:
        dim = sequence_dim(self.output_layouts[0])
        return ("gemm_ar" if dim is None else "gemm_rs"), dim

    def why_not_layouts(self) -> str | None:
        layout = self.output_layouts[0]
        if layout == Replicate() or sequence_dim(layout) is not None:
            return None
        return f"output layout {layout!r} is not Replicate(), Shard(0) or Shard(1)"
