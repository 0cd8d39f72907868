"""gemm_ar: z = all_reduce(x @ weight.T). The all-reduce is overlapped with the GEMM.

    x [M, K / W] on each rank, weight [N, K / W] (this rank's columns)  ->  z [M, N], bitwise equal on all ranks

The tuner selects one of two exchanges.

"two_shot", for large M (``kernel``). Tiles are divided into groups, and each rank owns every W-th group. Partial tiles
are sent to their owner while later tiles are computed. The owner adds them in rank order and sends the sum to all
peers, and each peer copies the sums that it has received to z. All of this is one launch. It sends twice the data of a
reduce-scatter.

"one_shot", for small M (``dense.kernel_one_shot``). Each rank sends its partial tiles to all peers and sums all
partials itself. The data crosses the wire once instead of twice.

On several nodes (``kernel_multinode``) the ranks of each node sum first, then the nodes.

Partials are rounded to the dtype of x, including this rank's own, and added in fp32 in rank order. There is no barrier:
call t uses half t mod 2 of the workspace, and no rank can finish call t + 1 before all ranks have begun it.

Backward. z is equal on all ranks, and so is its gradient dz. The gradients need no communication:

    dx = dz @ weight        dweight = dz.T @ x        dbias = dz.sum(0)

Example:
    z = tdkernels.gemm_ar(x, weight)            # instead of z = x @ weight.T; all_reduce(z)
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config
from tdkernels.ops.common.scaling import check_no_scales, check_scaled_call
from tdkernels.ops.common.torch_collectives import all_reduce
from tdkernels.ops.dense import scaled
from tdkernels.ops.dense.call import forward, keep_call
from tdkernels.ops.dense.gemm_ar import launch
from tdkernels.ops.dense.gemm_ar.config import GemmArConfig
from tdkernels.ops.dense.weight_gradient import as_list, check_main_grad, local_weight_gradient
from tdkernels.runtime import autograd
from tdkernels.runtime.call_cache import lookup_run
from tdkernels.runtime.torch_op import register
from tdkernels.symm import GroupLike, resolve_group

if TYPE_CHECKING:
    import torch.distributed as dist


@torch.no_grad()
def gemm_ar_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
) -> torch.Tensor:
    """Compute ``gemm_ar`` in plain torch: a GEMM, then an all-reduce. Arguments as for ``gemm_ar``; no gradient."""
    group = resolve_group(group)
    z = all_reduce(F.linear(x, weight), group)
    return z if bias is None else z + bias


# ---- torch.library operators, for torch.compile ----


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: "dist.ProcessGroup", config: GemmArConfig,
) -> torch.Tensor:
    """Compute z for 2-D operands and a resolved config, without gradient."""
    if config.method != "torch":
        return launch.launch(x, weight, bias, group, config)
    return gemm_ar_ref(x, weight, bias, group=group)


def _forward(x, weight, bias, group, config):
    fields = launch.bias_fields(bias)
    return forward("gemm_ar", launch, run, x, weight, bias, group, config, fields=fields)


def _fake_gemm_ar(x, weight, bias, group, config):
    return x.new_empty(x.shape[0], weight.shape[0])


register("gemm_ar(Tensor x, Tensor weight, Tensor? bias, str group, str config) -> Tensor", _forward, _fake_gemm_ar)


class _GemmAr(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, config, main_grads):
        ctx.save_for_backward(x, weight)
        ctx.main_grads = main_grads
        return torch.ops.tdkernels.gemm_ar(x, weight, bias, group, config)

    @staticmethod
    def backward(ctx, dz):
        autograd.reject_second_derivatives("gemm_ar")
        x, weight = ctx.saved_tensors
        need_dx, need_dweight, need_dbias = ctx.needs_input_grad[:3]
        dx = dz @ weight if need_dx else None
        dweight = local_weight_gradient(dz, x, weight, ctx.main_grads) if need_dweight else None
        dbias = dz.sum(0, dtype=torch.float32).to(dz.dtype) if need_dbias else None
        return dx, dweight, dbias, None, None, None


def gemm_ar(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, main_grad: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None, scale_w: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False, group: GroupLike = None, config: GemmArConfig | None = None,
) -> torch.Tensor:
    """Multiply x by ``weight.T``, and all-reduce the product while it is computed.

    Args:
        x: This rank's columns, [M, K / W] in bf16, fp16, fp32 or float8, for any M. Further leading dimensions are
            flattened and restored: [B, S, K / W] gives [B, S, N].
        weight: This rank's columns of the full weight, [N, K / W] as in torch.nn.Linear, in the dtype of x.
        bias: [N] in the dtype of z, the same on all ranks, or None. It is added once, after the sum.
        main_grad: A tensor with the shape of weight, in fp32 or in the dtype of weight, or None. The backward adds
            dweight to it in the GEMM, and weight gets no gradient: the fused gradient accumulation of Megatron-LM.
        scale_x: For x in float8: its scale in fp32, which multiplies its elements. One element, [M, 1]
            (row-wise), or [M, ceil(K / W / 128)] (block-wise).
        scale_w: For weight in float8, whose format may differ from that of x: its scale in fp32, one element, [N, 1],
            or with block-wise scales [ceil(N / 128), ceil(K / W / 128)].
        out_dtype: For float8: bf16 (default), fp16 or fp32, the dtype of the output and of the partials that are sent.
        use_fast_accum: For float8: whether tensor cores accumulate all of K with their reduced precision, as in
            ``torch._scaled_mm``. Otherwise products are added in fp32 every 128 or 256 elements of K, depending on the
            config.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: GemmArConfig, the same on all ranks. None selects the best known config (see tdkernels.autotune).

    Returns:
        z [M, N] in the dtype of x or ``out_dtype``, bitwise equal on all ranks, summed in fp32 in rank order, or in the
        batch-invariant mode with ``max_ranks`` by a tree (see the guide on batch invariance). If the selected method is
        "torch", torch's all-reduce sums in its own order. If the group spans several nodes, the ranks of each node are
        summed first, then the sums of the nodes, each rounded to the dtype of x.

    Gradient:
        dx = dz @ weight, dweight = dz.T @ x, dbias = dz.sum(0). dz must be equal on all ranks, as z is.

    Raises:
        TypeError, ValueError: If operands or config are invalid. Errors name the argument and its shape. Nothing has
            been launched.
        ValueError: On every rank, if the ranks disagree on shapes, dtype or config.
        ValueError: In the batch-invariant mode with ``max_ranks``, on every rank, if W is not a power of two of at most
            ``max_ranks``, or K is not divisible by ``max_ranks`` times ``block_k`` of the tile.
        PeerTimeoutError: If a peer does not make the call in time. On a GPU it is raised by the next call or by
            ``tdkernels.synchronize()``.
        NotImplementedError: For float8, if the group spans several nodes and the method of the config is not "torch",
            and in the batch-invariant mode with ``max_ranks``.
        RuntimeError: In a backward with ``create_graph=True``; if an operand with scales needs a gradient.

    Contract:
        Collective over ``group``. No host synchronization, except in the first call with a shape, which runs a
        consensus check and allocates. Can be captured in a CUDA graph after one call outside. The caller owns the
        output.

    Source:
        The exchanges are the all-reduce algorithms of NCCL and TensorRT-LLM. Fusion with the GEMM by signals:
        Triton-distributed (https://arxiv.org/abs/2504.19442).
    """
    group = resolve_group(group)
    if scale_x is not None or scale_w is not None or out_dtype is not None or use_fast_accum:
        scaling = scale_x, scale_w, out_dtype, use_fast_accum
        return _scaled(x, weight, bias, main_grad, scaling, group, config)
    known, key = lookup_run("gemm_ar", group, (x, weight, bias), (config, get_mode()))
    if known is not None:
        return known(group, x, weight, bias)
    check_no_scales("gemm_ar", x)
    x, weight, bias = autograd.apply_autocast(x, weight, bias)
    validation.check_operands("gemm_ar", x, weight, bias)
    check_main_grad("gemm_ar", weight, main_grad)
    rows = x.shape[:-1].numel()
    x_rows = x.reshape(rows, x.shape[-1])
    check_config("gemm_ar", config, GemmArConfig, x)
    call = x_rows, weight, bias, group.group_name, as_argument(config)
    z = autograd.apply(_GemmAr, torch.ops.tdkernels.gemm_ar, *call, for_backward=(as_list(main_grad),))
    z = z.view(*x.shape[:-1], weight.shape[0])
    keep_call(key, "gemm_ar", launch, run, group, x, weight, bias, config, x_rows, z)
    return z


def _scaled(x, weight, bias, main_grad, scaling, group, config):
    """Execute ``gemm_ar`` of scaled operands."""
    check_scaled_call("gemm_ar", x, main_grad, *scaling)
    z = scaled.call("gemm_ar", x, weight, bias, *scaling, group, config)
    return z.view(*x.shape[:-1], weight.shape[0])
