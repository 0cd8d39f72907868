"""Tensor-parallel linear layers, which replace torch.nn.Linear.

    module                  weight of a rank    without sequence parallelism    with sequence parallelism
    ColumnParallelLinear    [out / W, in]       column_linear                   ag_gemm
    RowParallelLinear       [out, in / W]       gemm_ar                         gemm_rs
"""

import copy
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.nn.checkpoint import Divided, Part, as_dtensor_like, load_own_parts
from tdkernels.nn.float8 import check_float8, float8_linear
from tdkernels.ops.collectives.regions import gather_rows, scatter_rows
from tdkernels.ops.dense.ag_gemm.op import AgGemmConfig, ag_gemm
from tdkernels.ops.dense.column_linear.op import column_linear
from tdkernels.ops.dense.gemm_ar.op import GemmArConfig, gemm_ar
from tdkernels.ops.dense.gemm_rs.op import GemmRsConfig, gemm_rs
from tdkernels.symm import resolve_group

if TYPE_CHECKING:
    import torch.distributed as dist
    from typing_extensions import Self

    from tdkernels.symm.group import GroupLike


def check_linear(function: str, name: str, linear: Any) -> None:
    """Raise TypeError unless ``linear`` is a torch.nn.Linear, or a subclass that computes the same."""
    if not isinstance(linear, torch.nn.Linear):
        raise TypeError(f"{function}: {name} must be a torch.nn.Linear, not {type(linear).__name__}")
    if type(linear).forward is not torch.nn.Linear.forward:
        raise TypeError(f"{function}: {name} is a {type(linear).__name__} with another forward than torch.nn.Linear")


def check_divisible(module: str, name: str, size: int, world_size: int) -> None:
    """Raise ValueError unless ``size`` is divisible by the number of ranks."""
    if size % world_size:
        raise ValueError(f"{module}: {name} {size} must be divisible by the group's {world_size} ranks")


def check_seq_dim(module: str, seq_dim: int) -> None:
    """Raise ValueError unless ``seq_dim`` is 0 or 1."""
    if seq_dim not in (0, 1):
        raise ValueError(f"{module}: seq_dim must be 0 or 1, not {seq_dim!r}")


def copy_with_same_group(module: Any, memo: dict[int, Any]) -> Any:
    """Return a deep copy of a module that has a ``group``. A process group cannot be copied, so copies share it."""
    kind: Any = type(module)
    memo[id(module.group)] = module.group
    memo[id(module)] = copied = kind.__new__(kind)
    copied.__dict__.update(copy.deepcopy(module.__dict__, memo))
    return copied


def part_of(parameter: torch.Tensor, part: Part | None) -> torch.nn.Parameter:
    """Return this rank's part of a complete parameter as a new parameter; None is a copy of all of it."""
    own = parameter.detach().clone() if part is None else part.of(parameter.detach())
    return torch.nn.Parameter(own, requires_grad=parameter.requires_grad)


class _ParallelLinear(Divided):
    """Base class: a weight and an optional bias. A subclass sets ``parts`` and computes the output."""

    group: "dist.ProcessGroup"
    bias: torch.nn.Parameter | None

    def __init__(
        self, in_features: int, out_features: int, shape: tuple[int, int], parts: dict[str, Part], *, bias: bool,
        group: "dist.ProcessGroup", sequence_parallel: bool, seq_dim: int, float8: str | None, float8_dweight: bool,
        config: Any, device: torch.device | str | None, dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        check_seq_dim(type(self).__name__, seq_dim)
        sizes = {"this rank's number of output features": shape[0], "this rank's number of input features": shape[1]}
        check_float8(type(self).__name__, float8, float8_dweight, sizes)
        self.float8, self.float8_dweight = float8, float8_dweight
        self.in_features, self.out_features, self.group, self.config = in_features, out_features, group, config
        self.sequence_parallel, self.seq_dim = sequence_parallel, seq_dim
        self.parts = parts if bias else {"weight": parts["weight"]}
        self.weight = torch.nn.Parameter(torch.empty(*shape, device=device, dtype=dtype))
        own = torch.nn.Parameter(torch.empty(shape[0], device=device, dtype=dtype)) if bias else None
        self.register_parameter("bias", own)
        self.register_load_state_dict_pre_hook(load_own_parts)
        self.reset_parameters()

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, **options: Any) -> "Self":
        """Create the module from a complete torch.nn.Linear, with its weights.

        Each rank keeps its part of the parameters as new tensors, with the device, dtype and ``requires_grad`` of the
        originals. Hooks of ``linear`` are not kept.

        Args:
            linear: The layer, the same on every rank. If it is on the "meta" device, so is the module, and
                ``load_state_dict`` fills it later.
            options: Keyword arguments of the class except ``bias``, ``device`` and ``dtype``.

        Returns:
            The module, in the training or evaluation mode of the layer.

        Raises:
            TypeError: If ``linear`` is not a torch.nn.Linear, or is a subclass with another ``forward``.
            ValueError: As the class.
        """
        check_linear(f"{cls.__name__}.from_linear", "linear", linear)
        kind: Any = cls
        biased, dtype = linear.bias is not None, linear.weight.dtype
        module = kind(linear.in_features, linear.out_features, biased, device="meta", dtype=dtype, **options)
        module.weight = part_of(linear.weight, module.parts["weight"])
        if biased:
            module.bias = part_of(linear.bias, module.parts.get("bias"))
        return module.train(linear.training)

    def reset_parameters(self) -> None:
        """Initialize the parameters with the distribution of the complete torch.nn.Linear.

        All ranks of the group must have the same seed, as for all replicated parameters. The divided parameters then
        differ between the ranks, and the bias of a RowParallelLinear is equal on all ranks.
        """
        if self.weight.is_meta:
            return
        device = self.weight.device
        bound = max(self.in_features, 1) ** -0.5
        seeds = torch.randint(1 << 62, (2,), device="cpu").tolist()
        divided = torch.Generator(device).manual_seed(seeds[0] + self.group.rank())
        replicated = torch.Generator(device).manual_seed(seeds[1])
        for name, parameter in self.named_parameters(recurse=False):
            # Draw plain tensors: for a DTensor, such as a parameter under FSDP2, all ranks would draw the same values.
            drawn = torch.empty(parameter.shape, device=device, dtype=parameter.dtype)
            drawn.uniform_(-bound, bound, generator=divided if name in self.parts else replicated)
            with torch.no_grad():
                parameter.copy_(as_dtensor_like(parameter, drawn))

    def __deepcopy__(self, memo):
        return copy_with_same_group(self, memo)

    def _float8_linear(self, layer, x):
        """Compute y in float8; ``layer`` is "column" or "row"."""
        return float8_linear(
            layer, x, self.weight, self.bias, recipe=self.float8, float8_dweight=self.float8_dweight,
            dim=self.seq_dim if self.sequence_parallel else None, main_grad=getattr(self.weight, "main_grad", None),
            group=self.group, config=self.config,
        )

    def extra_repr(self) -> str:
        sizes = f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}"
        sequence = f", sequence_parallel=True, seq_dim={self.seq_dim}" if self.sequence_parallel else ""
        if self.float8 is not None:
            sequence += f", float8={self.float8!r}" + ", float8_dweight=True" * self.float8_dweight
        return f"{sizes}{sequence}, rank {self.group.rank()} of {self.group.size()}"


class ColumnParallelLinear(_ParallelLinear):
    """Linear layer whose output features are divided between the W ranks: y = x @ weight.T + bias.

    Rank r has the output features r * out / W to (r + 1) * out / W - 1. ``load_state_dict`` also takes the complete
    weight and bias of a torch.nn.Linear; each rank then keeps its part. ``full_state_dict`` returns the complete ones.

    With ``sequence_parallel``, x is divided along the sequence, and ``ag_gemm`` gathers it while it is multiplied.
    Otherwise x is equal on all ranks, and ``column_linear`` all-reduces the gradient of x while it is computed.

    Args:
        in_features: Size of an input row.
        out_features: Size of an output row, before it is divided between the ranks.
        bias: Whether to add a bias.
        group: The ranks: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world.
        sequence_parallel: Whether x is divided along dimension ``seq_dim``.
        seq_dim: Dimension of the sequence: 0 for [S, B, in] or [tokens, in], 1 for [B, S, in]. It has no effect
            without ``sequence_parallel``.
        gather_output: Whether to all-gather the output along its last dimension. Set it only if all ranks compute the
            same with y, because the gradient of y is then this rank's columns of it, without communication.
        float8: None, or "rowwise" or "tensorwise": multiply in float8 with dynamic scales, see the section Float8.
        float8_dweight: Whether the gradient of the weight is computed in float8, too.
        config: AgGemmConfig with ``sequence_parallel``, otherwise GemmArConfig, as in ``ag_gemm`` and
            ``column_linear``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        weight: Parameter [out / W, in].
        bias: Parameter [out / W], or None.

    Raises:
        ValueError: If W does not divide ``out_features``, ``seq_dim`` is not 0 or 1, or with ``float8`` a size of the
            weight is no multiple of 16.

    Shape:
        With ``sequence_parallel``: x [S / W, B, in] gives y [S, B, out / W]; with seq_dim=1, x [B, S / W, in] gives
        y [B, S, out / W]. Otherwise x [..., in] gives y [..., out / W]. With ``gather_output`` the last size is out.

    Gradient:
        The gradients of the weight and the bias are complete for this rank's features: do not all-reduce them over the
        group. The gradient of x is complete: for this rank's rows with ``sequence_parallel``, otherwise on every rank.
        If ``weight.main_grad`` exists, the gradient of the weight is added to it, see ``ag_gemm``.

    Float8:
        x, the weight and the gradient of y are quantized before each GEMM, and tensors that are gathered are sent in
        float8. y and the gradients have the dtype of x and of the parameters, which remain in bf16 or fp32, and so do
        checkpoints. "rowwise" has a scale for each row of an operand and uses e4m3. "tensorwise" has one scale, and
        uses e5m2 for the gradient of y. The gradient of the weight is computed in the dtype of x, unless
        ``float8_dweight`` is set. The recipes are those of torchao.float8.

    Example:
        >>> up = tdkernels.nn.ColumnParallelLinear(4096, 14336, sequence_parallel=True, device="cuda")
        >>> down = tdkernels.nn.RowParallelLinear(14336, 4096, sequence_parallel=True, device="cuda")
        >>> y = down(torch.relu(up(x)))  # x and y: [S / W, B, 4096]
    """

    blocks = 1  # the blocks of output features, each of which is divided between the ranks

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: "GroupLike" = None,
        sequence_parallel: bool = False, seq_dim: int = 0, gather_output: bool = False, float8: str | None = None,
        float8_dweight: bool = False, config: AgGemmConfig | GemmArConfig | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:
        resolved = resolve_group(group)
        world_size = resolved.size()
        check_divisible(type(self).__name__, "out_features", out_features, world_size)
        part = Part(0, resolved.rank(), world_size, self.blocks)
        super().__init__(
            in_features, out_features, (out_features // world_size, in_features), {"weight": part, "bias": part},
            bias=bias, group=resolved, sequence_parallel=sequence_parallel, seq_dim=seq_dim, float8=float8,
            float8_dweight=float8_dweight, config=config, device=device, dtype=dtype,
        )
        self.gather_output = gather_output

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute y for x, with the shapes of the class.

        Collective over the group. With neither ``sequence_parallel`` nor ``gather_output`` only the backward is.
        """
        weight = self.weight
        main_grad = getattr(weight, "main_grad", None)
        if self.float8 is not None:
            y = self._float8_linear("column", x)
        elif self.sequence_parallel:
            y = ag_gemm(
                x, weight, self.bias, dim=self.seq_dim, main_grad=main_grad, group=self.group, config=self.config
            )
        else:
            y = column_linear(x, weight, self.bias, main_grad=main_grad, group=self.group, config=self.config)
        if not self.gather_output:
            return y
        columns = gather_rows(y.movedim(-1, 0).contiguous(), backward="slice", group=self.group)
        return columns.movedim(0, -1).contiguous()


class RowParallelLinear(_ParallelLinear):
    """Linear layer whose input features are divided between the W ranks: y = all_reduce(x @ weight.T) + bias.

    Rank r has the input features r * in / W to (r + 1) * in / W - 1. ``load_state_dict`` also takes the complete weight
    of a torch.nn.Linear; each rank then keeps its part. ``full_state_dict`` returns the complete one. The bias is
    complete and equal on all ranks.

    With ``sequence_parallel``, ``gemm_rs`` adds up the products and divides them along the sequence. Otherwise
    ``gemm_ar`` adds them up on every rank.

    Args:
        in_features: Size of an input row, before it is divided between the ranks.
        out_features: Size of an output row.
        bias: Whether to add a bias, once, after the sum.
        group: The ranks: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world.
        sequence_parallel: Whether y is divided along dimension ``seq_dim``, whose size W must divide.
        seq_dim: Dimension of the sequence: 0 for [S, B, in] or [tokens, in], 1 for [B, S, in]. It has no effect
            without ``sequence_parallel``.
        input_is_parallel: Whether x has this rank's input features only, as the output of a ColumnParallelLinear has.
            If not, x has all of them and is equal on all ranks, and so is its gradient.
        float8: None, or "rowwise" or "tensorwise": multiply in float8 with dynamic scales, see ColumnParallelLinear.
        float8_dweight: Whether the gradient of the weight is computed in float8, too.
        config: GemmRsConfig with ``sequence_parallel``, otherwise GemmArConfig, as in ``gemm_rs`` and ``gemm_ar``.
        device: Device of the parameters.
        dtype: Dtype of the parameters.

    Attributes:
        weight: Parameter [out, in / W].
        bias: Parameter [out], equal on all ranks, or None.

    Raises:
        ValueError: If W does not divide ``in_features``, ``seq_dim`` is not 0 or 1, or with ``float8`` a size of the
            weight is no multiple of 16.

    Shape:
        With ``sequence_parallel``: x [S, B, in / W] gives y [S / W, B, out]; with seq_dim=1, x [B, S, in / W] gives
        y [B, S / W, out]. Otherwise x [..., in / W] gives y [..., out], equal on all ranks. The last size of x is in
        if not ``input_is_parallel``.

    Gradient:
        The gradient of the bias is complete and equal on all ranks: do not all-reduce it over the group. The gradient
        of the weight is complete for this rank's features. Without ``sequence_parallel`` the gradient of y must be
        equal on all ranks, as y is. If ``weight.main_grad`` exists, the gradient of the weight is added to it, see
        ``gemm_rs``.

    Example:
        >>> down = tdkernels.nn.RowParallelLinear(14336, 4096, sequence_parallel=True, seq_dim=1, device="cuda")
        >>> y = down(h)  # h: [B, S, 14336 / W], y: [B, S / W, 4096]
    """

    def __init__(
        self, in_features: int, out_features: int, bias: bool = True, *, group: "GroupLike" = None,
        sequence_parallel: bool = False, seq_dim: int = 0, input_is_parallel: bool = True, float8: str | None = None,
        float8_dweight: bool = False, config: GemmRsConfig | GemmArConfig | None = None,
        device: torch.device | str | None = None, dtype: torch.dtype | None = None,
    ) -> None:
        resolved = resolve_group(group)
        world_size = resolved.size()
        check_divisible(type(self).__name__, "in_features", in_features, world_size)
        super().__init__(
            in_features, out_features, (out_features, in_features // world_size),
            {"weight": Part(1, resolved.rank(), world_size)}, bias=bias, group=resolved,
            sequence_parallel=sequence_parallel, seq_dim=seq_dim, float8=float8, float8_dweight=float8_dweight,
            config=config, device=device, dtype=dtype,
        )
        self.input_is_parallel = input_is_parallel

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Compute y for x, with the shapes of the class. Collective over the group."""
        if not self.input_is_parallel:
            x = scatter_rows(x.movedim(-1, 0), backward="sum", group=self.group).movedim(0, -1)
        if self.float8 is not None:
            return self._float8_linear("row", x)
        weight = self.weight
        main_grad = getattr(weight, "main_grad", None)
        if self.sequence_parallel:
            return gemm_rs(
                x, weight, self.bias, dim=self.seq_dim, main_grad=main_grad, group=self.group, config=self.config
            )
        return gemm_ar(x, weight, self.bias, main_grad=main_grad, group=self.group, config=self.config)
