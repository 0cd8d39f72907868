"""AG-GEMM: y = all_gather(x) @ weight.T, the gather hidden behind the product.

    x [M / W, K] on each rank, weight [N / W, K] (columns of the full weight)  ->  y [M, N / W]

Schedule (``ag_gemm_kernel``). Programs take pieces of work from a list. The first pieces push our shard to all peers in
chunks of rows and raise one signal for each chunk at each peer. Every other one is a tile of y: first those of our own
shard, which need nothing from anybody, then those of the peers' chunks in the order in which they arrive, each after a
wait for its chunk's signal. Call t uses half t mod 2 of the workspace: no rank can finish call t + 1 before all have
begun it, hence when a peer pushes call t + 2 nobody reads call t any more, and there is no barrier.

With ``transport="copy_engine"`` the host enqueues one copy a chunk on a second stream instead, and all multiprocessors
compute; a barrier opens the call.

On several nodes (``ag_gemm_nodes_kernel``) a shard crosses the network once for each other node, to the rank of the
same number there, which relays it to its node peers; tiles follow in order of arrival over both ways.

With ``method="parts"`` (``pipelined``) products are the vendor's, one a shard, beside copies of the next shards.

Backward. dx = reduce_scatter(dy @ weight) and dweight = dy.T @ all_gather(x) are two products of the vendor's: x is
gathered again beside the first, and parts of dx travel beside both (``pipelined``). Where that would take the host
longer than the GPU, on several nodes, or if only dx is asked for, dx is a GEMM-RS, beside which x is gathered; dweight
alone is multiplied shard by shard as they come. Only shards are saved.

Example:
    y = tdkernels.ag_gemm(x, weight)            # instead of all_gather_into_tensor(full, x); y = full @ weight.T
"""

import torch
import torch.nn.functional as F

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common import validation
from tdkernels.ops.common.config import as_argument, check_config
from tdkernels.ops.common.torch_collectives import all_gather_rows
from tdkernels.ops.dense.ag_gemm import launch
from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig
from tdkernels.ops.dense.backward import ag_gemm_backward
from tdkernels.ops.dense.call import forward, keep_call
from tdkernels.runtime import autograd, torch_op
from tdkernels.runtime.autograd import fake_gradients
from tdkernels.runtime.call_cache import lookup_run
from tdkernels.symm import GroupLike, resolve_group


@torch.no_grad()
def ag_gemm_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
) -> torch.Tensor:
    """The specification of ``ag_gemm``, in plain torch.distributed."""
    group = resolve_group(group)
    return F.linear(all_gather_rows(x, group), weight, bias)


# ---- torch.library: what torch.compile sees ----


def run(x, weight, bias, group, config):
    if config.method != "torch":
        return launch.launch(x, weight, bias, group, config)[0]
    return ag_gemm_ref(x, weight, bias, group=group)


def _forward(x, weight, bias, group, config):
    return forward("ag_gemm", launch, run, x, weight, bias, group, config)


def _fake_ag_gemm(x, weight, bias, group, config):
    return x.new_empty(torch_op.world_size_by_name(group) * x.shape[0], weight.shape[0])


def _fake_ag_gemm_backward(dy, x, weight, need_dx, need_dweight, group, config):
    return fake_gradients((x, weight), (need_dx, need_dweight))


torch_op.register(
    "ag_gemm(Tensor x, Tensor weight, Tensor? bias, str group, str config) -> Tensor",
    _forward,
    _fake_ag_gemm,
)
torch_op.register(
    "ag_gemm_backward(Tensor dy, Tensor x, Tensor weight, bool need_dx, bool need_dweight, str group, str config)"
    " -> (Tensor, Tensor)",
    ag_gemm_backward,
    _fake_ag_gemm_backward,
)


class _AgGemm(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, group, config):
        ctx.save_for_backward(x, weight)
        ctx.group, ctx.config = group, config
        return torch.ops.tdkernels.ag_gemm(x, weight, bias, group, config)

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("ag_gemm")
        x, weight = ctx.saved_tensors
        need_dx, need_dweight, need_dbias, _, _ = ctx.needs_input_grad
        dx = dweight = dbias = None
        if need_dx or need_dweight:
            dx, dweight = torch.ops.tdkernels.ag_gemm_backward(
                dy, x, weight, need_dx, need_dweight, ctx.group, ctx.config
            )
        if need_dbias:
            dbias = dy.sum(0, dtype=torch.float32).to(dy.dtype)
        return dx if need_dx else None, dweight if need_dweight else None, dbias, None, None


def ag_gemm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
    config: AgGemmConfig | None = None,
) -> torch.Tensor:
    """Gather x along its rows while multiplying it by weight.

    In a group on several nodes each shard crosses the network once for each other node, and is relayed inside it.

    Args:
        x: [M / W, K] bf16, fp16 or fp32; further leading dimensions are flattened and restored, so that [B, S, K] gives
            [W * B, S, N / W] with rank r's rows r-th
        weight: [N / W, K], the layout of torch.nn.Linear, this rank's rows of the full weight; same dtype
        bias: [N / W] or None
        group: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world (W ranks)
        config: AgGemmConfig, the same on all ranks; None takes the best one known, see tdkernels.autotune

    Returns:
        y: [M, N / W], dtype of x, accumulated in fp32

    Gradient:
        dx = reduce_scatter(dy @ weight); dweight = dy.T @ all_gather(x); dbias = dy.sum(0), each [as its input]

    Raises:
        TypeError or ValueError: for operands that do not fit, with their shapes, before anything is launched
        ValueError: on every rank when the ranks disagree
        PeerTimeoutError: when a peer does not come (on a GPU at the next call or at tdkernels.synchronize())
        RuntimeError: in a backward with create_graph=True

    Contract:
        collective over group; host sync: no (the first call with a shape agrees with the peers and allocates); CUDA
        graph: yes, after one call outside; the caller owns the output

    Source:
        the overlap of gather and tiles by signals: FLUX (https://arxiv.org/abs/2406.06858), Triton-distributed
        (https://arxiv.org/abs/2504.19442)
    """
    group = resolve_group(group)
    known, key = lookup_run("ag_gemm", group, (x, weight, bias), (config, get_mode()))
    if known is not None:
        return known(group, x, weight, bias)
    x, weight, bias = autograd.apply_autocast(x, weight, bias)
    validation.check_operands("ag_gemm", x, weight, bias)
    rows = x.shape[:-1].numel()
    x_rows = x.reshape(rows, x.shape[-1])
    check_config("ag_gemm", config, AgGemmConfig, x)
    call = x_rows, weight, bias, group.group_name, as_argument(config)
    y = autograd.apply(_AgGemm, torch.ops.tdkernels.ag_gemm, *call)
    y = y.view(group.size() * x.shape[0], *x.shape[1:-1], weight.shape[0])
    keep_call(key, "ag_gemm", launch, run, group, x, weight, bias, config, x_rows, y)
    return y
