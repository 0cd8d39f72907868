"""Launch the forward kernel of ag_attention, or compile it ahead of time."""

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.attention.ag_attention.config import AgAttentionConfig
    from tdkernels.symm.workspace import Workspace

COPY_WORDS = 4096  # words copied per step of a push


def mask_of(causal: bool, sharding: str) -> int:
    """Return ALL, CONTIGUOUS or ZIGZAG, as an int."""
    return ALL.value if not causal else ZIGZAG.value if sharding == "zigzag" else CONTIGUOUS.value


def straddles(rows: int, block_k: int, causal: bool, sharding: str) -> bool:
    """Return whether a block of keys overlaps both pieces of a rank. The second piece may not have been sent."""
    return causal and sharding == "zigzag" and (rows + 1) // 2 % block_k != 0


def problem_fields(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sharding: str, scale: float
) -> dict[str, Any]:
    """Return the properties of a call that must be the same on all ranks."""
    return {
        "B": q.shape[0], "S/W": q.shape[1], "Hq": q.shape[2], "Hkv": k.shape[2], "D": q.shape[3], "Dv": v.shape[3],
        "dtype": str(q.dtype), "causal": causal, "sharding": sharding, "scale": scale,
    }


def uses_tma(*tensors: torch.Tensor) -> bool:
    """Return whether tensors [B, S, H, D] are loaded through tensor descriptors."""
    # Only for 16-bit types does a descriptor load have the shared-memory layout that wgmma needs.
    fit = all(tensor.element_size() == 2 and tensor.shape[3] % 8 == 0 for tensor in tensors)
    return fit and gpu.has_tma(tensors[0].device)


def width_of(size: int) -> int:
    """Return the block size for ``size`` elements of a head: a power of two of at least 16."""
    return max(16, next_power_of_2(size))


def widths_of(k: torch.Tensor, v: torch.Tensor) -> tuple[int, int]:
    """Return the block sizes (block_d, block_dv) for heads of keys and queries, and of values and outputs.

    On Hopper, block_dv is at least min(block_d, 64) for 16-bit types, because of a bug in ptxas 12.8, which Triton
    ships: if values are narrower than keys, ptxas reads the shared-memory address of the second 16 rows of the values
    from an uninitialized register.
    """
    wide, narrow = width_of(k.shape[3]), width_of(v.shape[3])
    if k.element_size() == 2 and gpu.capability(k.device)[0] == 9:
        narrow = max(narrow, min(wide, 64))
    return wide, narrow


def shard_descriptor(x: torch.Tensor, block: int, width: int) -> TensorDescriptor:
    """Return a descriptor of a tensor [B, S, H, D] as [1, B, H, S, D], for loads of ``block`` rows of one head."""
    batch, rows, heads, d = x.shape
    shape, strides = [1, batch, heads, rows, d], [x.numel(), rows * heads * d, d, heads * d, 1]
    return TensorDescriptor(x, shape, strides, [1, 1, 1, block, width])


def gathered_descriptor(
    workspace: "Workspace | None", first_byte: int, like: torch.Tensor, ranks: int, block: int, width: int
) -> TensorDescriptor:
    """Return a descriptor of the gathered tensors in both halves of the workspace, as [2, W * B, H, S, D].

    The tensor of each rank has the shape of ``like``. The tensors begin at byte ``first_byte`` of a half. Without a
    workspace, for compilation, the descriptor describes ``like``.
    """
    if workspace is None:
        return shard_descriptor(like, block, width)
    batch, rows, heads, d = like.shape
    size = like.element_size()
    data = workspace.buffer.tensor(workspace.rank)[workspace.data_offset + first_byte :].view(like.dtype)
    shape = [2, ranks * batch, heads, rows, d]
    strides = [workspace.half_bytes // size, rows * heads * d, d, heads * d, 1]
    return TensorDescriptor(data.as_strided((1, d), (d, 1)), shape, strides, [1, 1, 1, block, width])


def slot_size(x: torch.Tensor) -> int:
    """Return the bytes of a tensor's slot in the workspace; see ``attention.tile.slot_bytes``."""
    return round_up(x.numel() * x.element_size(), 16)


def resident_programs(device: torch.device, num_warps: int) -> int:
    """Return an upper bound of the programs that run at a time, by their threads. More than fit do no harm."""
    return gpu.num_sms(device) * max(1, 8 // num_warps)


def prepare_keys(
    workspace: "Workspace", k: torch.Tensor, v: torch.Tensor, config: "AgAttentionConfig", fields: dict[str, Any]
) -> tuple[int, int]:
    """Return (plan id, number of programs that push) of a launch that gathers keys and values in a workspace."""
    ranks = workspace.world_size
    num_chunks = cdiv(k.shape[0] * k.shape[1], config.chunk_rows)
    half_bytes = ranks * (slot_size(k) + slot_size(v)) if ranks > 1 else 256
    plan = workspace.prepare("ag_attention", fields, half_bytes, ranks * num_chunks + ranks)
    return plan, config.num_comm_sms if ranks > 1 else 0


def key_descriptors(
    workspace: "Workspace | None", k: torch.Tensor, v: torch.Tensor, ranks: int, block_k: int
) -> tuple[TensorDescriptor, TensorDescriptor, TensorDescriptor, TensorDescriptor]:
    """Return descriptors of k, v, gathered k and gathered v. With one rank, k and v take the place of the latter."""
    wide, narrow = widths_of(k, v)
    own = shard_descriptor(k, block_k, wide), shard_descriptor(v, block_k, narrow)
    if ranks == 1:
        return *own, *own
    far_v = gathered_descriptor(workspace, ranks * slot_size(k), v, ranks, block_k, narrow)
    return *own, gathered_descriptor(workspace, 0, k, ranks, block_k, wide), far_v


def bases_of(descriptors: Iterable[TensorDescriptor | None]) -> list[torch.Tensor]:
    """Return the tensors behind descriptors, for ``Launch``, which distinguishes workspace memory from operands."""
    return [descriptor.base for descriptor in descriptors if descriptor is not None]


def _descriptors(workspace, q, k, v, ranks, config):
    """Return descriptors of q, k, v, gathered k and gathered v, or None for each if the kernel does not use TMA."""
    if not uses_tma(q, k, v):
        return (None,) * 5
    of_queries = shard_descriptor(q, config.block_q, widths_of(k, v)[0])
    return of_queries, *key_descriptors(workspace, k, v, ranks, config.block_k)


def tile_of(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sharding: str, block_q: int, block_k: int,
    stages: int,
) -> AttentionTile:
    """Return the AttentionTile that a kernel is compiled for."""
    return AttentionTile(
        q.shape[3], v.shape[3], *widths_of(q, v), block_q, block_k, mask_of(causal, sharding),
        straddles(q.shape[1], block_k, causal, sharding), q.element_size(), uses_tma(q, k, v),
        gemm_operands.dot_precision(q.dtype), stages,
    )


def _arguments(ctx, q, k, v, o, lse, descriptors, causal, sharding, scale, plan, num_comm, config):
    """Return (arguments of the kernel, its constants)."""
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


def compile(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sharding: str, world_size: int,
    config: "AgAttentionConfig",
) -> None:
    """Compile the kernel that ``launch`` would launch for the same operands into Triton's cache."""
    q, k, v = (gemm_operands.rows_contiguous(x) for x in (q, k, v))
    ctx = torch.empty(1, dtype=torch.int64, device=q.device)
    outputs = q.new_empty(1), q.new_empty(1, dtype=torch.float32)
    descriptors = _descriptors(None, q, k, v, world_size, config)
    args, constants = _arguments(ctx, q, k, v, *outputs, descriptors, causal, sharding, 1.0, 0, 1, config)
    ag_attention_kernel.warmup(*args, grid=(1,), **constants)


def launch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sharding: str, scale: float,
    group: "dist.ProcessGroup", config: "AgAttentionConfig",
) -> list[torch.Tensor]:
    """Launch the kernel on contiguous, non-empty q, k and v [B, S / W, ·, ·], and return [o, lse].

    ``config`` is complete.
    """
    return launch_cached(*_call(q, k, v, causal, sharding, scale, group, config))


def bind_call(
    given: Sequence[torch.Tensor], q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, causal: bool, sharding: str,
    scale: float, group: "dist.ProcessGroup", config: "AgAttentionConfig",
) -> Launch | None:
    """Return the Launch of ``launch`` with these operands, or None if one of them is a copy of a ``given`` one."""
    return bind_uncopied(given, *_call(q, k, v, causal, sharding, scale, group, config))


def _call(q, k, v, causal, sharding, scale, group, config):
    """Return the arguments of ``launch_cached``."""
    workspace = get_workspace(group, q.device, "ag_attention")
    call = causal, sharding, scale, config
    key = "o", *call, gemm_operands.dot_precision(q.dtype)
    return workspace, key, (q, k, v), lambda *of: _prepare(workspace, *of, *call)


def _prepare(workspace, q, k, v, causal, sharding, scale, config):
    ranks, (batch, rows, heads, _) = workspace.world_size, q.shape
    fields = with_config(problem_fields(q, k, v, causal, sharding, scale), config)
    plan, num_comm = prepare_keys(workspace, k, v, config, fields)
    outputs = output_spec(q, *q.shape[:3], v.shape[3]), output_spec(q, *q.shape[:3], dtype=torch.float32)
    descriptors = _descriptors(workspace, q, k, v, ranks, config)
    args, constants = _arguments(
        workspace.ctx, q, k, v, *outputs, descriptors, causal, sharding, scale, plan, num_comm, config
    )
    pieces = num_comm + cdiv(rows, config.block_q) * batch * heads + (ranks > 1)
    far_chunks = (ranks - 1) * cdiv(batch * rows, config.chunk_rows)
    constants["trace_ptr"] = recorder.buffer(q.device, pieces, 2 * far_chunks)
    grid = (min(pieces, resident_programs(q.device, config.num_warps)),)
    fixed = workspace.ctx, *bases_of(descriptors[-2:])
    return Launch(workspace, ag_attention_kernel, grid, args, constants, (q, k, v), outputs, fixed)
