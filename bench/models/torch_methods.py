"""Methods of the plain Llama: no communication, hand-written collectives, DTensor, tdkernels, and torch.compile.

With sequence parallelism, in prefill and train, the hidden states between the layers are [B, S / W, hidden]. In decode
they are complete on every rank. "no communication" has complete hidden states in both, so that its norms run on all
tokens.
"""

import copy

import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    PrepareModuleInput,
    RowwiseParallel,
    SequenceParallel,
    parallelize_module,
)

import tdkernels
from bench.models import compiled
from bench.models.cases import ASYNC_TP, COMPILED, DTENSOR, INDUCTOR, NO_COMMUNICATION, SYMM_MEM
from bench.models.llama import COLUMNS, ROWS, shard
from bench.models.method import checking_operators, full, own
from bench.models.nccl import add_collectives
from bench.models.reference import llama_method, llama_reference
from tdkernels.launch import rank_device


def prepare(case):
    """Return the Reference of a case."""
    if case.compiled:
        compiled.start_case()
    return llama_reference(case)


def build(name, reference):
    """Return the Method ``name`` of the case of a Reference."""
    if name in (NO_COMMUNICATION, "nccl"):
        return _by_hand(reference, communicates=name == "nccl")
    if name in COMPILED:
        return _compiled(name, reference)
    return _by_plan(reference, parallelize_module if name == DTENSOR else _parallelize)


def _by_hand(reference, communicates):
    """Return the Method with sharded weights and the collectives of ``nccl``, or without any."""
    case, ranks = reference.case, dist.get_world_size()
    model = shard(reference.model, dist.get_rank(), ranks)
    sharded = communicates and not case.is_decode
    if communicates:
        add_collectives(model, sequence_parallel=sharded)
    x, dy, caches = _inputs(reference, sharded)

    def complete(outputs):
        if case.phase == "train":
            dist.all_reduce(outputs[1])  # the gradient of a norm's weight is that of this rank's tokens
        return outputs

    return llama_method(
        case, model, x, dy, reference.rope, caches, dims=(1 if sharded else None, None, 0), complete=complete,
        checked=communicates,
    )


def _by_plan(reference, parallelize, call_model=None):
    """Return the Method with DTensor parameters.

    Args:
        parallelize: function (model, mesh, plan).
        call_model: function of the parallel model that returns a compiled form of it, or None.
    """
    case = reference.case
    model = copy.deepcopy(reference.model)
    parallelize(model, _mesh(), _plan(case))
    sharded = not case.is_decode
    x, dy, caches = _inputs(reference, sharded)
    return llama_method(
        case, model, x, dy, reference.rope, caches, call_model=None if call_model is None else call_model(model),
        dims=(1 if sharded else None, None, None),
        complete=checking_operators(model, full) if parallelize is _parallelize else full,
    )


def _parallelize(model, mesh, plan):
    """Apply a plan with tdkernels. The all-gathers are fused, because attention and MLP use x in linear layers only."""
    tdkernels.nn.parallelize(model, mesh, plan, fuse_inputs=True)


def _compiled(name, reference):
    def build(compile_model):
        return _by_plan(reference, parallelize_module, compile_model)

    ways = {ASYNC_TP: compiled.with_async_tp, SYMM_MEM: compiled.with_tdkernels, INDUCTOR: compiled.with_pass}
    return ways[name](build)


def _plan(case):
    """Return the usual plan of a Llama: {pattern of modules: style}, for sequence parallelism unless in decode."""
    if case.is_decode:
        plan = {f"layers.*.{name}": ColwiseParallel() for name in COLUMNS}
        return plan | {f"layers.*.{name}": RowwiseParallel() for name in ROWS}
    gathered = PrepareModuleInput(input_layouts=(Shard(1),), desired_input_layouts=(Replicate(),))
    return {
        "layers.*.attention_norm": SequenceParallel(), "layers.*.feed_forward_norm": SequenceParallel(),
        "layers.*.attention": gathered, "layers.*.feed_forward": gathered,
        **{f"layers.*.{name}": ColwiseParallel() for name in COLUMNS},
        **{f"layers.*.{name}": RowwiseParallel(output_layouts=Shard(1)) for name in ROWS},
        "norm": SequenceParallel(use_local_output=True),
    }


def _mesh():
    return init_device_mesh(rank_device().type, (dist.get_world_size(),))


def _inputs(reference, sharded):
    """Return (x, dy, caches) of this rank; x and dy are divided along the sequence if ``sharded``."""
    caches = reference.caches and [one.own(dist.get_rank(), dist.get_world_size()) for one in reference.caches]
    dim = 1 if sharded else None
    return own(reference.x, dim).contiguous(), own(reference.dy, dim).contiguous(), caches

