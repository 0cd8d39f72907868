"""Overrides for torchtitan's ``--override.imports``: projections that run ``ag_gemm`` and ``gemm_rs``.

    override        replaces                                      operators
    fused_qkv       AllGatherFusedQKVLinear of attention          ag_gemm of [B, S / W, H]
    row_parallel    RowParallelLinear of attention                gemm_rs to [B, S / W, H]
    feed_forward    AllGatherFusedFeedForward                     one ag_gemm for w1 and w3, gemm_rs for w2
    dispatcher      AllToAllTokenDispatcher of experts            ep_dispatch and ep_combine

The first three replace the modules that ``tp_gemm_backend="dist_gemm"`` selects, so that torchtitan's sharding of
activations is right for them. Parameters and checkpoints are the same. Without tensor parallelism the modules run
torchtitan's forward, and so does the dispatcher without expert parallelism.

Example:
    --override.imports tdkernels.integrations.torchtitan.overrides.fused_qkv,\
tdkernels.integrations.torchtitan.overrides.row_parallel,tdkernels.integrations.torchtitan.overrides.feed_forward,\
tdkernels.integrations.torchtitan.overrides.dispatcher
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torchtitan.config.override import derive, override
from torchtitan.models.common import dist_gemm
from torchtitan.models.common.token_dispatcher import AllToAllTokenDispatcher

from tdkernels.integrations.torchtitan import is_type_checking, typed
from tdkernels.ops.dense.ag_gemm.op import ag_gemm
from tdkernels.ops.dense.gemm_rs.op import gemm_rs
from tdkernels.ops.experts.dispatch.op import EpHandle, ep_combine, ep_dispatch


def _group_or_warning():
    """Return the tensor-parallel group. If there is none, torchtitan warns that nothing is fused, and None is returned.
    """
    group = dist_gemm._tp_group_from_context()
    if group is None:
        dist_gemm._warn_once_unfused()
    return group


def _scattered(x, weight, bias, group):
    """Return gemm_rs of x [B, S, K / W] to [B, S / W, N]."""
    return typed(lambda: gemm_rs(x, weight, bias, dim=1, group=group), [(x, 2), (weight, 1)], x, 1, group)


class FusedQKVLinear(dist_gemm.AllGatherFusedQKVLinear):
    """torchtitan's fused projection of q, k and v. ``ag_gemm`` gathers the sequence while it is multiplied."""

    @dataclass(kw_only=True, slots=True)
    class Config(dist_gemm.AllGatherFusedQKVLinear.Config):
        """The fields of torchtitan's config."""

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return q, k, v [B, S, heads / W, head_dim] for x [B, S / W, H]. Collective over the group."""
        group = _group_or_warning()
        if group is None:
            return super().forward(x)
        weight, bias = self.wqkv.weight, self.wqkv.bias
        divided = [(x, 1), *((one, 0) for one in (weight, bias) if one is not None)]
        y = typed(lambda: ag_gemm(x, weight, bias, dim=1, group=group), divided, x, 2, group)
        batch, length = y.shape[:2]
        heads = y.view(batch, length, -1, self.r_dim, self.head_dim)
        parts = torch.split(heads, [self.heads_per_kv, 1, 1], dim=-2)
        q, k, v = (part.reshape(batch, length, -1, self.head_dim).contiguous() for part in parts)
        return q, k, v


class RowParallelLinear(dist_gemm.RowParallelLinear):
    """torchtitan's row-parallel projection. ``gemm_rs`` scatters the sequence while the product is computed."""

    @dataclass(kw_only=True, slots=True)
    class Config(dist_gemm.RowParallelLinear.Config):
        """The fields of torchtitan's config."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Return z [B, S / W, N] for an input [B, S, K / W]. Collective over the group."""
        group = _group_or_warning()
        return super().forward(input) if group is None else _scattered(input, self.weight, self.bias, group)


class FeedForward(dist_gemm.AllGatherFusedFeedForward):
    """torchtitan's SwiGLU feed-forward with one gather for w1 and w3."""

    @dataclass(kw_only=True, slots=True)
    class Config(dist_gemm.AllGatherFusedFeedForward.Config):
        """The fields of torchtitan's config."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return z [B, S / W, H] for x [B, S / W, H]. Collective over the group."""
        group = _group_or_warning()
        if group is None:
            return super().forward(x)
        weights = [self.w1.weight, self.w3.weight]
        divided = [(x, 1), (weights[0], 0), (weights[1], 0)]
        gate, up = typed(lambda: tuple(ag_gemm(x, weights, dim=1, group=group)), divided, x, 2, group)
        return _scattered(F.silu(gate) * up, self.w2.weight, self.w2.bias, group)


@dataclass(frozen=True)
class EpMetadata:
    """What ``combine`` needs of a dispatch: the handle of ``ep_dispatch`` and the scores [T, K] of the router."""

    handle: EpHandle
    scores: torch.Tensor


class TokenDispatcher(AllToAllTokenDispatcher):
    """torchtitan's dispatcher of tokens to experts of other ranks, with ``ep_dispatch`` and ``ep_combine``.

    A token is sent once to each rank that has experts for it. The scores are applied in the combine, in fp32, and the
    outputs of the experts of a token are summed in fp32. torchtitan's dispatcher runs in graphs of torch.compile and
    while spmd_types checks types.
    """

    @dataclass(kw_only=True, slots=True)
    class Config(AllToAllTokenDispatcher.Config):
        """The fields of torchtitan's config."""

    def dispatch(
        self, x_TD: torch.Tensor, topk_scores_TK: torch.Tensor, topk_expert_ids_TK: torch.Tensor,
        num_local_tokens_per_expert_E: torch.Tensor,
    ) -> Any:
        """Return (rows of this rank's experts in their order, rows of each expert, metadata for ``combine``)."""
        if self.ep_mesh is None or torch.compiler.is_compiling() or is_type_checking():
            return super().dispatch(x_TD, topk_scores_TK, topk_expert_ids_TK, num_local_tokens_per_expert_E)
        group = self.ep_mesh.get_group()
        recv, handle = ep_dispatch(x_TD, topk_expert_ids_TK, num_experts=self.num_experts, group=group)
        counts = recv.splits.to(num_local_tokens_per_expert_E.dtype)
        return recv.x, counts, EpMetadata(handle, topk_scores_TK)

    def combine(self, routed_output_RD: torch.Tensor, metadata: Any, x_TD: torch.Tensor) -> torch.Tensor:
        """Return the scored sums [T, D] of the outputs of the experts."""
        if not isinstance(metadata, EpMetadata):
            return super().combine(routed_output_RD, metadata, x_TD)
        group = self.ep_mesh.get_group()
        return ep_combine(routed_output_RD, metadata.handle, metadata.scores, group=group).to(x_TD.dtype)


@override(target=AllToAllTokenDispatcher.Config, exact=True, description="ep_dispatch and ep_combine of tdkernels")
def dispatcher(config: AllToAllTokenDispatcher.Config) -> TokenDispatcher.Config:
    """Replace the dispatcher of tokens to experts."""
    return derive(config, TokenDispatcher.Config)


@override(target=dist_gemm.AllGatherFusedQKVLinear.Config, exact=True, description="ag_gemm of tdkernels")
def fused_qkv(config: dist_gemm.AllGatherFusedQKVLinear.Config) -> FusedQKVLinear.Config:
    """Replace the fused projection of q, k and v."""
    return derive(config, FusedQKVLinear.Config)


@override(target=dist_gemm.RowParallelLinear.Config, exact=True, description="gemm_rs of tdkernels")
def row_parallel(config: dist_gemm.RowParallelLinear.Config) -> RowParallelLinear.Config:
    """Replace the output projection of attention."""
    return derive(config, RowParallelLinear.Config)


@override(target=dist_gemm.AllGatherFusedFeedForward.Config, exact=True, description="ag_gemm and gemm_rs of tdkernels")
def feed_forward(config: dist_gemm.AllGatherFusedFeedForward.Config) -> FeedForward.Config:
    """Replace the feed-forward layer."""
    return derive(config, FeedForward.Config)
