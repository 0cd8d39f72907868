"""All-gather of the scales of x, for methods of ag_gemm in which scales do not travel with their rows."""

from typing import TYPE_CHECKING

import torch

from tdkernels.ops.collectives import op as _collectives  # noqa: F401  registers torch.ops.tdkernels.all_gather
from tdkernels.ops.common.torch_collectives import all_gather_rows

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.ops.common.scaling import Scales


def gathered_scales(
    x: torch.Tensor, scales: "Scales", group: "dist.ProcessGroup", by_torch: bool = False
) -> "Scales":
    """Return the scales with those of the rows of all ranks: one for each row, also if the ranks' are tensor-wise.

    ``by_torch``: use the all-gather of torch.distributed.
    """
    own = scales.x
    if own.numel() == 1:  # a peer may have row-wise scales
        own = own.reshape(1, 1).expand(x.shape[0], 1).contiguous()
    full = all_gather_rows(own, group) if by_torch else torch.ops.tdkernels.all_gather(own, group.group_name, "")
    return scales._replace(x=full)
