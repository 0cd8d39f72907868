"""What a call asks to have routed, and what is decided from its shapes before any id is read."""

from typing import NamedTuple

import torch

from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.device_errors import Splits, TopkIds


class RoutingShape(NamedTuple):
    """The sizes of a routing. Launches, tables, agreement and errors follow from them, not from the ids.

    Attributes:
        operator: the operator's name, for errors
        tokens, choices: T and k of this rank's topk_ids
        num_experts: E, of all ranks
        world_size: W
        max_tokens: the rows of the output; None: as many as the rank receives
        max_tokens_per_rank: a bound on the T of every rank, or None; it goes with a max_tokens
        by_source: whether rows are grouped by source rank (all_to_all), not by expert
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
        operator: the operator's name, for errors
        x, ids: [T, H] and [T, k]; an id of -1 is a dropped choice
        config: the EpConfig of the call, or None
        by_source: whether rows are grouped by source rank (all_to_all), not by expert
        error_code: int32 scalar on the device; not 0 if the ids are invalid in a way that their values do not show: 1,
            or minus the number of tokens of a rank that has more than max_tokens_per_rank
        operand: describes the operand that the ids come from, for errors; None: they are the topk_ids of the call

    The other fields are the arguments of ``ep_dispatch`` of the same name.
    """

    operator: str
    group: object
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
    def shape(self):
        """The RoutingShape of the ids."""
        return RoutingShape(
            self.operator, *self.ids.shape, self.num_experts, self.group.size(), self.max_tokens,
            self.max_tokens_per_rank, self.by_source,
        )


    @property
    def has_too_many_tokens(self):
        """Whether x has more rows than max_tokens_per_rank."""
        return self.max_tokens_per_rank is not None and len(self.x) > self.max_tokens_per_rank

    def without_tokens(self):
        """The request that a rank with too many tokens makes instead: no tokens, and their number as the error code."""
        code = torch.full((), -len(self.x), dtype=torch.int32, device=self.x.device)
        return self._replace(x=self.x[:0], ids=self.ids[:0], error_code=code)


class RoutePlan(NamedTuple):
    """How the tokens of a call are routed, as far as shapes decide it. It holds no tensor and no group.

    Attributes:
        shape: the RoutingShape, in which ``max_tokens_per_rank`` has set a missing max_tokens
        config: the EpConfig; None: to be selected when the tokens are counted
        config_is_given: whether the call has named the config, or there is no other
        per_choice: whether each choice is sent by itself, and all choices of a rank have to fit max_tokens, too; in a
            group on one node
        is_low_latency: whether one launch counts and sends; then
        slots, words: the staging slots for the tokens of all ranks, and the words of the tables
    """

    shape: RoutingShape
    config: EpConfig | None
    config_is_given: bool
    per_choice: bool = False
    is_low_latency: bool = False
    slots: int = 0
    words: int = 0
