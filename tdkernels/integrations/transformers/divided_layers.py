"""Forwards and hooks of a transformers model that ``parallelize`` has changed.

    Border             hooks at the borders of the layers: divide and gather the hidden states along the sequence
    make_replicated    a module with complete parameters; the gradients are summed over the ranks if they are partial
    share_heads        k_proj or v_proj with fewer kv heads than ranks
    HeadGather         SharedGather of linear layers that include these
"""

import types
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from tdkernels.nn.checkpoint import as_dtensor_like
from tdkernels.nn.parallel.dtensors import from_local, to_local
from tdkernels.nn.parallel.shared_gather import SharedGather
from tdkernels.nn.parallel.styles import LinearStyle, column_product, local_parameters
from tdkernels.ops.collectives.regions import copy_to_ranks, gather_rows, scatter_rows

if TYPE_CHECKING:
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh

UNSUPPORTED = {
    "output_hidden_states": "the hidden states between the layers are divided",
    "output_router_logits": "EPMoE does not record the router logits",
    "output_attentions": "each rank has only its own heads",
}


# ---- borders ----


class Border:
    """Hooks at the borders of the layers.

    Attributes:
        mesh: The one-dimensional mesh.
        group: The ranks of the mesh.
        unsupported: Names of options of a forward that are rejected.
    """

    def __init__(self, mesh: "DeviceMesh", group: "dist.ProcessGroup", unsupported: list[str]) -> None:
        self.mesh, self.group, self.unsupported = mesh, group, unsupported

    def __deepcopy__(self, memo):
        return self  # it has no state, and a mesh and a group cannot be copied

    def reject(self, base: Any, args: Any, kwargs: dict[str, Any]) -> None:
        """Raise ValueError for options of a forward that are not supported. A pre-hook of the base model."""
        for name in self.unsupported:
            value = kwargs.get(name)
            if getattr(base.config, name, False) if value is None else value:
                raise ValueError(f"{name}=True is not supported by a parallel {type(base).__name__}: "
                                 f"{UNSUPPORTED[name]}")

    def scatter(self, _layer: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Divide the hidden states [B, S, H] along S. A pre-hook of the first layer."""
        return _replace_hidden_states(args, kwargs, self._scattered)

    def _scattered(self, x):
        world_size = self.group.size()
        if x.dim() != 3 or x.shape[1] % world_size:
            raise ValueError(
                f"the sequence length S = {x.shape[1]} of the hidden states {list(x.shape)} must be divisible by the "
                f"W = {world_size} ranks: pad the sequences, or call parallelize with sequence_parallel=False, which "
                "generate() needs"
            )
        return scatter_rows(x.transpose(0, 1), backward="sum", group=self.group).transpose(0, 1).contiguous()

    def divide(self, _module: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        """Pass the hidden states as a DTensor [B, S, H] with Shard(1). A pre-hook of an attention or MLP."""
        return _replace_hidden_states(args, kwargs, lambda x: from_local(x, self.mesh, (Shard(1),)))

    def gather(self, _norm: Any, _args: Any, x: torch.Tensor) -> torch.Tensor:
        """Gather the hidden states [B, S / W, H] along S. A hook of the final norm; all ranks compute the same next."""
        rows = x.transpose(0, 1).contiguous()
        return gather_rows(rows, backward="slice", group=self.group).transpose(0, 1).contiguous()

    def gather_logits(self, _head: Any, _args: Any, y: torch.Tensor) -> torch.Tensor:
        """Gather the logits [..., V / W] along V. A hook of the output layer."""
        rows = y.movedim(-1, 0).contiguous()
        return gather_rows(rows, backward="slice", group=self.group).movedim(0, -1).contiguous()


def _replace_hidden_states(args, kwargs, function):
    """Return (args, kwargs) with function(hidden states); they are the first argument, or a keyword argument."""
    if args:
        return (function(args[0]), *args[1:]), kwargs
    return args, {**kwargs, "hidden_states": function(kwargs["hidden_states"])}


# ---- modules with complete parameters ----


@dataclass(eq=False)
class Replicated:
    """State of a module with complete parameters, its attribute ``tdkernels_replicated``.

    Attributes:
        group: The ranks.
        summed: Whether each rank computes a part of the gradients, which are then summed.
    """

    group: "dist.ProcessGroup"
    summed: bool

    def __deepcopy__(self, memo):
        return self  # a group cannot be copied


def replicate_parameters(module: torch.nn.Module, mesh: "DeviceMesh", src_data_rank: int | None, known: Any) -> None:
    """Replace the parameters of a module by DTensors with Replicate().

    Args:
        module: The module.
        mesh: The mesh.
        src_data_rank: As for ``parallelize_module``.
        known: {parameter: its DTensor}, so that tied parameters stay tied.
    """
    for name, parameter in list(module.named_parameters(recurse=False)):
        if parameter not in known:
            new = distribute_tensor(parameter.detach(), mesh, (Replicate(),), src_data_rank=src_data_rank)
            known[parameter] = torch.nn.Parameter(new, requires_grad=parameter.requires_grad)
        module._parameters[name] = known[parameter]


def make_replicated(module: Any, group: "dist.ProcessGroup", summed: bool) -> None:
    """Let a module with replicated parameters compute with local tensors."""
    module.tdkernels_replicated = Replicated(group, summed)
    module.forward = types.MethodType(_replicated_forward, module)


def _replicated_forward(module, *args, **kwargs):
    """Call the forward of the module's class with local tensors in place of the parameters."""
    state = module.tdkernels_replicated
    parameters = {name: one for name, one in module._parameters.items() if one is not None}
    try:
        for name, parameter in parameters.items():
            local = to_local(parameter, parameter.placements)
            module._parameters[name] = copy_to_ranks(local, group=state.group) if state.summed else local
        return type(module).forward(module, *args, **kwargs)
    finally:
        module._parameters.update(parameters)


# ---- kv heads that ranks share ----


@dataclass(eq=False)
class SharedHeadStyle(LinearStyle):
    """LinearStyle of a k_proj or v_proj that is complete on each rank. A rank uses the rows of one kv head.

    Attributes:
        rows: First row of this rank's head, and the first one behind it.
    """

    rows: tuple[int, int] = (0, 0)


def share_heads(module: Any, kv_heads: int, style: LinearStyle) -> None:
    """Let a k_proj or v_proj with replicated parameters compute the kv head of this rank's query heads.

    Args:
        module: The linear layer.
        kv_heads: Number of kv heads, which divides the number of ranks.
        style: Style of the layer.
    """
    rows = module.out_features // kv_heads
    head = style.group.rank() * kv_heads // style.group.size()
    module.tdkernels_style = SharedHeadStyle(**vars(style), rows=(head * rows, (head + 1) * rows))
    module.forward = types.MethodType(_shared_head_forward, module)


def _parameters_of(module):
    """Return the weight and bias of a linear layer that this rank multiplies with."""
    weight, bias = local_parameters(module)
    style = module.tdkernels_style
    if not isinstance(style, SharedHeadStyle):
        return weight, bias
    # Each rank computes the gradient for its own query heads.
    rows = slice(*style.rows)
    return tuple(None if one is None else copy_to_ranks(one, group=style.group)[rows] for one in (weight, bias))


def _shared_head_forward(module, x):
    style = module.tdkernels_style
    y = style.gather.take(style.slot, x) if style.gather is not None else None
    return column_product(x, style, *_parameters_of(module), style.config) if y is None else y


class HeadGather(SharedGather):
    """SharedGather of linear layers of which some are complete on each rank."""

    def parameters_of(self, member: Any) -> tuple[Any, Any]:
        return _parameters_of(member)


# ---- checkpoints ----


def load_complete(module: Any, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace complete tensors by DTensors like the parameters. A ``load_state_dict`` pre-hook of the model."""
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found = state_dict.get(prefix + name)
        if isinstance(found, torch.Tensor) and isinstance(parameter, DTensor):
            state_dict[prefix + name] = as_dtensor_like(parameter, found.to(parameter.device))
