"""Config of ep_moe, and its selection for calls without a config."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

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

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

    from tdkernels.ops.experts.dispatch.counted import CountedRouting
    from tdkernels.ops.experts.dispatch.request import DispatchRequest


@dataclass(frozen=True)
class EpMoeConfig:
    """Config of ``ep_moe``.

    If ``ep`` or ``gemm`` is None, the best known config of that part is selected (see tdkernels.autotune).

    Attributes:
        ep: Config of dispatch and combine, see ``EpConfig``. It must be the same on all ranks.
        gemm: Config of both GEMMs, see ``GroupGemmConfig``.
        method: Must be the same on all ranks. In a graph of torch.compile it is always "sequence".

            - "fused": The GEMMs overlap the communication. Of ``ep`` and ``gemm`` only the tiles of ``gemm`` are used.
            - "sequence" or "": Dispatch, GEMMs and combine run one after the other. This sends fewer bytes if tokens
              have several experts on one rank.
            - "torch": The sequence with torch's collectives, and with torch's grouped GEMM if it supports the operands.
    """

    ep: EpConfig | None = None
    gemm: GroupGemmConfig | None = None
    method: str = ""

    def illegal(self, device: "torch.device", dtype: "torch.dtype") -> str | None:
        """Return why this config cannot run with a device and a dtype, or None if it can."""
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
                return f"{name} must be {kind.__name__} or None, not {type(part).__name__}"
            reason = part.illegal(device, dtype)
            if reason is not None:
                return f"{name}: {reason}"
        return None

    def variant_reason(self) -> str | None:
        """Return why a row of a result depends on the batch with this config, or None if it does not."""
        if self.method == "torch":
            return 'method must not be "torch"'
        # The fused method uses only the tiles of ``gemm``.
        parts = (("gemm", self.gemm),) if self.method == "fused" else (("ep", self.ep), ("gemm", self.gemm))
        for name, part in parts:
            reason = None if part is None else part.variant_reason()
            if reason is not None:
                return f"{name}: {reason}"
        return None

    def parts(self, x: "torch.Tensor") -> tuple[EpConfig | None, GroupGemmConfig | None]:
        """Return (ep, gemm) for a call with tokens x. None means that the part selects its own config."""
        if self.method != "torch":
            return self.ep, self.gemm
        gemm = GroupGemmConfig(method="torch")
        return EpConfig(method="torch"), None if gemm.illegal(x.device, x.dtype) else gemm


SEQUENCE = EpMoeConfig(method="sequence")


def layout_of(
    quantize: str | None, max_tokens: int | None, max_tokens_per_rank: int | None, choices: int,
    group: "dist.ProcessGroup",
) -> str | None:
    """Return the layout of the tuning problem of a call without a config, or None if it must use the sequence.

    With ``max_tokens``, the fused method needs capacity for all assignments of any rank and for all tokens that any
    rank may stage; the sequence does not. A rank does not know the number of tokens of its peers, so fused needs
    ``max_tokens_per_rank`` as a bound that all ranks know.
    """
    ranks = group.size()
    if quantize is not None or ranks == 1 or spans_nodes(group):
        return None
    if max_tokens is None:
        return "exact"
    fits = max_tokens_per_rank is not None and max_tokens >= max_tokens_per_rank * max(choices, ranks - 1)
    return "bounded" if fits else None


def choose_config(
    layout: str, request: Any, w_down: "torch.Tensor",
) -> "tuple[EpMoeConfig, CountedRouting | None]":
    """Select the EpMoeConfig of a call for a DispatchRequest, the same on all ranks.

    The first call with a problem is collective. The problem has the number of tokens of all ranks. With layout
    "bounded" it is computed from the bound. With "exact" the tokens are counted here; both methods start with that.

    Returns:
        (config, routing). ``routing`` is the CountedRouting of the tokens, or None if they were not counted.
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


def handle_for(config: EpMoeConfig, counted: "CountedRouting", request: "DispatchRequest") -> EpHandle:
    """Return the EpHandle with which the sequence dispatches the tokens of a CountedRouting."""
    if config.method == "torch":
        return EpHandle(routing_by_torch(counted, request.ids, config.parts(request.x)[0]), None)
    return EpHandle(settle(counted, request), None)
