"""The kernel behind AG-GEMM: some of the work is pushing our shard to all peers, the rest multiplies what has arrived.

Signal number ``source * num_chunks + chunk`` of a half is raised by ``source`` when that chunk of its shard stands in
our memory; the waiters are the tiles made of its rows.
"""

from dataclasses import dataclass, replace

import torch
import triton.language as tl

from tdkernels import lang as td
from tdkernels.ops.collectives.async_all_gather import Gather, rows_of_buffer, slot_rows_of
from tdkernels.ops.collectives.kernel_async_all_gather import push_shard
from tdkernels.ops.common import gemm_operands, small_m_gemm
from tdkernels.ops.common.config import METHODS, text_of
from tdkernels.ops.common.gemm_operands import launch_product
from tdkernels.ops.common.gemm_tile import as_aligned, gemm_tile, store_rows, swizzle, with_bias
from tdkernels.ops.common.tile_config import Tiles, tiles_of_product
from tdkernels.ops.dense.ag_gemm import kernel_multinode as nodes
from tdkernels.ops.dense.ag_gemm import kernel_one_shot as one_shot
from tdkernels.ops.dense.ag_gemm import pipelined as parts
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, to_be_made
from tdkernels.symm import get_workspace
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call

_COPY_WORDS = 4096
# From here on one copy a peer is faster than programs that push: it takes no multiprocessor (4 H200).
_LARGE_SHARD_BYTES = 64 << 20
# Up to so many rows of all ranks the weight counts most, and is read once.
_ONE_SHOT_ROWS = {"cpu": 16, "cuda": 256}


@dataclass(frozen=True)
class AgGemmConfig:
    """How ``ag_gemm`` runs.

    method:          "fused"; "parts": torch's GEMM of a part of the rows at a time, as the copy engine brings them; or
                     "torch": a plain all-gather, then a plain GEMM
    tiles:           the tile of the product, see ``Tiles``; None takes the default for the device and shape
    transport:       "push" (by programs); "copy_engine"; "one_shot": by programs, and nothing is multiplied before
                     all of it is there, for few rows; in a group on several nodes it is always push
    num_comm_sms:    programs that push at the same time, before they multiply like the others; not for copy_engine
    chunk_tiles:     tile rows that travel together under one signal; not for one_shot
    split_k:         programs that share the K of one tile; one_shot only
    pieces:          in which a shard travels and is multiplied; parts only, which takes none of the others
    """

    method: str = "fused"
    tiles: Tiles | None = None
    transport: str = "push"
    num_comm_sms: int = 24
    chunk_tiles: int = 1
    split_k: int = 1
    pieces: int = 1

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in METHODS:
            return f'method must be "fused", "parts" or "torch", not {self.method!r}'
        if self.method == "torch":
            return None  # takes none of the rest
        if self.pieces < 1:
            return f"pieces must be at least 1, not {self.pieces}"
        if self.method == "parts":
            return None  # takes no others
        if self.transport not in ("push", "copy_engine", "one_shot"):
            return f'transport must be "push", "copy_engine" or "one_shot", not {self.transport!r}'
        if self.num_comm_sms < 1:
            return f"num_comm_sms must be at least 1, not {self.num_comm_sms}"
        if device.type == "cuda" and self.num_comm_sms >= gpu.num_sms(device):
            return f"num_comm_sms must leave some of the {gpu.num_sms(device)} free, not be {self.num_comm_sms}"
        for name in ("chunk_tiles", "split_k"):
            if getattr(self, name) < 1:
                return f"{name} must be at least 1, not {getattr(self, name)}"
        return self.tiles.illegal(device, dtype) if self.tiles is not None else None


def default_config(rows, n, k, dtype, device, world_size, num_nodes=1):
    """The config for operands [rows, K] and [n, K] of a shape that nobody has tuned."""
    if rows * world_size <= _ONE_SHOT_ROWS[device.type] and num_nodes == 1:
        tiles, split_k = small_m_gemm.default_tiles(rows * world_size, n, k, dtype, device)
        num_comm = 2 if device.type == "cpu" else 24
        return AgGemmConfig(tiles=tiles, transport="one_shot", num_comm_sms=num_comm, split_k=split_k)
    tiles = tiles_of_product(rows, n, world_size, 0.5, dtype, device)
    if device.type == "cpu":
        return AgGemmConfig(tiles=tiles, num_comm_sms=2)
    if rows * k * dtype.itemsize >= _LARGE_SHARD_BYTES and num_nodes == 1:
        return AgGemmConfig(tiles=tiles, transport="copy_engine", chunk_tiles=-(-rows // tiles.block_m))
    return AgGemmConfig(tiles=tiles, num_comm_sms=24)


def default_config_for(x, weight, world_size):
    """``default_config`` of operands [M / W, K] and [N / W, K]."""
    return default_config(x.shape[0], *weight.shape, x.dtype, x.device, world_size)


@td.jit
def _tile_by_arrival(tile, me, ranks, tiles_m, tiles_n, group_m, chunk_tiles):
    """Which shard, tile row and tile column: own shard first, then chunk by chunk as the sources push them."""
    own_tiles = tiles_m * tiles_n
    source = me
    pid_m, pid_n = swizzle(tile, tiles_m, tiles_n, group_m)
    if tile >= own_tiles:
        remote = tile - own_tiles
        per_chunk = chunk_tiles * tiles_n
        chunk = remote // (per_chunk * (ranks - 1))
        step = remote % (per_chunk * (ranks - 1)) // per_chunk + 1
        source = (me + ranks - step) % ranks
        within = remote % per_chunk
        pid_m = chunk * chunk_tiles + within % chunk_tiles
        pid_n = within // chunk_tiles
    return source, pid_m, pid_n


# Compiled once for a tile, whatever the shape, plan and transport: that is what makes tuning cheap.
@td.jit(do_not_specialize=[
    "M_shard", "N", "K", "stride_w", "slot_rows", "plan", "num_comm", "chunk_tiles", "group_m",
])  # fmt: skip
def ag_gemm_kernel(
    ctx, x_ptr, x_desc, gathered_desc, w_ptr, w_desc, bias_ptr, y_ptr,
    M_shard, N, K, stride_w, slot_rows, plan, num_comm, chunk_tiles, group_m,
    COPY_WORDS: tl.constexpr, FIXED_HALF: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    ELEM_BYTES: tl.constexpr, ALIGNED: tl.constexpr, HAS_BIAS: tl.constexpr, USE_TMA: tl.constexpr,
    W_IS_KN: tl.constexpr, PRECISION: tl.constexpr, trace_ptr=None,
):  # fmt: skip
    """Pieces 0 … num_comm - 1 push our shard to the peers; each later one computes one tile, in order of arrival.

    Programs take them by tickets (``lang.work_queue``) until none is left.

    FIXED_HALF: a ``begin_kernel`` has opened the call; the gathered rows, our own included, stay in half 0 for the
    launches that follow. num_comm may be 0 then, when somebody else pushes.
    """
    N = as_aligned(N, ALIGNED)
    K = as_aligned(K, ALIGNED)
    stride_w = as_aligned(stride_w, ALIGNED)
    me = td.rank(ctx)
    ranks = td.num_ranks(ctx)
    if FIXED_HALF:  # behind the barrier of a Gather, which has counted this call
        half = tl.full((), 0, tl.int32)
        signal = td.signal_of(ctx, td.epoch(ctx), plan)
    else:
        epoch, half, signal = td.call(ctx, plan)
    tiles_m = (M_shard + BLOCK_M - 1) // BLOCK_M
    tiles_n = (N + BLOCK_N - 1) // BLOCK_N
    num_chunks = (tiles_m + chunk_tiles - 1) // chunk_tiles
    row_bytes = tl.cast(K, tl.int64) * ELEM_BYTES
    slot_bytes = slot_rows * row_bytes

    pieces = num_comm + tiles_n * (tiles_m + (ranks - 1) * num_chunks * chunk_tiles)

    piece = td.ticket_of(td.take_first_ticket(ctx, signal))
    while piece < pieces:
        trace = (trace_ptr, piece)
        td.mark(trace, "starts")
        if piece < num_comm:
            push_shard(
                ctx, x_ptr.to(tl.int64), half, signal, M_shard * row_bytes, chunk_tiles * BLOCK_M * row_bytes,
                num_chunks, slot_bytes, piece, num_comm, COPY_OWN=FIXED_HALF, COPY_WORDS=COPY_WORDS, trace=trace,
            )  # fmt: skip
            answer = td.take_ticket(ctx)
        else:
            source, pid_m, pid_n = _tile_by_arrival(piece - num_comm, me, ranks, tiles_m, tiles_n, group_m, chunk_tiles)
            if pid_m < tiles_m:  # the last chunk of a shard may have fewer tile rows
                row = pid_m * BLOCK_M
                col = pid_n * BLOCK_N
                # Two loops in a row, of which one is empty: in two branches each would get shared memory of its own.
                own_k = tl.where(source == me, K, 0)
                td.mark(trace, "multiplies", source)
                acc = tl.full((BLOCK_M, BLOCK_N), 0.0, tl.float32)
                acc = gemm_tile(
                    acc, x_ptr, x_desc, 0, row, M_shard, w_ptr, w_desc, col, stride_w, N, own_k, K,
                    BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, W_IS_KN, PRECISION,
                )  # fmt: skip
                # A multiple of 16: see slot_rows_of.
                slot = td.data_at(ctx, half, me) + source.to(tl.int64) * slot_bytes
                if source != me:
                    td.mark(trace, "waits", source)
                    # producer: push_shard of the source, or the copy engine
                    signal_ptr = td.signal_at(ctx, half, source * num_chunks + pid_m // chunk_tiles)
                    seen = td.wait_plan(ctx, signal_ptr, signal, source, FOR_TMA=USE_TMA)
                    slot = td.consume_token(slot, seen)
                    td.mark(trace, "multiplies", source)
                acc = gemm_tile(
                    acc, td.pointer_to(slot, x_ptr.dtype.element_ty), gathered_desc, half,
                    row + source * slot_rows * USE_TMA, M_shard, w_ptr, w_desc, col, stride_w, N, K - own_k, K,
                    BLOCK_M, BLOCK_N, BLOCK_K, USE_TMA, W_IS_KN, PRECISION,
                )  # fmt: skip
                answer = td.take_ticket(ctx)
                td.mark(trace, "stores")
                offs_n = col + tl.arange(0, BLOCK_N)
                acc = with_bias(acc, bias_ptr, offs_n, N, HAS_BIAS)
                y = td.from_float32(acc, y_ptr.dtype.element_ty)
                y_rows = y_ptr + source.to(tl.int64) * M_shard * N
                store_rows(y_rows, y, row + tl.arange(0, BLOCK_M), offs_n, M_shard, N)
            else:
                answer = td.take_ticket(ctx)
        td.mark(trace, "finishes")
        piece = td.ticket_of(answer)
        td.mark(trace, "ends")
    td.finish(ctx, ADVANCE=FIXED_HALF == 0)


def problem_fields(x, weight):
    """What must be the same on all ranks before a config is chosen."""
    return {"M/W": x.shape[0], "K": x.shape[1], "N/W": weight.shape[0], "dtype": str(x.dtype)}


def plan_fields(x, weight, config):
    """What must be the same on all ranks."""
    return {**problem_fields(x, weight), "config": text_of(config)}


def _arguments(ctx, x, gathered, weight, bias, y, slot_rows, plan, num_comm, fixed_half, config):
    """The kernel's arguments; ``gathered`` is (rows as [1, K], planes, rows of a plane, elements between planes)."""
    tiles = config.tiles
    rows, k = x.shape
    n = weight.shape[0]
    weight, stride_w, x_desc, w_desc, constants = gemm_operands.product(x, weight, bias, tiles)
    gathered_desc = None
    if constants["USE_TMA"]:
        gathered_desc = gemm_operands.rows_descriptor(*gathered, tiles.block_m, tiles.block_k)
    args = (
        ctx, x, x_desc, gathered_desc, weight, w_desc, bias, y,
        rows, n, k, stride_w, slot_rows, plan, num_comm, config.chunk_tiles, tiles.group_m,
    )  # fmt: skip
    return args, {"COPY_WORDS": _COPY_WORDS, "FIXED_HALF": fixed_half, **constants}


def compile(x, weight, bias, world_size, config, num_nodes=1):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    if x.device.type == "cpu" or config.method != "fused":
        return  # interpreted; nothing of it depends on the config
    config = _that_reaches(config, num_nodes)
    if config.transport == "one_shot":
        return one_shot.compile(x, weight, bias, config)
    x = gemm_operands.rows_contiguous(x)
    ctx = torch.empty(1, dtype=torch.int64, device=x.device)
    y = x.new_empty(1, weight.shape[0])
    fixed_half = config.transport == "copy_engine"
    args, constants = _arguments(
        ctx, x, (x, 1, x.shape[0], x.numel()), weight, bias, y, x.shape[0], 0, 0, fixed_half, config
    )
    _kernel(num_nodes).warmup(*args, grid=(1,), **constants)


def _kernel(num_nodes):
    return ag_gemm_kernel if num_nodes == 1 else nodes.ag_gemm_nodes_kernel


def _comm_pieces(num_comm, num_chunks, topology):
    """How many pieces send to others, and how many things one of them does."""
    if topology.num_nodes > 1:
        return nodes.comm_pieces(num_comm, num_chunks, topology)
    return num_comm, -(-(topology.world_size - 1) * num_chunks // num_comm) if num_comm else 0


def _that_reaches(config, num_nodes):
    """The config with a transport that reaches other nodes, which no other than push does, if there are any.

    Chunks for the copy engine are as large as can be; those that programs push are to arrive early.
    """
    return _pushing(config) if num_nodes > 1 else config


def _pushing(config):
    return config if config.transport == "push" else replace(config, transport="push", chunk_tiles=1)


def launch(x, weight, bias, group, config, keep_gathered=False):
    """Launch an overlapping form on 2-D operands; returns y and, if kept, the Gather of x, to be closed."""
    if config.method == "parts":
        return parts.launch(x, weight, bias, group, config, plan_fields(x, weight, config), keep_gathered)
    config = _that_reaches(config, group_state(group).topology.num_nodes)
    if keep_gathered and config.transport == "one_shot":
        config = _pushing(config)  # in a backward; what one_shot gathers is not kept
    if keep_gathered or config.transport == "copy_engine":
        return _launch_beside_gather(*gemm_operands.ready(x, weight, bias), group, config, keep_gathered)
    name = "ag_gemm one shot" if config.transport == "one_shot" else "ag_gemm"
    workspace = get_workspace(group, x.device, name, across_nodes=True)
    y, *_ = launch_product(workspace, x, weight, bias, config, _prepare)
    return y, None


def _prepare(workspace, x, weight, bias, config):
    """The Launch of the kernel that sends its own shard."""
    if config.transport == "one_shot":
        return one_shot.prepare(workspace, x, weight, bias, config, plan_fields(x, weight, config))
    rows, k = x.shape
    ranks = workspace.world_size
    num_chunks = _num_chunks(rows, config)
    slot_rows = slot_rows_of(rows)
    plan = workspace.prepare(
        "ag_gemm", plan_fields(x, weight, config), ranks * slot_rows * k * x.element_size(), ranks * num_chunks
    )
    gathered = rows_of_buffer(workspace, x), 2, ranks * slot_rows, workspace.half_bytes // x.element_size()
    y = to_be_made(x, ranks * rows, weight.shape[0])
    num_comm = config.num_comm_sms
    args, constants = _arguments(workspace.ctx, x, gathered, weight, bias, y, slot_rows, plan, num_comm, False, config)
    topology = workspace.group.topology
    pieces, turns = _count(x, weight, num_comm, topology, config)
    constants["trace_ptr"] = recorder.buffer(x.device, pieces, turns)
    grid = (min(pieces, gpu.resident_programs(x.device, config.tiles, x.dtype)),)
    fixed = workspace.ctx, gathered[0]
    return Launch(workspace, _kernel(topology.num_nodes), grid, args, constants, (x, weight, bias), (y,), fixed)


@whole_call
def _launch_beside_gather(x, weight, bias, group, config, keep_gathered):
    """The same where x is gathered into the memory of a Gather: since it is kept, or as the copy engine sends it."""
    rows, k = x.shape
    copies = config.transport == "copy_engine"
    fields, chunk_rows = plan_fields(x, weight, config), config.chunk_tiles * config.tiles.block_m
    gather = Gather("ag_gemm", fields, x, group, chunk_rows, copies)
    workspace, topology = gather.workspace, gather.topology
    y = x.new_empty(topology.world_size * rows, weight.shape[0])
    gather.begin()
    num_comm = config.num_comm_sms
    if copies:
        gather.copy(own=keep_gathered)
        num_comm = 0
    all_rows = topology.world_size * gather.slot_rows
    gathered = rows_of_buffer(workspace, x), 1, all_rows, all_rows * k
    args, constants = _arguments(
        workspace.ctx, x, gathered, weight, bias, y, gather.slot_rows, gather.plan, num_comm, True, config
    )
    pieces, turns = _count(x, weight, num_comm, topology, config)
    programs = min(pieces, gpu.resident_programs(x.device, config.tiles, x.dtype))
    _kernel(topology.num_nodes)[(programs,)](*args, **constants, trace_ptr=recorder.buffer(x.device, pieces, turns))
    if not keep_gathered:
        gather.close()
    return y, gather


def _num_chunks(rows, config):
    return -(-rows // (config.chunk_tiles * config.tiles.block_m))


def _count(x, weight, num_comm, topology, config):
    """How many pieces of work there are, and how many things one that sends does."""
    tiles, num_chunks = config.tiles, _num_chunks(x.shape[0], config)
    tiles_m, tiles_n = -(-x.shape[0] // tiles.block_m), -(-weight.shape[0] // tiles.block_n)
    remote = (topology.world_size - 1) * num_chunks * config.chunk_tiles * tiles_n
    comm, turns = _comm_pieces(num_comm, num_chunks, topology)
    return comm + tiles_m * tiles_n + remote, turns
