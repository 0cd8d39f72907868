"""Collectives without a GEMM: all_gather, reduce_scatter and all_reduce.

    all_gather      x [R, ...]      on each rank  ->  y [W * R, ...], equal on all ranks
    reduce_scatter  x [W * R, ...]  on each rank  ->  z [R, ...]
    all_reduce      x               on each rank  ->  z of the shape of x, bitwise equal on all ranks

They use the same symmetric memory and signals as the other operators. Each collective is one kernel (``kernel``). A
program stores chunks of x in the peers' buffers, sets one signal per chunk, and waits for the signal of the same chunk
from each peer. There is no barrier before it, so a small message crosses the wire once. Sums are computed in fp32 and
in rank order.

    exchange         used by                         algorithm
    "one_shot"       all; all_reduce: small sizes    data goes directly to the ranks that need it
    "two_shot"       all_reduce, large sizes         one rank sums each chunk and sends the sum to all ranks
    "copy_engine"    all_gather, large sizes         the copy engine sends whole shards

Backward. The backward of all_gather is a reduce_scatter, and the backward of reduce_scatter is an all_gather. The
result of all_reduce is equal on all ranks, and so is its gradient dz; dx = dz.

Example:
    y = tdkernels.all_gather(x)                 # instead of y = x.new_empty(...); all_gather_into_tensor(y, x)
"""

from typing import Any

import torch

from tdkernels.autotune import tunable as tunables
from tdkernels.autotune.invariance import check_invariant, check_ranks, reject_invariant, without_invariance
from tdkernels.autotune.modes import get_mode
from tdkernels.ops.collectives import launch as launcher
from tdkernels.ops.collectives import quantized
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
    """Compute ``all_gather`` with torch.distributed, for any dtype; no gradient.

    It gathers bytes, because the backends of torch.distributed do not support all dtypes.
    """
    group = resolve_group(group)
    full = plain.all_gather_rows(launcher.as_bytes(x.contiguous()), group)
    return full.view(x.dtype).view(-1, *x.shape[1:])


@torch.no_grad()
def reduce_scatter_ref(x: torch.Tensor, *, group: GroupLike = None) -> torch.Tensor:
    """Compute ``reduce_scatter`` with torch.distributed; no gradient."""
    group = resolve_group(group)
    return plain.reduce_scatter_rows(x, group)


@torch.no_grad()
def all_reduce_ref(x: torch.Tensor, *, group: GroupLike = None) -> torch.Tensor:
    """Compute ``all_reduce`` with torch.distributed; no gradient."""
    group = resolve_group(group)
    return plain.all_reduce(x.clone(memory_format=torch.contiguous_format), group)


_REFERENCES = {"all_gather": all_gather_ref, "reduce_scatter": reduce_scatter_ref, "all_reduce": all_reduce_ref}


# ---- torch.library operators, for torch.compile ----


def _run(operator, x, group, config):
    """Run an operator inside the torch.library op, with a group given by name and a config given as text."""
    group = torch_op.group_by_name(group)
    if operator != "all_gather":
        check_ranks(operator, group.size())
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
    """Run an operator with the method of a resolved config."""
    if config.method == "fused":
        return launcher.launch(operator, x, group, config)
    return _REFERENCES[operator](x, group=group)


def _config_for(operator, text, x, group):
    """Return the resolved config of a call: the config given as ``text``, or the selected one if it is empty."""
    if text:
        config = from_text(CollectiveConfig, text)
        if operator != "all_gather":  # it only copies
            check_invariant(operator, config)
        return config
    if spans_nodes(group):
        if operator != "all_gather":
            reject_invariant(operator, "a group on several nodes")
        return CollectiveConfig(method="torch")
    tunable = tunables.tunable(operator)

    def describe():
        sizes = tunable.sizes_of(x.shape, world_size=group.size())
        return sizes, tunable.layout_of(x), launcher.problem_fields(x)

    if x.dtype not in validation.DTYPES:  # only bytes are moved, and they are not tuned
        return tunable.default(problem_of(operator, *describe()[:2], x, group), x.device)
    return select(operator, x, group, x.shape, describe).config


def _register(operator, name, decorate=lambda function: function):
    @decorate
    def implementation(x, group, config):
        return _run(operator, x, group, config)

    def fake(x, group, config):
        return x.new_empty(launcher.output_shape(operator, x.shape, torch_op.world_size_by_name(group)))

    torch_op.register(f"{name}(Tensor x, str group, str config) -> Tensor", implementation, fake)


for _operator in _REFERENCES:
    _register(_operator, _operator)
for _operator in ("reduce_scatter", "all_reduce"):  # the batch-invariant mode does not cover gradients
    _register(_operator, f"{_operator}_of_gradient", without_invariance)


def _config_of_backward(config):
    """Return the config of the backward, as text: method "torch" is kept, and otherwise a config is selected.

    It works on the text because torch.compile traces it.
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
        dx = torch.ops.tdkernels.reduce_scatter_of_gradient(dy, ctx.group, _config_of_backward(ctx.config))
        return dx, None, None


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


# ---- validation ----


def _check(operator, x, world_size, config):
    """Raise TypeError or ValueError if the arguments of a call are invalid on this rank."""
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


def _call(function: Any, operator: str, x: torch.Tensor, group: GroupLike, config: CollectiveConfig | None):
    """Run a public operator: fast path, validation, torch.library op; ``function`` is its autograd.Function."""
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


# ---- public functions ----


def all_gather(x: torch.Tensor, *, group: GroupLike = None, config: CollectiveConfig | None = None) -> torch.Tensor:
    """All-gather x along its first dimension.

    Args:
        x: [R, ...], with the same shape on all ranks. Any dtype, including integers, bool and fp8: only bytes are
            moved.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: CollectiveConfig, the same on all ranks. None selects the best known config (see tdkernels.autotune).

    Returns:
        y [W * R, ...], in which block r of R rows is the x of rank r.

    Gradient:
        dx = reduce_scatter(dy), for bf16, fp16 and fp32.

    Raises:
        TypeError, ValueError: If x or config is invalid. Nothing has been launched.
        ValueError: On every rank, if the ranks disagree on shape, dtype or config.
        PeerTimeoutError: If a peer does not make the call in time. On a GPU it is raised by the next call or by
            ``tdkernels.synchronize()``.
        RuntimeError: In a backward with ``create_graph=True``.

    Contract:
        Collective over ``group``. No host synchronization, except in the first call with a shape, which runs a
        consensus check and allocates. Can be captured in a CUDA graph after one call outside. The caller owns the
        output.

    Source:
        Pushes with one signal per chunk: Triton-distributed (https://arxiv.org/abs/2504.19442).
    """
    return _call(_AllGather, "all_gather", x, group, config)


def reduce_scatter(x: torch.Tensor, *, group: GroupLike = None, config: CollectiveConfig | None = None) -> torch.Tensor:
    """Sum x over the ranks, and scatter the sum along its first dimension.

    Args:
        x: [W * R, ...] in bf16, fp16 or fp32, with the same shape on all ranks.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: CollectiveConfig, the same on all ranks. None selects the best known config (see tdkernels.autotune).

    Returns:
        z [R, ...] in the dtype of x: rank r gets block r of the sum. The sum is computed in fp32 in rank order, or in
        the batch-invariant mode with ``max_ranks`` by a tree over the ranks. If the selected method is "torch", torch's
        reduce-scatter sums in its own order.

    Gradient:
        dx = all_gather(dz).

    Raises:
        TypeError, ValueError: If x or config is invalid. Nothing has been launched.
        ValueError: On every rank, if the ranks disagree on shape, dtype or config.
        ValueError: In the batch-invariant mode with ``max_ranks``, on every rank, if W is not a power of two of at most
            ``max_ranks``.
        PeerTimeoutError: If a peer does not make the call in time. On a GPU it is raised by the next call or by
            ``tdkernels.synchronize()``.
        RuntimeError: In a backward with ``create_graph=True``.

    Contract:
        As for ``all_gather``.

    Source:
        Each part is sent directly to its owner, as in the direct algorithms of TensorRT-LLM and RCCL.
    """
    return _call(_ReduceScatter, "reduce_scatter", x, group, config)


def all_reduce(
    x: torch.Tensor, *, quantize: str | None = None, group: GroupLike = None, config: CollectiveConfig | None = None,
) -> torch.Tensor:
    """Sum x over the ranks.

    Args:
        x: In bf16, fp16 or fp32, with any shape, the same on all ranks. It is not modified.
        quantize: None, or "fp8" to send e4m3 codes with one fp32 scale per 128 consecutive elements: 1/2 of the bytes
            of 16-bit elements and 1/4 of fp32, plus 3 %. See the section Quantization.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: CollectiveConfig, the same on all ranks. None selects the best known config (see tdkernels.autotune).

    Returns:
        z, a new tensor with the shape and dtype of x, bitwise equal on all ranks. The sum is computed in fp32 in rank
        order, or in the batch-invariant mode with ``max_ranks`` by a tree over the ranks. If the selected method is
        "torch", torch's all-reduce sums in its own order.

    Quantization:
        With ``quantize="fp8"`` one rank adds each chunk: its own exact part and the dequantized parts of its peers, in
        fp32 in rank order. It quantizes the sum, and all ranks dequantize it. A value v that is sent, a part or a sum,
        arrives with an error of at most max(2**-4 * |v|, 2**-10 / 448 * m), where m is the largest finite magnitude of
        its group of 128 elements. The error of z, besides rounding, is at most the sum of these bounds over the parts
        of the W - 1 peers and the sum. Elements that are not finite become NaN. ``config`` must be None or have method
        "fused" and exchange "two_shot". A group of one rank quantizes nothing.

    Gradient:
        dx = dz, with ``quantize``, too. dz must be equal on all ranks, as z is.

    Raises:
        TypeError, ValueError: If x or config is invalid. Nothing has been launched.
        ValueError: On every rank, if the ranks disagree on shape, dtype or config.
        ValueError: In the batch-invariant mode with ``max_ranks``, on every rank, if W is not a power of two of at most
            ``max_ranks``.
        PeerTimeoutError: If a peer does not make the call in time. On a GPU it is raised by the next call or by
            ``tdkernels.synchronize()``.
        RuntimeError: In a backward with ``create_graph=True``.
        NotImplementedError: With ``quantize``, if the group spans several nodes.

    Contract:
        As for ``all_gather``.

    Source:
        One-shot and two-shot algorithms: TensorRT-LLM's custom all-reduce.
    """
    if quantize is not None:
        return quantized.call(x, quantize, resolve_group(group), config, _check)
    return _call(_AllReduce, "all_reduce", x, group, config)
