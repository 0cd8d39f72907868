"""The product of group_gemm and its gradients, each by our kernel or by torch's, as a config says or as is known.

    product           y  = x[rows of e] @ w[e].T, with SwiGLU or without
    input_gradient    dx = dy[rows of e] @ w[e], a product with the weights the other way round
    weight_gradient   dw[e] = dy[rows of e].T @ x[rows of e]

What is known comes from the tuner's tables, by the rows up to a power of two and by one of LAYOUTS. Nobody else is
asked, so ranks may differ.
"""

import torch
import torch.nn.functional as F

from tdkernels.autotune import tunable as tunables
from tdkernels.autotune.modes import get_mode
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.selection import DEFAULT, choice_of_call, look_up
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.experts.grouped_gemm import launch
from tdkernels.symm.group import alone

# What is tuned apart: the plain product, those with an activation, that of weights which lie as [K, N], as they do for
# dx, and the gradient of the weights.
KN, DW = "kn", "dw"
LAYOUTS = "none", "swiglu", "swiglu_interleaved", KN, DW


def layout_of(w, activation=None):
    """Of LAYOUTS that of a product."""
    return activation or (KN if launch.lies_as_kn(w) else "none")


def product(x, w, splits, activation=None, keep=False, config=None):
    """(y, what SwiGLU was made of if there is one and it is to ``keep``, else None)."""
    if config is None:
        config = known_config(x, (*w.shape[1:], w.shape[0]), layout_of(w, activation))
    if config is None or config.method == "fused":
        return launch.product(x, w, splits, activation, keep, config)
    pre = by_torch(x, w, splits)
    return swiglu_ref(pre, activation), pre if keep and activation else None


def input_gradient(dy, w, splits):
    """dx [R, K] of dy [R, N] and w [E, N, K]."""
    return product(dy, w.transpose(1, 2), splits)[0]


def weight_gradient(dy, x, splits, experts, config=None):
    """dw [E, N, K] of dy [R, N] and x [R, K]; zeros for an expert without rows."""
    if config is None:
        config = known_config(x, (dy.shape[1], x.shape[1], experts), DW)
    if config is None or config.method == "fused":
        return launch.weight_gradient(dy, x, splits, experts, config)
    return weight_gradient_by_torch(dy, x, splits)


# ---- what is known ----


def known_config(x, sizes, layout):
    """The config for rows x and (N, K, experts) if one is known that is better than the default, else None."""
    mode = get_mode()
    if mode == "off" or not x.shape[0]:
        return None
    rows = 1 << (x.shape[0] - 1).bit_length()  # differs from call to call
    sizes = rows, *sizes

    def make():
        problem = Problem.on(x.device, "group_gemm", sizes, x.dtype, layout, 1, 1)
        return look_up(tunables.tunable("group_gemm"), problem, x.device, mode)

    choice = choice_of_call("group_gemm", None, (sizes, layout, x.dtype, x.device), make)
    return None if choice.source == DEFAULT else choice.config


def forget_choices():
    """Let the next calls look their configs up again."""
    alone.choices.clear()


# ---- by torch ----


def ends_of(splits, rows):
    """The row past the last of each group, int64 [E]; none past the rows that there are."""
    return splits.clamp(0, rows).cumsum(0).clamp(max=rows)


def swiglu_ref(pre, activation):
    """silu(gate) * up of pre [R, 2 * I]; as it is if ``activation`` is None."""
    if activation is None:
        return pre
    if activation == "swiglu":
        gate, up = pre.chunk(2, dim=-1)
    else:
        gate, up = pre[..., ::2], pre[..., 1::2]
    return F.silu(gate) * up


def product_by_group(x, w, splits):
    """In plain torch, a product for each group; the host waits for the splits."""
    parts = torch.tensor_split(x, ends_of(splits, x.shape[0]).tolist())  # the last: rows of no group
    products = [F.linear(part, weight) for part, weight in zip(parts, w, strict=False)]
    return torch.cat([*products, x.new_zeros(parts[-1].shape[0], w.shape[1])])


def weight_gradient_by_group(dy, x, splits):
    """As ``product_by_group``, of the weights' gradient."""
    ends = ends_of(splits, x.shape[0]).tolist()
    pairs = zip(torch.tensor_split(dy, ends)[:-1], torch.tensor_split(x, ends)[:-1], strict=True)
    return torch.stack([of_dy.t() @ of_x for of_dy, of_x in pairs])


def by_torch(x, w, splits):
    """The products without an activation, by what torch has for them on the device."""
    if x.device.type == "cpu":
        return product_by_group(x, w, splits)
    w = _as_torch_takes_it(w).transpose(1, 2)
    return torch._grouped_mm(gemm_operands.rows_contiguous(x), w, offs=launch.ends_of_groups(splits, x))


def weight_gradient_by_torch(dy, x, splits):
    """The gradient of the weights by what torch has for it on the device; zeros for a group without rows."""
    if x.device.type == "cpu":
        return weight_gradient_by_group(dy, x, splits)
    dy, x = gemm_operands.rows_contiguous(dy), gemm_operands.rows_contiguous(x)
    return torch._grouped_mm(dy.t(), x, offs=launch.ends_of_groups(splits, x))


def _as_torch_takes_it(w):
    """The weight, copied unless its rows or columns are contiguous and all begin at multiples of 16 bytes."""
    w, *strides, _ = launch.weight_layout(w)
    starts = w.data_ptr(), *(stride * w.element_size() for stride in strides)
    return w.clone(memory_format=torch.contiguous_format) if any(start % 16 for start in starts) else w


def why_not_torch(shape, dtype, device):
    """Why torch's grouped product cannot take a weight [E, N, K], or give its gradient; None if it can."""
    if device.type == "cpu" or not any(size * dtype.itemsize % 16 for size in shape[1:]):
        return None
    return 'method "torch" needs rows and columns of a multiple of 16 bytes'
