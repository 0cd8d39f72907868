"""How ep_moe runs, and how it comes to that where it is not told."""

from dataclasses import dataclass

from tdkernels.ops.common.multinode import spans_nodes
from tdkernels.ops.common.tunable_base import select
from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.counting import count
from tdkernels.ops.experts.dispatch.op import EpHandle
from tdkernels.ops.experts.dispatch.request import RoutePlan
from tdkernels.ops.experts.dispatch.route import settle
from tdkernels.ops.experts.dispatch.token_buckets import bucket, tokens_of
from tdkernels.ops.experts.dispatch.torch_backend import routing_by_torch
from tdkernels.ops.experts.grouped_gemm.config import GroupGemmConfig


@dataclass(frozen=True)
class EpMoeConfig:
    """How ``ep_moe`` runs; None takes the best config known of the part, see tdkernels.autotune.

    Attributes:
        ep: the ways there and back, see ``EpConfig``; the same on all ranks
        gemm: both products, see ``GroupGemmConfig``
        method: "fused": products overlap the ways there and back, see ``ep_moe_fused``; of the parts' configs it takes
            the tiles of ``gemm`` alone; "sequence": one step after the other, which sends fewer bytes where tokens have
            several experts on a rank; "torch": the sequence by torch's collectives and torch's grouped product, the
            latter where it has one; "": the sequence. The same on all ranks. torch.compile sees the sequence always
    """

    ep: EpConfig | None = None
    gemm: GroupGemmConfig | None = None
    method: str = ""

    def illegal(self, device, dtype):
        """Why this config cannot run on a device with a dtype; None when it can."""
        if self.method not in ("", "fused", "sequence", "torch"):
            return f'method must be "fused", "sequence", "torch" or "", not {self.method!r}'
        if self.method == "torch" and (self.ep, self.gemm) != (None, None):
            return 'method "torch" takes no ep and no gemm'
        if self.method == "fused" and self.gemm is not None and self.gemm.method != "fused":
            return f'method "fused" multiplies by its own kernels, not by {self.gemm.method!r}'
        for name, kind in (("ep", EpConfig), ("gemm", GroupGemmConfig)):
            part = getattr(self, name)
            if part is None:
                continue
            if not isinstance(part, kind):
                return f"{name} must be of {kind.__name__} or None, not of {type(part).__name__}"
            reason = part.illegal(device, dtype)
            if reason is not None:
                return f"{name}: {reason}"
        return None

    def parts(self, x):
        """(ep, gemm) of a call with tokens x, each None if it is to be chosen."""
        if self.method != "torch":
            return self.ep, self.gemm
        gemm = GroupGemmConfig(method="torch")
        return EpConfig(method="torch"), None if gemm.illegal(x.device, x.dtype) else gemm


SEQUENCE = EpMoeConfig(method="sequence")


def layout_of(quantize, max_tokens, max_tokens_per_rank, choices, group):
    """The layout by which the config of a call without one is looked up; None: the sequence, whatever is known.

    With ``max_tokens`` the overlapping layer needs room for all choices of any rank and for all tokens that any rank
    could stage, which the sequence need not have. Nobody knows the tokens of others; a bound on them all know.
    """
    ranks = group.size()
    if quantize is not None or ranks == 1 or spans_nodes(group):
        return None
    if max_tokens is None:
        return "exact"
    fits = max_tokens_per_rank is not None and max_tokens >= max_tokens_per_rank * max(choices, ranks - 1)
    return "bounded" if fits else None


def choose_config(layout, request, w_down):
    """(the EpMoeConfig that the group has chosen, the CountedRouting of the tokens or None) of a call of a layout.

    Collective at the first call with a problem. How many tokens there are all ranks know by the bound, or else when
    they are counted; so they are then, as the first step of either method does.
    """
    x, num_experts, k = request.x, request.num_experts, request.ids.shape[1]
    (hidden, inner), counted = w_down.shape[1:], None
    if layout == "bounded":
        tokens = bucket(request.group.size() * request.max_tokens_per_rank)
    else:
        request = request._replace(operator="ep_dispatch")
        counted = count(RoutePlan(request.shape, None, config_is_given=False), request)
        tokens = tokens_of(counted.staged, None, request.group.size(), num_experts, k)

    def describe():
        fields = {
            "max_tokens_per_rank": request.max_tokens_per_rank, "tokens": tokens, "width": hidden, "hidden": inner,
            "dtype": str(x.dtype), "k": k, "num_experts": num_experts,
        }
        return (tokens, hidden, inner, num_experts, k), layout, fields

    call = layout, tokens, hidden, inner, num_experts, k
    return select("ep_moe", x, request.group, call, describe).config, counted


def handle_for(config, counted, request):
    """The EpHandle by which the tokens of a CountedRouting go, if not to be multiplied as they come."""
    if config.method == "torch":
        return EpHandle(routing_by_torch(counted, request.ids, config.parts(request.x)[0]), None)
    return EpHandle(settle(counted, request), None)
