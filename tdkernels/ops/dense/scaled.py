"""ag_gemm, gemm_rs and gemm_ar of scaled fp8 operands: torch.library operators, references and calls.

The kernels are those of the unscaled operators. Scales of x in ag_gemm are gathered with their rows. Partial sums of
gemm_rs and gemm_ar are sent in ``out_dtype``.

    method       ag_gemm                     gemm_rs                        gemm_ar
    "fused"      kernel                      kernel                         kernel
    "parts"      pipelined with scaled_mm    pipelined with scaled_mm       -
    "torch"      all-gather, scaled_mm       scaled_mm, reduce-scatter      scaled_mm, all-reduce

``scaled_mm`` is ``torch._scaled_mm`` (cuBLAS). For block-wise scales and on CPUs, the operands are dequantized to fp32.
Groups on several nodes use "torch".
"""

from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.invariance import reject_invariant, reject_max_ranks
from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common.config import as_argument, check_config, with_config
from tdkernels.ops.common.gemm_tunable import config_for, explicit_config
from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.scaling import Scales, check_scaled_operands, invalid_tiles, scaled_linear
from tdkernels.ops.common.torch_collectives import all_gather_rows, all_reduce, reduce_scatter_rows
from tdkernels.ops.dense.ag_gemm import launch as ag_gemm_launch
from tdkernels.ops.dense.ag_gemm.config import AgGemmConfig
from tdkernels.ops.dense.gemm_ar import launch as gemm_ar_launch
from tdkernels.ops.dense.gemm_ar.config import GemmArConfig
from tdkernels.ops.dense.gemm_rs import launch as gemm_rs_launch
from tdkernels.ops.dense.gemm_rs.config import GemmRsConfig
from tdkernels.ops.dense.local import linear_of_scaled
from tdkernels.ops.dense.scaled_gather import gathered_scales
from tdkernels.runtime import call_cache, torch_op
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    import torch.distributed as dist


# ---- method "torch" ----


def ag_gemm_by_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: Scales, group: "dist.ProcessGroup"
) -> torch.Tensor:
    """Compute ag_gemm of scaled 2-D operands: an all-gather of x and its scales, then a GEMM."""
    full = all_gather_rows(x.view(torch.uint8), group).view(x.dtype)  # NCCL of older versions has no fp8 types
    return scaled_linear(full, weight, bias, gathered_scales(x, scales, group, by_torch=True))


def gemm_rs_by_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: Scales, group: "dist.ProcessGroup"
) -> torch.Tensor:
    """Compute gemm_rs of scaled 2-D operands: a GEMM, then a reduce-scatter."""
    z = reduce_scatter_rows(scaled_linear(x, weight, None, scales), group)
    return z if bias is None else z + bias


def gemm_ar_by_torch(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: Scales, group: "dist.ProcessGroup"
) -> torch.Tensor:
    """Compute gemm_ar of scaled 2-D operands: a GEMM, then an all-reduce."""
    z = all_reduce(scaled_linear(x, weight, None, scales), group)
    return z if bias is None else z + bias


# ---- calls with a resolved config ----


def _ag_gemm(x, weight, bias, scales, group, config):
    return ag_gemm_launch.launch(x, weight, bias, group, config, scales=scales)[0]


def _gemm_rs(x, weight, bias, scales, group, config, reordered=None):
    return gemm_rs_launch.launch(x, weight, bias, group, config, scales=scales, reordered=reordered)


def _gemm_ar(x, weight, bias, scales, group, config):
    return gemm_ar_launch.launch(x, weight, bias, group, config, scales=scales)


class _Operator:
    """What differs between the three operators.

    Attributes:
        launch: The operator's module ``launch``.
        fused: (x, weight, bias, scales, group, config, **options) -> output, for the methods "fused" and "parts".
        by_torch: (x, weight, bias, scales, group) -> output, for the method "torch".
        config_class: Class of the configs.
        rows: (rows of x, W) -> rows of the output.
    """

    def __init__(
        self, launch: ModuleType, fused: Callable[..., torch.Tensor], by_torch: Callable[..., torch.Tensor],
        config_class: type, rows: Callable[[Any, int], Any],
    ) -> None:
        self.launch, self.fused, self.by_torch = launch, fused, by_torch
        self.config_class, self.rows = config_class, rows


_OPERATORS = {
    "ag_gemm": _Operator(ag_gemm_launch, _ag_gemm, ag_gemm_by_torch, AgGemmConfig, lambda rows, ranks: rows * ranks),
    "gemm_rs": _Operator(gemm_rs_launch, _gemm_rs, gemm_rs_by_torch, GemmRsConfig, lambda rows, ranks: rows // ranks),
    "gemm_ar": _Operator(gemm_ar_launch, _gemm_ar, gemm_ar_by_torch, GemmArConfig, lambda rows, ranks: rows),
}


def run(
    operator: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, scales: Scales,
    group: "dist.ProcessGroup", config: Any, **options: Any,
) -> torch.Tensor:
    """Compute the output of an operator for 2-D operands and a resolved config. ``options``: those of its launch."""
    if config.method == "torch":
        return _OPERATORS[operator].by_torch(x, weight, bias, scales, group)
    return _OPERATORS[operator].fused(x, weight, bias, scales, group, config, **options)


def _options(reordered):
    """Return the options of the launch: how the rows of gemm_rs were reordered, if they were."""
    return {} if reordered is None else {"reordered": reordered}


def _problem(operator, x, weight, bias, scales, reordered):
    """Return the properties of a call that must be equal on all ranks, before a config is selected."""
    fields = _OPERATORS[operator].launch.problem_fields(x, weight, scales)
    if operator == "gemm_ar":
        fields |= gemm_ar_launch.bias_fields(bias)
    return {**fields, **gemm_rs_launch.segment_fields(reordered)}


def _resolved(operator, x, weight, scales, group, text, fields):
    """Return the config of a call: the one given as ``text``, or the selected one. ``fields``: see ``_problem``."""
    if spans_nodes(group):
        reject_invariant(operator, "a group on several nodes")
        return _OPERATORS[operator].config_class(method="torch")
    return config_for(operator, text, x, weight, group, lambda: fields, scales)


# ---- torch.library operators ----


def _forward(operator):
    def forward(x, weight, bias, scale_x, scale_w, scaling, out_dtype, use_fast_accum, reordered, group, config):
        scales = Scales(scale_x, scale_w, scaling, out_dtype, use_fast_accum)
        group = torch_op.group_by_name(group)
        if operator != "ag_gemm":
            reject_max_ranks(operator, "float8")
        elif bias is not None:  # the compiler may fuse the scale and the bias into one operation, on several ranks only
            reject_max_ranks(operator, "float8 with a bias")
        if group.size() == 1:
            return linear_of_scaled(x, weight, bias, scales, explicit_config(operator, config) if config else None)
        fields = _problem(operator, x, weight, bias, scales, reordered)
        if not x.shape[0]:
            group_state(group).check_consensus_cached(operator, fields)
            return x.new_empty(0, weight.shape[0], dtype=out_dtype)
        resolved = _resolved(operator, x, weight, scales, group, config, fields)
        if resolved.method == "torch":
            group_state(group).check_consensus_cached(operator, with_config(fields, resolved))
        return run(operator, x, weight, bias, scales, group, resolved, **_options(reordered))

    return forward


def _fake(operator):
    def fake(x, weight, bias, scale_x, scale_w, scaling, out_dtype, use_fast_accum, reordered, group, config):
        rows = _OPERATORS[operator].rows(x.shape[0], torch_op.world_size_by_name(group))
        return x.new_empty(rows, weight.shape[0], dtype=out_dtype)

    return fake


for _name in _OPERATORS:
    torch_op.register(
        f"{_name}_scaled(Tensor x, Tensor weight, Tensor? bias, Tensor scale_x, Tensor scale_w, str scaling,"
        " ScalarType out_dtype, bool use_fast_accum, SymInt? reordered, str group, str config) -> Tensor",
        _forward(_name),
        _fake(_name),
    )


# ---- calls ----


def call(
    operator: str, x: Any, weight: Any, bias: Any, scale_x: Any, scale_w: Any, out_dtype: Any, use_fast_accum: Any,
    group: "dist.ProcessGroup", config: Any, reordered: int | None = None,
) -> torch.Tensor:
    """Validate and execute a call of ``operator`` with scaled operands.

    Args:
        operator: "ag_gemm", "gemm_rs" or "gemm_ar".
        x: As given by the caller, and so are the other operands.
        weight: See ``x``.
        bias: See ``x``.
        scale_x: See ``x``.
        scale_w: See ``x``.
        out_dtype: See ``x``.
        use_fast_accum: See ``x``.
        group: The resolved group.
        config: See ``x``.
        reordered: For gemm_rs, see its ``launch.launch``.

    Returns:
        The output, [rows, N].
    """
    given = x, weight, bias, scale_x, scale_w
    known, key = call_cache.lookup_run(
        f"{operator}, scaled", group, given, (config, out_dtype, use_fast_accum, reordered, get_mode())
    )
    if known is not None:
        return known(group, *given)
    scales = check_scaled_operands(operator, x, weight, bias, scale_x, scale_w, out_dtype, use_fast_accum)
    x_rows = x.reshape(x.shape[:-1].numel(), x.shape[-1])
    _check_config(operator, config, x, scales, group)
    text = as_argument(config)
    z = getattr(torch.ops.tdkernels, f"{operator}_scaled")(
        x_rows, weight, bias, scales.x, scales.weight, scales.kind, scales.out_dtype, scales.use_fast_accum,
        reordered, group.group_name, text,
    )
    _keep_call(key, operator, group, x_rows, weight, scales, text, z.shape, _options(reordered))
    return z


def reject_nodes(operator: str, config: Any, group: "dist.ProcessGroup") -> None:
    """Raise NotImplementedError if a config cannot run because the group spans several nodes."""
    if config is not None and config.method != "torch" and spans_nodes(group):
        raise NotImplementedError(f'{operator}: on several nodes float8 operands support only method "torch"')


def _check_config(operator, config, x, scales, group):
    """Raise an error unless the config can run with these scales and on this group, or is None."""
    check_config(operator, config, _OPERATORS[operator].config_class, x)
    reject_nodes(operator, config, group)
    if config is None or config.method == "torch":
        return
    reason = invalid_tiles(config.tiles, scales.kind)
    if reason is not None:
        raise ValueError(f"{operator}: config cannot run: {reason}")


def _keep_call(key, operator, group, x_rows, weight, scales, text, shape, options):
    """Insert a call into the call cache, see ``runtime.call_cache.lookup_run``."""
    if not call_cache.is_current(group, key) or group.size() == 1 or not x_rows.shape[0]:
        return
    config = _resolved(operator, x_rows, weight, scales, group, text, {})
    rows, columns, shape_w = x_rows.shape, scales.x.shape[1:], scales.weight.shape
    settings = scales._replace(x=None, weight=None)  # type: ignore[arg-type]  # an entry holds no tensor of the call

    def operands(x, weight, bias, scale_x, scale_w):
        scale_w = scale_w.reshape(shape_w).contiguous()
        given = settings._replace(x=scale_x.reshape(-1, *columns).contiguous(), weight=scale_w)
        return x.reshape(rows), weight, bias, given

    def again(group, *given):
        return run(operator, *operands(*given), group, config, **options)

    def bind(group, *given):
        x, weight, bias, scales = operands(*given)
        used = (x, given[0]), (scales.x, given[3]), (scales.weight, given[4])
        if any(one.data_ptr() != other.data_ptr() for one, other in used):
            return None  # the launch would read a copy
        return _OPERATORS[operator].launch.bind(x, weight, bias, group, config, scales=scales, **options)

    is_fused = config.method == "fused"
    call_cache.insert(group, key, call_cache.CachedCall(again, bind if is_fused else None, shape))
