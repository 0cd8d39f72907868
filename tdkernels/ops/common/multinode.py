"""Groups on several nodes, as an operator sees them that has no form for them but torch's sequence."""

from tdkernels.symm.group import group_state


def spans_nodes(group):
    """Whether a (resolved) group is on several nodes."""
    return group.size() > 1 and group_state(group).topology.num_nodes > 1


def torch_across_nodes(config, kind, group):
    """``config``, or where there is none and the group is on several nodes, the ``kind`` of torch's sequence."""
    return kind(method="torch") if config is None and spans_nodes(group) else config
