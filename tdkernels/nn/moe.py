"""EPMoE and TPMoE: a router and its experts, which are divided between the ranks, or each of which is."""

import copy

import torch

import tdkernels
from tdkernels.nn.checkpoint import Shard, load_any_layout
from tdkernels.nn.huggingface import settings_of
from tdkernels.nn.router import Router
from tdkernels.symm import resolve_group


class _MoE(torch.nn.Module):
    """What both have: a router called gate, and w_gate_up and w_down of this rank."""

    def __init__(self, gate, intermediate, *, group=None, config=None, device=None, dtype=None):
        super().__init__()
        if not hasattr(gate, "num_experts") or not hasattr(gate, "hidden"):
            name = type(self).__name__
            raise TypeError(f"{name}: gate must be a Router, or have hidden and num_experts, not {type(gate).__name__}")
        self.gate, self.group, self.config = gate, resolve_group(group), config
        self.intermediate = intermediate
        experts, channels = self._divide(gate.num_experts, intermediate, self.group.rank(), self.group.size())
        self.shard = Shard(experts, channels, gate.num_experts, intermediate, gate.hidden)
        new = {"device": device, "dtype": dtype}
        self.w_gate_up = torch.nn.Parameter(torch.empty(len(experts), 2 * len(channels), gate.hidden, **new))
        self.w_down = torch.nn.Parameter(torch.empty(len(experts), gate.hidden, len(channels), **new))
        self.register_load_state_dict_pre_hook(load_any_layout)
        self.reset_parameters()

    @classmethod
    def from_hf(cls, block, **options):
        """This rank's part of a MoE block of a model from transformers 5, Qwen3-MoE or Mixtral, with its weights.

        Args:
            block: Qwen3MoeSparseMoeBlock or MixtralSparseMoeBlock, whole and the same on every rank; on "meta", if
                load_state_dict is to fill it later
            options: of the class, but for gate and intermediate

        Raises:
            ValueError: for another block, or one that does what these modules do not
        """
        settings = settings_of(block)
        weight = block.gate.weight
        new = {"device": weight.device, "dtype": weight.dtype}
        gate = Router(settings.hidden, settings.num_experts, settings.top_k, normalize=settings.normalize, **new)
        module = cls(gate, settings.intermediate, **new, **options)
        if not weight.is_meta:
            module.load_state_dict(block.state_dict())
        return module.train(block.training)

    def reset_parameters(self):
        """Uniform, as torch.nn.Linear has it; the router has its own."""
        if self.w_down.is_meta:
            return
        # Ranks are seeded alike, so that what they share is alike. What they do not share must not be.
        seed = int(torch.randint(1 << 62, (), device="cpu")) + self.group.rank()
        generator = torch.Generator(self.w_down.device).manual_seed(seed)
        for weight, fan_in in ((self.w_gate_up, self.gate.hidden), (self.w_down, self.intermediate)):
            torch.nn.init.uniform_(weight, -(fan_in**-0.5), fan_in**-0.5, generator=generator)

    def __deepcopy__(self, memo):
        memo[id(self.group)] = self.group  # which cannot be copied, and need not be
        memo[id(self)] = copied = type(self).__new__(type(self))
        copied.__dict__.update(copy.deepcopy(self.__dict__, memo))
        return copied

    def extra_repr(self):
        return f"intermediate={self.intermediate}, rank {self.group.rank()} of {self.group.size()}"

    def forward(self, x):
        rows = x.reshape(-1, x.shape[-1])
        return self._experts(rows, *self.gate(rows)).view(x.shape)


class EPMoE(_MoE):
    """A mixture of experts with SwiGLU; rank r has the experts r * E / W to (r + 1) * E / W - 1. See ``ep_moe``.

    Args:
        gate: Router, or any module of this rank's rows [T, H] to (topk_ids, topk_weights) with the attributes hidden
            and num_experts; the same on every rank
        intermediate: I quantize, max_tokens, max_tokens_per_rank, config: of ``ep_moe`` group: a ProcessGroup, a
            one-dimensional DeviceMesh, or None for the world device, dtype: of the parameters
    Call:     x [..., H], this rank's tokens, whose number may differ between ranks -> y [..., H]. Collective
    State:    gate.weight, w_gate_up [E / W, 2 * I, H], w_down [E / W, H, I]. ``load_state_dict`` also takes whole
              weights in the layouts of ``full_state_dict``, of which each rank keeps its part

    Gradient:
        that of the experts is of all ranks' tokens, that of the router of this rank's: add up or average the latter
        over the ranks, as of all that is the same on every rank, and divide the former if you average
    Example:
        layer = tdkernels.nn.EPMoE(tdkernels.nn.Router(4096, 128, 8), 1536, device="cuda", dtype=torch.bfloat16)
        y = layer(x)
    """

    def __init__(
        self, gate, intermediate, *, quantize=None, max_tokens=None, max_tokens_per_rank=None, **options
    ):
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
    """A mixture of experts with SwiGLU; rank r has channels r * I / W to (r + 1) * I / W - 1 of each. See ``tp_moe``.

    Args:     gate, intermediate, group, device, dtype: as of EPMoE; config: of ``tp_moe``
    Call:     x [..., H], this rank's rows, as many on every rank -> y [..., H]. Collective
    State:    gate.weight, w_gate_up [E, 2 * I / W, H], gate first, w_down [E, H, I / W]. As of EPMoE,
              ``load_state_dict`` also takes whole weights, of which each rank keeps its part

    Gradient:
        as of EPMoE
    Example:
        layer = tdkernels.nn.TPMoE(tdkernels.nn.Router(4096, 8, 2), 14336, device="cuda", dtype=torch.bfloat16)
        y = layer(x)
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
