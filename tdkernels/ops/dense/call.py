"""What a call of a dense operator does, whichever it is."""

import torch.nn.functional as F

from tdkernels.autotune.modes import get_mode
from tdkernels.ops.common.config import as_argument
from tdkernels.ops.common.gemm_tunable import call_of, config_for
from tdkernels.ops.common.tunable_base import selected
from tdkernels.runtime import call_cache, torch_op
from tdkernels.symm.group import group_state


def forward(operator, kernel, run, x, weight, bias, group, config):
    """The body of the ``torch.library`` op: the output for 2-D operands, as the config of the call says.

    Args:     kernel: the operator's kernel module, which knows what must be the same on all ranks
              run: (x, weight, bias, group, config) -> output, by whatever method the config says
              group, config: as they go through torch.library, by name and as text
    """
    group = torch_op.group_by_name(group)
    if group.size() == 1:
        return F.linear(x, weight, bias)
    if not x.shape[0]:
        group_state(group).agree_once(operator, kernel.problem_fields(x, weight))
        return x.new_empty(0, weight.shape[0])
    config = config_for(operator, config, x, weight, group, lambda: kernel.problem_fields(x, weight))
    if config.method == "torch":
        group_state(group).agree_once(operator, kernel.plan_fields(x, weight, config))
    return run(x, weight, bias, group, config)


def keep_call(operator, run, group, x, weight, bias, config, rows, y):
    """Let ``runtime.call_cache.find`` find what a call has come to.

    Args:     run: as above; x, weight, bias, config: as they were given; rows: x [rows, K]; y: the output
    """
    operands = x, weight, bias
    if not call_cache.are_plain(operands) or group.size() == 1 or not rows.shape[0]:
        return
    chosen = None
    if config is None:
        chosen = selected(operator, rows, group, call_of(rows, weight))
        if chosen is None:
            return  # it is to be chosen again
        resolved = chosen[1].config
    else:
        resolved = config_for(operator, as_argument(config), rows, weight, group, dict)
    flat, rows, shape = x.dim() == 2, rows.shape, y.shape

    def again(group, x, weight, bias):
        if flat:
            return run(x, weight, bias, group, resolved)
        return run(x.reshape(rows), weight, bias, group, resolved).view(shape)

    call_cache.keep(operator, group, operands, (config, get_mode()), again, chosen)
