"""Ulysses sequence parallelism: the projections before and after attention, each fused with its all-to-all.

    ulysses_qkv   x [B, S / W, K] (positions sharded), weight [N, K]  ->  y [B, S, N / W] (heads sharded)
    ulysses_out   o [B, S, K / W] (heads sharded), weight [N, K]      ->  z [B, S / W, N] (positions sharded)

The weights are replicated. Between the two operators every rank has all positions of its heads, so any attention works.
The rows of the first weight belong to the heads of rank 0, then of rank 1 and so on, and so do the columns of the
second weight.

Forward. In ``ulysses_qkv_kernel`` a rank computes the tiles of the other ranks' heads first. While it computes later
tiles, it receives the tiles of its own heads from the ranks that computed them. In ``ulysses_out_kernel`` some programs
push each peer's positions in chunks of rows. The others compute tiles: each tile begins with the heads of this rank and
continues with the heads that have arrived. Call t uses half t mod 2 of a workspace. There is no barrier.

Backward. The dgrad of each operator is a call of the other one.

    operator      dgrad                            wgrad
    ulysses_qkv   dx = ulysses_out(dy, weight.T)   from dy, which the dgrad has gathered
    ulysses_out   do = ulysses_qkv(dz, weight.T)   from o, gathered and kept by the forward; it has the size of o, and
                                                   another gather would compete with the dgrad for the link

dweight and dbias cover this rank's positions only. Sum them over the ranks, as over data-parallel ranks.

Example:
    qkv = tdkernels.ulysses_qkv(x, w_qkv)       # instead of all_to_all(x @ w_qkv.T)
    z = tdkernels.ulysses_out(attention(qkv), w_out)
"""

import torch
import torch.distributed as dist
import torch.nn.functional as F

from tdkernels.autotune.invariance import reject_invariant
from tdkernels.autotune.modes import get_mode
from tdkernels.ops.attention.ulysses import launch_out, launch_qkv
from tdkernels.ops.attention.ulysses.config import UlyssesConfig
from tdkernels.ops.attention.ulysses.validation import check_divided, check_product
from tdkernels.ops.common.config import as_argument, check_config, with_config
from tdkernels.ops.common.gemm_tunable import config_for
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.runtime import autograd, call_cache, torch_op
from tdkernels.runtime.autograd import unpack_gradients
from tdkernels.symm import GroupLike, resolve_group
from tdkernels.symm.group import group_state
from tdkernels.symm.whole_call import whole_call

# ---- references with plain torch.distributed ----


def _all_to_all(parts, group):
    """Exchange ``parts`` [W, …], one part per rank, and return the received parts in rank order."""
    received = torch.empty_like(parts)
    dist.all_to_all_single(received, parts, group=group)
    return received


def _to_heads(y, batch, group):
    """Exchange all heads of this rank's positions [B * S / W, N] for its heads of all positions [B * S, N / W]."""
    world_size = dist.get_world_size(group)
    width = y.shape[1] // world_size
    parts = y.view(batch, y.shape[0] // max(batch, 1), world_size, width).permute(2, 0, 1, 3).contiguous()
    return _all_to_all(parts, group).transpose(0, 1).reshape(-1, width)


def _to_positions(o, batch, group):
    """Exchange this rank's heads of all positions [B * S, K / W] for all heads of its positions [B * S / W, K]."""
    world_size, positions = dist.get_world_size(group), o.shape[0] // max(batch, 1)
    parts = o.view(batch, world_size, positions // world_size, o.shape[1]).transpose(0, 1).contiguous()
    return _all_to_all(parts, group).permute(1, 2, 0, 3).reshape(-1, world_size * o.shape[1])


@torch.no_grad()
def ulysses_qkv_ref(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
) -> torch.Tensor:
    """Compute ``ulysses_qkv`` in plain torch, without gradients: a GEMM, then an all-to-all."""
    group = resolve_group(group)
    y = F.linear(x, weight, bias)
    rows = _to_heads(y.reshape(-1, y.shape[-1]), x.shape[:-2].numel(), group)
    return rows.view(*x.shape[:-2], dist.get_world_size(group) * x.shape[-2], rows.shape[1])


@torch.no_grad()
def ulysses_out_ref(
    o: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
) -> torch.Tensor:
    """Compute ``ulysses_out`` in plain torch, without gradients: an all-to-all, then a GEMM."""
    group = resolve_group(group)
    rows = _to_positions(o.reshape(-1, o.shape[-1]), o.shape[:-2].numel(), group)
    positions = o.shape[-2] // dist.get_world_size(group)
    return F.linear(rows, weight, bias).view(*o.shape[:-2], positions, weight.shape[0])


# ---- torch.library operators, which torch.compile traces; operands are [rows, ·] of ``batch`` sequences ----


def _config(text, kind, operator, x, weight, group, fields):
    """Return the config of a call. ``kind`` is "ulysses_qkv" or "ulysses_out", also if the call is a dgrad."""
    if not text and spans_nodes(group):
        return UlyssesConfig(method="torch")
    of_call = {} if kind == operator else {"call": operator}
    return config_for(kind, text, x, weight, group, lambda: {**of_call, **fields})


def _qkv(operator, x, weight, bias, batch, group, text):
    """Return this rank's heads of all positions."""
    world_size = group.size()
    if world_size == 1:
        return F.linear(x, weight, bias)
    fields = launch_qkv.problem_fields(x, weight, bias, batch)
    if not x.shape[0]:
        group_state(group).check_consensus_cached(operator, fields)
        return x.new_empty(0, weight.shape[0] // world_size)
    config = _config(text, "ulysses_qkv", operator, x, weight, group, fields)
    if config.method != "fused":
        group_state(group).check_consensus_cached(operator, with_config(fields, config))
    return _run_qkv(operator, x, weight, bias, batch, group, config)


def _run_qkv(operator, x, weight, bias, batch, group, config):
    if config.method == "fused":
        return launch_qkv.launch(operator, x, weight, bias, batch, group, config)
    return _to_heads(F.linear(x, weight, bias), batch, group)


def _out(operator, o, weight, bias, batch, group, text, keep):
    """Return (output for this rank's positions, the gathered rows if ``keep``)."""
    world_size = group.size()
    if world_size == 1:
        return F.linear(o, weight, bias), None
    fields = {**launch_out.problem_fields(o, weight, batch), "kept": keep}
    if not o.shape[0]:
        group_state(group).check_consensus_cached(operator, fields)
        return o.new_empty(0, weight.shape[0]), o.new_empty(0, weight.shape[1])
    config = _config(text, "ulysses_out", operator, o, weight, group, fields)
    if config.method != "fused":
        group_state(group).check_consensus_cached(operator, with_config(fields, config))
    return _run_out(operator, o, weight, bias, batch, group, config, keep)


def _run_out(operator, o, weight, bias, batch, group, config, keep=False):
    if config.method == "fused":
        return launch_out.launch(operator, o, weight, bias, batch, group, config, keep)
    rows = _to_positions(o, batch, group)
    return F.linear(rows, weight, bias), rows


def _forward_qkv(x, weight, bias, batch, group, config):
    reject_invariant("ulysses_qkv")
    return _qkv("ulysses_qkv", x, weight, bias, batch, torch_op.group_by_name(group), config)


def _forward_out(o, weight, bias, batch, keep, group, config):
    reject_invariant("ulysses_out")
    group = torch_op.group_by_name(group)
    z, kept = _out("ulysses_out", o, weight, bias, batch, group, config, keep and group.size() > 1)
    return z, kept if keep and group.size() > 1 else o.new_empty(0)


@whole_call
def _backward_qkv(dy, x, weight, need_dx, need_dweight, need_dbias, batch, group, config):
    group = torch_op.group_by_name(group)
    dx, dweight, dbias = x.new_empty(0), x.new_empty(0), x.new_empty(0)
    keeps = need_dweight or need_dbias
    gathered = dy
    if need_dx:
        dx, gathered = _out("ulysses_qkv backward", dy, weight.t(), None, batch, group, config, keeps)
        gathered = dy if gathered is None else gathered
    elif group.size() > 1 and x.shape[0]:
        gathered = _to_positions(dy, batch, group)  # no GEMM to overlap it with
    gathered = gathered.view(x.shape[0], weight.shape[0])
    if need_dweight:
        dweight = gathered.t() @ x
    if need_dbias:
        dbias = gathered.sum(0, dtype=torch.float32).to(dy.dtype)
    return dx, dweight, dbias


@whole_call
def _backward_out(dz, weight, batch, group, config):
    return _qkv("ulysses_out backward", dz, weight.t(), None, batch, torch_op.group_by_name(group), config)


_TAIL = "int batch, str group, str config"


def _fake_ulysses_qkv(x, weight, bias, batch, group, config):
    world_size = torch_op.world_size_by_name(group)
    return x.new_empty(world_size * x.shape[0], weight.shape[0] // world_size)


def _fake_ulysses_qkv_backward(dy, x, weight, need_dx, need_dweight, need_dbias, batch, group, config):
    return (
        x.new_empty(x.shape if need_dx else (0,)),
        x.new_empty(weight.shape if need_dweight else (0,)),
        x.new_empty(weight.shape[:1] if need_dbias else (0,)),
    )


def _fake_ulysses_out(o, weight, bias, batch, keep, group, config):
    world_size = torch_op.world_size_by_name(group)
    rows = o.shape[0] // world_size
    kept = (rows, weight.shape[1]) if keep and world_size > 1 else (0,)
    return o.new_empty(rows, weight.shape[0]), o.new_empty(kept)


def _fake_ulysses_out_backward(dz, weight, batch, group, config):
    world_size = torch_op.world_size_by_name(group)
    return dz.new_empty(world_size * dz.shape[0], weight.shape[1] // world_size)


torch_op.register(
    f"ulysses_qkv(Tensor x, Tensor weight, Tensor? bias, {_TAIL}) -> Tensor", _forward_qkv, _fake_ulysses_qkv
)
torch_op.register(
    "ulysses_qkv_backward(Tensor dy, Tensor x, Tensor weight, bool need_dx, bool need_dweight, bool need_dbias, "
    f"{_TAIL}) -> (Tensor, Tensor, Tensor)", _backward_qkv, _fake_ulysses_qkv_backward
)
torch_op.register(
    "ulysses_out(Tensor o, Tensor weight, Tensor? bias, int batch, bool keep, str group, str config)"
    " -> (Tensor, Tensor)", _forward_out, _fake_ulysses_out
)
torch_op.register(
    f"ulysses_out_backward(Tensor dz, Tensor weight, {_TAIL}) -> Tensor", _backward_out, _fake_ulysses_out_backward
)


class _Qkv(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, weight, bias, *call):
        ctx.save_for_backward(x, weight)
        ctx.call = call
        return torch.ops.tdkernels.ulysses_qkv(x, weight, bias, *call)

    @staticmethod
    def backward(ctx, dy):
        autograd.reject_second_derivatives("ulysses_qkv")
        need = ctx.needs_input_grad[:3]
        grads = torch.ops.tdkernels.ulysses_qkv_backward(dy, *ctx.saved_tensors, *need, *ctx.call)
        return *unpack_gradients(grads, need), None, None, None


class _Out(torch.autograd.Function):
    @staticmethod
    def forward(ctx, o, weight, bias, batch, group, config):
        keep = ctx.needs_input_grad[1]
        z, kept = torch.ops.tdkernels.ulysses_out(o, weight, bias, batch, keep, group, config)
        if keep and not kept.numel():
            kept = o  # for one rank, or without positions
        ctx.save_for_backward(weight, kept if keep else None)
        ctx.call = batch, group, config
        return z

    @staticmethod
    def backward(ctx, dz):
        autograd.reject_second_derivatives("ulysses_out")
        weight, kept = ctx.saved_tensors
        need_do, need_dweight, need_dbias = ctx.needs_input_grad[:3]
        do = dweight = dbias = None
        if need_do:
            do = torch.ops.tdkernels.ulysses_out_backward(dz, weight, *ctx.call)
        if need_dweight:
            dweight = dz.t() @ kept.view(dz.shape[0], weight.shape[1])
        if need_dbias:
            dbias = dz.sum(0, dtype=torch.float32).to(dz.dtype)
        return do, dweight, dbias, None, None, None


def ulysses_qkv(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
    config: UlyssesConfig | None = None,
) -> torch.Tensor:
    """Project this rank's positions with the whole weight, and return its heads of all positions.

    Args:
        x: [B, S / W, K] or [S / W, K] in bf16, fp16 or fp32. Rank r has the r-th S / W positions of each sequence. More
            leading dimensions are sequences, too.
        weight: [N, K], as in torch.nn.Linear, in the dtype of x. Replicated; its r-th N / W rows belong to the heads of
            rank r.
        bias: [N] in the order of these rows, or None.
        group: A ProcessGroup, a one-dimensional DeviceMesh, or None for the default group (W ranks).
        config: UlyssesConfig, the same on all ranks, also used for the backward. None selects the best known config
            (see tdkernels.autotune); the backward then selects the best one for its own GEMM.

    Returns:
        y [B, S, N / W] in the dtype of x, accumulated in fp32.

    Gradient:
        dx is complete. dweight and dbias cover this rank's positions only; sum them as over data-parallel ranks.

    Raises:
        TypeError, ValueError: If operands are invalid; the message has their shapes. Nothing has been launched.
        ValueError: On every rank, if the ranks disagree.
        PeerTimeoutError: If a peer does not make the call in time. On a GPU it is raised by the next call or by
            tdkernels.synchronize().
        RuntimeError: In a backward with create_graph=True.

    Contract:
        Collective over ``group``. No host synchronization, but the first call with a shape communicates with the peers
        and allocates. Can be captured in a CUDA graph after one call outside. The caller owns the output.

    Source:
        DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509).
    """
    group = resolve_group(group)
    known, key = call_cache.lookup_run("ulysses_qkv", group, (x, weight, bias), (config, get_mode()))
    if known is not None:
        return known(group, x, weight, bias)
    x, weight, bias = autograd.apply_autocast(x, weight, bias)
    check_product("ulysses_qkv", "x", x, weight, bias, 1)
    check_divided("ulysses_qkv", "weight", weight, 0, "N", group.size())
    check_config("ulysses_qkv", config, UlyssesConfig, x)
    batch = x.shape[:-2].numel()
    call = x.reshape(-1, x.shape[-1]), weight, bias, batch, group.group_name, as_argument(config)
    y = autograd.apply(_Qkv, torch.ops.tdkernels.ulysses_qkv, *call)
    y = y.view(*x.shape[:-2], group.size() * x.shape[-2], y.shape[1])
    _insert_call(key, "ulysses_qkv", _run_qkv, call[0], weight, batch, group, config, y.shape, launch_qkv.bind_call)
    return y


def _insert_call(key, operator, run, rows, weight, batch, group, config, shape, bind_call=None):
    """Insert a call into the call cache.

    ``rows`` is the first operand of ``run``, and ``shape`` the shape of the output. ``bind_call`` returns the Launch of
    a fused call; it is None if the call is not a single launch on its own operands.
    """
    if not call_cache.is_current(group, key) or group.size() == 1 or not rows.shape[0]:
        return
    config = _config(as_argument(config), operator, operator, rows, weight, group, {})
    rows = rows.shape

    def run_cached(group, x, weight, bias):
        return run(operator, x.reshape(rows), weight, bias, batch, group, config).view(shape)

    def bind(group, x, weight, bias):
        given = x.reshape(rows)
        if given.data_ptr() != x.data_ptr():
            return None
        return bind_call(operator, given, weight, bias, batch, group, config)

    is_launch = config.method == "fused" and bind_call is not None
    call_cache.insert(group, key, call_cache.CachedCall(run_cached, bind if is_launch else None, shape))


def ulysses_out(
    o: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group: GroupLike = None,
    config: UlyssesConfig | None = None,
) -> torch.Tensor:
    """Gather all heads of this rank's positions, and project them with the whole weight.

    Args:
        o: This rank's heads of all positions, [B, S, K / W] or [S, K / W] in bf16, fp16 or fp32, in the layout of
            ``ulysses_qkv``. More leading dimensions are sequences, too.
        weight: [N, K] in the dtype of o. Replicated; its r-th K / W columns belong to the heads of rank r.
        bias: [N] or None.
        group: As in ``ulysses_qkv``.
        config: As in ``ulysses_qkv``.

    Returns:
        z [B, S / W, N], this rank's positions in the dtype of o. It is accumulated in fp32 in a fixed order: this
        rank's heads first, then the heads of rank + 1, rank + 2 and so on.

    Gradient:
        do is complete. dweight and dbias cover this rank's positions only; sum them as over data-parallel ranks.

    Raises:
        TypeError, ValueError, PeerTimeoutError, RuntimeError: As ``ulysses_qkv``.

    Contract:
        As for ``ulysses_qkv``.

    Source:
        DeepSpeed-Ulysses (https://arxiv.org/abs/2309.14509).
    """
    group = resolve_group(group)
    known, key = call_cache.lookup_run("ulysses_out", group, (o, weight, bias), (config, get_mode()))
    if known is not None:
        return known(group, o, weight, bias)
    o, weight, bias = autograd.apply_autocast(o, weight, bias)
    check_product("ulysses_out", "o", o, weight, bias, group.size())
    check_divided("ulysses_out", "o", o, -2, "S", group.size())
    check_config("ulysses_out", config, UlyssesConfig, o)
    batch = o.shape[:-2].numel()
    call = o.reshape(-1, o.shape[-1]), weight, bias, batch, group.group_name, as_argument(config)
    if autograd.may_be_differentiated([o, weight] if bias is None else [o, weight, bias]):
        z = _Out.apply(*call)
    else:
        z, _ = torch.ops.tdkernels.ulysses_out(*call[:4], False, *call[4:])
    z = z.view(*o.shape[:-2], o.shape[-2] // group.size(), z.shape[1])
    _insert_call(key, "ulysses_out", lambda *call: _run_out(*call)[0], call[0], weight, batch, group, config, z.shape)
    return z
