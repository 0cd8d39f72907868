"""Read the tensor-parallel plan of a transformers model, and check that ``parallelize`` supports the model.

Nothing is modified here. All checks are local and depend only on the model and the number of ranks, so that they give
the same result on all ranks.
"""

import re
from dataclasses import dataclass, field
from typing import Any, NoReturn

import torch
from torch.distributed.tensor import DTensor

from tdkernels.nn.huggingface import BLOCKS, settings_of
from tdkernels.nn.parallel.styles import why_not_linear

COLUMN, ROW, HEAD = "colwise", "rowwise", "colwise_gather_output"
SUMMED, EMBEDDING = "replicated_with_grad_allreduce", "embedding_rowwise"


@dataclass
class ModelPlan:
    """The modules of a model by what ``parallelize`` does with them. Names are those of the whole model.

    Attributes:
        base: The base model, such as a LlamaModel.
        first_layer: Name of the first decoder layer.
        final_norm: Name of the norm behind the last decoder layer.
        columns: {name of a parent, such as an attention: names of its column-parallel linear layers}.
        rows: Names of the row-parallel linear layers.
        norms: Names of the norms of hidden states: those of the decoder layers, and the final norm.
        head_norms: Names of norms inside of an attention, which normalize this rank's heads.
        embedding: Name of the input embedding.
        head: Name of the output layer; empty if there is none.
        head_reason: Why the output layer is not divided; empty if it is.
        moe: Names of the MoE blocks.
        shared_heads: {name of k_proj or v_proj: number of kv heads}, if there are fewer of them than ranks.
        groups: {name of an attention: its number of query heads for each kv head on a rank}.
    """

    base: Any
    first_layer: str = ""
    final_norm: str = ""
    columns: dict[str, list[str]] = field(default_factory=dict)
    rows: list[str] = field(default_factory=list)
    norms: list[str] = field(default_factory=list)
    head_norms: list[str] = field(default_factory=list)
    embedding: str = ""
    head: str = ""
    head_reason: str = ""
    moe: list[str] = field(default_factory=list)
    shared_heads: dict[str, int] = field(default_factory=dict)
    groups: dict[str, int] = field(default_factory=dict)


def fail(text: str) -> NoReturn:
    raise ValueError(f"parallelize: {text}")


def parent_of(name: str) -> str:
    return name.rpartition(".")[0]


def read_plan(model: Any, world_size: int) -> ModelPlan:
    """Return the ModelPlan of a transformers model for a number of ranks.

    Raises:
        ValueError: If the model has no plan, or a part that is not supported. The message names the module.
    """
    kind = type(model).__name__
    styles = getattr(model, "tp_plan", None)
    if not hasattr(model, "config") or not styles:
        fail(f"{kind} has no tensor-parallel plan: it must be a transformers model with a non-empty tp_plan")
    _check_parameters(model)
    names = {module: name for name, module in model.named_modules()}
    plan = ModelPlan(model.base_model)
    layers, norm = (getattr(plan.base, name, None) for name in ("layers", "norm"))
    embedding = model.get_input_embeddings()
    if not isinstance(layers, torch.nn.ModuleList) or not len(layers) or norm is None or embedding not in names:
        fail(f"{type(plan.base).__name__} must have an embedding, decoder layers named layers, and a norm named norm")
    plan.first_layer, plan.final_norm, plan.embedding = names[layers[0]], names[norm], names[embedding]
    head = model.get_output_embeddings() if plan.base is not model else None
    plan.head = names[head] if head is not None else ""
    layer_names = {names[layer] for layer in layers}
    for name, module in model.named_modules():
        if type(module).__name__ in BLOCKS and parent_of(name) in layer_names:
            plan.moe.append(name)
        elif not any(name.startswith(f"{block}.") for block in plan.moe):
            _classify(plan, name, module, styles, layer_names)
    _check_tied(model, plan)
    for parent, columns in plan.columns.items():
        _check_parent(model, plan, parent, columns, world_size)
    _check_moe(model, plan, world_size)
    if head is not None and not plan.head_reason and head.out_features % world_size:
        plan.head_reason = f"out_features {head.out_features} is not divisible by {world_size} ranks"
    return plan


def _check_parameters(model):
    """Raise ValueError for a model whose parameters cannot be divided."""
    kind = type(model).__name__
    if getattr(model, "hf_quantizer", None) is not None or getattr(model.config, "quantization_config", None):
        fail(f"{kind} is quantized, which is not supported")
    if len(set((getattr(model, "hf_device_map", None) or {}).values())) > 1:
        fail(f"{kind} was loaded with a device_map over several devices; load it on one device")
    for name, parameter in model.named_parameters():
        if parameter.is_meta:
            fail(f"{name} is on the meta device, or offloaded; load the complete weights on each rank first")
        if isinstance(parameter, DTensor):
            fail(f"{name} is a DTensor: the model is parallel already")


def _style_of(name, module, styles):
    """Return the style of a module in the plan, or of one of its parameters; None if the plan has neither."""
    pattern = re.sub(r"\d+", "*", name)
    for one in (pattern, *(f"{pattern}.{parameter}" for parameter in module._parameters)):
        if one in styles:
            return styles[one]
    return None


def _classify(plan, name, module, styles, layer_names):
    """Add a module to the plan. Raise ValueError if leaving it unchanged would give wrong results."""
    style, kind = _style_of(name, module, styles), type(module).__name__
    if style is None and next(module.parameters(recurse=False), None) is None:
        return
    described = f'{name} ({kind}) with the style "{style}"' if style else f"{name} ({kind}), which is not in the plan,"
    reason = "its forward was replaced by another library" if "forward" in vars(module) else None
    depth = "layer" if parent_of(name) in layer_names else "block" if parent_of(parent_of(name)) in layer_names else ""
    if name == plan.embedding and style in (None, EMBEDDING):
        pass
    elif name == plan.head and style in (None, HEAD):
        plan.head_reason = why_not_linear(module) or ("" if style else "not in the plan")
    elif style in (COLUMN, ROW) and depth == "block":
        reason = why_not_linear(module)
        if style == COLUMN:
            plan.columns.setdefault(parent_of(name), []).append(name)
        else:
            plan.rows.append(name)
    elif style == SUMMED and depth == "block" and _is_norm(module):
        plan.head_norms.append(name)
    elif style is None and _is_norm(module) and (depth == "layer" or name == plan.final_norm):
        plan.norms.append(name)
    else:
        reason = ""
    if reason is not None:
        fail(f"{described} is not supported" + (f": {reason}" if reason else ""))


def _is_norm(module):
    return type(module).__name__.endswith("Norm") and {*module._parameters} <= {"weight", "bias"}


def _check_tied(model, plan):
    """Reject tied parameters, except those of the embedding and the output layer, which then stay complete."""
    owners: dict[Any, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        owners.setdefault(parameter, []).append(name)
    for names in owners.values():
        modules = {parent_of(name) for name in names}
        if len(names) > 1 and modules != {plan.embedding, plan.head}:
            fail(f"the tied parameters {names} are not supported")
        if len(names) > 1:
            plan.head_reason = f"its weight is tied to {plan.embedding}, which is complete on every rank"


def _check_parent(model, plan, parent, columns, world_size):
    """Check the layers and sizes of an attention or an MLP."""
    if not any(parent_of(row) == parent for row in plan.rows):
        fail(f'{parent}: it has layers with the style "{COLUMN}" and none with "{ROW}"; its output would stay divided')
    if f"{parent}.q_proj" in columns:
        _check_heads(model, plan, parent, columns, world_size)
    for name in columns:
        size = model.get_submodule(name).out_features
        if name not in plan.shared_heads and size % world_size:
            fail(f"{name}: out_features {size} (config.intermediate_size) must be divisible by the mesh's "
                 f"{world_size} ranks")
    for name in (row for row in plan.rows if parent_of(row) == parent):
        size = model.get_submodule(name).in_features
        if size % world_size:
            fail(f"{name}: in_features {size} must be divisible by the mesh's {world_size} ranks")


def _check_heads(model, plan, parent, columns, world_size):
    """Check the heads of an attention, and set which of its layers share kv heads between ranks."""
    config = plan.base.config
    heads, kv_heads = config.num_attention_heads, getattr(config, "num_key_value_heads", None)
    kv_heads = heads if kv_heads is None else kv_heads
    if heads % world_size:
        fail(f"{parent}: config.num_attention_heads {heads} must be divisible by the mesh's {world_size} ranks")
    if kv_heads % world_size and world_size % kv_heads:
        fail(f"{parent}: config.num_key_value_heads {kv_heads} must be divisible by the mesh's {world_size} ranks, or "
             "divide them")
    if kv_heads % world_size == 0:
        return
    shared = [f"{parent}.{name}" for name in ("k_proj", "v_proj")]
    attention = model.get_submodule(parent)
    if not {*shared} <= {*columns} or not hasattr(attention, "num_key_value_groups"):
        fail(f"{parent}: {kv_heads} kv heads on {world_size} ranks need the column-parallel layers k_proj and v_proj, "
             "and the attribute num_key_value_groups")
    for name in shared:
        if model.get_submodule(name).out_features % kv_heads:
            fail(f"{name}: config.num_key_value_heads {kv_heads} must divide its out_features")
        plan.shared_heads[name] = kv_heads
    plan.groups[parent] = heads // world_size


def _check_moe(model, plan, world_size):
    for name in plan.moe:
        experts = settings_of(model.get_submodule(name)).num_experts
        if experts % world_size:
            fail(f"{name}: the number of experts {experts} must be divisible by the mesh's {world_size} ranks")
