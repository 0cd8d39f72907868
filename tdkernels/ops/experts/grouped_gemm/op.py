"""group_gemm: grouped GEMM on one rank, for rows that are grouped by expert.

    x [R, K], w [E, N, K], splits [E] on the device  ->  y [R, N];   y[rows of e] = x[rows of e] @ w[e].T

The host does not read the splits. The kernels (``group_gemm_kernel``, or ``specialized`` on Hopper) compute their tiles
from the splits on the device. SwiGLU can be fused into the epilogue. The output of the gate-up GEMM is then stored only
if the backward needs it.

Backward. dx is a group_gemm with transposed weights. dw sums over the rows of each group.

fp8. With scales, x and w are float8 codes (``scaled``): the kernel multiplies the accumulator by the scales, before the
activation.

Example:
    recv, handle = tdkernels.ep_dispatch(x, topk_ids, topk_weights, num_experts=64)
    h = tdkernels.group_gemm(recv.x, w_gate_up, recv.splits, activation="swiglu")
    y = tdkernels.ep_combine(tdkernels.group_gemm(h, w_down, recv.splits), handle)
"""

import torch

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common.config import as_argument, check_config, from_text
from tdkernels.ops.common.scaling import check_no_scales, check_scaled_call
from tdkernels.ops.experts.grouped_gemm import dispatch, launch, scaled
from tdkernels.ops.experts.grouped_gemm import tree as _tree  # noqa: F401  registers torch.ops.tdkernels.linear_by_tree
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig
from tdkernels.ops.experts.grouped_gemm.dispatch import product_by_group, swiglu_ref
from tdkernels.ops.experts.grouped_gemm.validation import check_activation, check_experts, check_method, check_splits
from tdkernels.runtime import autograd, call_cache
from tdkernels.runtime.autograd import fake_gradients, unpack_gradients
from tdkernels.runtime.torch_op import register


def group_gemm_ref(
    x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, *, activation: str | None = None,
) -> torch.Tensor:
    """Compute ``group_gemm`` with plain torch operators, one matmul per group. It is the specification for tests."""
    return swiglu_ref(product_by_group(x, w, splits), activation)


# ---- torch.library operators, which torch.compile traces ----


def _forward(x, w, splits, activation, keep, config):
    config = dispatch.explicit_config(from_text(GroupGemmConfig, config) if config else None)
    y, pre = dispatch.product(x, w, splits, activation or None, keep, config)
    return y, x.new_empty(0) if pre is None else pre


def _backward(dy, x, w, splits, pre, activation, need_dx, need_dw):
    if activation:
        dy = launch.swiglu_backward(dy, pre, splits, activation)
    dx = dispatch.input_gradient(dy, w, splits) if need_dx else x.new_empty(0)
    dw = dispatch.weight_gradient(dy, x, splits, w.shape[0]) if need_dw else x.new_empty(0)
    return dx, dw


def _fake_group_gemm(x, w, splits, activation, keep, config):
    width = w.shape[1] // 2 if activation else w.shape[1]
    pre = x.new_empty((x.shape[0], w.shape[1]) if keep and activation else (0,))
    return x.new_empty(x.shape[0], width), pre


def _fake_group_gemm_backward(dy, x, w, splits, pre, activation, need_dx, need_dw):
    return fake_gradients((x, w), (need_dx, need_dw))


register(
    "group_gemm(Tensor x, Tensor w, Tensor splits, str activation, bool keep, str config) -> (Tensor, Tensor)",
    _forward,
    _fake_group_gemm,
)
register(
    "group_gemm_backward(Tensor dy, Tensor x, Tensor w, Tensor splits, Tensor pre, str activation, bool need_dx,"
    " bool need_dw) -> (Tensor, Tensor)",
    _backward,
    _fake_group_gemm_backward,
)


class _GroupGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, w, splits, activation, config):
        y, pre = torch.ops.tdkernels.group_gemm(x, w, splits, activation, True, config)
        ctx.save_for_backward(x, w, splits, pre)
        ctx.activation = activation
        return y

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("group_gemm")
        need = ctx.needs_input_grad[:2]
        x, w, splits, pre = ctx.saved_tensors
        gradients = torch.ops.tdkernels.group_gemm_backward(dy, x, w, splits, pre, ctx.activation, *need)
        dx, dw = unpack_gradients(gradients, need)
        autograd.clear_unwritten_rows(dx, splits)
        return dx, dw, None, None, None


def group_gemm(
    x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, *, activation: str | None = None,
    scale_x: torch.Tensor | None = None, scale_w: torch.Tensor | None = None, out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False, config: GroupGemmConfig | None = None,
) -> torch.Tensor:
    """Multiply each group of rows by the weight of its expert.

    Args:
        x: Rows [R, K] in bf16, fp16, fp32 or float8, sorted by group: first the rows of expert 0, then the rows of
            expert 1, and so on. For float8, K must be a multiple of 16.
        w: Weights [E, N, K], for each expert in the layout of torch.nn.Linear, in the dtype of x; in float8 the formats
            of x and w may differ. Strides are arbitrary. A transposed [E, K, N] tensor is not copied, except with
            activation "swiglu" and in float8.
        splits: Number of rows of each expert, [E] int32 or int64, on the device of x; 0 is allowed. If the sum is less
            than R, the remaining rows of x are not read and those of y are not written. If it is more than R, the rows
            beyond R are ignored.
        activation: None, "swiglu" or "swiglu_interleaved". With "swiglu" w is [E, 2 * I, K]: the first I rows of an
            expert are the gate, the others are up, and y is silu(gate) * up. With "swiglu_interleaved" gate and up
            rows alternate, gate first.
        scale_x: For x in float8: its scale in fp32, which multiplies its elements. One element, [R, 1] (row-wise), or
            [R, ceil(K / 128)] (block-wise), the scales of ``ep_dispatch(quantize="fp8")``. Scales of rows past the sum
            of splits are not used.
        scale_w: For w in float8: its scale in fp32, one element, [E] or [E, 1, 1] (one for each expert), [E, N, 1]
            (row-wise), or with block-wise scales [E, ceil(N / 128), ceil(K / 128)].
        out_dtype: For float8: bf16 (default), fp16 or fp32, the dtype of y.
        use_fast_accum: For float8: whether tensor cores accumulate all of K with their reduced precision, as in
            ``torch._scaled_mm``. Otherwise products are added in fp32 every 128 elements of K.
        config: GroupGemmConfig of the forward. None selects the best known config (see tdkernels.autotune); for float8
            it is the default config, which is not tuned. Method "torch" supports float8 on CPUs only. Gradients always
            select their own config.

    Returns:
        y [R, N], or [R, I] with an activation, in the dtype of x or ``out_dtype``. Products are accumulated and scaled
        in fp32, and the activation is applied in fp32.

    Gradient:
        dx = dy @ w[e]; rows past the sum of splits are not written. dw[e] = dy.T @ x over the rows of e, and zeros for
        an expert without rows. Operands with scales have no gradient.

    Raises:
        TypeError, ValueError: If operands are invalid; the message has their shapes. Nothing has been launched.
        RuntimeError: In a backward with create_graph=True; if an operand with scales requires a gradient.

    Contract:
        Local to this rank, without a group. No host synchronization. Can be captured in a CUDA graph after one call
        outside. The caller owns the output.

    Source:
        Persistent programs that find their group on the device: the grouped GEMM of the Triton tutorials.
    """
    if scale_x is not None or scale_w is not None or out_dtype is not None or use_fast_accum:
        check_scaled_call("group_gemm", x, None, scale_x, scale_w, out_dtype, use_fast_accum)
        return scaled.call(x, w, splits, activation, scale_x, scale_w, out_dtype, use_fast_accum, config)
    known, key = call_cache.lookup_run(
        "group_gemm", None, (x, w, splits), (activation, config, get_mode()), with_rows=(0,)
    )
    if known is not None:
        return known(None, x, w, splits)
    check_no_scales("group_gemm", x)
    x, w = autograd.apply_autocast(x, w)
    check_experts("group_gemm", x, w)
    check_activation("group_gemm", activation, w)
    check_splits(x, w, splits)
    check_config("group_gemm", config, GroupGemmConfig, x)
    check_method("group_gemm", config, w)
    splits, text = splits.contiguous(), as_argument(config)
    if autograd.may_be_differentiated([x, w]):
        return _GroupGemm.apply(x, w, splits, activation or "", text)
    y = torch.ops.tdkernels.group_gemm(x, w, splits, activation or "", False, text)[0]
    _keep(key, x, w, activation, config)
    return y


def _keep(key, x, w, activation, config):
    """Insert a call into the call cache."""
    config = dispatch.explicit_config(config)
    if config is None:
        config = dispatch.known_config(x, (*w.shape[1:], w.shape[0]), dispatch.layout_of(w, activation))
    # If config is None here, no tuned config is known. ``launch.product`` then uses the default without a lookup.
    product = launch.product if config is None else dispatch.product

    def run(_, x, w, splits):
        return product(x, w, splits.contiguous(), activation, False, config)[0]

    def bind(_, x, w, splits):
        return launch.bind_product(x, w, splits, activation, config)

    is_fused = config is None or config.method == "fused"
    call_cache.insert(None, key, call_cache.CachedCall(run, bind if is_fused else None))
