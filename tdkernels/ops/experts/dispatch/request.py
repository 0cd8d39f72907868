"""Arguments of a dispatch, and the decisions that follow from shapes alone, before any id is read."""

from typing import TYPE_CHECKING, NamedTuple

import torch

from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.device_errors import Splits, TopkIds

if TYPE_CHECKING:
    import torch.distributed as dist


class RoutingShape(NamedTuple):
    """The sizes of a routing. Launches, tables, consensus checks and errors depend on them, not on the ids.

    Attributes:
        operator: Name of the operator, for errors.
        tokens: T of this rank's topk_ids.
        choices: k of this rank's topk_ids.
        num_experts: E, the experts of all ranks.
        world_size: W.
        max_tokens: Number of rows of the output. None: as many as the rank receives, and spare rows if there are any.
        max_tokens_per_rank: Upper bound of T on all ranks, or None. ``with_capacity`` then sets max_tokens too.
        by_source: Whether rows are grouped by source rank (all_to_all) instead of by expert.
    """

    operator: str
    tokens: int
    choices: int
    num_experts: int
    world_size: int
    max_tokens: int | None = None
    max_tokens_per_rank: int | None = None
    by_source: bool = False


class DispatchRequest(NamedTuple):
    """The arguments of a call that routes tokens.

    Attributes:
        operator: Name of the operator, for errors.
        x: Tokens, [T, H].
        ids: Experts of each token, [T, k]. An id of -1 is a dropped assignment.
        config: The EpConfig of the call, or None.
        by_source: Whether rows are grouped by source rank (all_to_all) instead of by expert.
        error_code: int32 scalar on the device for errors that the values of the ids do not show, or None. 0: no error;
            1: the splits are invalid; negative: minus the number of tokens, which is more than max_tokens_per_rank.
        operand: Describes the operand from which the ids were computed, for errors. None: the ids are topk_ids.

    The other fields are the arguments of ``ep_dispatch`` of the same name.
    """

    operator: str
    group: "dist.ProcessGroup"
    x: torch.Tensor
    ids: torch.Tensor
    num_experts: int | None
    config: EpConfig | None = None
    quantize: str | None = None
    max_tokens: int | None = None
    max_tokens_per_rank: int | None = None
    by_source: bool = False
    error_code: torch.Tensor | None = None
    operand: TopkIds | Splits | None = None

    @property
    def shape(self) -> RoutingShape:
        """The RoutingShape of the ids."""
        return RoutingShape(  # type: ignore[call-arg]
            self.operator, *self.ids.shape, self.num_experts, self.group.size(), self.max_tokens,
            self.max_tokens_per_rank, self.by_source,
        )

    @property
    def has_too_many_tokens(self) -> bool:
        """Whether x has more rows than max_tokens_per_rank."""
        return self.max_tokens_per_rank is not None and len(self.x) > self.max_tokens_per_rank

    def without_tokens(self) -> "DispatchRequest":
        """Return the request of a rank with too many tokens: no tokens, and minus their number as the error code."""
        code = torch.full((), -len(self.x), dtype=torch.int32, device=self.x.device)
        return self._replace(x=self.x[:0], ids=self.ids[:0], error_code=code)


class RoutePlan(NamedTuple):
    """The part of a routing that shapes decide. It holds no tensor and no group, so it can be cached.

    Attributes:
        shape: The RoutingShape after ``with_capacity``.
        config: The EpConfig. None: it is selected after the tokens are counted.
        config_is_given: Whether the call has named the config, or there is only one.
        per_choice: Whether each assignment is sent separately, so that max_tokens also bounds the assignments of a
            rank. Only for groups on one node.
        is_low_latency: Whether a single launch counts and sends. The following fields are set only then.
        slots: Number of staging slots for the tokens of all ranks.
        words: Number of int32 words of the tables.
    """

    shape: RoutingShape
    config: EpConfig | None
    config_is_given: bool
    per_choice: bool = False
    is_low_latency: bool = False
    slots: int = 0
    words: int = 0
