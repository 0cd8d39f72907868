"""Load and save complete weights: of divided linear layers, and of experts in the layouts of Hugging Face checkpoints.

A parallel linear layer holds this rank's ``Part`` of its parameters. The parameters of a checkpoint are complete.

A mixture-of-experts module holds ``w_gate_up`` and ``w_down`` of its rank's experts, or of its rank's part of the
intermediate size I. The checkpoint layouts are:

    fused       experts.gate_up_proj [E, 2 * I, H], gate first, and experts.down_proj [E, H, I]. Used by the modules of
                transformers 5.
    qwen3_moe   experts.{e}.gate_proj.weight [I, H], experts.{e}.up_proj.weight [I, H] and
                experts.{e}.down_proj.weight [H, I]. Used by the checkpoints of Qwen3-MoE and many other models.
    mixtral     The same weights named experts.{e}.w1.weight, experts.{e}.w3.weight and experts.{e}.w2.weight. Used by
                the checkpoints of Mixtral.
"""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

PARTS = ("gate", "up", "down")
LAYOUTS = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
FUSED = ("experts.gate_up_proj", "experts.down_proj")
CHECKPOINT_WRAPPER = "_checkpoint_wrapped_module."  # a name of torch's checkpoint_wrapper, absent from state dicts


class Part(NamedTuple):
    """One rank's part of a parameter.

    Dimension ``dim`` consists of ``blocks`` blocks of equal size, such as gate and up, and each block is divided
    between the ranks.
    """

    dim: int
    rank: int
    world_size: int
    blocks: int = 1

    def of(self, complete: torch.Tensor) -> torch.Tensor:
        """Return this rank's part of a complete parameter, as a new tensor.

        It is no view, because ``load_state_dict(assign=True)`` would keep the memory of the complete parameter.
        """
        divided = complete.unflatten(self.dim, (self.blocks, self.world_size, -1)).select(self.dim + 1, self.rank)
        return divided.flatten(self.dim, self.dim + 1).clone(memory_format=torch.contiguous_format)

    def join(self, parts: list[torch.Tensor]) -> torch.Tensor:
        """Return the complete parameter for the list of all ranks' parts in rank order."""
        blocks = [part.unflatten(self.dim, (self.blocks, -1)) for part in parts]
        return torch.cat(blocks, self.dim + 1).flatten(self.dim, self.dim + 1)

    def complete_shape(self, shape: torch.Size) -> list[int]:
        """Return the shape of the complete parameter for the shape of a part."""
        sizes = [*shape]
        sizes[self.dim] *= self.world_size
        return sizes


class Divided(torch.nn.Module):
    """Base class of modules whose parameters are divided between the ranks of ``group``.

    ``parts`` maps the name of each divided parameter to its Part. ``load_own_parts`` must be registered as a hook.
    """

    parts: dict[str, Part]
    group: Any


class Renamed(torch.nn.Module):
    """Base class of modules whose parameters have other names in a checkpoint."""

    def rename_complete(self, state: dict[str, Any], prefix: str) -> None:
        """Change the names of the module's complete parameters in ``state`` to those of a checkpoint."""
        raise NotImplementedError


class Shard:
    """One rank's part of the experts' weights: a range of experts, and a range of the I intermediate channels.

    It allows a module to load and save any of the layouts. The module needs the attributes ``shard``,
    ``w_gate_up`` [experts, 2 * channels, H] and ``w_down`` [experts, H, channels]. ``load_any_layout``, registered as a
    hook, loads weights, and ``full_state_dict`` returns them.
    """

    def __init__(self, experts: range, channels: range, num_experts: int, intermediate: int, hidden: int) -> None:
        self.experts, self.channels = experts, channels
        self.num_experts = num_experts
        self.shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}

    def of(self, part: str, weight: torch.Tensor) -> torch.Tensor:
        """Return this rank's channels of one expert's complete weight; ``part`` is "gate", "up" or "down"."""
        channels = slice(self.channels.start, self.channels.stop)
        return weight[:, channels] if part == "down" else weight[channels]

    def weights(self, found: dict[tuple[int, str], torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """Return this rank's (w_gate_up, w_down) for a dict from (expert, part) to the complete weight."""
        gate_up = [
            torch.cat([self.of(part, found[expert, part]) for part in ("gate", "up")]) for expert in self.experts
        ]
        return torch.stack(gate_up), torch.stack([self.of("down", found[expert, "down"]) for expert in self.experts])

    def join(self, gate_up, down):
        """Return the complete (w_gate_up, w_down) for the lists of all ranks' parts in rank order."""
        if len(self.experts) < self.num_experts:  # the experts are divided between the ranks
            return torch.cat(gate_up), torch.cat(down)
        gate_up = torch.cat([part.unflatten(1, (2, -1)) for part in gate_up], dim=2)
        return gate_up.flatten(1, 2), torch.cat(down, dim=2)


# ---- from a checkpoint ----


def load_own_parts(module, state_dict, prefix, *_):
    """Replace complete parameters by this rank's parts. A ``load_state_dict`` pre-hook of ``Divided`` modules.

    Tensors of other shapes are left unchanged: they are this rank's parts, or ``load_state_dict`` rejects them.
    """
    for name, parameter in module.named_parameters(recurse=False):
        found, part = state_dict.get(prefix + name), module.parts.get(name)
        if not isinstance(found, torch.Tensor):
            continue
        if part is not None and part.world_size > 1 and [*found.shape] == part.complete_shape(parameter.shape):
            found = part.of(to_plain_tensor(found))
        state_dict[prefix + name] = as_dtensor_like(parameter, found)


def to_plain_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return a DTensor, such as a parameter under FSDP2, as a complete plain tensor, and other tensors unchanged."""
    return tensor.full_tensor() if hasattr(tensor, "full_tensor") else tensor


def as_dtensor_like(parameter: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return a plain tensor of the shape of ``parameter`` as a DTensor if ``parameter`` is one, else unchanged.

    All ranks of the mesh of ``parameter`` must have the same ``tensor``; there is no communication.
    """
    if not hasattr(parameter, "full_tensor") or hasattr(tensor, "full_tensor") or tensor.shape != parameter.shape:
        return tensor
    from torch.distributed.tensor import distribute_tensor

    return distribute_tensor(tensor, parameter.device_mesh, parameter.placements, src_data_rank=None)


def _take(state_dict, prefix, shard, error_msgs):
    """Remove the experts' weights, in any layout, from ``state_dict``. Return {(expert, part): complete weight}."""
    found, names = {}, {}
    for layout in LAYOUTS.values():
        for expert in range(shard.num_experts):
            for part, name in zip(PARTS, layout, strict=True):
                key = f"{prefix}experts.{expert}.{name}.weight"
                if key in state_dict:
                    found[expert, part], names[expert, part] = state_dict.pop(key), key
    gate_up, down = (state_dict.pop(prefix + name, None) for name in FUSED)
    for expert in range(0 if gate_up is None else gate_up.shape[0]):
        found[expert, "gate"], found[expert, "up"] = gate_up[expert].chunk(2)
        names[expert, "gate"] = names[expert, "up"] = f"{prefix}{FUSED[0]}[{expert}]"
    for expert in range(0 if down is None else down.shape[0]):
        found[expert, "down"], names[expert, "down"] = down[expert], f"{prefix}{FUSED[1]}[{expert}]"
    for (expert, part), weight in found.items():
        if expert >= shard.num_experts:
            error_msgs.append(f"{names[expert, part]}: the module has {shard.num_experts} experts")
        elif tuple(weight.shape) != shard.shapes[part]:
            error_msgs.append(
                f"size mismatch for {names[expert, part]}: {part} of an expert is {list(weight.shape)} in the "
                f"checkpoint, {list(shard.shapes[part])} in the whole model"
            )
    return found


def load_any_layout(module, state_dict, prefix, _metadata, _strict, missing_keys, _unexpected_keys, error_msgs):
    """Convert complete weights in any layout to this rank's part. A ``load_state_dict`` pre-hook.

    If the state dict has this rank's ``w_gate_up`` and ``w_down`` instead, it is left unchanged.
    """
    shard, errors = module.shard, []
    found = _take(state_dict, prefix, shard, errors)
    if not found and not errors:
        return
    missing = [key for key in ((e, part) for e in shard.experts for part in PARTS) if key not in found]
    missing_keys += [f"{prefix}experts.{expert} ({part})" for expert, part in missing]
    error_msgs += errors
    if missing or errors:  # pass the current weights on, so that no additional errors report them as missing
        weights = module.w_gate_up.detach(), module.w_down.detach()
    else:
        weights = shard.weights(found)
    state_dict[prefix + "w_gate_up"], state_dict[prefix + "w_down"] = weights


# ---- to a checkpoint ----


def _gather(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return parts


def full_state_dict(model: torch.nn.Module, layout: str = "fused") -> dict[str, Any]:
    """Return the state dict of a model with complete weights, in a layout of Hugging Face.

    The weights of ColumnParallelLinear, RowParallelLinear, SwiGLU, EPMoE and TPMoE are gathered, and so are all
    DTensors, such as the parameters under FSDP2. Collective over the groups of these layers and the meshes of the
    DTensors. Every rank then holds all weights, which takes memory.

    Args:
        model: A model that contains such modules, or such a module itself.
        layout: Layout of the experts: "fused", which the modules of transformers 5 load, or "qwen3_moe" or "mixtral",
            which are the layouts of these models' checkpoints.

    Returns:
        The state dict, the same on every rank. The names of linear layers are those of torch.nn.Linear, and those of a
        SwiGLU are gate_proj, up_proj and down_proj. The gathered weights are new tensors on the device of the model.

    Raises:
        ValueError: If ``layout`` is unknown.
    """
    if layout != "fused" and layout not in LAYOUTS:
        raise ValueError(f"full_state_dict: layout must be one of {('fused', *LAYOUTS)}, not {layout!r}")
    state = model.state_dict()
    for name, value in state.items():
        state[name] = to_plain_tensor(value)
    # Children come first: a Renamed module renames the complete parameters of its children.
    for name, module in reversed([*model.named_modules(remove_duplicate=False)]):
        prefix = (name + ".").replace(CHECKPOINT_WRAPPER, "") if name else ""
        if isinstance(getattr(module, "shard", None), Shard):
            own = (state.pop(prefix + weight) for weight in ("w_gate_up", "w_down"))
            gate_up, down = module.shard.join(*(_gather(weight, module.group) for weight in own))
            state.update((prefix + key, weight) for key, weight in _in_layout(gate_up, down, layout))
        elif isinstance(module, Divided):
            for name, part in module.parts.items():
                state[prefix + name] = part.join(_gather(state[prefix + name], module.group))
        elif isinstance(module, Renamed):
            module.rename_complete(state, prefix)
    return state


def _in_layout(gate_up, down, layout):
    if layout == "fused":
        yield from zip(FUSED, (gate_up, down), strict=True)
        return
    for expert, (both, second) in enumerate(zip(gate_up, down, strict=True)):
        for name, weight in zip(LAYOUTS[layout], (*both.chunk(2), second), strict=True):
            # safetensors does not save tensors that share memory.
            yield f"experts.{expert}.{name}.weight", weight.clone()
