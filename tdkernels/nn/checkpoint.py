"""Load and save experts' weights in the layouts of Hugging Face checkpoints.

A module holds ``w_gate_up`` and ``w_down`` of its rank's experts, or of its rank's part of the intermediate size I. The
checkpoint layouts are:

    fused       experts.gate_up_proj [E, 2 * I, H], gate first, and experts.down_proj [E, H, I]. Used by the modules of
                transformers 5.
    qwen3_moe   experts.{e}.gate_proj.weight [I, H], experts.{e}.up_proj.weight [I, H] and
                experts.{e}.down_proj.weight [H, I]. Used by the checkpoints of Qwen3-MoE and many other models.
    mixtral     The same weights named experts.{e}.w1.weight, experts.{e}.w3.weight and experts.{e}.w2.weight. Used by
                the checkpoints of Mixtral.
"""

from typing import Any

import torch
import torch.distributed as dist

PARTS = ("gate", "up", "down")
LAYOUTS = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
FUSED = ("experts.gate_up_proj", "experts.down_proj")


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
    """Return the state dict of a model with complete experts, in a layout of Hugging Face.

    Collective over the groups of the layers. Every rank then holds all experts, which takes memory.

    Args:
        model: A model that contains EPMoE or TPMoE modules, or such a module itself.
        layout: "fused", which the modules of transformers 5 load, or "qwen3_moe" or "mixtral", which are the layouts
            of these models' checkpoints.

    Returns:
        The state dict, the same on every rank. The experts' weights are new tensors on the device of the model.

    Raises:
        ValueError: If ``layout`` is unknown.
    """
    if layout != "fused" and layout not in LAYOUTS:
        raise ValueError(f"full_state_dict: layout must be one of {('fused', *LAYOUTS)}, not {layout!r}")
    state = model.state_dict()
    for name, module in model.named_modules():
        if isinstance(getattr(module, "shard", None), Shard):
            prefix = name + "." if name else ""
            own = (state.pop(prefix + weight) for weight in ("w_gate_up", "w_down"))
            gate_up, down = module.shard.join(*(_gather(weight, module.group) for weight in own))
            state.update((prefix + key, weight) for key, weight in _in_layout(gate_up, down, layout))
    return state


def _in_layout(gate_up, down, layout):
    if layout == "fused":
        yield from zip(FUSED, (gate_up, down), strict=True)
        return
    for expert, (both, second) in enumerate(zip(gate_up, down, strict=True)):
        for name, weight in zip(LAYOUTS[layout], (*both.chunk(2), second), strict=True):
            # safetensors does not save tensors that share memory.
            yield f"experts.{expert}.{name}.weight", weight.clone()
