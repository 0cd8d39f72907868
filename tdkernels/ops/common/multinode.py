"""Groups that span several nodes."""

from typing import TYPE_CHECKING, Any

from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    import torch.distributed as dist


def spans_nodes(group: "dist.ProcessGroup") -> bool:
    """Return whether a (resolved) group spans several nodes."""
    return group.size() > 1 and group_state(group).topology.num_nodes > 1


def torch_across_nodes(config: Any, kind: Any, group: "dist.ProcessGroup") -> Any:
    """Return ``config``; if it is None and the group spans several nodes, a config of class ``kind``, method "torch".

    For operators that only support method "torch" on several nodes.
    """
    return kind(method="torch") if config is None and spans_nodes(group) else config
