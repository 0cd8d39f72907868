"""gemm_rs: z = reduce_scatter(x @ weight.T). The reduce-scatter is overlapped with the GEMM.

    x [M, K / W] on each rank, weight [N, K / W] (this rank's columns)  ->  z [M / W, N]

Method "fused" (``kernel``). A rank computes the partial tiles of the rows of rank + 1 first, then of rank + 2, and so
on, and stages them in its own memory. Work items interleaved with the tiles copy each finished group of tiles to the
rank that owns the rows, and set one signal per group there. The tiles of the rank's own rows come last. In its
epilogue, each of them waits for the peers' partials of the same tile and adds all partials in fp32 in rank order, so
the result does not depend on timing. Partials are sent in the dtype of x, as in a reduce-scatter of torch. There is no
barrier: call t uses half t mod 2 of the workspace, and no rank can finish call t + 1 before all ranks have begun it.

    transport      how a partial tile is sent
    "forward"      staged, then copied in groups by other work items, as above
    "direct"       by the program that computed it, each tile with its own signal; the tiles of all ranks are computed
                   by turns, and other programs add the partials (``kernel_direct``), or other warps of each program
                   (``specialized``, on Hopper)
    "one_shot"     by the program that computed it; one program per tile and K split, for small M
                   (``dense.kernel_one_shot``)

Method "parts" (``pipelined``). A pipelined GEMM: torch's GEMM (cuBLAS) multiplies the rows of one owner at a time,
while the copy engine sends the previous results.

Groups on several nodes (``kernel_multinode``). Each node adds the partials of its own ranks first, and only their
sum leaves the node.

Backward. Only x and weight are saved.

    gradient    GEMM                                         communication
    dx          ag_gemm: all_gather(dz) @ weight             dz is gathered, overlapped with the GEMM
    dweight     cuBLAS: all_gather(dz).T @ x                 none; uses the dz that the ag_gemm has gathered
    dbias       sum over the rows of all_gather(dz)          none

If dweight or dbias is needed and the GEMM is large, the ag_gemm uses method "parts": its kernels gather more slowly
during a GEMM if all of dz must be kept. If dx is not needed, dz is gathered alone.

Example:
    z = tdkernels.gemm_rs(x, weight)            # instead of partial = x @ weight.T; reduce_scatter_tensor(z, partial)
"""

from typing import TYPE_CHECKING

import torch
import torch.nn.functional as F

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config
from tdkernels.ops.common.scaling import check_no_scales, check_scaled_call, check_scaled_operands
from tdkernels.ops.common.torch_collectives import reduce_scatter_rows
from tdkernels.ops.dense import scaled
from tdkernels.ops.dense.backward import gemm_rs_backward
from tdkernels.ops.dense.call import forward, keep_call
from tdkernels.ops.dense.gemm_rs import compressed, launch
from tdkernels.ops.dense.gemm_rs.config import GemmRsConfig
from tdkernels.ops.dense.layout import by_rank, by_segment, check_dim, scattered, segment_rows_of
from tdkernels.ops.dense.weight_gradient import as_list, check_main_grad, returned_gradient
from tdkernels.runtime import autograd, torch_op
from tdkernels.runtime.call_cache import lookup_run
from tdkernels.symm import GroupLike, resolve_group

if TYPE_CHECKING:
    import torch.distributed as dist


@torch.no_grad()
def gemm_rs_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dim: int = 0, group: GroupLike = None,
) -> torch.Tensor:
    """Compute ``gemm_rs`` in plain torch: a GEMM, then a reduce-scatter. Arguments as for ``gemm_rs``; no gradient."""
    group = resolve_group(group)
    rows = by_rank(x.reshape(-1, x.shape[-1]), segment_rows_of(x, dim, group.size()), group.size())
    z = reduce_scatter_rows(F.linear(rows, weight), group)
    z = z.view(*scattered(x.shape, dim, group.size()), weight.shape[0])
    return z if bias is None else z + bias


# ---- torch.library operators, for torch.compile ----


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: "dist.ProcessGroup", config: GemmRsConfig,
    segment_rows: int | None = None,
) -> torch.Tensor:
    """Compute z for 2-D operands and a resolved config, without gradient; ``segment_rows`` as for ``launch.launch``."""
    reordered = None
    if segment_rows is not None and not launch.supports_segments(config, segment_rows, group):
        x, segment_rows, reordered = by_rank(x, segment_rows, group.size()), None, segment_rows
    if config.method != "torch":
        return launch.launch(x, weight, bias, group, config, segment_rows, reordered=reordered)
    return gemm_rs_ref(x, weight, bias, group=group)


def _forward(x, weight, bias, segment_rows, group, config):
    fields = launch.segment_fields(segment_rows)
    return forward("gemm_rs", launch, run, x, weight, bias, group, config, segment_rows, fields=fields)


def _fake_gemm_rs(x, weight, bias, segment_rows, group, config):
    return x.new_empty(x.shape[0] // torch_op.world_size_by_name(group), weight.shape[0])


def _fake_gemm_rs_backward(dz, x, weight, main_grads, need_dx, need_dweight, need_dbias, group, config):
    return (
        x.new_empty(x.shape if need_dx else (0,)),
        x.new_empty(weight.shape if need_dweight and not main_grads else (0,)),
        x.new_empty(weight.shape[:1] if need_dbias else (0,)),
    )


torch_op.register(
    "gemm_rs(Tensor x, Tensor weight, Tensor? bias, SymInt? segment_rows, str group, str config) -> Tensor",
    _forward,
    _fake_gemm_rs,
)
torch_op.register(
    "gemm_rs_backward(Tensor dz, Tensor x, Tensor weight, Tensor(a!)[] main_grads, bool need_dx, bool need_dweight,"
    " bool need_dbias, str group, str config) -> (Tensor, Tensor, Tensor)",
    gemm_rs_backward,
    _fake_gemm_rs_backward,
)


class _GemmRs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, segment_rows, group, config, main_grads):
        ctx.save_for_backward(x, weight)
        ctx.main_grads = main_grads
        ctx.segment_rows, ctx.group, ctx.config = segment_rows, group, config
        return torch.ops.tdkernels.gemm_rs(x, weight, bias, segment_rows, group, config)

    @staticmethod
    def backward(ctx, dz):
        autograd.reject_second_derivatives("gemm_rs")
        x, weight = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        ranks = 1 if ctx.segment_rows is None else x.shape[0] // dz.shape[0]
        rows = x if ctx.segment_rows is None else by_rank(x, ctx.segment_rows, ranks)
        dx, dweight, dbias = torch.ops.tdkernels.gemm_rs_backward(
            dz, rows, weight, ctx.main_grads, *need, ctx.group, ctx.config
        )
        if need[0] and ctx.segment_rows is not None:
            dx = by_segment(dx, ctx.segment_rows, ranks)
        if need[1]:
            dweight = returned_gradient(dweight, weight, len(ctx.main_grads) > 0)
        gradients = (grad if needed else None for grad, needed in zip((dx, dweight, dbias), need, strict=True))
        return *gradients, None, None, None, None


def gemm_rs(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dim: int = 0,
    main_grad: torch.Tensor | None = None, scale_x: torch.Tensor | None = None, scale_w: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False, wire: str | None = None,
    group: GroupLike = None, config: GemmRsConfig | None = None,
) -> torch.Tensor:
    """Multiply x by ``weight.T``, and reduce-scatter the product along its rows while it is computed.

    Args:
        x: This rank's columns, [M, K / W] in bf16, fp16, fp32 or float8. M must be divisible by W. Further leading
            dimensions are flattened and restored: [S, B, K / W] gives [S / W, B, N], block r of z on rank r.
        weight: This rank's columns of the full weight, [N, K / W] as in torch.nn.Linear, in the dtype of x.
        bias: [N] in the dtype of z, the same on all ranks, or None. It is added once, after the sum.
        dim: The dimension that is scattered: 0, or 1 for [B, S, K / W], which gives [B, S / W, N]. It must be divisible
            by W.
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
        wire: None, or "fp8" to send partials in e4m3 with one fp32 scale per row and 128 columns: 1/2 of the bytes of
            16-bit elements and 1/4 of fp32, plus 3 %. For x in bf16, fp16 and fp32; see the section Wire compression.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: GemmRsConfig, the same on all ranks. None selects the best known config (see tdkernels.autotune).

    Returns:
        z [M / W, N] in the dtype of x or ``out_dtype``, summed in fp32 in rank order, or in the batch-invariant mode
        with ``max_ranks`` by a tree (see the guide on batch invariance). If the selected method is "torch", torch's
        reduce-scatter sums in its own order. If the group spans several nodes, the ranks of each node are summed first,
        then the sums of the nodes; the sums of other nodes are rounded to the dtype of x.

    Gradient:
        dx = all_gather(dz) @ weight, dweight = all_gather(dz).T @ x, dbias = all_gather(dz).sum(0), which is complete
        on every rank.

    Wire compression:
        With ``wire="fp8"`` each rank computes its partials in the dtype of x and quantizes those that it sends. The
        owner adds the dequantized partials of its peers, and its own partial, which is not quantized, in fp32 in rank
        order. A partial p arrives with an error of at most max(2**-4 * |p|, 2**-10 / 448 * m), where m is the largest
        finite magnitude among the 128 columns of its row. So the error of z, besides rounding, is at most the sum of
        these bounds over the W - 1 peers. Sent partials that are not finite become NaN. The gradient is that of the
        operator without compression, and the backward sends uncompressed data. The call is pipelined: ``config`` must
        be None or have method "parts". A group of one rank compresses nothing.

    Raises:
        TypeError, ValueError: If operands or config are invalid. Errors name the argument and its shape. Nothing has
            been launched.
        ValueError: On every rank, if the ranks disagree on shapes, dtype or config.
        ValueError: In the batch-invariant mode with ``max_ranks``, on every rank, if W is not a power of two of at most
            ``max_ranks``, or K is not divisible by ``max_ranks`` times ``block_k`` of the tile.
        PeerTimeoutError: If a peer does not make the call in time. On a GPU it is raised by the next call or by
            ``tdkernels.synchronize()``.
        RuntimeError: In a backward with ``create_graph=True``; if an operand with scales needs a gradient.
        NotImplementedError: If the group spans several nodes: with ``wire``, or for float8 with a config whose method
            is not "torch". For float8 in the batch-invariant mode with ``max_ranks``.

    Contract:
        Collective over ``group``. No host synchronization, except in the first call with a shape, which runs a
        consensus check and allocates. Can be captured in a CUDA graph after one call outside. The caller owns the
        output.

    Source:
        Reduction in the epilogue of the owner's tiles: FLUX (https://arxiv.org/abs/2406.06858).
    """
    group = resolve_group(group)
    if wire is not None:
        scaling = scale_x, scale_w, out_dtype, use_fast_accum
        return compressed.call(x, weight, bias, dim, main_grad, scaling, wire, group, config, _check_divisible)
    if scale_x is not None or scale_w is not None or out_dtype is not None or use_fast_accum:
        scaling = scale_x, scale_w, out_dtype, use_fast_accum
        return _scaled(x, weight, bias, dim, main_grad, scaling, group, config)
    known, key = lookup_run("gemm_rs", group, (x, weight, bias), (config, dim, get_mode()))
    if known is not None:
        return known(group, x, weight, bias)
    check_no_scales("gemm_rs", x)
    x, weight, bias = autograd.apply_autocast(x, weight, bias)
    validation.check_operands("gemm_rs", x, weight, bias)
    check_main_grad("gemm_rs", weight, main_grad)
    check_dim("gemm_rs", "x", x, dim)
    world_size = group.size()
    _check_divisible(x, dim, world_size)
    x_rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    segment_rows = segment_rows_of(x, dim, world_size) if dim == 1 and x.shape[0] > 1 and x_rows.shape[0] else None
    check_config("gemm_rs", config, GemmRsConfig, x)
    call = x_rows, weight, bias, segment_rows, group.group_name, as_argument(config)
    z = autograd.apply(_GemmRs, torch.ops.tdkernels.gemm_rs, *call, for_backward=(as_list(main_grad),))
    z = z.view(*scattered(x.shape, dim, world_size), weight.shape[0])
    more = () if segment_rows is None else (segment_rows,)
    keep_call(key, "gemm_rs", launch, run, group, x, weight, bias, config, x_rows, z, *more)
    return z


def _scaled(x, weight, bias, dim, main_grad, scaling, group, config):
    """Execute ``gemm_rs`` of scaled operands."""
    check_scaled_call("gemm_rs", x, main_grad, *scaling)
    world_size = group.size()
    if isinstance(x, torch.Tensor) and x.dim() > 1:  # other errors are those of scaled.call
        check_dim("gemm_rs", "x", x, dim)
        _check_divisible(x, dim, world_size)
    rows, scale_x, segment_rows = x, scaling[0], None
    if dim == 1 and isinstance(x, torch.Tensor) and x.dim() > 2 and x.shape[0] > 1 and x.numel() > 0:
        scale_x = check_scaled_operands("gemm_rs", x, weight, bias, *scaling).x
        # Rows are ordered by their owner in a pass of their own, and so are their scales.
        segment_rows = segment_rows_of(x, dim, world_size)
        rows = by_rank(x.view(torch.uint8).reshape(-1, x.shape[-1]), segment_rows, world_size).view(x.dtype)
        if scale_x.numel() > 1:
            scale_x = by_rank(scale_x, segment_rows, world_size)
    z = scaled.call("gemm_rs", rows, weight, bias, scale_x, *scaling[1:], group, config, reordered=segment_rows)
    return z.view(*scattered(x.shape, dim, world_size), weight.shape[0])


def _check_divisible(x, dim, world_size):
    """Raise ValueError unless the ranks can divide the scattered dimension of x."""
    if x.shape[dim] % world_size:
        raise ValueError(
            f"gemm_rs: dimension {dim} of x {list(x.shape)} must be divisible by the group's {world_size} ranks"
        )
