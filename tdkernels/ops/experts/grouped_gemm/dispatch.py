"""Backend selection for grouped GEMM and its gradients: the Triton kernel or torch's grouped GEMM.

    product           y  = x[rows of e] @ w[e].T, with or without SwiGLU
    input_gradient    dx = dy[rows of e] @ w[e], a product with transposed weights
    weight_gradient   dw[e] = dy[rows of e].T @ x[rows of e]

The backend is given by the config, or by the tuning tables if there is no config. The key of the tables has the number
of rows, rounded up to a power of two, and one of LAYOUTS. The lookup is local, so ranks may use different backends.
"""

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tdkernels.autotune import tunable as tunables
from tdkernels.autotune.invariance import check_invariant, is_batch_invariant
from tdkernels.autotune.modes import get_mode
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.selection import DEFAULT, choice_of_call, look_up
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.experts.grouped_gemm import launch, launch_weights
from tdkernels.ops.experts.grouped_gemm.config import invariant_config
from tdkernels.ops.experts.grouped_gemm.layout import is_stored_kn, weight_layout
from tdkernels.symm.group import alone

if TYPE_CHECKING:
    from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig

# Layouts are tuned separately: the plain product, the products with an activation, the product with weights that are
# stored as [K, N] (as they are for dx), and the weight gradient.
KN, DW = "kn", "dw"
LAYOUTS = "none", "swiglu", "swiglu_interleaved", KN, DW


def layout_of(w: torch.Tensor, activation: str | None = None) -> str:
    """Return the entry of LAYOUTS for a product with w [E, N, K]."""
    return activation or (KN if is_stored_kn(w) else "none")


def product(
    x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, activation: str | None = None, keep: bool = False,
    config: "GroupGemmConfig | None" = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Compute the grouped product, and return (y, pre).

    ``pre`` is the input of SwiGLU if there is an activation and ``keep`` is true, else None.
    """
    if config is None:
        config = known_config(x, (*w.shape[1:], w.shape[0]), layout_of(w, activation))
    if config is None or config.method == "fused":
        return launch.product(x, w, splits, activation, keep, config)
    return product_by_torch(x, w, splits, activation, keep)


def input_gradient(dy: torch.Tensor, w: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """Return dx [R, K] for dy [R, N] and w [E, N, K]."""
    return product(dy, w.transpose(1, 2), splits)[0]


def weight_gradient(
    dy: torch.Tensor, x: torch.Tensor, splits: torch.Tensor, experts: int, config: "GroupGemmConfig | None" = None,
) -> torch.Tensor:
    """Return dw [E, N, K] for dy [R, N] and x [R, K]. It is zero for an expert without rows."""
    if config is None:
        config = known_config(x, (dy.shape[1], x.shape[1], experts), DW)
    if config is None or config.method == "fused":
        return launch_weights.weight_gradient(dy, x, splits, experts, config)
    return weight_gradient_by_torch(dy, x, splits)


# ---- tuned configs ----


def explicit_config(config: "GroupGemmConfig | None") -> "GroupGemmConfig | None":
    """Return the config that a call was given. In the batch-invariant mode it is None if it leaves the tiles open.

    Raises:
        ValueError: If the mode is on and results with the config depend on the batch.
    """
    check_invariant("group_gemm", config)
    return None if is_batch_invariant() and config is not None and config.tiles is None else config


def known_config(x: torch.Tensor, sizes: tuple[int, ...], layout: str) -> Any:
    """Return the tuned GroupGemmConfig for rows x and sizes (N, K, experts), or None if the default is best.

    In the batch-invariant mode it is the config of the mode, except for the weight gradient.
    """
    if is_batch_invariant():
        return None if layout == DW else invariant_config(x.dtype, x.device)
    mode = get_mode()
    if mode == "off" or not x.shape[0]:
        return None
    rows = 1 << (x.shape[0] - 1).bit_length()  # rounded up, because it differs from call to call
    sizes = rows, *sizes

    def make():
        problem = Problem.on(x.device, "group_gemm", sizes, x.dtype, layout, 1, 1)
        return look_up(tunables.tunable("group_gemm"), problem, x.device, mode)

    choice = choice_of_call("group_gemm", None, (sizes, layout, x.dtype, x.device), make)
    return None if choice.source == DEFAULT else choice.config


def forget_choices() -> None:
    """Clear the selected configs, so that the next calls look them up again."""
    alone.choices.clear()


# ---- torch backend ----


def ends_of(splits: torch.Tensor, rows: int) -> torch.Tensor:
    """Return the end (exclusive) of each group's rows, int64 [E], clamped to ``rows``."""
    return splits.clamp(0, rows).cumsum(0).clamp(max=rows)


def swiglu_ref(pre: torch.Tensor, activation: str | None) -> torch.Tensor:
    """Return silu(gate) * up for pre [R, 2 * I], or ``pre`` itself if ``activation`` is None."""
    if activation is None:
        return pre
    if activation == "swiglu":
        gate, up = pre.chunk(2, dim=-1)
    else:
        gate, up = pre[..., ::2], pre[..., 1::2]
    return F.silu(gate) * up


def product_by_group(x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """Compute the product with one matmul per group. The host waits for the splits."""
    parts = torch.tensor_split(x, ends_of(splits, x.shape[0]).tolist())  # the last part has the rows without a group
    products = [F.linear(part, weight) for part, weight in zip(parts, w, strict=False)]
    return torch.cat([*products, x.new_zeros(parts[-1].shape[0], w.shape[1])])


def weight_gradient_by_group(dy: torch.Tensor, x: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """Compute the weight gradient with one matmul per group. The host waits for the splits."""
    ends = ends_of(splits, x.shape[0]).tolist()
    pairs = zip(torch.tensor_split(dy, ends)[:-1], torch.tensor_split(x, ends)[:-1], strict=True)
    return torch.stack([of_dy.t() @ of_x for of_dy, of_x in pairs])


def by_torch(x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """Compute the product without an activation: with torch's grouped GEMM on a GPU, group by group on CPU."""
    if x.device.type == "cpu":
        return product_by_group(x, w, splits)
    w = _as_torch_takes_it(w).transpose(1, 2)
    return torch._grouped_mm(gemm_operands.rows_contiguous(x), w, offs=launch.ends_of_groups(splits, x))


def product_by_torch(
    x: torch.Tensor, w: torch.Tensor, splits: torch.Tensor, activation: str | None, keep: bool,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """As ``product``, with torch's grouped GEMM and a kernel for SwiGLU."""
    pre = by_torch(x, w, splits)
    if activation is None:
        return pre, None
    return launch.swiglu(pre, splits, activation), pre if keep else None


def weight_gradient_by_torch(dy: torch.Tensor, x: torch.Tensor, splits: torch.Tensor) -> torch.Tensor:
    """Compute the weight gradient with torch, like ``by_torch``. It is zero for a group without rows."""
    if x.device.type == "cpu":
        return weight_gradient_by_group(dy, x, splits)
    dy, x = gemm_operands.rows_contiguous(dy), gemm_operands.rows_contiguous(x)
    return torch._grouped_mm(dy.t(), x, offs=launch.ends_of_groups(splits, x))


def _as_torch_takes_it(w):
    """Return the weight, copied unless its rows or columns are contiguous and all start at multiples of 16 bytes."""
    w, *strides, _ = weight_layout(w)
    starts = w.data_ptr(), *(stride * w.element_size() for stride in strides)
    return w.clone(memory_format=torch.contiguous_format) if any(start % 16 for start in starts) else w


def why_not_torch(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> str | None:
    """Return why torch's grouped GEMM does not support a weight [E, N, K] or its gradient, or None if it does."""
    if device.type == "cpu" or not any(size * dtype.itemsize % 16 for size in shape[1:]):
        return None
    return 'method "torch" needs rows and columns of a multiple of 16 bytes'
