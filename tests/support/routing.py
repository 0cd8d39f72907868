"""Routing of tokens for tests that call no operator."""

from tdkernels.ops.experts.dispatch.request import DispatchRequest, RoutePlan


def planned(group, ids, num_experts, config, operator="op", per_choice=False, **options):
    """Return (RoutePlan, DispatchRequest) of ids [T, k] for a config given by the call; options: of DispatchRequest."""
    request = DispatchRequest(operator, group, None, ids, num_experts, config, **options)
    return RoutePlan(request.shape, config, config_is_given=True, per_choice=per_choice), request
