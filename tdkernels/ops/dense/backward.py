"""Backward of ag_gemm and gemm_rs. Each uses the kernels of the other operator: one gathers rows, the other scatters.

    operator    dx                                  dweight
    ag_gemm     gemm_rs: dy @ weight                GEMM over all rows: dy.T @ all_gather(x)
    gemm_rs     ag_gemm: all_gather(dz) @ weight    GEMM over all rows: all_gather(dz).T @ x
"""

from collections.abc import Sequence
from typing import Any

import torch

from tdkernels.autotune.invariance import for_one_number_of_ranks
from tdkernels.ops.collectives.async_all_gather import AsyncAllGather
from tdkernels.ops.common import gemm_operands
from tdkernels.ops.common.config import from_text
from tdkernels.ops.common.gemm_tunable import config_for
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.specialized.launch import is_enabled
from tdkernels.ops.common.torch_collectives import all_gather_rows, reduce_scatter_rows
from tdkernels.ops.dense.ag_gemm import launch as ag_gemm_launch
from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig
from tdkernels.ops.dense.gemm_rs import launch as gemm_rs_launch
from tdkernels.ops.dense.gemm_rs import pipelined
from tdkernels.ops.dense.gemm_rs.config import GemmRsConfig
from tdkernels.ops.dense.vendor_gemm import host_s_of_backward, is_worth_its_launches
from tdkernels.ops.dense.weight_gradient import weight_gradient
from tdkernels.runtime.torch_op import group_by_name
from tdkernels.symm.whole_call import whole_call


def _method(config_class, config):
    return from_text(config_class, config).method if config else None


# ---- ag_gemm ----


def _ag_gemm_in_parts(config, dy, x, group):
    """Return whether dx and dweight are computed by the pipelined form: two GEMMs of torch."""
    if spans_nodes(group):  # the pipelined gemm_rs does not support several nodes
        return False
    if config:
        return _method(AgGemmConfig, config) == "parts"
    ranks = group.size()
    flops, least_s = 4 * dy.numel() * x.shape[1], host_s_of_backward("ag_gemm", ranks)
    return is_worth_its_launches(flops, 2 * (ranks - 1) * x.nbytes, least_s)


def _ag_gemm_config_of_dx(dy, back, group):
    """Return the config of the gemm_rs that computes dx; ``back`` is weight.T."""
    fields = lambda: {"backward of": "ag_gemm", **gemm_rs_launch.problem_fields(dy, back)}  # noqa: E731
    return config_for("gemm_rs", "", dy, back, group, fields)


@whole_call
@for_one_number_of_ranks
def ag_gemm_backward(dy, x, weight, main_grads, need_dx, need_dweight, group, config):
    """Return (dx, dweight) of ``ag_gemm``: the body of the torch.library op. Gradients not needed are empty tensors.

    ``group`` is a group name, ``config`` the config of the forward as text. With ``main_grads`` (see
    ``weight_gradient``) dweight is added to them, and an empty tensor is returned.
    """
    group = group_by_name(group)
    dx, dweight = x.new_empty(0), x.new_empty(0)
    if group.size() == 1 or x.shape[0] == 0:
        dx = dy @ weight if need_dx else dx
        dweight = weight_gradient(dy, x, main_grads) if need_dweight else dweight
    elif _method(AgGemmConfig, config) == "torch":
        dx = reduce_scatter_rows(dy @ weight, group) if need_dx else dx
        dweight = weight_gradient(dy, all_gather_rows(x, group), main_grads) if need_dweight else dweight
    elif need_dx and need_dweight and _ag_gemm_in_parts(config, dy, x, group):
        dx, dweight = _ag_gemm_backward_in_parts(dy, x, weight, main_grads, group)
    else:
        choice = _ag_gemm_config_of_dx(dy, weight.t(), group) if need_dx else None
        # x is gathered while the gemm_rs computes and sends dx. Then all of x has arrived for dweight. Programs that
        # push would take SMs from the gemm_rs: on 4 H200 they cost 1.05 to 1.37 of the time of copies in CUDA graphs.
        gather = AsyncAllGather.start("ag_gemm backward", x, group, copies=need_dx) if need_dweight else None
        if need_dx:
            if choice.method == "torch":
                dx = reduce_scatter_rows(dy @ weight, group)
            else:
                dx = gemm_rs_launch.launch(dy, weight.t(), None, group, choice)
        if need_dweight:
            dweight = gathered_weight_gradient(
                gather, dy, gathered_on_left=False, overlapped=need_dx, main_grads=main_grads
            )
            gather.close()
    return dx, dweight


@whole_call
def _ag_gemm_backward_in_parts(dy, x, weight, main_grads, group):
    """Return (dx, dweight) of ``ag_gemm`` on one node, computed by two GEMMs of torch.

    x is gathered during the GEMM of dx. The parts of dx are sent during both GEMMs. The transfers are hidden as long as
    they take less time than the GEMMs.
    """
    x = gemm_operands.rows_contiguous(x)
    back = weight.t()
    fields = {"rows": x.shape[0], "n": weight.shape[0], "width": x.shape[1], "dtype": str(x.dtype)}
    gather = AsyncAllGather("ag_gemm backward", fields, x, group, x.shape[0], copies=True)
    scatter = pipelined.start("ag_gemm backward", fields, dy, back, group, pieces=1)
    with gather, scatter:
        gather.copy(in_order=False)
        own = pipelined.send_halves(scatter, dy, back)
        gather.finish()
        dweight = weight_gradient(dy, gather.gathered.reshape(-1, gather.width), main_grads)
        return scatter.add_to(own, out=torch.empty_like(own)), dweight


# ---- gemm_rs ----


def _gemm_rs_in_parts(config, choice, dz, x, keeps, group):
    """Return whether the ag_gemm of dx uses method "parts" instead of ``choice``.

    The warp-specialized kernel is preferred: on 4 H200 it takes 0.96 to 1.03 of the time in CUDA graphs, and half of
    the time on the host.
    """
    if config or spans_nodes(group):
        return _method(GemmRsConfig, config) == "parts"
    if not keeps or (choice.method == "fused" and choice.transport == "push" and is_enabled(choice)):
        return False
    ranks = group.size()
    flops = 4 * x.numel() * dz.shape[1]
    return is_worth_its_launches(flops, (ranks - 1) * dz.nbytes, host_s_of_backward("gemm_rs", ranks))


def _gemm_rs_config_of_dx(config, dz, x, back, keeps, group):
    """Return the config of the ag_gemm that computes dx. ``keeps``: the gathered dz is kept for the other gradients."""
    fields = lambda: {"backward of": "gemm_rs", **ag_gemm_launch.problem_fields(dz, back)}  # noqa: E731
    choice = config_for("ag_gemm", "", dz, back, group, fields)
    if _gemm_rs_in_parts(config, choice, dz, x, keeps, group):
        return AgGemmConfig(method="parts")
    return choice


@whole_call
@for_one_number_of_ranks
def gemm_rs_backward(dz, x, weight, main_grads, need_dx, need_dweight, need_dbias, group, config):
    """Return (dx, dweight, dbias) of ``gemm_rs``: the body of the torch.library op.

    Gradients that are not needed are empty tensors. ``main_grads``, ``group`` and ``config`` as for
    ``ag_gemm_backward``.
    """
    group = group_by_name(group)
    dx, dweight, dbias = x.new_empty(0), x.new_empty(0), x.new_empty(0)
    full = gather = choice = None
    plain = group.size() == 1 or x.shape[0] == 0 or _method(GemmRsConfig, config) == "torch"
    if not plain and need_dx:
        back = weight.t()
        keeps = need_dweight or need_dbias
        choice = _gemm_rs_config_of_dx(config, dz, x, back, keeps, group)
        plain = choice.method == "torch"
    if plain:
        full = all_gather_rows(dz, group) if group.size() > 1 and x.shape[0] else dz
        dx = full @ weight if need_dx else dx
        dweight = weight_gradient(full, x, main_grads) if need_dweight else dweight
    elif need_dx:
        # The ag_gemm keeps the gathered dz for the gradient of the weight.
        dx, gather = ag_gemm_launch.launch(dz, back, None, group, choice, keep_gathered=keeps)
        if gather is not None:
            gather.finish()
            full = gather.gathered.reshape(x.shape[0], dz.shape[1])
        dweight = weight_gradient(full, x, main_grads) if need_dweight else dweight
    else:
        gather = AsyncAllGather.start("gemm_rs backward", dz, group)
        if need_dweight:
            dweight = gathered_weight_gradient(
                gather, x, gathered_on_left=True, overlapped=False, main_grads=main_grads
            )
        gather.finish()
        full = gather.gathered.reshape(x.shape[0], dz.shape[1])
    if need_dbias:
        dbias = full.sum(0, dtype=torch.float32).to(dz.dtype)
    if gather is not None:
        gather.close()
    return dx, dweight, dbias


# ---- dweight ----


def gathered_weight_gradient(
    gather: AsyncAllGather, local: torch.Tensor, *, gathered_on_left: bool, overlapped: bool,
    main_grads: Sequence[torch.Tensor] = (),
) -> torch.Tensor:
    """Return gathered.T @ local if ``gathered_on_left``, otherwise local.T @ gathered, over the rows of all ranks.

    Args:
        gather: A started AsyncAllGather of [rows, P] per rank.
        local: [W * rows, Q] in the dtype of the gathered tensor.
        gathered_on_left: Which of the two products is computed.
        overlapped: Whether the gather has run concurrently with another GEMM. If so, one GEMM follows the whole gather.
            If not, each shard is multiplied while later shards arrive.
        main_grads: As for ``weight_gradient``.

    Returns:
        [P, Q] if ``gathered_on_left``, otherwise [Q, P]. Accumulated in fp32. An empty tensor with ``main_grads``.
    """
    if overlapped:
        gather.finish()
        full = gather.gathered.reshape(-1, gather.width)
        return weight_gradient(*((full, local) if gathered_on_left else (local, full)), main_grads)
    locals_by_rank = local.view(gather.world_size, gather.rows, local.shape[1])
    total: Any = None
    for step in range(gather.world_size):
        source = gather.source(step)
        if step == 0:
            shard = gather.x
        else:
            gather.wait(step)
            shard = gather.gathered[source]
        left, right = (shard, locals_by_rank[source]) if gathered_on_left else (locals_by_rank[source], shard)
        if main_grads:
            weight_gradient(left, right, main_grads)
            continue
        product = _matmul_fp32(left.t(), right)
        total = product if total is None else total.add_(product)
    return local.new_empty(0) if main_grads else total.to(local.dtype)


def _matmul_fp32(a, b):
    """Return a @ b in fp32."""
    if a.device.type == "cuda" and a.dtype != torch.float32:
        return torch.mm(a, b, out_dtype=torch.float32)
    return a.float() @ b.float()
