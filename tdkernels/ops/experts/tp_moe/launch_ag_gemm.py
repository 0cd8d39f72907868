"""Launch the kernel of the first half of tp_moe, or compile it ahead of time."""

from dataclasses import dataclass

import torch

from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.ops.experts.grouped_gemm.launch import planes_of, product_constants, rows_descriptor, weight_layout
from tdkernels.ops.experts.tp_moe.kernel_ag_gemm import BLOCK_COLUMNS, BLOCK_TOKENS, Piece, moe_ag_gemm_kernel
from tdkernels.ops.experts.tp_moe.kernel_route import MAX_STAGES
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, launch_cached, output_spec
from tdkernels.symm import get_workspace

_COPY_WORDS = 4096


def problem_fields(x, w, routing, activation):
    """What must be the same on all ranks."""
    return {
        "M/W": x.shape[0], "K": x.shape[1], "w": tuple(w.shape), "k": routing.num_choices, "activation": activation,
        "dtype": str(x.dtype),
    }


@dataclass
class Gradients:
    """What a launch for the gradient of ``h`` takes beside, and what it leaves."""

    h: torch.Tensor  # [R, N]
    weights: torch.Tensor  # [M, k] fp32
    weighted: torch.Tensor | None = None  # [R, N]: h times the weights of its rows
    dots: torch.Tensor | None = None  # [tile columns, R]


@dataclass
class Launched:
    """What a launch leaves.

    Attributes:
        y: [R, ·]
        pre: what SwiGLU was made of, or None
        rows: [R, K], the tokens of all ranks by rows
    """

    y: torch.Tensor
    pre: torch.Tensor | None
    rows: torch.Tensor


def _arguments(ctx, x, w, routing, routed, made, done, plan, num_comm, config, activation, gradients=None):
    """The kernel's arguments and its constants; ``routed``: ``_tensors_of`` the routing, ``made``: Launched."""
    tokens, k = x.shape
    tiles, (of_choices, choices, table, begins) = config.tiles, routed
    w, *strides, is_kn = weight_layout(w, activation)
    planes, n = planes_of(w, activation)
    desc, constants = product_constants(k, w, planes, n, strides, is_kn, activation, tiles)
    of_gradient = (None,) * 5
    if gradients is not None:
        of_gradient = gradients.h, gradients.weighted, gradients.weights, gradients.dots, choices
    args = (
        ctx, x, made.rows, rows_descriptor(made.rows, constants, tiles), w, desc, of_choices, table,
        begins, done, made.y, made.pre, *of_gradient, tokens, choices.shape[0], n, k, *strides,
        routing.slot_rows, plan, num_comm, routing.chunk_rows, routing.num_stages, tiles.group_m,
    )
    return args, {
        "COPY_WORDS": _COPY_WORDS, "PIECE": piece_of(k, routing), "trace_ptr": None, **constants,
    }


def piece_of(width, routing):
    """The Piece that copies or adds up rows of so many elements."""
    return Piece(BLOCK_TOKENS, min(next_power_of_2(width), BLOCK_COLUMNS), routing.num_choices)


def _make(x, w, rows, activation, keep):
    """Launched, of so many rows, to be made."""
    y = output_spec(x, rows, w.shape[1] // 2 if activation else w.shape[1])
    pre = output_spec(x, rows, w.shape[1]) if keep and activation else None
    return Launched(y, pre, output_spec(x, rows, x.shape[1]))


def compile(x, w, routing, config, activation=None, gradients=None):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    if x.device.type == "cpu":
        return  # interpreted
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    made = Launched(x.new_empty(1), None, x.new_empty(1, x.shape[1]))
    tiling = routing.tiling(config.tiles.block_m)
    routed = routing.rows, routing.choices, tiling.table, tiling.begins
    if gradients is not None:
        made_of_h = x.new_empty(1), x.new_empty(1, dtype=torch.float32)
        gradients = Gradients(gradients.h, gradients.weights, *made_of_h)
    args, constants = _arguments(
        ctx, x, w, routing, routed, made, ctx, 0, config.num_comm_sms, config, activation, gradients
    )
    moe_ag_gemm_kernel.warmup(*args, grid=(1,), **constants)


def launch(x, w, routing, config, activation=None, keep=False, gradients=None):
    """The products of all ranks' tokens x [M / W, K] with the weights of their experts; ``keep`` what SwiGLU is of."""
    workspace = get_workspace(routing.group, x.device, "moe_ag_gemm")
    tiling = routing.tiling(config.tiles.block_m)
    routed = routing.rows, routing.choices, tiling.table, tiling.begins
    done = torch.zeros(MAX_STAGES.value, dtype=torch.int64, device=x.device)
    of_gradient = (None, None) if gradients is None else (gradients.h, gradients.weights)
    differs = activation, keep, gradients is not None, gemm_operands.dot_precision(x.dtype)
    y, rows, *others = launch_cached(
        workspace, (config, routing.sizes, *differs), (x, w, *routed, done, *of_gradient),
        lambda *of: _prepare(workspace, routing, of, config, *differs[:3]),
        lambda x, w, *others: (gemm_operands.rows_contiguous(x), weight_layout(w, activation)[0], *others),
    )
    if gradients is not None:
        gradients.weighted, gradients.dots = others
        others = ()
    return Launched(y, others[0] if others else None, rows)


def _prepare(workspace, routing, operands, config, activation, keep, gradient):
    """The Launch for tensors of a routing; of the routing itself it takes nothing but sizes."""
    x, w, *routed, done, h, weights = operands
    _, choices, table, _ = routed
    k, tiles = x.shape[1], config.tiles
    made = _make(x, w, choices.shape[0], activation, keep)
    gradients, to_make = None, [made.y, made.rows]
    if gradient:
        dots = output_spec(x, cdiv(w.shape[1], tiles.block_n), choices.shape[0], dtype=torch.float32)
        gradients = Gradients(h, weights, output_spec(x, *made.y.shape), dots)
        to_make += [gradients.weighted, dots]
    elif made.pre is not None:
        to_make.append(made.pre)
    num_comm = config.num_comm_sms if routing.world_size > 1 else 0
    half_bytes = routing.world_size * routing.slot_rows * k * x.element_size() if num_comm else 256
    fields = with_config({**problem_fields(x, w, routing, activation), "gradient": gradient}, config)
    plan = workspace.prepare("moe_ag_gemm", fields, half_bytes, routing.world_size * routing.num_chunks)
    args, constants = _arguments(
        workspace.ctx, x, w, routing, routed, made, done, plan, num_comm, config, activation, gradients
    )
    tiles_n = cdiv(planes_of(w, activation)[1], constants["PRODUCT"].block_n)
    blocks = cdiv(routing.chunk_rows, BLOCK_TOKENS) * cdiv(k, constants["PIECE"].columns)
    most = num_comm + table.shape[0] * tiles_n + routing.world_size * routing.num_chunks * blocks
    grid = (min(most, gpu.resident_programs(x.device, tiles, x.dtype)),)
    turns = cdiv(routing.num_chunks * (routing.world_size - 1), num_comm) if num_comm else 0
    constants["trace_ptr"] = recorder.buffer(x.device, most, turns, all_run=False)
    return Launch(workspace, moe_ag_gemm_kernel, grid, args, constants, operands, to_make, [workspace.ctx])
