"""The interface of a routing: which rows of which ranks the tokens of a call go to, and the operations by it.

Each strategy is a class in a module of its own:

    CountedRouting      ``counted``: the ranks exchange counts in one launch, tokens in another
    LowLatencyRouting   ``low_latency``: one launch exchanges both; few tokens, with max_tokens_per_rank
    MultinodeRouting    ``multinode.routing``: as CountedRouting, in a group on several nodes
    TorchRouting        ``torch_backend``: torch's collectives

``route`` selects the class of a call.
"""

import abc
from dataclasses import dataclass

import torch

from tdkernels.ops.experts.dispatch.config import EpConfig
from tdkernels.ops.experts.dispatch.request import RoutingShape


@dataclass(eq=False, kw_only=True)
class Routing(abc.ABC):
    """What every strategy knows, and what it can do.

    Attributes:
        config: the EpConfig; None between counting and the selection of a config
        config_is_given: whether the call has named the config, or there is no other
        rows: R, rows of the output
        splits: [E / W] int32, rows of each expert here; of rows grouped by source [W, E / W]
        staged: tokens on the rank that stages the most, or max_tokens: the same number on all ranks
    """

    shape: RoutingShape
    group: object
    config: EpConfig | None
    config_is_given: bool = True
    rows: int
    splits: torch.Tensor
    staged: int

    method = "fused"  # of an EpConfig

    @abc.abstractmethod
    def dispatch(self, x, *, scales=None, weights=None, quantize=False):
        """x [T, H] of each rank as rows [R, H]; returns (rows, scales [R, S] or None, weights [R] or None)."""

    @abc.abstractmethod
    def send_dispatch(self, x, *, scales=None, weights=None, quantize=False):
        """The send phase of ``dispatch``; returns a function that receives, and returns what ``dispatch`` returns."""

    @abc.abstractmethod
    def dispatch_gradient(self, dy, expert_rows, weights, want_dots):
        """The gradient of a sum of rows, each times its ``weights`` [T, K] or 1.

        Returns:
            (gradient of the rows [R, H], products of dy with ``expert_rows`` by rows [R] or None)
        """

    @abc.abstractmethod
    def combine(self, rows, *, weights=None, row_weights=None, row_numbers=None, config=None):
        """The weighted sum of each token's rows.

        Args:
            rows: [R, H]
            weights: [T, K] the weight of each choice, or None for 1
            row_weights: [R] the same by rows, if ``weighs_rows``
            row_numbers: [R] fp32 to be sent along, or None
            config: EpConfig, or None for that of the routing

        Returns:
            (y [T, H], row_numbers by choices [T, K] or None)
        """

    @abc.abstractmethod
    def send_combine(self, rows, *, weights=None, row_weights=None, config=None):
        """The send phase of ``combine``; returns a function that receives, and returns y."""

    @abc.abstractmethod
    def weighs_rows(self, config):
        """Whether a combine needs the weights where the rows are."""
