"""all_gather, reduce_scatter and all_reduce alone, where there is no product for them to hide behind.

    all_gather      x [R, …]      on each rank  ->  y [W * R, …], the same on all ranks
    reduce_scatter  x [W * R, …]  on each rank  ->  z [R, …]
    all_reduce      x             on each rank  ->  z of the shape of x, the same bits on all ranks

They go by the same memory and signals as the other operators. Schedule (``kernel``): one kernel, in which
each program stores pieces of x in the peers' buffers, raises one signal a piece and waits for that of the same piece
from each peer; there is no barrier before it, so a small message takes one way over the wire. With few bytes
``all_reduce`` sends everything to everybody ("one_shot"); with many, a piece is summed by one rank, which sends the sum
to all ("two_shot"). Large shards are gathered by the copy engine. Sums are in fp32 and in rank order.

Backward. That of all_gather is a reduce_scatter and the other way round. What all_reduce gives is the same on all ranks
and so is its gradient dz: dx = dz.

Example:
    y = tdkernels.all_gather(x)                 # instead of y = x.new_empty(…); all_gather_into_tensor(y, x)
"""

import torch

from tdkernels.autotune import tunable as tunables
from tdkernels.autotune.modes import get_mode
from tdkernels.ops.collectives import launch as launcher
from tdkernels.ops.collectives.config import CollectiveConfig
from tdkernels.ops.common import torch_collectives as plain
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config, from_text, with_config
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.tunable_base import problem_of, select
from tdkernels.runtime import autograd, call_cache, torch_op
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.group import group_state


@torch.no_grad()
def all_gather_ref(x: torch.Tensor, *, group: GroupLike = None) -> torch.Tensor:
    """The specification of ``all_gather``, in plain torch.distributed; of bytes, as backends do not know all dtypes."""
    group = resolve_group(group)
    full = plain.all_gather_rows(launcher.as_bytes(x.contiguous()), group)
    return full.view(x.dtype).view(-1, *x.shape[1:])


@torch.no_grad()
def reduce_scatter_ref(x: torch.Tensor, *, group: GroupLike = None) -> torch.Tensor:
    """The specification of ``reduce_scatter``, in plain torch.distributed."""
    group = resolve_group(group)
    return plain.reduce_scatter_rows(x, group)


@torch.no_grad()
def all_reduce_ref(x: torch.Tensor, *, group: GroupLike = None) -> torch.Tensor:
    """The specification of ``all_reduce``, in plain torch.distributed."""
    group = resolve_group(group)
    return plain.all_reduce(x.clone(memory_format=torch.contiguous_format), group)


_REFERENCES = {"all_gather": all_gather_ref, "reduce_scatter": reduce_scatter_ref, "all_reduce": all_reduce_ref}


# ---- torch.library: what torch.compile sees ----


def _run(operator, x, group, config):
    """The output, by our kernels or by torch's collective, as the config of the call says."""
    group = torch_op.group_by_name(group)
    if group.size() == 1:
        return x.clone(memory_format=torch.contiguous_format)
    if not x.numel():
        group_state(group).check_consensus_cached(operator, launcher.problem_fields(x))
        return x.new_empty(launcher.output_shape(operator, x.shape, group.size()))
    config = _config_for(operator, config, x, group)
    if config.method != "fused":
        group_state(group).check_consensus_cached(operator, with_config(launcher.problem_fields(x), config))
    return _run_by(config, operator, x, group)


def _run_by(config, operator, x, group):
    if config.method == "fused":
        return launcher.launch(operator, x, group, config)
    return _REFERENCES[operator](x, group=group)


def _config_for(operator, text, x, group):
    """The config of a call: the one that it was given as ``text``, else what the group has chosen."""
    if text:
        return from_text(CollectiveConfig, text)
    if spans_nodes(group):
        return CollectiveConfig(method="torch")
    tunable = tunables.tunable(operator)

    def describe():
        sizes = tunable.sizes_of(x.shape, world_size=group.size())
        return sizes, tunable.layout_of(x), launcher.problem_fields(x)

    if x.dtype not in validation.DTYPES:  # bytes, for which nothing is tuned
        return tunable.default(problem_of(operator, *describe()[:2], x, group), x.device)
    return select(operator, x, group, x.shape, describe).config


def _register(operator):
    def implementation(x, group, config):
        return _run(operator, x, group, config)

    def fake(x, group, config):
        return x.new_empty(launcher.output_shape(operator, x.shape, torch_op.world_size_by_name(group)))

    torch_op.register(f"{operator}(Tensor x, str group, str config) -> Tensor", implementation, fake)


for _operator in _REFERENCES:
    _register(_operator)


def _config_of_backward(config):
    """An explicit config says of the other direction only whether torch's collective is wanted there as well.

    Of the text, since torch.compile traces this.
    """
    return config if "method=torch" in config.split() else ""


class _AllGather(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, config):
        ctx.group, ctx.config = group, config
        return torch.ops.tdkernels.all_gather(x, group, config)

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("all_gather")
        return torch.ops.tdkernels.reduce_scatter(dy, ctx.group, _config_of_backward(ctx.config)), None, None


class _ReduceScatter(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, config):
        ctx.group, ctx.config = group, config
        return torch.ops.tdkernels.reduce_scatter(x, group, config)

    @staticmethod
    def backward(ctx, dz):
        autograd.reject_second_derivatives("reduce_scatter")
        return torch.ops.tdkernels.all_gather(dz, ctx.group, _config_of_backward(ctx.config)), None, None


class _AllReduce(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, group, config):
        return torch.ops.tdkernels.all_reduce(x, group, config)

    @staticmethod
    def backward(ctx, dz):
        autograd.reject_second_derivatives("all_reduce")
        return dz, None, None


# ---- checks ----


def _check(operator, x, world_size, config):
    """Raise TypeError or ValueError unless the call makes sense on this rank."""
    validation.check_tensor(operator, "x", x, memory=False)
    if x.layout != torch.strided or x.is_quantized:
        kind = "quantized" if x.is_quantized else x.layout
        raise TypeError(f"{operator}: x must be a plain dense tensor, not {kind}")
    if operator != "all_gather":
        validation.check_tensor(operator, "x", x, validation.DTYPES, memory=False)
    validation.check_device(operator, "x", x)
    if operator != "all_reduce" and x.dim() == 0:
        raise ValueError(f"{operator}: x must have at least one dimension, the rows; it is a scalar")
    if operator == "reduce_scatter" and x.shape[0] % world_size:
        raise ValueError(
            f"{operator}: the first dimension of x {list(x.shape)} must be divisible by the group's {world_size} ranks"
        )
    check_config(operator, config, CollectiveConfig, x, operator)


def _call(function, operator, x, group, config):
    group = resolve_group(group)
    known, key = call_cache.lookup_run(operator, group, (x,), (config, get_mode()))
    if known is not None:
        return known(group, x)
    _check(operator, x, group.size(), config)
    op = getattr(torch.ops.tdkernels, operator)
    y = autograd.apply(function, op, x, group.group_name, as_argument(config))
    _keep(key, operator, group, x, config, y)
    return y


def _keep(key, operator, group, x, config, y):
    """Insert a call into the call cache."""
    if not call_cache.is_current(group, key) or group.size() == 1 or not x.numel():
        return
    config = _config_for(operator, as_argument(config), x, group)
    run = lambda group, x: _run_by(config, operator, x, group)  # noqa: E731
    bind = lambda group, x: launcher.bind(operator, x, group, config)  # noqa: E731
    is_fused = config.method == "fused"
    call_cache.insert(group, key, call_cache.CachedCall(run, bind if is_fused else None, y.shape))


# ---- the public functions ----


def all_gather(x: torch.Tensor, *, group: GroupLike = None, config: CollectiveConfig | None = None) -> torch.Tensor:
    """Put all ranks' x below each other.

    Args:
        x: [R, …], the same shape on all ranks; any dtype, integers, bool and fp8 too, since only bytes are moved
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world (W ranks)
        config: CollectiveConfig, the same on all ranks; None takes the best one known, see tdkernels.autotune

    Returns:
        y: [W * R, …], rank r's rows r-th

    Gradient:
        dx = reduce_scatter(dy), for bf16, fp16 and fp32

    Raises:
        TypeError or ValueError: for an x that does not fit, before anything is launched
        ValueError: on every rank when the ranks disagree
        PeerTimeoutError: when a peer does not come (on a GPU at the next call or at tdkernels.synchronize())
        RuntimeError: in a backward with create_graph=True

    Contract:
        collective over group; host sync: no (the first call with a shape agrees with the peers and allocates); CUDA
        graph: yes, after one call outside; the caller owns the output

    Source:
        pushes with a signal a piece: Triton-distributed (https://arxiv.org/abs/2504.19442)
    """
    return _call(_AllGather, "all_gather", x, group, config)


def reduce_scatter(x: torch.Tensor, *, group: GroupLike = None, config: CollectiveConfig | None = None) -> torch.Tensor:
    """Sum x over ranks and scatter the sum along its rows.

    Args:
        x: [W * R, …] bf16, fp16 or fp32, the same shape on all ranks
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world (W ranks)
        config: CollectiveConfig, the same on all ranks; None takes the best one known, see tdkernels.autotune

    Returns:
        z: [R, …], dtype of x, rank r having the r-th rows, summed in fp32 in rank order (by torch's reduce-scatter, in
        its own order, where that is the best config known)

    Gradient:
        dx = all_gather(dz)

    Raises:
        TypeError or ValueError: for an x that does not fit, before anything is launched
        ValueError: on every rank when the ranks disagree
        PeerTimeoutError: when a peer does not come (on a GPU at the next call or at tdkernels.synchronize())
        RuntimeError: in a backward with create_graph=True

    Contract:
        collective over group; host sync: no (the first call with a shape agrees with the peers and allocates); CUDA
        graph: yes, after one call outside; the caller owns the output

    Source:
        every part straight to its owner, as the direct algorithms of TensorRT-LLM and RCCL have it
    """
    return _call(_ReduceScatter, "reduce_scatter", x, group, config)


def all_reduce(x: torch.Tensor, *, group: GroupLike = None, config: CollectiveConfig | None = None) -> torch.Tensor:
    """Sum x over ranks.

    Args:
        x: bf16, fp16 or fp32, any shape, the same on all ranks; it stays as it is
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world (W ranks)
        config: CollectiveConfig, the same on all ranks; None takes the best one known, see tdkernels.autotune

    Returns:
        z: a new tensor of the shape and dtype of x, the same bits on all ranks, summed in fp32 in rank order (by
        torch's all-reduce, in its own order, where that is the best config known)

    Gradient:
        dx = dz, which is taken to be the same on all ranks, as z is

    Raises:
        TypeError or ValueError: for an x that does not fit, before anything is launched
        ValueError: on every rank when the ranks disagree
        PeerTimeoutError: when a peer does not come (on a GPU at the next call or at tdkernels.synchronize())
        RuntimeError: in a backward with create_graph=True

    Contract:
        collective over group; host sync: no (the first call with a shape agrees with the peers and allocates); CUDA
        graph: yes, after one call outside; the caller owns the output

    Source:
        one shot and two shots: TensorRT-LLM's custom all-reduce
    """
    return _call(_AllReduce, "all_reduce", x, group, config)
