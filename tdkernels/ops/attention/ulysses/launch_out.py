"""Launch the kernel of ulysses_out, or compile it ahead of time."""

import torch

from tdkernels.ops.attention.ulysses.kernel_out import ulysses_out_kernel
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, launch_cached, output_spec
from tdkernels.symm import get_workspace

_PUSH_ROWS, _PUSH_COLUMNS = 64, 2048  # that a program moves at a time, at most
_FEW_COLUMNS = 256  # that are worth a block of their own


def problem_fields(o, weight, batch):
    """What must be the same on all ranks before a config is chosen."""
    return {
        "B": batch, "S": o.shape[0] // batch if batch else 0, "K/W": o.shape[1], "N": weight.shape[0],
        "dtype": str(o.dtype),
    }


def _own_positions(o, batch, rank, world_size):
    """Our positions of our heads, [B * S / W, K / W]; a copy only where there are several sequences."""
    return gemm_operands.rows_contiguous(o.view(batch, world_size, -1, o.shape[1])[:, rank].reshape(-1, o.shape[1]))


def _push_bytes(device):
    """How much a program moves at a time; in the interpreter little, so that it comes to a second time."""
    return 2048 if device.type == "cpu" else 32 << 10


def _push_block(width, elements):
    """(rows, columns) of ``width`` that a program moves at a time: powers of two, of about so many elements."""
    columns = min(next_power_of_2(width), _PUSH_COLUMNS)
    while columns > _FEW_COLUMNS and width % columns:
        columns //= 2  # or the last block would be partly empty
    return min(max(1, elements // columns), _PUSH_ROWS), columns


def _gathered_descriptor(workspace, like, rows, k, tiles):
    """Descriptor of the gathered rows of both halves, [2, rows, K]; without a workspace, of other memory."""
    if workspace is None:
        data, plane_stride = like.new_empty(1, k), rows * k
    else:
        data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset :].view(like.dtype)
        plane_stride = workspace.half_bytes // like.element_size()
    first = data.as_strided((1, k), (k, 1))
    return gemm_operands.rows_descriptor(first, 2, rows, plane_stride, tiles.block_m, tiles.block_k)


def _arguments(workspace, o, own, weight, bias, z, kept, batch, world_size, programs, plan, config):
    """(the kernel's arguments, its constants, the gathered rows if it has a descriptor of them).

    ``workspace`` is None where nothing is launched.
    """
    weight, stride_w, _ = gemm_operands.weight_layout(weight)
    tiles, width, n = config.tiles, o.shape[1], weight.shape[0]
    rows, k = o.shape[0] // world_size, world_size * width
    even = width % tiles.block_k == 0  # no block of columns has some of two ranks
    product = gemm_operands.compiled_for(o, weight, bias, tiles)
    product = product._replace(use_tma=product.use_tma and even, aligned=gemm_operands.aligned(width, n, stride_w))
    own_desc, w_desc = gemm_operands.product_descriptors(own, weight, product)
    gathered_desc = _gathered_descriptor(workspace, o, rows, k, tiles) if product.use_tma else None
    push_rows, push_columns = _push_block(width, _push_bytes(o.device) // o.element_size())
    ctx = torch.empty(1, dtype=torch.int64, device=o.device) if workspace is None else workspace.ctx
    args = (
        ctx, o, own, own_desc, gathered_desc, weight, w_desc, bias, z, kept,
        rows, n, rows // batch, width, stride_w, plan, config.num_comm_sms, config.chunk_tiles, config.chunk_parts,
        programs, config.sources_at_once if even else 1, world_size if even else 1, tiles.group_m,
    )
    constants = {
        "PUSH_ROWS": push_rows, "PUSH_COLUMNS": push_columns, "PRODUCT": product, **tiles.options(), "trace_ptr": None,
    }
    return args, constants, [] if gathered_desc is None else [gathered_desc.base]


def compile(o, weight, bias, world_size, config):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    o = gemm_operands.rows_contiguous(o)
    own = o[: o.shape[0] // world_size]
    args, constants, _ = _arguments(None, o, own, weight, bias, own, None, 1, world_size, 1, 0, config)
    ulysses_out_kernel.warmup(*args, grid=(1,), **constants)


def launch(operator, o, weight, bias, batch, group, config, keep=False):
    """(z [B * S / W, N] of o [B * S, K / W], what was gathered for it [B * S / W, K] if it is to be kept)."""
    o = gemm_operands.rows_contiguous(o)
    workspace = get_workspace(group, o.device, "ulysses_out")
    own = _own_positions(o, batch, group.rank(), group.size())
    z, *kept = launch_cached(
        workspace, (operator, batch, config, keep, gemm_operands.dot_precision(o.dtype)), (o, own, weight, bias),
        lambda *of: _prepare(workspace, operator, *of, batch, config, keep), _ready,
    )
    return z, kept[0] if keep else None


def _ready(o, own, weight, bias):
    """The operands as a launch takes them, of which o and own are such already."""
    return o, own, gemm_operands.weight_layout(weight)[0], None if bias is None else bias.contiguous()


def _prepare(workspace, operator, o, own, weight, bias, batch, config, keep):
    world_size, n, tiles = workspace.world_size, weight.shape[0], config.tiles
    rows, k = o.shape[0] // world_size, world_size * o.shape[1]
    num_chunks = cdiv(rows, config.chunk_tiles * tiles.block_m)
    fields = with_config({**problem_fields(o, weight, batch), "kept": keep}, config)
    plan = workspace.prepare(
        operator, fields, rows * k * o.element_size(), world_size * num_chunks,
        num_flags=(world_size - 1) * num_chunks,
    )
    z, kept = output_spec(o, rows, n), output_spec(o, rows, k) if keep else None
    copies = tiles.count(rows, k) if keep else 0
    pieces = config.num_comm_sms + tiles.count(rows, n) + copies
    programs = min(pieces, gpu.resident_programs(o.device, tiles, o.dtype))
    args, constants, gathered = _arguments(
        workspace, o, own, weight, bias, z, kept, batch, world_size, programs, plan, config
    )
    pushes = cdiv(num_chunks * (world_size - 1) * config.chunk_parts, config.num_comm_sms)
    constants["trace_ptr"] = recorder.buffer(o.device, pieces, max(pushes, 2 * (world_size - 1)))
    operands, made = (o, own, weight, bias), [z, kept] if keep else [z]
    fixed = workspace.ctx, *gathered
    return Launch(workspace, ulysses_out_kernel, (programs,), args, constants, operands, made, fixed)
