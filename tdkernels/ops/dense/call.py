"""What a call of a dense operator does, whichever it is."""

import torch.nn.functional as F

from tdkernels.ops.common.config import as_argument, with_config
from tdkernels.ops.common.gemm_tunable import config_for
from tdkernels.runtime import call_cache, torch_op
from tdkernels.symm.group import group_state


def forward(operator, kernel, run, x, weight, bias, group, config):
    """The body of the ``torch.library`` op: the output for 2-D operands, as the config of the call says.

    Args:
        kernel: the operator's kernel module, which knows what must be the same on all ranks
        run: (x, weight, bias, group, config) -> output, by whatever method the config says
        group, config: as they go through torch.library, by name and as text
    """
    group = torch_op.group_by_name(group)
    if group.size() == 1:
        return F.linear(x, weight, bias)
    if not x.shape[0]:
        group_state(group).check_consensus_cached(operator, kernel.problem_fields(x, weight))
        return x.new_empty(0, weight.shape[0])
    config = config_for(operator, config, x, weight, group, lambda: kernel.problem_fields(x, weight))
    if config.method == "torch":
        group_state(group).check_consensus_cached(operator, with_config(kernel.problem_fields(x, weight), config))
    return run(x, weight, bias, group, config)


def keep_call(key, operator, launch, run, group, x, weight, bias, config, rows, y):
    """Insert a call into the call cache, see ``runtime.call_cache.lookup_run``.

    Args:
        key: from ``lookup_run``
        launch: the operator's module of that name
        run: as above
        x, weight, bias, config: as they were given
        rows: x [rows, K]
        y: the output
    """
    if not call_cache.is_current(group, key) or group.size() == 1 or not rows.shape[0]:
        return
    config = config_for(operator, as_argument(config), rows, weight, group, dict)
    flat, rows, shape = x.dim() == 2, rows.shape, y.shape

    def again(group, x, weight, bias):
        if flat:
            return run(x, weight, bias, group, config)
        return run(x.reshape(rows), weight, bias, group, config).view(shape)

    def bind(group, x, weight, bias):
        given = x if flat else x.reshape(rows)
        return launch.bind(given, weight, bias, group, config) if given.data_ptr() == x.data_ptr() else None

    is_fused = config.method == "fused"
    call_cache.insert(group, key, call_cache.CachedCall(again, bind if is_fused else None, shape))
