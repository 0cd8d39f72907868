"""Router: which experts a token goes to, and what each of them weighs."""

import torch
import torch.distributed as dist
import torch.nn.functional as F

SCORES = ("softmax", "sigmoid")


class Router(torch.nn.Module):
    """Choose top_k of num_experts for each token; the same parameters on every rank.

    Args:
        hidden, num_experts, top_k: H, E and k
        scores: "softmax" over the experts, as Mixtral and Qwen3-MoE; or "sigmoid" of each, as DeepSeek-V3
        normalize: divide the weights of a token by their sum
        scale: by which they are multiplied, then
        balanced: keep a bias for each expert that takes part in the choice but not in the weights, and that ``balance``
            adjusts, as in DeepSeek-V3
    Call:     x [T, H] -> topk_ids [T, k] int64, topk_weights [T, k] fp32 (Qwen3-MoE rounds them to the dtype of x).
              Scores are in fp32; logits in the dtype of x for softmax and in fp32 for sigmoid, as those models have it
    State:    weight [E, H]; e_score_correction_bias [E] fp32 if balanced: the names of these models' checkpoints

    Source:
        the bias without a loss: https://arxiv.org/abs/2408.15664
    """

    def __init__(
        self, hidden, num_experts, top_k, *, scores="softmax", normalize=True, scale=1.0, balanced=False, device=None,
        dtype=None,
    ):
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
        # Choices since the last balance; no part of a checkpoint.
        self.register_buffer("choices", None if bias is None else torch.zeros_like(bias), persistent=False)
        self.reset_parameters()

    def reset_parameters(self):
        torch.nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def extra_repr(self):
        return f"{self.hidden}, {self.num_experts} experts, top_k={self.top_k}, {self.scores}"

    def forward(self, x):
        if self.scores == "softmax":
            scores = torch.softmax(F.linear(x, self.weight), dim=-1, dtype=torch.float32)
        else:
            scores = torch.sigmoid(F.linear(x.float(), self.weight.float()))
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
    def balance(self, rate=0.001, *, group=None):
        """After a training step: whatever had more than its share since the last call is chosen less from now on.

        Args:
            rate: by which each bias goes up or down
            group: whose ranks' tokens count, None for the world

        Contract:
            collective over group, after which the bias is the same on all of its ranks
        """
        if self.e_score_correction_bias is None:
            raise ValueError("Router: balance needs a Router with balanced=True")
        dist.all_reduce(self.choices, group=group)
        self.e_score_correction_bias += rate * torch.sign(self.choices.mean() - self.choices)
        self.choices.zero_()
