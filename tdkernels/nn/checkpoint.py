"""The weights of experts as checkpoints have them, from and to a rank's part of them.

A module keeps w_gate_up and w_down of its own experts, or of its own part of I. The layouts of Hugging Face's models:

    fused       experts.gate_up_proj [E, 2 * I, H], gate first; experts.down_proj [E, H, I]: modules of transformers 5
    qwen3_moe   experts.{e}.gate_proj.weight [I, H], experts.{e}.up_proj.weight, experts.{e}.down_proj.weight [H, I]:
                checkpoints of Qwen3-MoE, and of many others
    mixtral     the same as experts.{e}.w1.weight, experts.{e}.w3.weight, experts.{e}.w2.weight: those of Mixtral
"""

import torch
import torch.distributed as dist

PARTS = ("gate", "up", "down")
LAYOUTS = {"qwen3_moe": ("gate_proj", "up_proj", "down_proj"), "mixtral": ("w1", "w3", "w2")}
FUSED = ("experts.gate_up_proj", "experts.down_proj")


class Shard:
    """What a rank has: which experts, and which of the I channels between their two products.

    A module that has ``shard``, w_gate_up [experts, 2 * channels, H] and w_down [experts, H, channels] takes any of the
    layouts once ``load_any_layout`` is its hook, and gives them back by ``full_state_dict``.
    """

    def __init__(self, experts, channels, num_experts, intermediate, hidden):
        self.experts, self.channels = experts, channels
        self.num_experts = num_experts
        self.shapes = {"gate": (intermediate, hidden), "up": (intermediate, hidden), "down": (hidden, intermediate)}

    def of(self, part, weight):
        """The rank's part of a whole weight of one expert."""
        channels = slice(self.channels.start, self.channels.stop)
        return weight[:, channels] if part == "down" else weight[channels]

    def weights(self, found):
        """(w_gate_up, w_down) of whole weights by (expert, part)."""
        gate_up = [
            torch.cat([self.of(part, found[expert, part]) for part in ("gate", "up")]) for expert in self.experts
        ]
        return torch.stack(gate_up), torch.stack([self.of("down", found[expert, "down"]) for expert in self.experts])

    def join(self, gate_up, down):
        """Whole w_gate_up and w_down of those of all ranks, in their order."""
        if len(self.experts) < self.num_experts:  # divided by experts
            return torch.cat(gate_up), torch.cat(down)
        gate_up = torch.cat([part.unflatten(1, (2, -1)) for part in gate_up], dim=2)
        return gate_up.flatten(1, 2), torch.cat(down, dim=2)


# ---- from a checkpoint ----


def _take(state_dict, prefix, shard, error_msgs):
    """{(expert, part): whole weight} of what there is in any layout, which is removed from ``state_dict``."""
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
    """A load_state_dict pre-hook: a rank's part of whole weights in any layout. Its own are taken as they are."""
    shard, errors = module.shard, []
    found = _take(state_dict, prefix, shard, errors)
    if not found and not errors:
        return
    missing = [key for key in ((e, part) for e in shard.experts for part in PARTS) if key not in found]
    missing_keys += [f"{prefix}experts.{expert} ({part})" for expert, part in missing]
    error_msgs += errors
    if missing or errors:  # what was said is what is wrong, and not that the stacked weights are missing
        weights = module.w_gate_up.detach(), module.w_down.detach()
    else:
        weights = shard.weights(found)
    state_dict[prefix + "w_gate_up"], state_dict[prefix + "w_down"] = weights


# ---- to a checkpoint ----


def _gather(tensor, group):
    parts = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, tensor.detach().contiguous(), group=group)
    return parts


def full_state_dict(model, layout="fused"):
    """The state dict of a model with all experts whole, in a layout of Hugging Face's.

    Args:
        model: a module, with EPMoE or TPMoE in it or itself one
        layout: "fused", which modules of transformers 5 load; or "qwen3_moe" or "mixtral", as their checkpoints

    Returns:
        the state dict, the same on every rank; weights of experts are new tensors, on the device of the model

    Contract:
        collective over the groups of the layers; all ranks hold all experts at the end, so it takes memory
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
            yield f"experts.{expert}.{name}.weight", weight.clone()  # safetensors takes no two that share memory
