"""Top-k router of a mixture-of-experts layer: select the experts of each token and compute their weights."""

from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from tdkernels.ops.dense.local import linear

SCORES = ("softmax", "sigmoid")


class Router(torch.nn.Module):
    """Top-k router: select ``top_k`` of ``num_experts`` experts for each token.

    The parameters are the same on every rank. Their names are those of the models' checkpoints. Auxiliary-loss-free
    load balancing with a bias is described in https://arxiv.org/abs/2408.15664.

    Args:
        hidden: Hidden size H.
        num_experts: Number of experts E.
        top_k: Number of experts k for each token.
        scores: "softmax" over the experts, as in Mixtral and Qwen3-MoE, or "sigmoid" of each logit, as in DeepSeek-V3.
        normalize: Whether to divide the weights of a token by their sum.
        scale: Factor for the weights, applied after the normalization.
        balanced: Whether to keep a bias for each expert, as in DeepSeek-V3. The bias affects the selection of experts
            but not their weights. ``balance`` adjusts it.
        device: Device of the parameters.
        dtype: Dtype of the weight.

    Attributes:
        weight: Parameter [E, H].
        e_score_correction_bias: Buffer [E] in fp32; None unless ``balanced``.
        choices: Buffer [E]: number of assignments to each expert since the last ``balance``; None unless ``balanced``.
            It is not part of the state dict.

    Raises:
        ValueError: If ``scores`` is unknown, or ``top_k`` is not between 1 and ``num_experts``.
    """

    if TYPE_CHECKING:  # buffers, which are None unless balanced
        e_score_correction_bias: torch.Tensor
        choices: torch.Tensor

    def __init__(
        self, hidden: int, num_experts: int, top_k: int, *, scores: str = "softmax", normalize: bool = True,
        scale: float = 1.0, balanced: bool = False, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if scores not in SCORES:
            raise ValueError(f"Router: scores must be one of {SCORES}, not {scores!r}")
        if not 1 <= top_k <= num_experts:
            raise ValueError(f"Router: top_k must be from 1 to num_experts = {num_experts}, not {top_k!r}")
        self.hidden, self.num_experts, self.top_k = hidden, num_experts, top_k
        self.scores, self.normalize, self.scale = scores, normalize, scale
        self.weight = torch.nn.Parameter(torch.empty(num_experts, hidden, device=device, dtype=dtype))
        bias = torch.zeros(num_experts, device=device) if balanced else None
        self.register_buffer("e_score_correction_bias", bias)
        self.register_buffer("choices", None if bias is None else torch.zeros_like(bias), persistent=False)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Initialize the weight as ``torch.nn.Linear`` does."""
        torch.nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def extra_repr(self) -> str:
        return f"{self.hidden}, {self.num_experts} experts, top_k={self.top_k}, {self.scores}"

    def forward(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Route tokens.

        Scores are computed in fp32. Logits are computed in the dtype of ``x`` for softmax and in fp32 for sigmoid, as
        in the models above. In training mode a balanced router counts the assignments for ``balance``.

        Args:
            x: Tokens [T, H].

        Returns:
            (topk_ids [T, k] int64, topk_weights [T, k] fp32). Qwen3-MoE rounds the weights to the dtype of ``x``; this
            module does not.
        """
        if self.scores == "softmax":
            scores = torch.softmax(linear(x, self.weight), dim=-1, dtype=torch.float32)
        else:
            scores = torch.sigmoid(linear(x.float(), self.weight.float()))
        bias = self.e_score_correction_bias
        topk_ids = torch.topk(scores if bias is None else scores + bias, self.top_k, dim=-1).indices
        if bias is not None and self.training:
            self._count(topk_ids)
        topk_weights = scores.gather(1, topk_ids)
        if self.normalize:
            topk_weights = topk_weights / (topk_weights.sum(-1, keepdim=True) + 1e-20)  # sigmoids may all be 0
        return topk_ids, topk_weights * self.scale

    @torch.no_grad()
    def _count(self, topk_ids):
        ids = topk_ids.flatten()
        self.choices.scatter_add_(0, ids, torch.ones_like(ids, dtype=self.choices.dtype))

    @torch.no_grad()
    def balance(self, rate: float = 0.001, *, group: dist.ProcessGroup | None = None) -> None:
        """Update the biases from the load of the experts since the last call. Call it after a training step.

        The bias of an expert with more tokens than the average is decreased by ``rate``, and that of an expert with
        fewer tokens is increased. Collective over ``group``: afterwards the bias is the same on all of its ranks.

        Args:
            rate: Step by which each bias is changed.
            group: Group of ranks whose tokens are counted; None for the world.

        Raises:
            ValueError: If the router is not balanced.
        """
        if self.e_score_correction_bias is None:
            raise ValueError("Router: balance needs a Router with balanced=True")
        dist.all_reduce(self.choices, group=group)
        self.e_score_correction_bias += rate * torch.sign(self.choices.mean() - self.choices)
        self.choices.zero_()
