"""Steps of a call that all GEMM operators share: the body of the torch.library op, and the call cache."""

from collections.abc import Callable, Mapping
from types import ModuleType
from typing import TYPE_CHECKING, Any

from tdkernels.ops.common.config import as_argument, with_config
from tdkernels.ops.common.gemm_tunable import config_for, explicit_config
from tdkernels.ops.dense.local import linear_of_call
from tdkernels.runtime import call_cache, torch_op
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist


def forward(
    operator: str, kernel: ModuleType, run: "Callable[..., torch.Tensor]", x: "torch.Tensor", weight: "torch.Tensor",
    bias: "torch.Tensor | None", group: Any, config: Any, *more: Any, fields: Mapping[str, Any] | None = None,
) -> "torch.Tensor":
    """Compute the output for 2-D operands: the body of the torch.library op.

    Args:
        operator: Name of the operator.
        kernel: The operator's module ``launch``; ``problem_fields`` gives the properties that must be equal on all
            ranks.
        run: (x, weight, bias, group, config, *more) -> output, for a resolved config.
        x: [rows, K].
        weight: [N, K].
        bias: [N] or None.
        group: Name of the process group.
        config: The config as text, see ``as_argument``.
        more: Other arguments of ``run``.
        fields: Other properties that must be equal on all ranks.
    """
    group = torch_op.group_by_name(group)
    if group.size() == 1:
        return linear_of_call(operator, x, weight, bias, explicit_config(operator, config) if config else None)
    problem = lambda: {**kernel.problem_fields(x, weight), **(fields or {})}  # noqa: E731
    if not x.shape[0]:
        group_state(group).check_consensus_cached(operator, problem())
        return x.new_empty(0, weight.shape[0])
    config = config_for(operator, config, x, weight, group, problem)
    if config.method == "torch":
        group_state(group).check_consensus_cached(operator, with_config(problem(), config))
    return run(x, weight, bias, group, config, *more)


def keep_call(
    key: Any, operator: str, launch: ModuleType, run: "Callable[..., torch.Tensor]", group: "dist.ProcessGroup",
    x: "torch.Tensor", weight: "torch.Tensor", bias: "torch.Tensor | None", config: Any, rows: Any, y: "torch.Tensor",
    *more: Any,
) -> None:
    """Insert a call into the call cache, see ``runtime.call_cache.lookup_run``.

    Args:
        key: From ``lookup_run``.
        operator: Name of the operator.
        launch: The operator's module ``launch``.
        run: As for ``forward``.
        group: The resolved group.
        x: As given by the caller.
        weight: As given by the caller.
        bias: As given by the caller.
        config: As given by the caller.
        rows: x as [rows, K].
        y: The output.
        more: Other arguments of ``run``, which ``launch.bind`` takes, too.
    """
    if not call_cache.is_current(group, key) or group.size() == 1 or not rows.shape[0]:
        return
    config = config_for(operator, as_argument(config), rows, weight, group, dict)
    flat, rows, shape = x.dim() == 2, rows.shape, y.shape

    def again(group, x, weight, bias):
        if flat:
            return run(x, weight, bias, group, config, *more)
        return run(x.reshape(rows), weight, bias, group, config, *more).view(shape)

    def bind(group, x, weight, bias):
        given = x if flat else x.reshape(rows)
        return launch.bind(given, weight, bias, group, config, *more) if given.data_ptr() == x.data_ptr() else None

    is_fused = config.method == "fused"
    call_cache.insert(group, key, call_cache.CachedCall(again, bind if is_fused else None, shape))
