"""DTensor.to_local and DTensor.from_local with less work on the host.

    to_local      the local tensor of a DTensor
    from_local    a DTensor of local tensors

A forward and backward of a layer has about ten of these conversions. torch's functions compute the global shape and
strides in each of them. These functions keep them. They call torch's functions while a program is traced, if the
gradient is differentiated again, and for shards of different sizes.

With both, and local norms (norms.py), the forward and backward of two Llama layers took 6.4 ms on the host instead of
9.9 (2 CPU ranks, kernels left out; 2.0 without any parallelism).
"""

from typing import TYPE_CHECKING, Any

import torch
from torch.distributed._functional_collectives import AsyncCollectiveTensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor.placement_types import Placement


def to_local(x: DTensor, layouts: "tuple[Placement, ...]") -> torch.Tensor:
    """Return ``x.to_local(grad_placements=layouts)``: the gradient of the result has these layouts."""
    if _is_traced(x) or not (torch.is_grad_enabled() and x.requires_grad):
        return x.to_local(grad_placements=layouts)
    return _ToLocal.apply(x, layouts)


def from_local(
    x: torch.Tensor, mesh: "DeviceMesh", layouts: "tuple[Placement, ...]", shape: torch.Size | None = None
) -> DTensor:
    """Return ``DTensor.from_local(x, mesh, layouts, run_check=False)``.

    Args:
        x: The local tensor.
        mesh: The mesh.
        layouts: The placements.
        shape: The global shape. It is needed if the shards have different sizes; then the result is contiguous.
    """
    if _is_traced(x) or isinstance(x, AsyncCollectiveTensor):
        return DTensor.from_local(x, mesh, layouts, run_check=False)
    if shape is not None and _meta_of(x, mesh, layouts)[1].shape != shape:
        stride = torch.empty(shape, device="meta").stride()
        return DTensor.from_local(x, mesh, layouts, run_check=False, shape=shape, stride=stride)
    return _FromLocal.apply(x, mesh, layouts)


def _is_traced(x):
    """Return whether torch.compile or another tracer records a call with x."""
    return torch.compiler.is_compiling() or not all(type(size) is int for size in (*x.shape, *x.stride()))


# Shapes, strides and dtypes of DTensors by those of their local tensors. The key does not contain the mesh, because
# equal meshes may have different process groups.
_metas: dict[tuple, Any] = {}
_MAX_METAS = 4096


def _meta_of(local, mesh, layouts):
    """Return (layouts with dimensions that are not negative, TensorMeta) of a DTensor of equal local tensors."""
    key = mesh.shape, layouts, local.shape, local.stride(), local.dtype
    found = _metas.get(key)
    if found is None:
        if len(_metas) >= _MAX_METAS:  # if the lengths of the sequences keep changing
            _metas.clear()
        like = torch.empty_strided(local.shape, local.stride(), dtype=local.dtype, device="meta")
        spec = DTensor.from_local(like, mesh, layouts, run_check=False)._spec
        found = _metas[key] = spec.placements, spec.tensor_meta
    return found


def _as_dtensor(local, mesh, layouts, meta):
    dtensor: Any = DTensor  # its constructor is not public, but the same in torch 2.11 to 2.14
    return dtensor(local, DTensorSpec(mesh, layouts, tensor_meta=meta), requires_grad=local.requires_grad)


class _ToLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, layouts):
        ctx.set_materialize_grads(False)
        local = x._local_tensor
        ctx.spec, ctx.stride, ctx.layouts = x._spec, local.stride(), layouts
        return local.view_as(local)  # a new tensor, because autograd modifies it

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, None
        mesh, meta = ctx.spec.mesh, ctx.spec.tensor_meta
        if dy.stride() != ctx.stride:
            _, other = _meta_of(dy, mesh, ctx.spec.placements)
            meta = TensorMeta(meta.shape, other.stride, meta.dtype)
        if torch.is_grad_enabled() or _is_traced(dy):
            options = {"run_check": False, "shape": meta.shape, "stride": meta.stride}
            return DTensor.from_local(dy, mesh, ctx.layouts, **options), None
        return _as_dtensor(dy, mesh, ctx.layouts, meta), None


class _FromLocal(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, mesh, layouts):
        ctx.set_materialize_grads(False)
        layouts, meta = _meta_of(x, mesh, layouts)
        # As in torch: the gradient of a term of a sum is the complete gradient of the sum.
        ctx.layouts = tuple(Replicate() if layout.is_partial() else layout for layout in layouts)
        return _as_dtensor(x.view_as(x), mesh, layouts, meta)

    @staticmethod
    def backward(ctx, dy):
        if dy is None:
            return None, None, None
        if dy.placements != ctx.layouts:
            dy = dy.redistribute(placements=ctx.layouts)
        return dy.to_local(), None, None
