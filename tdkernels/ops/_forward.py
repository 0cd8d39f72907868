"""What a call of a dense operator does, whichever it is: the body of its ``torch.library`` op."""

import torch.nn.functional as F

from tdkernels.ops import _operands
from tdkernels.ops._dense_tuning import config_for
from tdkernels.symm.group import group_state


def forward(operator, kernel, launch, reference, x, weight, bias, group, config):
    """The output for 2-D operands, by the fused kernel or by torch's sequence, as the config of the call says.

    Args:     kernel: the operator's kernel module, which knows what must be the same on all ranks
              launch: (x, weight, bias, group, config) -> output; reference: the operator's specification
              group, config: as they go through torch.library, by name and as text
    """
    group = _operands.group_by_name(group)
    if group.size() == 1:
        return F.linear(x, weight, bias)
    if not x.shape[0]:
        group_state(group).agree_once(operator, kernel.problem_fields(x, weight))
        return x.new_empty(0, weight.shape[0])
    config = config_for(operator, config, x, weight, group, lambda: kernel.problem_fields(x, weight))
    if config.method == "fused":
        return launch(x, weight, bias, group, config)
    call = config, x.shape, x.dtype, weight.shape
    group_state(group).agree_once(operator, lambda: kernel.plan_fields(x, weight, config), call)
    return reference(x, weight, bias, group=group)
