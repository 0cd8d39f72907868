"""Launch the kernels of ag_gemm, or compile them ahead of time."""

import math
from collections.abc import Sequence
from dataclasses import replace
from itertools import chain
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.hardware import hardware
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather, rows_of_buffer, slot_rows_of
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.ops.common.costs import product_s, push_rate
from tdkernels.ops.common.gemm_operands import bind_product, launch_product
from tdkernels.ops.common.scaling import Scales, out_dtype_of, row_bytes
from tdkernels.ops.common.specialized.launch import is_enabled
from tdkernels.ops.dense.ag_gemm import (
    kernel_multinode,
    launch_multinode,
    launch_one_shot,
    launch_specialized,
    pipelined,
)
from tdkernels.ops.dense.ag_gemm.config import MAX_WEIGHTS, num_chunks, num_pushing
from tdkernels.ops.dense.ag_gemm.kernel import ag_gemm_kernel
from tdkernels.ops.dense.ag_gemm.output import output_descriptors
from tdkernels.ops.dense.scaled_gather import gathered_scales
from tdkernels.rounding import cdiv
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, WithinCall, bind_uncopied, launch_cached, output_spec
from tdkernels.symm import get_workspace
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig

_COPY_WORDS = 4096


def problem_fields(x: torch.Tensor, weight: torch.Tensor, scales: Scales | None = None) -> dict[str, Any]:
    """Return the properties of a call that must be equal on all ranks, before a config is selected."""
    fields = {"M/W": x.shape[0], "K": x.shape[1], "N/W": weight.shape[0], "dtype": str(x.dtype)}
    return fields if scales is None else {**fields, **scales.fields}


def _arguments(
    ctx, x, gathered, weights, biases, ys, slot_rows, plan, num_comm, fixed_half, config, late, segment_rows,
    scales=None,
):
    """Return the arguments and constants of the kernel.

    ``gathered`` describes the gathered rows: (first row as [1, K], planes, rows per plane, elements between planes).
    ``late``: the arguments num_late and first_late on one node; None on several nodes, for one weight.
    """
    tiles = config.tiles
    rows, k = x.shape
    weights, strides, x_desc, w_descs, constants = gemm_operands.products(x, weights, biases, tiles, scales)
    constants |= {"COPY_WORDS": _COPY_WORDS, "FIXED_HALF": fixed_half}
    gathered_desc = None
    if constants["PRODUCT"].use_tma:
        gathered_desc = gemm_operands.rows_descriptor(*gathered, tiles.block_m, tiles.block_k)
    sizes = [(weight.shape[0], stride) for weight, stride in zip(weights, strides, strict=True)]
    before = ctx, x, x_desc, gathered_desc
    common = (
        rows, sizes[0][0], k, sizes[0][1], slot_rows, plan, num_comm, config.chunk_tiles, tiles.group_m,
    )
    if late is None:
        return (*before, weights[0], w_descs[0], biases[0], ys[0], *common), constants
    constants["SLICES"] = launch_specialized.num_slices(k, config)
    y_descs = output_descriptors(x, ys, config, segment_rows, constants)
    pointers = list(zip(weights, w_descs, biases, ys, y_descs, strict=True))
    unused = MAX_WEIGHTS - len(weights)
    pointers, sizes = pointers + [(None,) * 5] * unused, sizes + [(0, 0)] * unused
    pointers_of_all = (*chain.from_iterable(pointers), *gemm_operands.scale_pointers(scales))
    args = (*before, *pointers_of_all, *common, *late, segment_rows, *chain.from_iterable(sizes[1:]))
    return args, constants


def compile(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, world_size: int, config: "AgGemmConfig",
    num_nodes: int = 1, scales: Scales | None = None,
) -> None:
    """Compile the kernel that ``launch`` would launch for these operands, into Triton's cache, without launching it."""
    if x.device.type == "cpu" or config.method != "fused":
        return  # the CPU interprets; the other methods have no kernel that depends on the config
    config = _multinode_config(config, num_nodes)
    if config.transport == "one_shot":
        return launch_one_shot.compile(x, weight, bias, config, scales)
    x = gemm_operands.rows_contiguous(x)
    if launch_specialized.supports(x, [weight], config, x.shape[0], num_nodes, scales):
        return launch_specialized.compile(x, weight, bias, world_size, config, scales)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    fixed_half, late = config.transport == "copy_engine", None if num_nodes > 1 else (0, 0)
    y = x.new_empty(1, weight.shape[0], dtype=out_dtype_of(x, scales))
    args, constants = _arguments(
        ctx, x, (x, 1, x.shape[0], x.numel()), [weight], [bias], [y], x.shape[0], 0, 0,
        fixed_half, config, late, x.shape[0], scales,
    )
    _kernel(num_nodes).warmup(*args, grid=(1,), **constants)


def _kernel(num_nodes):
    return ag_gemm_kernel if num_nodes == 1 else kernel_multinode.ag_gemm_nodes_kernel


def _comm_pieces(num_comm, num_chunks, topology):
    """Return (number of work items that send, maximum number of trace events of one of them)."""
    if topology.num_nodes > 1:
        return launch_multinode.comm_pieces(num_comm, num_chunks, topology)
    return num_comm, cdiv((topology.world_size - 1) * num_chunks, num_comm) if num_comm else 0


def _multinode_config(config, num_nodes):
    """Return the config with transport "push" on several nodes, because no other transport reaches other nodes."""
    return _push_config(config) if num_nodes > 1 else config


def _push_config(config):
    """Return the config with transport "push".

    Chunks for the copy engine are as large as possible. Pushed chunks have one tile row, so that they arrive early.
    """
    return config if config.transport == "push" else replace(config, transport="push", chunk_tiles=1)


def launch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: "dist.ProcessGroup",
    config: "AgGemmConfig", keep_gathered: bool = False, scales: Scales | None = None,
) -> tuple[torch.Tensor, AsyncAllGather | None]:
    """Run ag_gemm on 2-D operands with method "fused" or "parts". ``scales``: the scales of scaled operands.

    Returns:
        (y, gather). ``gather`` is None unless ``keep_gathered``. Otherwise it holds the gathered x; the caller reads
        ``gather.gathered`` and closes it.
    """
    if config.method == "parts":
        fields = with_config(problem_fields(x, weight, scales), config)
        of_weights = None if scales is None else [scales]
        (y,), gather = pipelined.launch(x, [weight], [bias], group, config, fields, keep_gathered, scales=of_weights)
        return y, gather
    config = _multinode_config(config, group_state(group).topology.num_nodes)
    if keep_gathered or config.transport == "copy_engine":
        x, weights, biases = _ready(x, [weight], [bias])
        (y,), gather = _launch_with_gather(x, weights, biases, group, config, keep_gathered, x.shape[0], scales)
        return y, gather
    workspace, scales = _workspace(x, group, config), _per_row(x, scales)
    y, *_ = launch_product(workspace, x, weight, bias, config, _prepare_one, scales=scales)
    return y, None


def launch_several(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None],
    group: "dist.ProcessGroup", config: "AgGemmConfig", keep_gathered: bool, segment_rows: int,
) -> tuple[list[torch.Tensor], AsyncAllGather | None]:
    """Run the kernel with method "fused" for up to MAX_WEIGHTS weights of one layout, on one node.

    Args:
        segment_rows: Rows of x that follow one another in the outputs: all rows of x for [M, N]. The outputs are
            [rows / segment_rows, W, segment_rows, N].

    Returns:
        (outputs, gather) as for ``launch``.
    """
    if keep_gathered or config.transport == "copy_engine":
        x, weights, biases = _ready(x, weights, biases)
        return _launch_with_gather(x, weights, biases, group, config, keep_gathered, segment_rows)
    return launch_cached(*_several_call(x, weights, biases, group, config, segment_rows)), None


def bind_several(
    x: torch.Tensor, weights: Sequence[torch.Tensor], biases: Sequence[torch.Tensor | None],
    group: "dist.ProcessGroup", config: "AgGemmConfig", segment_rows: int,
) -> Launch | None:
    """Return the Launch of ``launch_several``; None as for ``bind``."""
    if config.transport == "copy_engine":
        return None
    call = _several_call(x, weights, biases, group, config, segment_rows)
    return bind_uncopied((x, *weights, *biases), *call)


def _several_call(x, weights, biases, group, config, segment_rows):
    """Return the arguments of ``launch_cached``."""
    count = len(weights)
    key = config, gemm_operands.dot_precision(x.dtype), segment_rows, count
    prepare = lambda x, *rest: _prepare(  # noqa: E731
        _workspace(x, group, config), x, rest[:count], rest[count:], config, segment_rows
    )

    def ready(x, *rest):
        x, weights, biases = _ready(x, rest[:count], rest[count:])
        return x, *weights, *biases

    return _workspace(x, group, config), key, (x, *weights, *biases), prepare, ready


def _ready(x, weights, biases):
    """Return operands with layouts that the kernel supports (``gemm_operands.ready``)."""
    each = [gemm_operands.ready(x, *one)[1:] for one in zip(weights, biases, strict=True)]
    return gemm_operands.rows_contiguous(x), *map(list, zip(*each, strict=True))


def bind(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, group: "dist.ProcessGroup",
    config: "AgGemmConfig", scales: Scales | None = None,
) -> Launch | None:
    """Return the Launch of a fused call; None if the call needs more than one launch, or copies an operand."""
    config = _multinode_config(config, group_state(group).topology.num_nodes)
    if config.transport == "copy_engine" or _per_row(x, scales) is not scales:
        return None
    return bind_product(_workspace(x, group, config), x, weight, bias, config, _prepare_one, scales=scales)


def _per_row(x, scales):
    """Return the scales with one for each row of x, if all of x has one: scales are gathered with their rows."""
    if scales is None or scales.x.numel() > 1 or x.shape[0] == 1:
        return scales
    return scales._replace(x=scales.x.reshape(1, 1).expand(x.shape[0], 1).contiguous())


def _workspace(x, group, config):
    name = "ag_gemm one shot" if config.transport == "one_shot" else "ag_gemm"
    return get_workspace(group, x.device, name, across_nodes=True)


def _prepare_one(workspace, x, weight, bias, config, scales=None):
    """Return the Launch for one weight."""
    if config.transport == "one_shot":
        fields = with_config(problem_fields(x, weight, scales), config)
        return launch_one_shot.prepare(workspace, x, weight, bias, config, fields, scales)
    return _prepare(workspace, x, [weight], [bias], config, x.shape[0], scales)


def _prepare(workspace, x, weights, biases, config, segment_rows, scales=None):
    """Return the Launch of the kernel that also sends this rank's shard."""
    fields = with_config(_fields(x, weights, segment_rows, scales), config)
    rows, k = x.shape
    ranks, num_nodes = workspace.world_size, workspace.group.topology.num_nodes
    chunks = num_chunks(rows, config)
    slot_rows = slot_rows_of(rows)
    slot_bytes = slot_rows * k * x.element_size()
    # The scales of all rows follow the slots.
    plan = workspace.prepare(
        "ag_gemm", fields, ranks * (slot_bytes + slot_rows * row_bytes(scales)),
        ranks * chunks * launch_specialized.num_slices(k, config, num_nodes),
        launch_specialized.num_flags(rows, k, ranks, config, num_nodes), slot_bytes=slot_bytes,
    )
    gathered = rows_of_buffer(workspace, x), 2, ranks * slot_rows, workspace.half_bytes // x.element_size()
    memory = gathered, slot_rows, plan, False
    return _launch_of(
        workspace, workspace, memory, config.num_comm_sms, x, weights, biases, config, segment_rows, scales
    )


def _launch_of(order, workspace, memory, num_comm, x, weights, biases, config, segment_rows, scales=None):
    """Return the Launch of the kernel.

    ``order`` checks and orders the launch: the workspace, or WithinCall of it. ``memory`` are the arguments gathered,
    slot_rows, plan and fixed_half of ``_arguments``.
    """
    gathered, slot_rows, plan, fixed_half = memory
    topology = workspace.group.topology
    # The specialized kernel pushes the scales with their rows. Those of an AsyncAllGather are gathered already.
    may_specialize = scales is None or not fixed_half
    if may_specialize and launch_specialized.supports(x, weights, config, segment_rows, topology.num_nodes, scales):
        return launch_specialized.prepare(
            order, workspace, memory, num_comm, x, weights, biases, config, segment_rows, scales
        )
    if is_enabled(config):  # here programs that push do not multiply; other ranks may have another number
        num_comm = min(num_comm, num_pushing(topology.world_size))
    rows, dtype = topology.world_size * x.shape[0], out_dtype_of(x, scales)
    ys = [output_spec(x, rows, weight.shape[0], dtype=dtype) for weight in weights]
    pieces, turns = _count(x, weights, num_comm, topology, config)
    programs, late = _programs(x, weights, pieces, num_comm, topology, config)
    args, constants = _arguments(
        workspace.ctx, x, gathered, weights, biases, ys, slot_rows, plan, num_comm, fixed_half, config, late,
        segment_rows, scales,
    )
    constants["trace_ptr"] = recorder.buffer(x.device, pieces, turns)
    operands = (x, *weights, *biases, *gemm_operands.scale_operands(scales))
    fixed = (workspace.ctx, gathered[0])
    return Launch(order, _kernel(topology.num_nodes), (programs,), args, constants, operands, ys, fixed)


def _fields(x, weights, segment_rows, scales=None):
    """Return ``problem_fields`` for any number of weights."""
    fields = problem_fields(x, weights[0], scales)
    if len(weights) > 1:
        fields["N/W"] = ", ".join(str(weight.shape[0]) for weight in weights)
    if segment_rows != x.shape[0]:
        fields["rows of a segment"] = segment_rows
    return fields


@whole_call
def _launch_with_gather(x, weights, biases, group, config, keep_gathered, segment_rows, scales=None):
    """Launch the kernel on the memory of an AsyncAllGather, for the copy engine or because the caller reads it later.

    The scales of scaled operands are gathered first, by a launch of their own. Returns as ``launch_several``.
    """
    if scales is not None:
        scales = gathered_scales(x, scales, group)
    if config.transport == "one_shot":
        config = _push_config(config)  # "one_shot" does not keep the gathered x
    copies = config.transport == "copy_engine"
    fields = with_config(_fields(x, weights, segment_rows, scales), config)
    chunk_rows = config.chunk_tiles * config.tiles.block_m
    num_nodes = group_state(group).topology.num_nodes
    gather = AsyncAllGather(
        "ag_gemm", fields, x, group, chunk_rows, copies,
        launch_specialized.num_slices(x.shape[1], config, num_nodes),
        launch_specialized.num_flags(*x.shape, group.size(), config, num_nodes),
    )
    gather.begin()
    if copies:
        gather.copy(own=keep_gathered)
    count = len(weights)
    operands = x, *weights, *biases, *gemm_operands.scale_operands(scales)
    key = "tiles", config, segment_rows, count, gather.plan, gemm_operands.dot_precision(x.dtype), scales and scales.key

    def prepare(x, *rest):
        given = None if scales is None else scales._replace(x=rest[-2], weight=rest[-1])
        return _prepare_tiles(gather, x, rest[:count], rest[count : 2 * count], config, segment_rows, given)

    ys = launch_cached(WithinCall(gather.workspace), key, operands, prepare)
    if x.shape[1] and all(weight.shape[0] for weight in weights):  # the tiles have waited for all chunks
        gather.mark_received()
    if keep_gathered:
        return ys, gather
    gather.close()
    return ys, None


def _prepare_tiles(gather, x, weights, biases, config, segment_rows, scales):
    """Return the Launch of the kernel on the memory of an AsyncAllGather."""
    workspace, all_rows = gather.workspace, gather.world_size * gather.slot_rows
    memory = (rows_of_buffer(workspace, x), 1, all_rows, all_rows * x.shape[1]), gather.slot_rows, gather.plan, True
    num_comm = 0 if config.transport == "copy_engine" else config.num_comm_sms
    order = WithinCall(workspace)
    return _launch_of(order, workspace, memory, num_comm, x, weights, biases, config, segment_rows, scales)


def _count(x, weights, num_comm, topology, config):
    """Return (number of work items, maximum number of trace events of an item that sends)."""
    tiles = config.tiles
    comm, turns = _comm_pieces(num_comm, num_chunks(x.shape[0], config), topology)
    if topology.num_nodes == 1:
        return comm + topology.world_size * sum(tiles.count(x.shape[0], weight.shape[0]) for weight in weights), turns
    tiles_m, tiles_n = cdiv(x.shape[0], tiles.block_m), cdiv(weights[0].shape[0], tiles.block_n)
    remote = (topology.world_size - 1) * num_chunks(x.shape[0], config) * config.chunk_tiles * tiles_n
    return comm + tiles_m * tiles_n + remote, turns


def _programs(x, weights, pieces, num_comm, topology, config):
    """Return (number of programs of a launch with ``pieces`` work items, (num_late, first_late) of the kernel)."""
    if topology.num_nodes > 1:
        return min(pieces, gpu.resident_programs(x.device, config.tiles, x.dtype)), None
    fit = gpu.resident_programs(x.device, config.tiles, x.dtype, gpu.MOST_REGISTERS)
    tiles, on_time = pieces - num_comm, max(fit - num_comm, 1)
    first_late = _rounds_of_push(x, weights, num_comm, topology.world_size, config) if num_comm else 0
    if not num_comm or first_late * on_time >= tiles:
        return num_comm + min(on_time, tiles), (0, 0)
    return num_comm + on_time + num_comm, (num_comm, first_late)


def _rounds_of_push(x, weights, num_comm, world_size, config):
    """Return in how many rounds of tiles the programs that push finish, by the cost model."""
    rates = hardware(x.device, x.dtype)
    rows, k = x.shape
    pushed = (world_size - 1) * rows * k * x.element_size() / push_rate(num_comm, rates)
    n = sum(weight.shape[0] for weight in weights)
    _, tile = product_s(world_size * rows, n, k, x.dtype, config.tiles, rates.num_sms, rates)
    return max(1, math.ceil(pushed / tile))
