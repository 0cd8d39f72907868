"""What routes the tokens of tests that call no operator."""

from tdkernels.ops.experts.dispatch.request import DispatchRequest, RoutePlan


def planned(group, ids, num_experts, config, operator="op", per_choice=False, **options):
    """(RoutePlan, DispatchRequest) of ids [T, k] for a config that the call has named; options: of DispatchRequest."""
    request = DispatchRequest(operator, group, None, ids, num_experts, config, **options)
    return RoutePlan(request.shape, config, config_is_given=True, per_choice=per_choice), request
