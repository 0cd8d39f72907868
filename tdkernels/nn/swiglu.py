"""SwiGLU MLP with tensor parallelism: gate and up are one GEMM, so that x is gathered once."""

from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F

from tdkernels.nn.checkpoint import Part, Renamed, to_plain_tensor
from tdkernels.nn.linear import (
    ColumnParallelLinear,
    RowParallelLinear,
    check_divisible,
    check_linear,
    check_seq_dim,
    copy_with_same_group,
    part_of,
)
from tdkernels.symm import resolve_group

if TYPE_CHECKING:
    from typing_extensions import Self

    from tdkernels.symm.group import GroupLike

# Names of gate, up and down in checkpoints: those of Hugging Face, and those of Llama and torchtitan.
NAMES, OTHER_NAMES = ("gate_proj", "up_proj", "down_proj"), ("w1", "w3", "w2")


class _GateUp(ColumnParallelLinear):
    """Gate and up of a SwiGLU as one layer with 2 * I output features. A rank has its part of gate, then that of up."""

    blocks = 2


def _load_gate_and_up(module, state_dict, prefix, _metadata, _strict, missing_keys, _unexpected_keys, error_msgs):
    """Convert the complete parameters of gate, up and down to those of the module. A ``load_state_dict`` pre-hook."""
    for kind, own in module.gate_up.named_parameters(recurse=False):
        for other, name in zip(OTHER_NAMES, NAMES, strict=True):
            if f"{prefix}{other}.{kind}" in state_dict:
                state_dict[f"{prefix}{name}.{kind}"] = state_dict.pop(f"{prefix}{other}.{kind}")
        gate_key, up_key, down_key = (f"{prefix}{name}.{kind}" for name in NAMES)
        if down_key in state_dict:
            state_dict[f"{prefix}down.{kind}"] = state_dict.pop(down_key)
        found = {key: state_dict.pop(key) for key in (gate_key, up_key) if key in state_dict}
        if not found:
            continue
        missing = [key for key in (gate_key, up_key) if key not in found]
        expected = [module.intermediate, *own.shape[1:]]
        errors = [
            f"size mismatch for {key}: it is {list(tensor.shape)} in the checkpoint, {expected} in the complete model"
            for key, tensor in found.items() if [*tensor.shape] != expected
        ]
        missing_keys += missing
        error_msgs += errors
        if missing or errors:  # pass the current values on, so that no additional error reports them as missing
            state_dict[f"{prefix}gate_up.{kind}"] = own.detach()
        else:
            own_parts = [module.part.of(to_plain_tensor(tensor)) for tensor in found.values()]
            state_dict[f"{prefix}gate_up.{kind}"] = torch.cat(own_parts)


class SwiGLU(Renamed):
    """SwiGLU MLP with tensor parallelism: y = down(silu(gate(x)) * up(x)). Each of W ranks has I / W channels.

    Rank r has the channels r * I / W to (r + 1) * I / W - 1. Gate and up are one weight, so with ``sequence_parallel``
    x is gathered once, and the backward has one GEMM-RS. ``load_state_dict`` also takes the complete weights of three
    linear layers, named gate_proj, up_proj and down_proj as in the Llama of Hugging Face, or w1, w3 and w2 as in Llama
    and torchtitan; each rank then keeps its part. ``full_state_dict`` returns gate_proj, up_proj and down_proj.

    Args:
        hidden: Hidden size H.
        intermediate: Intermediate size I, before it is divided between the ranks.
        bias: Whether the three layers have biases.
        group: The ranks: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world.
        sequence_parallel: Whether x and y are divided along dimension ``seq_dim``. If not, they are equal on all ranks.
        seq_dim: Dimension of the sequence: 0 for [S, B, H] or [tokens, H], 1 for [B, S, H]. It has no effect without
            ``sequence_parallel``.
        float8: None, or "rowwise" or "tensorwise", as in ColumnParallelLinear. With "tensorwise", gate and up share
            the scale of their weight.
        float8_dweight: As in ColumnParallelLinear.
        config: A pair (config of ``gate_up``, config of ``down``), as in ColumnParallelLinear and RowParallelLinear, or
            None.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        gate_up: ColumnParallelLinear whose weight is [2 * I / W, H] and whose bias is [2 * I / W]: this rank's channels
            of gate, then those of up.
        down: RowParallelLinear with the weight [H, I / W] and the bias [H].

    Raises:
        ValueError: If W does not divide ``intermediate``, ``seq_dim`` is not 0 or 1, or with ``float8`` a size of a
            weight is no multiple of 16.

    Shape:
        With ``sequence_parallel``, x and y are [S / W, B, H], or [B, S / W, H] with seq_dim=1. Otherwise they are
        [..., H].

    Gradient:
        As for ColumnParallelLinear and RowParallelLinear: the gradients of all parameters are complete, also that of
        the replicated bias of ``down``. Do not all-reduce them over the group.

    Example:
        >>> mlp = tdkernels.nn.SwiGLU(4096, 14336, sequence_parallel=True, device="cuda", dtype=torch.bfloat16)
        >>> y = mlp(x)
    """

    def __init__(
        self, hidden: int, intermediate: int, bias: bool = False, *, group: "GroupLike" = None,
        sequence_parallel: bool = False, seq_dim: int = 0, float8: str | None = None, float8_dweight: bool = False,
        config: tuple[Any, Any] | None = None, device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        name, self.group = type(self).__name__, resolve_group(group)
        check_divisible(name, "intermediate", intermediate, self.group.size())
        check_seq_dim(name, seq_dim)
        self.hidden, self.intermediate = hidden, intermediate
        self.part = Part(0, self.group.rank(), self.group.size())  # of gate, and of up
        column_config, row_config = (None, None) if config is None else config
        options: dict[str, Any] = {
            "group": self.group, "sequence_parallel": sequence_parallel, "seq_dim": seq_dim, "float8": float8,
            "float8_dweight": float8_dweight, "device": device, "dtype": dtype,
        }
        self.gate_up = _GateUp(hidden, 2 * intermediate, bias, config=column_config, **options)
        self.down = RowParallelLinear(intermediate, hidden, bias, config=row_config, **options)
        self.register_load_state_dict_pre_hook(_load_gate_and_up)

    @classmethod
    def from_linears(
        cls, gate: torch.nn.Linear, up: torch.nn.Linear, down: torch.nn.Linear, **options: Any
    ) -> "Self":
        """Create the module from three complete torch.nn.Linear layers, with their weights.

        Each rank keeps its part of the parameters as new tensors, with the device, dtype and ``requires_grad`` of the
        originals. Hooks of the layers are not kept.

        Args:
            gate: Layer from H to I, the same on every rank.
            up: Layer from H to I, with the device, dtype and ``requires_grad`` of ``gate``.
            down: Layer from I to H. The three layers have biases, or none of them.
            options: Keyword arguments of the class except ``bias``, ``device`` and ``dtype``.

        Returns:
            The module, in the training or evaluation mode of ``gate``.

        Raises:
            TypeError: If a layer is not a torch.nn.Linear, or is a subclass with another ``forward``.
            ValueError: If the layers do not fit together, or as the class.
        """
        function = f"{cls.__name__}.from_linears"
        for name, linear in (("gate", gate), ("up", up), ("down", down)):
            check_linear(function, name, linear)
        _check_fit(function, gate, up, down)
        biased, dtype = gate.bias is not None, gate.weight.dtype
        module: Any = cls(gate.in_features, gate.out_features, biased, device="meta", dtype=dtype, **options)
        for kind, parameter in gate.named_parameters(recurse=False):
            own = [module.part.of(linear.get_parameter(kind).detach()) for linear in (gate, up)]
            joined = torch.nn.Parameter(torch.cat(own), requires_grad=parameter.requires_grad)
            setattr(module.gate_up, kind, joined)
            setattr(module.down, kind, part_of(down.get_parameter(kind), module.down.parts.get(kind)))
        return module.train(gate.training)

    def rename_complete(self, state: dict[str, Any], prefix: str) -> None:
        """Change the names of the complete parameters in ``state`` to gate_proj, up_proj and down_proj."""
        for kind, _ in self.gate_up.named_parameters(recurse=False):
            gate_and_up = state.pop(f"{prefix}gate_up.{kind}").chunk(2)
            # safetensors does not save tensors that share memory.
            parts = *(part.clone() for part in gate_and_up), state.pop(f"{prefix}down.{kind}")
            state.update((f"{prefix}{name}.{kind}", part) for name, part in zip(NAMES, parts, strict=True))

    def __deepcopy__(self, memo):
        return copy_with_same_group(self, memo)

    def extra_repr(self) -> str:
        return f"hidden={self.hidden}, intermediate={self.intermediate}"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute y, with the shape of x. Collective over the group.

        Args:
            x: With ``sequence_parallel``, this rank's rows, such as [S / W, B, H]. Otherwise [..., H], equal on all
                ranks.
        """
        gate, up = self.gate_up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


def _check_fit(function, gate, up, down):
    """Raise ValueError unless three linear layers form a SwiGLU whose gate and up can be one layer."""
    shapes = {name: list(linear.weight.shape) for name, linear in (("gate", gate), ("up", up), ("down", down))}
    if shapes["up"] != shapes["gate"] or shapes["down"] != shapes["gate"][::-1]:
        raise ValueError(f"{function}: gate and up must have weights [I, H], down must have [H, I]; they are {shapes}")
    if len({linear.bias is None for linear in (gate, up, down)}) > 1:
        raise ValueError(f"{function}: gate, up and down must all have a bias, or none of them")
    for kind, one in gate.named_parameters(recurse=False):
        other = up.get_parameter(kind)
        for attribute in ("dtype", "device", "requires_grad"):
            if getattr(one, attribute) != getattr(other, attribute):
                raise ValueError(f"{function}: the {kind} of gate and up must have the same {attribute}")
