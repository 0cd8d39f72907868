"""Mixture-of-experts layers: EPMoE divides the experts between the ranks, TPMoE divides each expert."""

import copy
from typing import TYPE_CHECKING, Any

import torch

import tdkernels
from tdkernels.nn.checkpoint import Shard, as_dtensor_like, load_any_layout
from tdkernels.nn.huggingface import settings_of
from tdkernels.nn.router import Router
from tdkernels.symm import resolve_group

if TYPE_CHECKING:
    from typing_extensions import Self

    from tdkernels.symm.group import GroupLike


class _MoE(torch.nn.Module):
    """Base class: a router named ``gate``, and this rank's part of the weights, ``w_gate_up`` and ``w_down``."""

    if TYPE_CHECKING:  # subclasses define _divide and _experts
        gate: Any
        _divide: Any
        _experts: Any

    def __init__(
        self, gate: Router | Any, intermediate: int, *, group: "GroupLike" = None, config: Any = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if not hasattr(gate, "num_experts") or not hasattr(gate, "hidden"):
            name = type(self).__name__
            raise TypeError(f"{name}: gate must be a Router, or have hidden and num_experts, not {type(gate).__name__}")
        self.gate, self.group, self.config = gate, resolve_group(group), config
        self.intermediate = intermediate
        experts, channels = self._divide(gate.num_experts, intermediate, self.group.rank(), self.group.size())
        self.shard = Shard(experts, channels, gate.num_experts, intermediate, gate.hidden)
        new: dict[str, Any] = {"device": device, "dtype": dtype}
        self.w_gate_up = torch.nn.Parameter(torch.empty(len(experts), 2 * len(channels), gate.hidden, **new))
        self.w_down = torch.nn.Parameter(torch.empty(len(experts), gate.hidden, len(channels), **new))
        self.register_load_state_dict_pre_hook(load_any_layout)
        self.reset_parameters()

    @classmethod
    def from_hf(cls, block: torch.nn.Module, **options: Any) -> "Self":
        """Create the module from a MoE block of a transformers 5 model (Qwen3-MoE or Mixtral), with its weights.

        Each rank keeps its part of the weights. Device and dtype are those of the block.

        Args:
            block: A complete Qwen3MoeSparseMoeBlock or MixtralSparseMoeBlock, the same on every rank. If it is on the
                "meta" device, so is the module, and ``load_state_dict`` fills it later.
            options: Keyword arguments of the class except ``gate``, ``intermediate``, ``device`` and ``dtype``:
                ``group`` and ``config``, and for EPMoE also ``quantize``, ``max_tokens`` and ``max_tokens_per_rank``.

        Returns:
            The module, in the training or evaluation mode of the block.

        Raises:
            ValueError: If the block is of another class, or has a feature that the module does not support.
        """
        settings = settings_of(block)
        weight: Any = block.gate.weight  # type: ignore[union-attr]
        new: dict[str, Any] = {"device": weight.device, "dtype": weight.dtype}
        gate = Router(settings.hidden, settings.num_experts, settings.top_k, normalize=settings.normalize, **new)
        module = cls(gate, settings.intermediate, **new, **options)
        if not weight.is_meta:
            module.load_state_dict(block.state_dict())
        return module.train(block.training)

    def reset_parameters(self) -> None:
        """Initialize the experts' weights as ``torch.nn.Linear`` does. The router initializes its own weight."""
        if self.w_down.is_meta:
            return
        # All ranks have the same seed, so that replicated parameters are equal. Experts' weights must differ by rank.
        seed = int(torch.randint(1 << 62, (), device="cpu")) + self.group.rank()
        generator = torch.Generator(self.w_down.device).manual_seed(seed)
        for weight, fan_in in ((self.w_gate_up, self.gate.hidden), (self.w_down, self.intermediate)):
            # Draw plain tensors: for a DTensor, such as a parameter under FSDP2, all ranks would draw the same values.
            drawn = torch.empty(weight.shape, device=weight.device, dtype=weight.dtype)
            drawn.uniform_(-(fan_in**-0.5), fan_in**-0.5, generator=generator)
            with torch.no_grad():
                weight.copy_(as_dtensor_like(weight, drawn))

    def __deepcopy__(self, memo):
        memo[id(self.group)] = self.group  # a process group cannot be copied, so copies share it
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self) -> str:
        return f"intermediate={self.intermediate}, rank {self.group.rank()} of {self.group.size()}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Route the tokens and apply the experts. Collective.

        Args:
            x: This rank's tokens [..., H]. Their number may differ between ranks for EPMoE, but not for TPMoE.

        Returns:
            The output [..., H] for these tokens.
        """
        rows = x.reshape(-1, x.shape[-1])
        return self._experts(rows, *self.gate(rows)).view(x.shape)


class EPMoE(_MoE):
    """Mixture of experts with SwiGLU and expert parallelism: each of W ranks has E / W whole experts.

    Rank r has the experts r * E / W to (r + 1) * E / W - 1. The module calls ``ep_moe``. ``load_state_dict`` also takes
    complete weights in the layouts of ``full_state_dict``; each rank then keeps its part.

    Args:
        gate: A Router, or any module that maps this rank's rows [T, H] to (topk_ids, topk_weights) and has the
            attributes ``hidden`` and ``num_experts``. It must be the same on every rank.
        intermediate: Intermediate size I of an expert.
        quantize: As in ``ep_moe``.
        max_tokens: As in ``ep_moe``.
        max_tokens_per_rank: As in ``ep_moe``.
        options: Further keyword arguments:

            - ``group`` (ProcessGroup, one-dimensional DeviceMesh or None): The ranks; None for the world.
            - ``config`` (EpMoeConfig or None): As in ``ep_moe``.
            - ``device`` (torch.device, str or None): Device of the parameters.
            - ``dtype`` (torch.dtype or None): Dtype of the parameters.

    Attributes:
        gate: The router.
        w_gate_up: Parameter [E / W, 2 * I, H], gate first.
        w_down: Parameter [E / W, H, I].

    Raises:
        ValueError: If W does not divide the number of experts.
        TypeError: If ``gate`` lacks ``hidden`` or ``num_experts``.

    Gradient:
        The gradients of the experts are sums over the tokens of all ranks. Those of the router are sums over this
        rank's tokens: add them up or average them over the ranks, as for all replicated parameters. If you average
        them, also divide the gradients of the experts by W.

    Example:
        >>> layer = tdkernels.nn.EPMoE(tdkernels.nn.Router(4096, 128, 8), 1536, device="cuda", dtype=torch.bfloat16)
        >>> y = layer(x)
    """

    def __init__(
        self, gate: Router | Any, intermediate: int, *, quantize: str | None = None, max_tokens: int | None = None,
        max_tokens_per_rank: int | None = None, **options: Any,
    ) -> None:
        super().__init__(gate, intermediate, **options)
        self.quantize, self.max_tokens, self.max_tokens_per_rank = quantize, max_tokens, max_tokens_per_rank

    @staticmethod
    def _divide(num_experts, intermediate, rank, world_size):
        if num_experts % world_size:
            raise ValueError(f"EPMoE: num_experts {num_experts} must be divisible by the group's {world_size} ranks")
        each = num_experts // world_size
        return range(rank * each, (rank + 1) * each), range(intermediate)

    def _experts(self, x, topk_ids, topk_weights):
        return tdkernels.ep_moe(
            x, topk_ids, topk_weights, self.w_gate_up, self.w_down, num_experts=self.gate.num_experts,
            quantize=self.quantize, max_tokens=self.max_tokens, max_tokens_per_rank=self.max_tokens_per_rank,
            group=self.group, config=self.config,
        )


class TPMoE(_MoE):
    """Mixture of experts with SwiGLU and tensor parallelism: each of W ranks has I / W channels of every expert.

    Rank r has the channels r * I / W to (r + 1) * I / W - 1. The module calls ``tp_moe``. ``load_state_dict`` also
    takes complete weights in the layouts of ``full_state_dict``; each rank then keeps its part.

    Args:
        gate: As in EPMoE.
        intermediate: Intermediate size I of an expert, before it is divided between the ranks.
        group: The ranks: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world.
        config: As in ``tp_moe``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        gate: The router.
        w_gate_up: Parameter [E, 2 * I / W, H], gate first.
        w_down: Parameter [E, H, I / W].

    Raises:
        ValueError: If W does not divide ``intermediate``.
        TypeError: If ``gate`` lacks ``hidden`` or ``num_experts``.

    Gradient:
        As for EPMoE.

    Example:
        >>> layer = tdkernels.nn.TPMoE(tdkernels.nn.Router(4096, 8, 2), 14336, device="cuda", dtype=torch.bfloat16)
        >>> y = layer(x)
    """

    @staticmethod
    def _divide(num_experts, intermediate, rank, world_size):
        if intermediate % world_size:
            raise ValueError(f"TPMoE: intermediate {intermediate} must be divisible by the group's {world_size} ranks")
        each = intermediate // world_size
        return range(num_experts), range(rank * each, (rank + 1) * each)

    def _experts(self, x, topk_ids, topk_weights):
        return tdkernels.tp_moe(
            x, topk_ids, topk_weights, self.w_gate_up, self.w_down, group=self.group, config=self.config
        )
