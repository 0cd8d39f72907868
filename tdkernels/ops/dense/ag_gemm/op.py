"""ag_gemm: y = all_gather(x) @ weight.T. The GEMM is overlapped with the all-gather.

    x [M / W, K] on each rank, weight [N / W, K] (this rank's rows)  ->  y [M, N / W]

Method "fused" (``kernel``). The first programs push this rank's shard to all peers in chunks of rows, and set one
signal per chunk at each peer. The other programs compute the tiles of y. Tiles of this rank's own shard come first,
because they depend on no peer. Tiles of the peers' chunks follow in the order in which the chunks arrive, and each of
them waits for the signal of its chunk. There is no barrier: call t uses half t mod 2 of the
workspace, and no rank can finish call t + 1 before all ranks have begun it. So when a peer pushes data of call t + 2,
no rank still reads data of call t.

On Hopper different warps of each program load, multiply, store and push (``warp_specialize``, ``specialized``). Then
all programs compute tiles from the start, and a chunk has a signal for each slice of its columns.

    transport        how a shard is sent
    "push"           by programs, as above
    "copy_engine"    by one copy per chunk on a side stream, so that all SMs compute. The call begins with a barrier.
    "one_shot"       by programs. Tiles begin after the whole gather, for small M (``kernel_one_shot``).

Method "parts" (``pipelined``). A pipelined GEMM: torch's GEMM (cuBLAS) multiplies one shard or several at a time, while
the copy engine brings the next shards.

Groups on several nodes (``kernel_multinode``). A shard crosses the network once per other node, to the rank with the
same local rank, which relays it to the ranks of its node.

Backward. Only shards are saved; x is gathered again.

    gradients         GEMMs                                     overlapped communication
    dx and dweight    cuBLAS: dy @ weight, dy.T @ gathered x    x is gathered during the first GEMM, and parts of dx are
                                                                scattered during both (``pipelined``)
    dx and dweight    gemm_rs kernel for dx, then cuBLAS        x is gathered during the gemm_rs
    dx                gemm_rs kernel                            as in gemm_rs
    dweight           cuBLAS, one shard at a time               x is gathered; each shard is multiplied on arrival

The second form is used on several nodes, and for GEMMs so small that launching the first one would take the host longer
than the GPU takes to run it.

Example:
    y = tdkernels.ag_gemm(x, weight)            # instead of all_gather_into_tensor(full, x); y = full @ weight.T
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
import torch.nn.functional as F

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config
from tdkernels.ops.common.scaling import check_no_scales
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.dense.ag_gemm import compressed, launch, multi, scaled_multi
from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig
from tdkernels.ops.dense.backward import ag_gemm_backward
from tdkernels.ops.dense.call import forward, keep_call
from tdkernels.ops.dense.layout import by_segment, check_dim, gathered, segment_rows_of
from tdkernels.ops.dense.operand_lists import LISTS, as_lists, main_grads_of
from tdkernels.ops.dense.weight_gradient import as_list, check_main_grad, returned_gradient
from tdkernels.runtime import autograd, torch_op
from tdkernels.runtime.autograd import fake_gradients
from tdkernels.runtime.call_cache import lookup_run
from tdkernels.symm import GroupLike, resolve_group

if TYPE_CHECKING:
    import torch.distributed as dist

@torch.no_grad()
def ag_gemm_ref(
    x: torch.Tensor, weight: Any, bias: Any = None, *, dim: int = 0, return_gathered: bool = False,
    group: GroupLike = None,
) -> Any:
    """Compute ``ag_gemm`` in plain torch: an all-gather, then a GEMM. Arguments as for ``ag_gemm``; no gradient."""
    group = resolve_group(group)
    rows = all_gather_rows(x.reshape(-1, x.shape[-1]), group)
    full = by_segment(rows, segment_rows_of(x, dim, 1), group.size())
    full = full.view(*gathered(x.shape, dim, group.size()), x.shape[-1])
    products = [F.linear(full, *one) for one in zip(*as_lists("ag_gemm", weight, bias), strict=True)]
    y = products if isinstance(weight, LISTS) else products[0]
    return (y, full) if return_gathered else y


# ---- torch.library operators, for torch.compile ----


def run(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: "dist.ProcessGroup", config: AgGemmConfig,
) -> torch.Tensor:
    """Compute y for 2-D operands and a resolved config, without gradient."""
    if config.method != "torch":
        return launch.launch(x, weight, bias, group, config)[0]
    return ag_gemm_ref(x, weight, bias, group=group)


def _forward(x, weight, bias, group, config):
    return forward("ag_gemm", launch, run, x, weight, bias, group, config)


def _fake_ag_gemm(x, weight, bias, group, config):
    return x.new_empty(torch_op.world_size_by_name(group) * x.shape[0], weight.shape[0])


def _fake_ag_gemm_backward(dy, x, weight, main_grads, need_dx, need_dweight, group, config):
    return fake_gradients((x, weight), (need_dx, need_dweight and not main_grads))


torch_op.register(
    "ag_gemm(Tensor x, Tensor weight, Tensor? bias, str group, str config) -> Tensor",
    _forward,
    _fake_ag_gemm,
)
torch_op.register(
    "ag_gemm_backward(Tensor dy, Tensor x, Tensor weight, Tensor(a!)[] main_grads, bool need_dx, bool need_dweight,"
    " str group, str config) -> (Tensor, Tensor)",
    ag_gemm_backward,
    _fake_ag_gemm_backward,
)


class _AgGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, config, main_grads):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.config, ctx.main_grads = group, config, main_grads
        return torch.ops.tdkernels.ag_gemm(x, weight, bias, group, config)

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("ag_gemm")
        x, weight = ctx.saved_tensors
        need_dx, need_dweight, need_dbias = ctx.needs_input_grad[:3]
        dx = dweight = dbias = None
        if need_dx or need_dweight:
            dx, dweight = torch.ops.tdkernels.ag_gemm_backward(
                dy, x, weight, ctx.main_grads, need_dx, need_dweight, ctx.group, ctx.config
            )
        if need_dbias:
            dbias = dy.sum(0, dtype=torch.float32).to(dy.dtype)
        if need_dweight:
            dweight = returned_gradient(dweight, weight, len(ctx.main_grads) > 0)
        return dx if need_dx else None, dweight if need_dweight else None, dbias, None, None, None


@overload
def ag_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, dim: int = 0,
    return_gathered: Literal[False] = False, main_grad: torch.Tensor | None = None,
    scale_x: torch.Tensor | None = None, scale_w: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False, wire: str | None = None,
    group: GroupLike = None, config: AgGemmConfig | None = None,
) -> torch.Tensor: ...


@overload
def ag_gemm(
    x: torch.Tensor, weight: Sequence[torch.Tensor], bias: Sequence[torch.Tensor | None] | None = None, *, dim: int = 0,
    return_gathered: Literal[False] = False, main_grad: Sequence[torch.Tensor] | None = None,
    scale_x: torch.Tensor | None = None, scale_w: Sequence[torch.Tensor] | None = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False, wire: str | None = None,
    group: GroupLike = None, config: AgGemmConfig | None = None,
) -> list[torch.Tensor]: ...


@overload
def ag_gemm(
    x: torch.Tensor, weight: torch.Tensor | Sequence[torch.Tensor],
    bias: torch.Tensor | Sequence[torch.Tensor | None] | None = None, *, dim: int = 0, return_gathered: bool,
    main_grad: torch.Tensor | Sequence[torch.Tensor] | None = None, scale_x: torch.Tensor | None = None,
    scale_w: torch.Tensor | Sequence[torch.Tensor] | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False, wire: str | None = None,
    group: GroupLike = None, config: AgGemmConfig | None = None,
) -> Any: ...


def ag_gemm(
    x: torch.Tensor, weight: Any, bias: Any = None, *, dim: int = 0, return_gathered: bool = False,
    main_grad: Any = None, scale_x: torch.Tensor | None = None, scale_w: Any = None,
    out_dtype: torch.dtype | None = None, use_fast_accum: bool = False, wire: str | None = None,
    group: GroupLike = None, config: AgGemmConfig | None = None,
) -> Any:
    """All-gather x along its rows, and multiply it by ``weight.T`` while the shards arrive.

    If the group spans several nodes, each shard crosses the network once per other node and is relayed there.

    Args:
        x: This rank's rows, [M / W, K] in bf16, fp16, fp32 or float8. Further leading dimensions are flattened and
            restored: [S / W, B, K] gives [S, B, N / W].
        weight: This rank's rows of the full weight, [N / W, K] as in torch.nn.Linear, in the dtype of x. Or a list of
            weights [N_i / W, K], such as those of q, k and v: x is gathered once.
        bias: [N / W] in the dtype of y, or None. For a list of weights, a list of the same length, or None.
        dim: The dimension of x that is gathered: 0, or 1 for [B, S / W, K], which gives [B, S, N / W]. Block r of the
            gathered dimension belongs to rank r.
        return_gathered: Whether the gathered x is returned, too; in float8 without its scales.
        main_grad: A tensor with the shape of weight, in fp32 or in the dtype of weight, or None. The backward adds
            dweight to it in the GEMM, and weight gets no gradient: the fused gradient accumulation of Megatron-LM. For
            a list of weights, a list of the same length; all of the weights must then need a gradient.
        scale_x: For x in float8: its scale in fp32, which multiplies its elements. One element, [M / W, 1]
            (row-wise), or [M / W, ceil(K / 128)] (block-wise). It is gathered with x, so ranks may have different
            scales.
        scale_w: For weight in float8, whose format may differ from that of x: its scale in fp32, one element,
            [N / W, 1], or with block-wise scales [ceil(N / W / 128), ceil(K / 128)]. For a list of
            weights, a list of scales.
        out_dtype: For float8: bf16 (default), fp16 or fp32, the dtype of the output.
        use_fast_accum: For float8: whether tensor cores accumulate all of K with their reduced precision, as in
            ``torch._scaled_mm``. Otherwise products are added in fp32 every 128 or 256 elements of K, depending on the
            config.
        wire: None, or "fp8" to send x in e4m3 with one fp32 scale per row and 128 columns: 1/2 of the bytes of 16-bit
            elements and 1/4 of fp32, plus 3 %. For x in bf16, fp16 and fp32; see the section Wire compression.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: AgGemmConfig, the same on all ranks. None selects the best known config (see tdkernels.autotune). For a
            list of weights it is selected for the sum of the N_i. For float8, calls with a list of weights, ``dim=1``
            or ``return_gathered`` run method "parts" instead of "fused".

    Returns:
        y [M, N / W] in the dtype of x or ``out_dtype``, accumulated in fp32; for a list of weights, a list of outputs.
        With ``return_gathered``: (y, gathered x), for example [M, K], a new tensor.

    Gradient:
        dx = reduce_scatter(dy @ weight), dweight = dy.T @ all_gather(x), dbias = dy.sum(0). Each has the shape of its
        operand. With several weights, dx is the sum over them. A gradient of the gathered x is reduce-scattered and
        added to dx; all ranks must use the gathered x, or none.

    Wire compression:
        With ``wire="fp8"`` all ranks multiply the same quantized x, their own rows included; the accumulator and y are
        not quantized. An element of x has an error of at most max(2**-4 * |x|, 2**-10 / 448 * m), where m is the
        largest finite magnitude among the 128 columns of its row. So the error of y, besides rounding, is at most
        the sum over k of that bound times |weight|, and for random data about 2.6 % of the standard deviation of y.
        Elements that are not finite become NaN. The gathered x is the quantized one. The gradient is that of the
        operator without compression: it is computed from the exact x, and the backward sends uncompressed data. The
        call is pipelined: ``config`` must be None or have method "parts". A group of one rank compresses nothing.

    Raises:
        TypeError, ValueError: If operands or config are invalid. Errors name the argument and its shape. Nothing has
            been launched.
        ValueError: On every rank, if the ranks disagree on shapes, dtype or config.
        PeerTimeoutError: If a peer does not make the call in time. On a GPU it is raised by the next call or by
            ``tdkernels.synchronize()``.
        NotImplementedError: For float8, if the group spans several nodes and the method of the config is not "torch".
        RuntimeError: In a backward with ``create_graph=True``; if an operand with scales needs a gradient.

    Contract:
        Collective over ``group``. No host synchronization, except in the first call with a shape, which runs a
        consensus check and allocates. Can be captured in a CUDA graph after one call outside. The caller owns the
        output.

    Source:
        Overlap of gather and tiles with signals: FLUX (https://arxiv.org/abs/2406.06858), Triton-distributed
        (https://arxiv.org/abs/2504.19442).
    """
    group = resolve_group(group)
    if wire is not None:
        scaling = scale_x, scale_w, out_dtype, use_fast_accum
        return compressed.call(x, weight, bias, dim, return_gathered, main_grad, scaling, wire, group, config)
    if scale_x is not None or scale_w is not None or out_dtype is not None or use_fast_accum:
        scaling = scale_x, scale_w, out_dtype, use_fast_accum
        return scaled_multi.call(x, weight, bias, dim, return_gathered, main_grad, *scaling, group, config)
    if return_gathered or dim != 0 or isinstance(weight, LISTS) or isinstance(bias, LISTS):
        return _general(x, weight, bias, dim, return_gathered, main_grad, group, config)
    known, key = lookup_run("ag_gemm", group, (x, weight, bias), (config, get_mode()))
    if known is not None:
        return known(group, x, weight, bias)
    check_no_scales("ag_gemm", x)
    x, weight, bias = autograd.apply_autocast(x, weight, bias)
    validation.check_operands("ag_gemm", x, weight, bias)
    check_main_grad("ag_gemm", weight, main_grad)
    rows = x.shape[:-1].numel()
    x_rows = x.reshape(rows, x.shape[-1])
    check_config("ag_gemm", config, AgGemmConfig, x)
    call = x_rows, weight, bias, group.group_name, as_argument(config)
    y = autograd.apply(_AgGemm, torch.ops.tdkernels.ag_gemm, *call, for_backward=(as_list(main_grad),))
    y = y.view(group.size() * x.shape[0], *x.shape[1:-1], weight.shape[0])
    keep_call(key, "ag_gemm", launch, run, group, x, weight, bias, config, x_rows, y)
    return y


def _general(x, weight, bias, dim, return_gathered, main_grad, group, config):
    """Execute ``ag_gemm`` with all its options."""
    several = isinstance(weight, LISTS)
    weights, biases = as_lists("ag_gemm", weight, bias)
    given = x, *weights, *biases
    settings = config, dim, return_gathered, len(weights), get_mode()
    known, key = lookup_run("ag_gemm, general", group, given, settings)
    if known is not None:
        return _as_returned(known(group, *given), several, return_gathered)
    check_no_scales("ag_gemm", x)
    x, *others = autograd.apply_autocast(*given)
    weights, biases = others[: len(weights)], others[len(weights) :]
    for one, its_bias in zip(weights, biases, strict=True):
        validation.check_operands("ag_gemm", x, one, its_bias)
    main_grads = main_grads_of("ag_gemm", weight, main_grad, weights)
    check_dim("ag_gemm", "x", x, dim)
    check_config("ag_gemm", config, AgGemmConfig, x)
    x_rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    call = x_rows, weights, biases, segment_rows_of(x, dim, 1), return_gathered
    results = multi.ag_gemm_multi(*call, group.group_name, as_argument(config), main_grads)
    lead = gathered(x.shape, dim, group.size())
    shapes = [(*lead, result.shape[1]) for result in results]
    multi.keep_call(key, group, *call, config, shapes)
    results = [result.view(shape) for result, shape in zip(results, shapes, strict=True)]
    return _as_returned(results, several, return_gathered)


def _as_returned(results, several, return_gathered):
    """Return the results [outputs, gathered x] as ``ag_gemm`` does."""
    ys = results[:-1] if return_gathered else results
    y = ys if several else ys[0]
    return (y, results[-1]) if return_gathered else y
