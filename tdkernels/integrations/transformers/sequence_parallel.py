"""parallelize: tensor and sequence parallelism for a transformers causal LM, with the fused operators.

    part of the model                 sequence_parallel=True          sequence_parallel=False
    embedding, masks, positions       complete on every rank          complete on every rank
    hidden states between layers      [B, S / W, H]                   [B, S, H]
    q, k, v; gate, up                 one ag_gemm for all             one column_linear for all
    o; down                           gemm_rs                         gemm_ar
    MoE block                         EPMoE                           complete on every rank
    output layer                      column_linear, all-gather       column_linear, all-gather
    logits, loss                      complete on every rank          complete on every rank

This module does not import transformers.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import parallelize_module

from tdkernels.integrations.transformers.divided_layers import (
    UNSUPPORTED,
    Border,
    HeadGather,
    load_complete,
    make_replicated,
    replicate_parameters,
    share_heads,
)
from tdkernels.integrations.transformers.model_plan import ModelPlan, read_plan
from tdkernels.nn.huggingface import replace_moe
from tdkernels.nn.moe import EPMoE
from tdkernels.nn.parallel.report import Entry, Report, runs_of
from tdkernels.nn.parallel.shared_gather import SharedGather
from tdkernels.nn.parallel.styles import ColwiseParallel, LinearStyle, RowwiseParallel
from tdkernels.symm import resolve_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from tdkernels.ops.dense.ag_gemm.op import AgGemmConfig
    from tdkernels.ops.dense.gemm_ar.op import GemmArConfig
    from tdkernels.ops.dense.gemm_rs.op import GemmRsConfig


def parallelize(
    model: torch.nn.Module, mesh: "DeviceMesh", *, sequence_parallel: bool = True,
    column_config: "AgGemmConfig | GemmArConfig | None" = None,
    row_config: "GemmRsConfig | GemmArConfig | None" = None, moe_options: Mapping[str, Any] | None = None,
    src_data_rank: int | None = 0,
) -> Report:
    """Divide a causal LM of transformers 5 between the ranks of a mesh, in place, with the fused operators.

    The linear layers are divided as the model's own ``tp_plan`` says. With ``sequence_parallel`` the hidden states
    between the layers are divided along the sequence: each of W ranks has [B, S / W, H]. q, k and v, as well as gate
    and up, gather them once, with one ``ag_gemm``; o and down scatter their output with ``gemm_rs``. The embedding,
    masks, positions, logits and the loss are complete on every rank, so the model is called as before, with the same
    tokens on all ranks. Without ``sequence_parallel`` the layers run ``column_linear`` and ``gemm_ar``.

    The MoE blocks of Mixtral and Qwen3-MoE are replaced by EPMoE with ``sequence_parallel``; without it they stay
    complete on every rank. If there are fewer kv heads than ranks, k_proj and v_proj stay complete, and each rank
    computes the kv head of its query heads. An output layer that is tied to the embedding stays complete.

    Use ``sequence_parallel=False`` for ``generate()``, since one new token cannot be divided between the ranks.

    Tried with Llama, Qwen2, Qwen3, Mistral, Gemma2, Gemma3 (text), Qwen3-MoE and Mixtral of transformers 5.23, and once
    with Cohere, Gemma, Granite, SmolLM3 and Starcoder2. A module with parameters inside of a decoder layer that is
    neither in the plan nor a norm is an error.

    Args:
        model: A complete model, such as a LlamaForCausalLM, the same on every rank. Its parameters and buffers are
            moved to the device type of the mesh.
        mesh: One-dimensional DeviceMesh of W ranks, such as mesh["tp"].
        sequence_parallel: Whether to divide the hidden states along the sequence. W must then divide S in each call.
        column_config: AgGemmConfig of the column-parallel layers, or GemmArConfig without ``sequence_parallel``. None
            selects the best known config.
        row_config: GemmRsConfig of the row-parallel layers, or GemmArConfig without ``sequence_parallel``.
        moe_options: Keyword arguments of EPMoE, such as ``config`` or ``max_tokens_per_rank``.
        src_data_rank: Rank of the mesh whose parameters are used, as for ``parallelize_module``. None if they are known
            to be the same on every rank: each rank then keeps its own part, without communication.

    Returns:
        The Report: an Entry for each linear layer, MoE block, embedding, and border of the divided hidden states.

    Raises:
        ValueError: On every rank, before the model is modified: if the mesh has several dimensions; the model has no
            plan, is quantized, offloaded or parallel already, or has a module that is not supported; the ranks do not
            divide the attention heads, the intermediate size or the experts; or the kv heads neither divide the ranks
            nor are divided by them. In a forward: if W does not divide S, or for an option among
            output_hidden_states, output_router_logits (with ``sequence_parallel``) and output_attentions.

    Gradient:
        All gradients are complete: for the shard of a divided parameter, and on every rank for the others. The
        gradients of norms and routers are summed over the ranks in the backward, so they can be accumulated.

    Contract:
        Collective over the mesh, and so are the forward and the backward. All ranks must call the model with the same
        tokens. The parameters are DTensors; those of EPMoE are plain tensors. ``tdkernels.nn.full_state_dict`` returns
        complete weights, and ``load_state_dict`` takes them. Apply activation checkpointing, ``torch.compile`` and
        ``fully_shard`` afterwards, in this order; ``fully_shard`` to the decoder layers and the model.

    Example:
        >>> model = LlamaForCausalLM.from_pretrained(path, dtype=torch.bfloat16)
        >>> print(parallelize(model, mesh["tp"]))
        >>> model(input_ids=ids, attention_mask=mask, labels=labels).loss.backward()
    """
    if mesh.ndim != 1:
        raise ValueError(
            f'parallelize: the mesh must have one dimension, such as mesh["tp"], not {mesh.ndim}: {mesh.mesh_dim_names}'
        )
    group = resolve_group(mesh)
    plan = read_plan(model, group.size())
    job = _Job(model, mesh, group, plan, sequence_parallel, src_data_rank)
    job.replace_moe(moe_options or {})
    job.divide_linears(column_config, row_config)
    job.replicate_others()
    job.add_borders()
    job.move_buffers()
    model.register_load_state_dict_pre_hook(load_complete)
    return Report(job.entries())


class _Job:
    """One call of ``parallelize``: the model and its plan, and the steps that modify the model."""

    def __init__(
        self, model: Any, mesh: "DeviceMesh", group: dist.ProcessGroup, plan: ModelPlan, sequence_parallel: bool,
        src_data_rank: int | None,
    ) -> None:
        self.model, self.mesh, self.group, self.plan = model, mesh, group, plan
        self.sequence_parallel, self.src_data_rank = sequence_parallel, src_data_rank
        self.unsupported = [*UNSUPPORTED] if sequence_parallel else ["output_attentions"]
        self.border = Border(mesh, group, self.unsupported)
        self.kinds = {name: type(module).__name__ for name, module in model.named_modules()}

    def replace_moe(self, options: Mapping[str, Any]) -> None:
        """Replace the MoE blocks by EPMoE."""
        if not self.plan.moe or not self.sequence_parallel:
            return
        for name in self.plan.moe if self.src_data_rank is not None else ():
            for parameter in self.model.get_submodule(name).parameters():
                # A copy on the device of the mesh, since the backend of the group may take no other.
                data = parameter.detach().to(self.mesh.device_type, copy=True)
                dist.broadcast(data, group=self.group, group_src=self.src_data_rank)
                parameter.detach().copy_(data)
        replace_moe(self.model, EPMoE, **{"group": self.group, **options})
        for name in self.plan.moe:
            self.model.get_submodule(name).to(self.mesh.device_type)

    def divide_linears(self, column_config: Any, row_config: Any) -> None:
        """Divide the linear layers. Those with the same parent share a gather."""
        columns = ColwiseParallel(input_layouts=Shard(1) if self.sequence_parallel else None, config=column_config)
        rows = RowwiseParallel(output_layouts=Shard(1) if self.sequence_parallel else None, config=row_config)
        for name in self.plan.rows:
            self._apply(name, rows)
        for parent, names in self.plan.columns.items():
            for name in names:
                if name in self.plan.shared_heads:
                    self._share_heads(name, columns)
                else:
                    self._apply(name, columns)
            if parent in self.plan.groups:
                self.model.get_submodule(parent).num_key_value_groups = self.plan.groups[parent]
            self._share_collective(parent, names)
        if self.plan.head and not self.plan.head_reason:
            self._apply(self.plan.head, ColwiseParallel())
            self.model.get_submodule(self.plan.head).register_forward_hook(self.border.gather_logits)

    def _apply(self, name, style):
        parallelize_module(self.model.get_submodule(name), self.mesh, style, src_data_rank=self.src_data_rank)

    def _share_heads(self, name, column_style):
        module, layout = self.model.get_submodule(name), column_style.input_layouts[0]
        operator, dim = column_style.operator()
        replicate_parameters(module, self.mesh, self.src_data_rank, {})
        style = LinearStyle(
            "ColwiseParallel", operator, self.mesh, self.group, layout, dim, True, column_style.config
        )
        share_heads(module, self.plan.shared_heads[name], style)

    def _share_collective(self, parent, names):
        """Let the column-parallel layers of an attention or MLP share the gather of x, or the all-reduce of dx."""
        module = self.model.get_submodule(parent)
        gather = HeadGather() if self.plan.shared_heads.keys() & {*names} else SharedGather()
        gather.join([self.model.get_submodule(name) for name in names])
        if self.sequence_parallel:
            module.register_forward_pre_hook(self.border.divide, with_kwargs=True)
        module.register_forward_pre_hook(gather.begin)
        module.register_forward_hook(gather.end, always_call=True)

    def replicate_others(self) -> None:
        """Make the parameters of all other modules replicated DTensors, and sum the partial gradients."""
        summed = {*self.plan.head_norms}
        if self.sequence_parallel:  # each rank has its own tokens
            summed |= {*self.plan.norms} | {f"{name}.gate" for name in self.plan.moe}
        done = {*self.plan.rows, *(name for names in self.plan.columns.values() for name in names)}
        done |= {*self.plan.moe} if self.sequence_parallel else {*()}
        if not self.plan.head_reason:
            done.add(self.plan.head)
        known: dict[Any, Any] = {}
        for name, module in self.model.named_modules():
            if name not in done and next(module.parameters(recurse=False), None) is not None:
                replicate_parameters(module, self.mesh, self.src_data_rank, known)
                make_replicated(module, self.group, name in summed)

    def add_borders(self) -> None:
        """Add the hooks at the borders of the divided hidden states."""
        self.plan.base.register_forward_pre_hook(self.border.reject, with_kwargs=True)
        if self.sequence_parallel:
            first, last = (self.model.get_submodule(name) for name in (self.plan.first_layer, self.plan.final_norm))
            first.register_forward_pre_hook(self.border.scatter, with_kwargs=True)
            last.register_forward_hook(self.border.gather)

    def move_buffers(self) -> None:
        """Move the buffers to the device type of the mesh, as torch does with the parameters."""
        for module in self.model.modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and buffer.device.type != self.mesh.device_type:
                    module._buffers[name] = buffer.to(self.mesh.device_type)

    def entries(self) -> list[Entry]:
        """Return the entries of the report, in the order of the model."""
        plan, moe_reason = self.plan, "" if self.sequence_parallel else "complete on every rank: no sequence_parallel"
        entries = []
        for name, module in self.model.named_modules():
            kind = self.kinds.get(name, type(module).__name__)
            style: Any = getattr(module, "tdkernels_style", None)
            if name == plan.embedding:
                entries.append(Entry(name, kind, None, "complete on every rank"))
            elif name == plan.head:
                runs = None if plan.head_reason else f"{runs_of(style)}, all_gather of the logits"
                entries.append(Entry(name, kind, runs, plan.head_reason))
            elif name in plan.moe:
                entries.append(Entry(name, kind, None if moe_reason else "ep_moe", moe_reason))
            elif style is not None:
                shared = ", kv head shared by ranks" if name in plan.shared_heads else ""
                entries.append(Entry(name, kind, runs_of(style) + shared))
            elif self.sequence_parallel and name == plan.first_layer:
                entries.append(Entry(name, kind, "scatter of the sequence"))
            elif self.sequence_parallel and name == plan.final_norm:
                entries.append(Entry(name, kind, "all_gather of the sequence"))
        return entries


__all__ = ["parallelize"]
