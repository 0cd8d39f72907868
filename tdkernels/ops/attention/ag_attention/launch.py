"""Launch the kernel of ag_attention, or compile it ahead of time."""

import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from tdkernels.ops.attention.ag_attention.kernel import ag_attention_kernel
from tdkernels.ops.attention.tile import ALL, CONTIGUOUS, LOG2_E, ZIGZAG, AttentionTile
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import with_config
from tdkernels.rounding import cdiv, next_power_of_2, round_up
from tdkernels.runtime import gpu, recorder
from tdkernels.runtime.kernel_launch import Launch, bind_uncopied, launch_cached, output_spec
from tdkernels.symm import get_workspace

COPY_WORDS = 4096


def mask_of(causal, sharding):
    return ALL.value if not causal else ZIGZAG.value if sharding == "zigzag" else CONTIGUOUS.value


def straddles(rows, block_k, causal, sharding):
    """Whether a block of keys overlaps both pieces of a rank: the second piece may not have been sent."""
    return causal and sharding == "zigzag" and (rows + 1) // 2 % block_k != 0


def problem_fields(q, k, v, causal, sharding, scale):
    """What must be the same on all ranks before a config is chosen."""
    return {
        "B": q.shape[0], "S/W": q.shape[1], "Hq": q.shape[2], "Hkv": k.shape[2], "D": q.shape[3], "Dv": v.shape[3],
        "dtype": str(q.dtype), "causal": causal, "sharding": sharding, "scale": scale,
    }


def uses_tma(*tensors):
    """Whether tensor descriptors can be made for tensors [B, S, H, D]."""
    # The descriptor takes the shared-memory layout that wgmma wants for 16-bit types only.
    fit = all(tensor.element_size() == 2 and tensor.shape[3] % 8 == 0 for tensor in tensors)
    return fit and gpu.has_tma(tensors[0].device)


def width_of(size):
    """The block that takes a head's elements."""
    return max(16, next_power_of_2(size))


def widths_of(k, v):
    """The blocks that take the elements of a head of keys and queries, and of values and what comes of them.

    For Hopper ptxas 12.8, which Triton brings, leaves out where narrow values lie in shared memory when those of keys
    are wider: it takes the address of their second 16 rows from a register that nothing has written.
    """
    wide, narrow = width_of(k.shape[3]), width_of(v.shape[3])
    if k.element_size() == 2 and gpu.capability(k.device)[0] == 9:
        narrow = max(narrow, min(wide, 64))
    return wide, narrow


def shard_descriptor(x, block, width):
    """Of a tensor [B, S, H, D], as [1, B, H, S, D]."""
    batch, rows, heads, d = x.shape
    shape, strides = [1, batch, heads, rows, d], [x.numel(), rows * heads * d, d, heads * d, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, 1, block, width])


def gathered_descriptor(workspace, first_byte, like, ranks, block, width):
    """Of all ranks' tensors ``like`` in both halves, as [2, W * B, H, S, D]; of some memory without a workspace."""
    if workspace is None:
        return shard_descriptor(like, block, width)
    batch, rows, heads, d = like.shape
    size = like.element_size()
    data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset + first_byte :].view(like.dtype)
    shape = [2, ranks * batch, heads, rows, d]
    strides = [workspace.half_bytes // size, rows * heads * d, d, heads * d, 1]
    return TensorDescriptor(data.as_strided((1, d), (d, 1)), shape, strides, [1, 1, 1, block, width])


def slot_size(x):
    """Bytes of a tensor's slot; see ``attention.tile.slot_bytes``."""
    return round_up(x.numel() * x.element_size(), 16)


def resident_programs(device, num_warps):
    """As many programs as there may be at a time, by their threads; more than fit do no harm."""
    return gpu.num_sms(device) * max(1, 8 // num_warps)


def prepare_keys(workspace, k, v, config, fields):
    """The plan of a launch for which keys and values go through a workspace, and how many programs push."""
    ranks = workspace.world_size
    num_chunks = cdiv(k.shape[0] * k.shape[1], config.chunk_rows)
    half_bytes = ranks * (slot_size(k) + slot_size(v)) if ranks > 1 else 256
    plan = workspace.prepare("ag_attention", fields, half_bytes, ranks * num_chunks + ranks)
    return plan, config.num_comm_sms if ranks > 1 else 0


def key_descriptors(workspace, k, v, ranks, block_k):
    """Descriptors of k and v, and of those of all ranks; on one rank there are none but ours."""
    wide, narrow = widths_of(k, v)
    own = shard_descriptor(k, block_k, wide), shard_descriptor(v, block_k, narrow)
    if ranks == 1:
        return *own, *own
    far_v = gathered_descriptor(workspace, ranks * slot_size(k), v, ranks, block_k, narrow)
    return *own, gathered_descriptor(workspace, 0, k, ranks, block_k, wide), far_v


def bases_of(descriptors):
    """What they describe, for ``Launch``: those of gathered memory, or of operands, which are told apart there."""
    return [descriptor.base for descriptor in descriptors if descriptor is not None]


def _descriptors(workspace, q, k, v, ranks, config):
    """Of q, k and v, and of all ranks' k and v; None where the kernel takes none."""
    if not uses_tma(q, k, v):
        return (None,) * 5
    of_queries = shard_descriptor(q, config.block_q, widths_of(k, v)[0])
    return of_queries, *key_descriptors(workspace, k, v, ranks, config.block_k)


def tile_of(q, k, v, causal, sharding, block_q, block_k, stages):
    """The AttentionTile that a kernel is compiled for."""
    return AttentionTile(
        q.shape[3], v.shape[3], *widths_of(q, v), block_q, block_k, mask_of(causal, sharding),
        straddles(q.shape[1], block_k, causal, sharding), q.element_size(), uses_tma(q, k, v),
        gemm_operands.dot_precision(q.dtype), stages,
    )


def _arguments(ctx, q, k, v, o, lse, descriptors, causal, sharding, scale, plan, num_comm, config):
    """The kernel's arguments."""
    batch, rows, heads, _ = q.shape
    args = (
        ctx, q, k, v, o, lse, *descriptors, scale * LOG2_E.value, batch, rows, heads, k.shape[2], plan, num_comm,
        config.chunk_rows,
    )
    constants = {
        "TILE": tile_of(q, k, v, causal, sharding, config.block_q, config.block_k, config.num_stages),
        "COPY_WORDS": COPY_WORDS, "trace_ptr": None, "num_warps": config.num_warps, "num_stages": config.num_stages,
    }
    return args, constants


def compile(q, k, v, causal, sharding, world_size, config):
    """Compile what ``launch`` with the same operands would launch, into Triton's cache; launches nothing."""
    q, k, v = (gemm_operands.rows_contiguous(x) for x in (q, k, v))
    ctx = torch.empty(1, dtype=torch.int64, device=q.device)
    made = q.new_empty(1), q.new_empty(1, dtype=torch.float32)
    descriptors = _descriptors(None, q, k, v, world_size, config)
    args, constants = _arguments(ctx, q, k, v, *made, descriptors, causal, sharding, 1.0, 0, 1, config)
    ag_attention_kernel.warmup(*args, grid=(1,), **constants)


def launch(q, k, v, causal, sharding, scale, group, config):
    """(o, lse) of contiguous q, k and v [B, S / W, ·, ·] that are not empty; ``config`` is complete."""
    return launch_cached(*_call(q, k, v, causal, sharding, scale, group, config))


def bind_call(given, q, k, v, causal, sharding, scale, group, config):
    """The Launch of ``launch`` with these operands, or None if one is a copy of what was ``given``."""
    return bind_uncopied(given, *_call(q, k, v, causal, sharding, scale, group, config))


def _call(q, k, v, causal, sharding, scale, group, config):
    """The arguments of ``launch_cached``."""
    workspace = get_workspace(group, q.device, "ag_attention")
    call = causal, sharding, scale, config
    key = "o", *call, gemm_operands.dot_precision(q.dtype)
    return workspace, key, (q, k, v), lambda *of: _prepare(workspace, *of, *call)


def _prepare(workspace, q, k, v, causal, sharding, scale, config):
    ranks, (batch, rows, heads, _) = workspace.world_size, q.shape
    fields = with_config(problem_fields(q, k, v, causal, sharding, scale), config)
    plan, num_comm = prepare_keys(workspace, k, v, config, fields)
    made = output_spec(q, *q.shape[:3], v.shape[3]), output_spec(q, *q.shape[:3], dtype=torch.float32)
    descriptors = _descriptors(workspace, q, k, v, ranks, config)
    args, constants = _arguments(
        workspace.ctx, q, k, v, *made, descriptors, causal, sharding, scale, plan, num_comm, config
    )
    pieces = num_comm + cdiv(rows, config.block_q) * batch * heads + (ranks > 1)
    far_chunks = (ranks - 1) * cdiv(batch * rows, config.chunk_rows)
    constants["trace_ptr"] = recorder.buffer(q.device, pieces, 2 * far_chunks)
    grid = (min(pieces, resident_programs(q.device, config.num_warps)),)
    fixed = workspace.ctx, *bases_of(descriptors[-2:])
    return Launch(workspace, ag_attention_kernel, grid, args, constants, (q, k, v), made, fixed)
