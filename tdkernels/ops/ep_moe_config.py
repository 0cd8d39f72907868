"""How ep_moe runs, and how it comes to that where it is not told."""

from dataclasses import dataclass

from tdkernels.autotune.choose import known_config
from tdkernels.ops._nodes import spans_nodes
from tdkernels.ops._tuning import chosen
from tdkernels.ops.ep_choice import tokens_of
from tdkernels.ops.ep_config import EpConfig
from tdkernels.ops.ep_torch import routed
from tdkernels.ops.ep_ways import as_chosen, route_tokens
from tdkernels.ops.group_gemm_kernel import GroupGemmConfig
from tdkernels.ops.moe_ep import EpHandle


@dataclass(frozen=True)
class EpMoeConfig:
    """How ``ep_moe`` runs; None takes the best config known of the part, see tdkernels.autotune.

    ep:    the ways there and back, see ``EpConfig``; the same on all ranks
    gemm:  both products, see ``GroupGemmConfig``
    method: "fused": products overlap the ways there and back, see ``ep_moe_fused``; of the parts' configs it takes the
           tiles of ``gemm`` alone; "sequence": one step after the other, which sends fewer bytes where tokens have
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


def is_open(quantize, max_tokens, max_tokens_per_rank, group):
    """Whether a call without a config can run by any method.

    With ``max_tokens`` nobody knows whether the choices of other ranks fit, as the overlapping layer needs it.
    """
    bounds = quantize, max_tokens, max_tokens_per_rank
    return bounds == (None, None, None) and group.size() > 1 and not spans_nodes(group)


def choose_config(x, topk_ids, w_down, num_experts, group):
    """(the EpMoeConfig that the group has chosen, the Routing of the tokens) of a call that ``is_open``.

    Collective at the first call with a problem. How many tokens there are all ranks know when they are counted; so they
    are, as the first step of either method does.
    """
    routing = route_tokens("ep_dispatch", x, topk_ids, num_experts, None, None, group, None)
    k, (hidden, inner) = topk_ids.shape[1], w_down.shape[1:]
    tokens = tokens_of(routing.staged, None, group.size(), num_experts, k)
    call = "ep_moe", tokens, hidden, inner, num_experts, k, x.dtype, x.device
    config = known_config(group, call)
    if config is None:
        fields = {
            "tokens": tokens, "width": hidden, "hidden": inner, "dtype": str(x.dtype), "k": k,
            "num_experts": num_experts,
        }  # fmt: skip
        config = chosen("ep_moe", (tokens, hidden, inner, num_experts, k), "exact", x, group, fields, call)
    return config, routing


def handle_for(config, routing, ids):
    """The EpHandle by which the tokens of a Routing go, if not to be multiplied as they come."""
    if config.method == "torch":
        return EpHandle(routed(routing, ids), None)
    return EpHandle(as_chosen(routing, ids), None)
