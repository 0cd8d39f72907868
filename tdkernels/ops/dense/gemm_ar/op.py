"""GEMM-AR: z = all_reduce(x @ weight.T), the reduction hidden behind the product.

    x [M, K / W] on each rank, weight [N, K / W] (columns of the full one)  ->  z [M, N], the same bits on all ranks

Two schedules, between which the tuner chooses. Many rows (``gemm_ar_kernel``, "two_shot"): each rank owns every W-th
piece of z. Partial tiles are forwarded to their owners while later ones are computed, the owner adds them in rank order
and sends the sum to everybody, and programs of each rank bring the sums that have come to z; all of it in one launch.
What travels is twice what a reduce-scatter carries. Few rows (``dense.kernel_one_shot``, "one_shot"): each rank sends
its partial tile to everybody and sums all of them itself, so that there is one way over the wire instead of two.

A group on several nodes has a schedule of its own (``gemm_ar_nodes_kernel``): each node's ranks sum first, then nodes.
Partials are rounded to the dtype of x, our own included, and added in fp32 in rank order. Call t uses half t mod 2 of
the workspace; no rank can finish call t + 1 before all have begun it, so there is no barrier.

Backward. z is the same on all ranks and so is its gradient dz: dx = dz @ weight and dweight = dz.T @ x are of this
rank's shards and need nobody else.

Example:
    z = tdkernels.gemm_ar(x, weight)            # instead of z = x @ weight.T; all_reduce(z)
"""

import torch
import torch.nn.functional as F

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config
from tdkernels.ops.common.torch_collectives import all_reduce
from tdkernels.ops.dense.call import forward, keep_call
from tdkernels.ops.dense.gemm_ar import launch
from tdkernels.ops.dense.gemm_ar.config import GemmArConfig
from tdkernels.runtime import autograd
from tdkernels.runtime.call_cache import lookup_run
from tdkernels.runtime.torch_op import register
from tdkernels.symm import GroupLike, resolve_group


@torch.no_grad()
def gemm_ar_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
) -> torch.Tensor:
    """The specification of ``gemm_ar``, in plain torch.distributed."""
    group = resolve_group(group)
    z = all_reduce(F.linear(x, weight), group)
    return z if bias is None else z + bias


# ---- torch.library: what torch.compile sees ----


def run(x, weight, bias, group, config):
    if config.method != "torch":
        return launch.launch(x, weight, bias, group, config)
    return gemm_ar_ref(x, weight, bias, group=group)


def _forward(x, weight, bias, group, config):
    return forward("gemm_ar", launch, run, x, weight, bias, group, config)


def _fake_gemm_ar(x, weight, bias, group, config):
    return x.new_empty(x.shape[0], weight.shape[0])


register("gemm_ar(Tensor x, Tensor weight, Tensor? bias, str group, str config) -> Tensor", _forward, _fake_gemm_ar)


class _GemmAr(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, config):
        ctx.save_for_backward(x, weight)
        return torch.ops.tdkernels.gemm_ar(x, weight, bias, group, config)

    @staticmethod
    def backward(ctx, dz):
        autograd.reject_second_derivatives("gemm_ar")
        x, weight = ctx.saved_tensors
        need_dx, need_dweight, need_dbias, _, _ = ctx.needs_input_grad
        dx = dz @ weight if need_dx else None
        dweight = dz.t() @ x if need_dweight else None
        dbias = dz.sum(0, dtype=torch.float32).to(dz.dtype) if need_dbias else None
        return dx, dweight, dbias, None, None


def gemm_ar(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
    config: GemmArConfig | None = None,
) -> torch.Tensor:
    """Multiply x by weight and sum the product over ranks.

    Args:
        x: [M, K / W] bf16, fp16 or fp32, any M; further leading dimensions are flattened and restored: [B, S, K / W]
            gives [B, S, N]
        weight: [N, K / W], the layout of torch.nn.Linear, this rank's columns of the full weight; same dtype
        bias: [N], the same on all ranks, or None; added once, after the sum
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world (W ranks)
        config: GemmArConfig, the same on all ranks; None takes the best one known, see tdkernels.autotune

    Returns:
        z: [M, N], dtype of x, the same bits on all ranks, summed in fp32 in rank order (by torch's all-reduce, in its
        own order, where torch's sequence is the best config known); in a group on several nodes the ranks of each node
        are added first, and then the nodes' sums, each rounded to the dtype of x

    Gradient:
        dx = dz @ weight; dweight = dz.T @ x; dbias = dz.sum(0); dz is taken to be the same on all ranks, as z is

    Raises:
        TypeError or ValueError: for operands that do not fit, with their shapes, before anything is launched
        ValueError: on every rank when the ranks disagree
        PeerTimeoutError: when a peer does not come (on a GPU at the next call or at tdkernels.synchronize())
        RuntimeError: in a backward with create_graph=True

    Contract:
        collective over group; host sync: no (the first call with a shape agrees with the peers and allocates); CUDA
        graph: yes, after one call outside; the caller owns the output

    Source:
        the two exchanges are those of all-reduce as NCCL and TensorRT-LLM have them; their fusion with the product by
        signals: Triton-distributed (https://arxiv.org/abs/2504.19442)
    """
    group = resolve_group(group)
    known, key = lookup_run("gemm_ar", group, (x, weight, bias), (config, get_mode()))
    if known is not None:
        return known(group, x, weight, bias)
    x, weight, bias = autograd.apply_autocast(x, weight, bias)
    validation.check_operands("gemm_ar", x, weight, bias)
    rows = x.shape[:-1].numel()
    x_rows = x.reshape(rows, x.shape[-1])
    check_config("gemm_ar", config, GemmArConfig, x)
    call = x_rows, weight, bias, group.group_name, as_argument(config)
    z = autograd.apply(_GemmAr, torch.ops.tdkernels.gemm_ar, *call)
    z = z.view(*x.shape[:-1], weight.shape[0])
    keep_call(key, "gemm_ar", launch, run, group, x, weight, bias, config, x_rows, z)
    return z
