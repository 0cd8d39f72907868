"""Launch the kernel of ulysses_out, or compile it ahead of time."""

from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.attention.ulysses.kernel_out import ulysses_out_kernel
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.rounding import cdiv, next_power_of_2
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, launch_cached, output_spec
from tdkernels.symm import get_workspace

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.attention.ulysses.config import UlyssesConfig

_PUSH_ROWS, _PUSH_COLUMNS = 64, 2048  # largest block that a program copies at a time
_FEW_COLUMNS = 256  # a block is not narrowed below this to divide the width


def problem_fields(o: torch.Tensor, weight: torch.Tensor, batch: int) -> dict[str, Any]:
    """Return the properties of a call that must be the same on all ranks."""
    return {
        "B": batch, "S": o.shape[0] // batch if batch else 0, "K/W": o.shape[1], "N": weight.shape[0],
        "dtype": str(o.dtype),
    }


def _own_positions(o, batch, rank, world_size):
    """Return this rank's positions of its own heads, [B * S / W, K / W]. Copies only if there are several sequences."""
    return gemm_operands.rows_contiguous(o.view(batch, world_size, -1, o.shape[1])[:, rank].reshape(-1, o.shape[1]))


def _push_bytes(device):
    """Return the bytes per block of a push. Few in the interpreter, so that tests have more than one block."""
    return 2048 if device.type == "cpu" else 32 << 10


def _push_block(width, elements):
    """Return (rows, columns) of a block of a push: powers of two, with about ``elements`` elements together."""
    columns = min(next_power_of_2(width), _PUSH_COLUMNS)
    while columns > _FEW_COLUMNS and width % columns:
        columns //= 2  # otherwise the last block would be partly empty
    return min(max(1, elements // columns), _PUSH_ROWS), columns


def _gathered_descriptor(workspace, like, rows, k, tiles):
    """Return a descriptor of the gathered rows in both halves, [2, rows, K]; of scratch memory without a workspace."""
    if workspace is None:
        data, plane_stride = like.new_empty(1, k), rows * k
    else:
        data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset :].view(like.dtype)
        plane_stride = workspace.half_bytes // like.element_size()
    first = data.as_strided((1, k), (k, 1))
    return gemm_operands.rows_descriptor(first, 2, rows, plane_stride, tiles.block_m, tiles.block_k)


def _arguments(workspace, o, own, weight, bias, z, kept, batch, world_size, programs, plan, config):
    """Return (arguments of the kernel, its constants, [the gathered rows] if a descriptor describes them).

    ``workspace`` is None for compilation without a launch.
    """
    weight, stride_w, _ = gemm_operands.weight_layout(weight)
    tiles, width, n = config.tiles, o.shape[1], weight.shape[0]
    rows, k = o.shape[0] // world_size, world_size * width
    even = width % tiles.block_k == 0  # no block of columns has heads of two ranks
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


def compile(
    o: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: "UlyssesConfig"
) -> None:
    """Compile the kernel that ``launch`` would launch for the same operands into Triton's cache."""
    o = gemm_operands.rows_contiguous(o)
    own = o[: o.shape[0] // world_size]
    args, constants, _ = _arguments(None, o, own, weight, bias, own, None, 1, world_size, 1, 0, config)
    ulysses_out_kernel.warmup(*args, grid=(1,), **constants)


def launch(
    operator: str, o: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, batch: int,
    group: "dist.ProcessGroup", config: "UlyssesConfig", keep: bool = False,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Launch the kernel on o [B * S, K / W], and return (z [B * S / W, N], gathered rows [B * S / W, K] or None).

    The gathered rows are returned if ``keep``. ``operator`` is the name of the operator in error messages.
    """
    o = gemm_operands.rows_contiguous(o)
    workspace = get_workspace(group, o.device, "ulysses_out")
    own = _own_positions(o, batch, group.rank(), group.size())
    z, *kept = launch_cached(
        workspace, (operator, batch, config, keep, gemm_operands.dot_precision(o.dtype)), (o, own, weight, bias),
        lambda *of: _prepare(workspace, operator, *of, batch, config, keep),  # type: ignore[call-arg]
        _normalize_operands,
    )
    return z, kept[0] if keep else None


def _normalize_operands(o, own, weight, bias):
    """Return the operands as the kernel supports them. o and own are contiguous already."""
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
    operands, outputs = (o, own, weight, bias), [z, kept] if keep else [z]
    fixed = workspace.ctx, *gathered
    return Launch(workspace, ulysses_out_kernel, (programs,), args, constants, operands, outputs, fixed)
