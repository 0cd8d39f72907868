"""group_gemm: rows that are grouped by expert, each group times the weight of its expert, on one rank.

    x [R, K], w [E, N, K], splits [E] on the device  ->  y [R, N];   y[rows of e] = x[rows of e] @ w[e].T

Nothing waits for the host: the kernels (``group_gemm_kernel``) find their tiles from the splits. SwiGLU can be applied
before y is stored, so that what the experts' first product gives is never read again but for the gradient.

Backward. dx is a group_gemm with the weights the other way round; dw adds up over the rows of each group.

Example:
    recv, handle = tdkernels.ep_dispatch(x, topk_ids, topk_weights, num_experts=64)
    h = tdkernels.group_gemm(recv.x, w_gate_up, recv.splits, activation="swiglu")
    y = tdkernels.ep_combine(tdkernels.group_gemm(h, w_down, recv.splits), handle)
"""

import torch

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common.config import as_argument, check_config, from_text
from tdkernels.ops.common.validation import INTEGERS, check_floats, check_tensor
from tdkernels.ops.experts.grouped_gemm import dispatch, launch
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig
from tdkernels.ops.experts.grouped_gemm.dispatch import product_by_group, swiglu_ref, why_not_torch
from tdkernels.ops.experts.grouped_gemm.swiglu import ACTIVATIONS
from tdkernels.runtime import autograd, call_cache
from tdkernels.runtime.autograd import fake_gradients, unpack_gradients
from tdkernels.runtime.torch_op import register


def group_gemm_ref(
    x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, *, activation: str | None = None,
) -> torch.Tensor:
    """The specification of ``group_gemm``, in plain torch: a product for each group."""
    return swiglu_ref(product_by_group(x, w, splits), activation)


# ---- torch.library: what torch.compile sees ----


def _forward(x, w, splits, activation, keep, config):
    config = from_text(GroupGemmConfig, config) if config else None
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
        return *unpack_gradients(gradients, need), None, None, None


# ---- checks ----


def check_experts(operator, x, w, name="w", rows="x"):
    """Raise TypeError or ValueError, naming the argument and its shape, unless rows of x can be multiplied by w [e]."""
    check_floats(operator, {rows: x, name: w}, memory=True)
    if x.dim() != 2:
        raise ValueError(f"{operator}: {rows} must have 2 dimensions [rows, K], its shape is {list(x.shape)}")
    if w.dim() != 3:
        raise ValueError(f"{operator}: {name} must have 3 dimensions [E, N, K], its shape is {list(w.shape)}")
    if x.shape[1] != w.shape[2]:
        raise ValueError(
            f"{operator}: the last dimension of {rows} {list(x.shape)} and of {name} {list(w.shape)} must be the same K"
        )
    if 0 in w.shape:
        raise ValueError(f"{operator}: {name} {list(w.shape)} has an empty dimension")


def check_activation(operator, activation, w, name="w"):
    if activation not in ACTIVATIONS:
        raise ValueError(f"{operator}: activation must be one of {ACTIVATIONS}, not {activation!r}")
    if activation is not None and w.shape[1] % 2:
        raise ValueError(f"{operator}: {name} {list(w.shape)} must have an even N for {activation}, gate and up")


def check_method(operator, config, w, name="w"):
    """Raise ValueError unless torch's grouped product can take the weight, if the config asks for it."""
    if config is None or config.method != "torch":
        return
    reason = why_not_torch(w.shape, w.dtype, w.device)
    if reason is not None:
        raise ValueError(f"{operator}: {reason}; {name} is {list(w.shape)} of {w.dtype}")


def _check_splits(x, w, splits):
    check_tensor("group_gemm", "splits", splits, INTEGERS, x, memory=False)
    if tuple(splits.shape) != tuple(w.shape[:1]):
        raise ValueError(
            f"group_gemm: splits must be [E] with the E = {w.shape[0]} of w, its shape is {list(splits.shape)}"
        )


def group_gemm(
    x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, *, activation: str | None = None,
    config: GroupGemmConfig | None = None,
) -> torch.Tensor:
    """Multiply each group of rows by the weight of its expert.

    Args:
        x: [R, K] bf16, fp16 or fp32, grouped: the rows of expert 0 come first, then those of expert 1, and so on
        w: [E, N, K], for each expert the layout of torch.nn.Linear; same dtype. Any strides; those of a transposed
            [E, K, N] cost no copy, but for "swiglu"
        splits: [E] int32 or int64, on x's device: the rows of each expert, 0 allowed. Their sum may be less than R:
            rows past it are not read, those of y are not written. Rows beyond R are left out
        activation: None; "swiglu": w is [E, 2 * I, K], the first I rows of an expert for the gate and the rest for up,
            y is silu(gate) * up; "swiglu_interleaved": the same of rows that are gate and up by turns
        config: GroupGemmConfig of the forward; None takes the best one known, as each gradient always does, see
            tdkernels.autotune

    Returns:
        y: [R, N], or [R, I] with an activation, dtype of x, accumulated and activated in fp32

    Gradient:
        dx = dy @ w[e], rows past the sum of splits are not written; dw[e] = dy.T @ x over the rows of e, zeros for an
        expert without any

    Raises:
        TypeError or ValueError: for operands that do not fit, with their shapes, before anything is launched
        RuntimeError: in a backward with create_graph=True

    Contract:
        local, no group; host sync: no; CUDA graph: yes, after one call outside; the caller owns the output

    Source:
        persistent programs that find their group: the grouped GEMM of Triton's tutorials
    """
    known, key = call_cache.lookup_run("group_gemm", None, (x, w, splits), (activation, config, get_mode()))
    if known is not None:
        return known(None, x, w, splits)
    x, w = autograd.apply_autocast(x, w)
    check_experts("group_gemm", x, w)
    check_activation("group_gemm", activation, w)
    _check_splits(x, w, splits)
    check_config("group_gemm", config, GroupGemmConfig, x)
    check_method("group_gemm", config, w)
    splits, text = splits.contiguous(), as_argument(config)
    if autograd.may_be_differentiated([x, w]):
        return _GroupGemm.apply(x, w, splits, activation or "", text)
    y = torch.ops.tdkernels.group_gemm(x, w, splits, activation or "", False, text)[0]
    _keep(key, x, w, activation, config, y.shape)
    return y


def _keep(key, x, w, activation, config, shape):
    """Insert a call into the call cache."""
    if config is None:
        config = dispatch.known_config(x, (*w.shape[1:], w.shape[0]), dispatch.layout_of(w, activation))
    # None is the default, which must not be looked up again.
    product = launch.product if config is None else dispatch.product

    def run(_, x, w, splits):
        return product(x, w, splits.contiguous(), activation, False, config)[0]

    def bind(_, x, w, splits):
        return launch.bind_product(x, w, splits, activation, config)

    is_fused = config is None or config.method == "fused"
    call_cache.insert(None, key, call_cache.CachedCall(run, bind if is_fused else None, shape))
