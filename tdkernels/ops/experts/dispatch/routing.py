"""Interface of a routing: the destination rows of a call's tokens, with the operations dispatch and combine.

Each strategy is a class in its own module:

    CountedRouting      ``counted``: two-phase; one launch exchanges counts, another one tokens
    LowLatencyRouting   ``low_latency``: one launch exchanges both; for few tokens, needs max_tokens_per_rank
    MultinodeRouting    ``multinode.routing``: two-phase, for groups on several nodes
    TorchRouting        ``torch_backend``: torch's collectives

``route`` selects the class for a call.
"""

import abc
import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.request import RoutingShape

if TYPE_CHECKING:
    import torch.distributed as dist

    Dispatched = tuple[torch.Tensor, torch.Tensor | None, torch.Tensor | None]  # rows, scales by rows, weights by rows


@dataclass(eq=False, kw_only=True)
class Routing(abc.ABC):
    """The destination rows of a call's tokens. Subclasses implement the operations for one strategy.

    Attributes:
        config: The EpConfig. None between counting and the selection of a config.
        config_is_given: Whether the call has named the config, or there is only one.
        rows: Number R of rows of the output.
        splits: Rows of each local expert, [E / W] int32, or [W, E / W] if rows are grouped by source.
        staged: Number of tokens on the rank that stages the most, or max_tokens. It is the same on all ranks.
    """

    shape: RoutingShape
    group: "dist.ProcessGroup"
    config: EpConfig | None
    config_is_given: bool = True
    rows: int
    splits: torch.Tensor
    staged: int

    method = "fused"  # value of ``EpConfig.method``

    def part_of_call(self, state: Any = None) -> contextlib.AbstractContextManager[None]:
        """Return the context for consensus checks with this routing, see ``symm.early_error``.

        A rank with too many tokens has raised an error, and does not get this routing. ``state``: the GroupState,
        if the caller has it.
        """
        return contextlib.nullcontext()

    def add_spare_rows(self) -> None:  # noqa: B027
        """Let dispatches return more rows than arrive, if that saves the host time; see ``CountedRouting``."""

    def dismiss_error(self) -> None:  # noqa: B027
        """Ignore the error code of this rank, which its own kernel reports, too: the rank raises an error at once.

        If a later call raised the error again, this rank would skip that call.
        """

    @abc.abstractmethod
    def dispatch(
        self, x: torch.Tensor, *, scales: torch.Tensor | None = None, weights: torch.Tensor | None = None,
        quantize: bool = False,
    ) -> "Dispatched":
        """Send x [T, H] of each rank to the ranks of its experts.

        Args:
            x: [T, H].
            scales: [T] or [T, S], sent along, or None.
            weights: [T, K], sent along, or None.
            quantize: Whether to send float8_e4m3fn with a scale per 128 channels.

        Returns:
            (rows [R, H], scales [R] or [R, S] or None, weights [R] or None).
        """

    @abc.abstractmethod
    def send_dispatch(
        self, x: torch.Tensor, *, scales: torch.Tensor | None = None, weights: torch.Tensor | None = None,
        quantize: bool = False,
    ) -> "Callable[[], Dispatched]":
        """Run the send phase of ``dispatch``. Return a function for the receive phase; it returns the rows."""

    @abc.abstractmethod
    def dispatch_gradient(
        self, dy: torch.Tensor, expert_rows: torch.Tensor | None, weights: torch.Tensor | None, want_dots: bool
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the gradients of a combine with ``weights`` [T, K], or None for 1, from the gradient dy of y.

        Returns:
            (gradient of the rows [R, H], dot products of dy with ``expert_rows`` [R] or None).
        """

    @abc.abstractmethod
    def combine(
        self, rows: torch.Tensor, *, weights: torch.Tensor | None = None, row_weights: torch.Tensor | None = None,
        row_numbers: torch.Tensor | None = None, config: EpConfig | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Compute the weighted sum of each token's rows on the token's rank.

        Args:
            rows: [R, H].
            weights: Weight of each assignment, [T, K], or None for 1.
            row_weights: The same weights by rows, [R], if ``weighs_rows``.
            row_numbers: A number for each row to send along, [R] fp32, or None.
            config: EpConfig, or None for the config of the routing.

        Returns:
            (y [T, H], row_numbers by assignments [T, K] or None).
        """

    @abc.abstractmethod
    def send_combine(
        self, rows: torch.Tensor, *, weights: torch.Tensor | None = None, row_weights: torch.Tensor | None = None,
        config: EpConfig | None = None,
    ) -> Callable[[], torch.Tensor]:
        """Run the send phase of ``combine``. Return a function for the receive phase; it returns y."""

    @abc.abstractmethod
    def weighs_rows(self, config: EpConfig) -> bool:
        """Return whether a combine needs the weights by rows."""
