"""GEMM-RS: z = reduce_scatter(x @ weight.T), the reduction hidden behind the product.

    x [M, K / W] on each rank, weight [N, K / W] (columns of the full one)  ->  z [M / W, N]

Schedule (``gemm_rs_kernel``). A rank computes the partial tiles of the rows of rank + 1 first, then those of rank + 2
and so on, and stages them in its own memory. Pieces of work strewn between them forward finished groups of tiles to the
rank that owns the rows and raise one signal for each group there; or, ``transport="direct"`` (``kernel_direct``), each
tile is sent from where it was computed, with a signal of its own. Its own rows come last: each of their tiles waits, in
its epilogue, for the peers' partials of that tile, and adds all partials in fp32 in rank order, so that the result does
not depend on timing. Partials travel in the dtype of x, as those of a plain reduce-scatter do. Call t uses half t mod
2 of the workspace; as with ag_gemm no rank can finish call t + 1 before all have begun it, so there is no barrier.
With ``method="parts"`` (``pipelined``) products are the vendor's, one an owner, beside copies of those before.
Across nodes (``gemm_rs_nodes_kernel``) each node adds its own ranks' partials first, and one sum of them leaves it.

Backward. dx = all_gather(dz) @ weight is an AG-GEMM, which leaves all_gather(dz) behind for dweight and dbias; of large
ones in parts, since its own kernels gather more slowly beside a product when all of it is to be kept.

Example:
    z = tdkernels.gemm_rs(x, weight)            # instead of partial = x @ weight.T; reduce_scatter_tensor(z, partial)
"""

import torch
import torch.nn.functional as F

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config
from tdkernels.ops.common.torch_collectives import reduce_scatter_rows
from tdkernels.ops.dense.backward import gemm_rs_backward
from tdkernels.ops.dense.call import forward, keep_call
from tdkernels.ops.dense.gemm_rs import launch
from tdkernels.ops.dense.gemm_rs.config import GemmRsConfig
from tdkernels.runtime import autograd, torch_op
from tdkernels.runtime.call_cache import lookup_run
from tdkernels.symm import GroupLike, resolve_group


@torch.no_grad()
def gemm_rs_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
) -> torch.Tensor:
    """The specification of ``gemm_rs``, in plain torch.distributed."""
    group = resolve_group(group)
    z = reduce_scatter_rows(F.linear(x, weight), group)
    return z if bias is None else z + bias


# ---- torch.library: what torch.compile sees ----


def run(x, weight, bias, group, config):
    if config.method != "torch":
        return launch.launch(x, weight, bias, group, config)
    return gemm_rs_ref(x, weight, bias, group=group)


def _forward(x, weight, bias, group, config):
    return forward("gemm_rs", launch, run, x, weight, bias, group, config)


def _fake_gemm_rs(x, weight, bias, group, config):
    return x.new_empty(x.shape[0] // torch_op.world_size_by_name(group), weight.shape[0])


def _fake_gemm_rs_backward(dz, x, weight, need_dx, need_dweight, need_dbias, group, config):
    return (
        x.new_empty(x.shape if need_dx else (0,)),
        x.new_empty(weight.shape if need_dweight else (0,)),
        x.new_empty(weight.shape[:1] if need_dbias else (0,)),
    )


torch_op.register(
    "gemm_rs(Tensor x, Tensor weight, Tensor? bias, str group, str config) -> Tensor",
    _forward,
    _fake_gemm_rs,
)
torch_op.register(
    "gemm_rs_backward(Tensor dz, Tensor x, Tensor weight, bool need_dx, bool need_dweight, bool need_dbias, "
    "str group, str config) -> (Tensor, Tensor, Tensor)",
    gemm_rs_backward,
    _fake_gemm_rs_backward,
)


class _GemmRs(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, config):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.config = group, config
        return torch.ops.tdkernels.gemm_rs(x, weight, bias, group, config)

    @staticmethod
    def backward(ctx, dz):
        autograd.reject_second_derivatives("gemm_rs")
        x, weight = ctx.saved_tensors
        need = ctx.needs_input_grad[:3]
        grads = torch.ops.tdkernels.gemm_rs_backward(dz, x, weight, *need, ctx.group, ctx.config)
        return *(grad if needed else None for grad, needed in zip(grads, need, strict=True)), None, None


def gemm_rs(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
    config: GemmRsConfig | None = None,
) -> torch.Tensor:
    """Multiply x by weight and scatter the sum over ranks along the rows.

    Args:
        x: [M, K / W] bf16, fp16 or fp32, M divisible by W; further leading dimensions are flattened and restored:
            [B, S, K / W] gives [B / W, S, N], rank r's rows being r-th
        weight: [N, K / W], the layout of torch.nn.Linear, this rank's columns of the full weight; same dtype
        bias: [N], the same on all ranks, or None; added once, after the sum
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world (W ranks)
        config: GemmRsConfig, the same on all ranks; None takes the best one known, see tdkernels.autotune

    Returns:
        z: [M / W, N], dtype of x, summed in fp32 in rank order (by torch's reduce-scatter, in its own order, where
        torch's sequence is the best config known); in a group on several nodes the ranks of each node are added first,
        and then the nodes' sums, of which those of other nodes are rounded to the dtype of x

    Gradient:
        dx = all_gather(dz) @ weight; dweight = all_gather(dz).T @ x; dbias = all_gather(dz).sum(0), complete on every
        rank

    Raises:
        TypeError or ValueError: for operands that do not fit, with their shapes, before anything is launched
        ValueError: on every rank when the ranks disagree
        PeerTimeoutError: when a peer does not come (on a GPU at the next call or at tdkernels.synchronize())
        RuntimeError: in a backward with create_graph=True

    Contract:
        collective over group; host sync: no (the first call with a shape agrees with the peers and allocates); CUDA
        graph: yes, after one call outside; the caller owns the output

    Source:
        reduction in the epilogue of the owner's tiles: FLUX (https://arxiv.org/abs/2406.06858)
    """
    group = resolve_group(group)
    known, key = lookup_run("gemm_rs", group, (x, weight, bias), (config, get_mode()))
    if known is not None:
        return known(group, x, weight, bias)
    x, weight, bias = autograd.apply_autocast(x, weight, bias)
    validation.check_operands("gemm_rs", x, weight, bias)
    world_size = group.size()
    if x.shape[0] % world_size:
        raise ValueError(
            f"gemm_rs: the first dimension of x {list(x.shape)} must be divisible by the group's {world_size} ranks"
        )
    x_rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    check_config("gemm_rs", config, GemmRsConfig, x)
    call = x_rows, weight, bias, group.group_name, as_argument(config)
    z = autograd.apply(_GemmRs, torch.ops.tdkernels.gemm_rs, *call)
    z = z.view(x.shape[0] // world_size, *x.shape[1:-1], weight.shape[0])
    keep_call(key, "gemm_rs", launch, run, group, x, weight, bias, config, x_rows, z)
    return z
