"""Kernels of tdkernels in the tensor-parallel linear layers of Megatron-Core.

    layer                   weight of a rank    without sequence parallelism    with sequence parallelism
    ColumnParallelLinear    [out / W, in]       column_linear                   ag_gemm
    RowParallelLinear       [out, in / W]       gemm_ar                         gemm_rs

The layers are subclasses of Megatron's local layers. Constructors, parameters, checkpoints and the results of forward
are the same. ``layer_spec`` puts them into the spec of a model, and ``SpecProvider`` into functions that build specs.

A layer that tdkernels does not support runs Megatron's forward. It warns once with the reason, and
``tdkernels.nn.report(model)`` lists the reason.

Needs megatron-core >= 0.16.

Example:
    from tdkernels.integrations import megatron

    spec = megatron.layer_spec(get_gpt_layer_local_spec())
    model = GPTModel(config, transformer_layer_spec=spec, ...)
"""

import copy
import dataclasses
import warnings
from typing import Any

import torch

from tdkernels.ops.common.validation import DTYPES
from tdkernels.ops.dense.ag_gemm.op import ag_gemm
from tdkernels.ops.dense.column_linear.op import column_linear
from tdkernels.ops.dense.gemm_ar.op import gemm_ar
from tdkernels.ops.dense.gemm_rs.op import gemm_rs
from tdkernels.runtime.autograd import DEVICES

try:
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.tensor_parallel import layers
    from megatron.core.tensor_parallel.mappings import scatter_to_tensor_model_parallel_region
    from megatron.core.transformer.spec_utils import ModuleSpec, get_module
    from megatron.core.utils import get_pg_size
except ImportError as error:
    raise ImportError(
        f"tdkernels.integrations.megatron needs megatron-core >= 0.16 (pip install megatron-core): {error}"
    ) from error

for _name in ("ColumnParallelLinear", "RowParallelLinear"):
    if not hasattr(getattr(layers, _name, None), "_forward_impl"):
        raise ImportError(
            f"tdkernels.integrations.megatron needs {_name}._forward_impl of megatron-core >= 0.16, which the installed"
            " version does not have"
        )


# ---- layers ----


class _Layer(torch.nn.Module):
    """Base class of both layers: construction, fallback and report. The other base is the layer of Megatron."""

    config: Any
    weight: Any
    bias: Any
    tp_group: Any
    sequence_parallel: bool
    explicit_expert_comm: bool
    _operators: tuple[str, str]  # without and with sequence parallelism

    def __init__(self, input_size: int, output_size: int, *, config: Any, **options: Any) -> None:
        # Megatron's constructor requires the CUDA extension of apex for gradient_accumulation_fusion. The operators do
        # not need it. The GEMM of a deferred gradient is Megatron's and needs it.
        given = config
        if config.gradient_accumulation_fusion and not config.defer_embedding_wgrad_compute:
            config = copy.copy(config)
            config.gradient_accumulation_fusion = False
        super().__init__(input_size, output_size, config=config, **options)  # type: ignore[call-arg]
        self.config = given
        self.gradient_accumulation_fusion = given.gradient_accumulation_fusion
        name, sizes = options.get("tp_comm_buffer_name"), f"{input_size} -> {output_size}"
        self._description = f"{type(self).__name__}({f'{name}, ' if name else ''}{sizes})"
        self._warned: set[str] = set()
        self._last_reason: str | None = None

    @property
    def tdkernels_runs(self) -> tuple[str | None, str]:
        """The operator and an empty reason; or None and the reason if the layer runs Megatron's forward.

        Settings are read now. A reason that depends on operands, such as their dtype, is that of the last forward.
        """
        reason = self._unsupported_setting() or self._last_reason
        return (self._operators[self.sequence_parallel], "") if reason is None else (None, reason)

    @property
    def tdkernels_problem(self) -> tuple[int, int, Any, torch.dtype]:
        """Number of input and of output features, group and dtype, for ``tdkernels.nn.report``."""
        layer: Any = self
        return layer.input_size, layer.output_size, self.tp_group, self.config.params_dtype

    def _unsupported_setting(self) -> str | None:
        """Return why the layer runs Megatron's forward for all operands, or None."""
        config = self.config
        if get_pg_size(self.tp_group) == 1:
            return "the tensor-parallel group has one rank"
        if self.explicit_expert_comm:
            return "a layer of experts: its collectives are in the token dispatcher"
        if getattr(self, "disable_grad_reduce", False) and not self.sequence_parallel:
            return "disable_grad_reduce: the layer has no collective"
        for setting in ("defer_embedding_wgrad_compute", "delay_wgrad_compute", "cpu_offloading"):
            if getattr(config, setting, False):
                return f"{setting} is not supported"
        return None

    def _unsupported_operand(self, x: torch.Tensor, weight: torch.Tensor) -> str | None:
        """Return why the operators do not support x or the weight, or None."""
        if type(weight) not in (torch.nn.Parameter, torch.Tensor):
            return f"the weight is a {type(weight).__name__}"  # fp8, DTensor, or a shard of the rank's weight (GTP)
        if x.device.type not in DEVICES:
            return f"the device is {x.device.type}"
        autocast = torch.is_autocast_enabled(x.device.type)
        dtype = torch.get_autocast_dtype(x.device.type) if autocast else weight.dtype
        if dtype not in DTYPES:
            return f"the dtype of the weight is {str(dtype).removeprefix('torch.')}"
        main_grad = self._main_grad(weight)
        if main_grad is None:
            return None
        if hasattr(weight, "__fsdp_param__"):
            return "gradient_accumulation_fusion with Megatron-FSDP"
        if main_grad.dtype not in (torch.float32, weight.dtype):
            name = str(main_grad.dtype).removeprefix("torch.")
            return f"main_grad is {name}, which is neither float32 nor the dtype of the weight"
        if dtype != weight.dtype:
            return "gradient_accumulation_fusion with autocast to another dtype than that of the weight"
        return None

    def _main_grad(self, weight):
        """Return the tensor to which the backward adds the gradient of the weight, or None."""
        fused = self.gradient_accumulation_fusion and weight.requires_grad
        return getattr(weight, "main_grad", None) if fused else None

    def _runs_megatron(self, x: torch.Tensor, weight: torch.Tensor) -> bool:
        """Return whether this forward must run Megatron's code. If so, warn once per reason."""
        reason = self._unsupported_setting() or self._unsupported_operand(x, weight)
        self._last_reason = reason
        if reason is not None and reason not in self._warned and get_pg_size(self.tp_group) > 1:
            self._warned.add(reason)
            message = f"tdkernels: {self._description} runs Megatron's forward: {reason}"
            warnings.warn(message, UserWarning, stacklevel=3)
        return reason is not None

    def _megatron_impl(self, input, weight, *args, **kwargs):
        """Run Megatron's GEMM.

        Without the CUDA extension it cannot add the gradient to ``main_grad``. Autograd then returns the gradient, and
        Megatron's DistributedDataParallel adds it to ``main_grad``.
        """
        available = getattr(layers, "_grad_accum_fusion_available", True)
        kwargs["gradient_accumulation_fusion"] = kwargs["gradient_accumulation_fusion"] and available
        return super()._forward_impl(input, weight, *args, **kwargs)  # type: ignore[misc]


class ColumnParallelLinear(_Layer, layers.ColumnParallelLinear):
    """Linear layer of Megatron-Core with column parallelism, which runs ``ag_gemm`` or ``column_linear``.

    A drop-in for ``megatron.core.tensor_parallel.ColumnParallelLinear``: arguments, parameters, checkpoints and
    ``forward(input_, weight=None, runtime_gather_output=None) -> (output, bias)`` are the same. Only ``_forward_impl``
    is overridden, so ``skip_bias_add``, ``gather_output`` and a ``weight`` given to ``forward`` work as in Megatron.

    With sequence parallelism x [S / W, B, in] is gathered by ``ag_gemm``. Otherwise x [S, B, in] is equal on all ranks,
    and its gradient is all-reduced by ``column_linear``.

    With ``config.gradient_accumulation_fusion`` the backward adds the gradient of the weight to ``weight.main_grad`` in
    the GEMM and sets ``grad_added_to_main_grad``, as Megatron's layer. The CUDA extension of apex is not needed.

    A frozen weight gets no gradient. The gradient of a bias is computed if it needs one; Megatron's layer leaves it out
    if the weight is frozen.

    Args:
        input_size: Number of input features.
        output_size: Number of output features, divisible by W.
        config: The ModelParallelConfig or TransformerConfig.
        options: The other keyword arguments of Megatron's layer.

    Raises:
        RuntimeError: If ``defer_embedding_wgrad_compute`` is set and the CUDA extension of apex is missing.
        TypeError, ValueError: In the forward, as the operators: for example, if x and the weight differ in dtype.

    Warns:
        UserWarning: In the first forward that runs Megatron's code, with the layer and the reason. A group of one rank
            always runs it, without a warning.

    Contract:
        The forward is collective over ``tp_group`` with sequence parallelism, and the backward always. All ranks must
        use the same class and the same settings.

    Example:
        fc1 = megatron.ColumnParallelLinear(H, F, config=config, init_method=config.init_method, skip_bias_add=True)
        y, bias = fc1(x)
    """

    _operators = ("column_linear", "ag_gemm")

    def _forward_impl(self, input, weight, *args, **kwargs):
        if self._runs_megatron(input, weight):
            return self._megatron_impl(input, weight, *args, **kwargs)
        operator = ag_gemm if kwargs["sequence_parallel"] else column_linear
        return operator(
            input, weight, kwargs["bias"], main_grad=self._main_grad(weight), group=kwargs["tp_group"],
        )


class RowParallelLinear(_Layer, layers.RowParallelLinear):
    """Linear layer of Megatron-Core with row parallelism, which runs ``gemm_rs`` or ``gemm_ar``.

    A drop-in for ``megatron.core.tensor_parallel.RowParallelLinear``: arguments, parameters, checkpoints and
    ``forward(input_) -> (output, bias)`` are the same, including ``skip_bias_add``.

    With sequence parallelism the output [S / W, B, out] is reduce-scattered by ``gemm_rs``. Otherwise the output
    [S, B, out] is all-reduced by ``gemm_ar``.

    With sequence parallelism the gradient of the bias is a partial gradient, as in Megatron's layer: that of this
    rank's rows. Megatron's ``finalize_model_grads`` sums it over the group, because ``bias.sequence_parallel`` is True.

    ``config.gradient_accumulation_fusion``, frozen weights and warnings: as for ``ColumnParallelLinear``.

    Args:
        input_size: Number of input features, divisible by W.
        output_size: Number of output features.
        config: The ModelParallelConfig or TransformerConfig.
        options: The other keyword arguments of Megatron's layer.

    Raises:
        TypeError, ValueError: In the forward, as the operators: for example, if the ranks do not divide S.

    Warns:
        UserWarning: As for ``ColumnParallelLinear``.

    Contract:
        The forward is collective over ``tp_group``, and with sequence parallelism also the backward. All ranks must use
        the same class and the same settings.
    """

    _operators = ("gemm_ar", "gemm_rs")
    _forward_impl = _Layer._megatron_impl

    def forward(self, input_: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return (output, None), or (output without bias, bias) with ``skip_bias_add``."""
        if self._runs_megatron(input_, self.weight):
            return super().forward(input_)
        x = input_
        if not self.input_is_parallel:
            x = scatter_to_tensor_model_parallel_region(x, group=self.tp_group)
        options = {"main_grad": self._main_grad(self.weight), "group": self.tp_group}
        returned = self.bias if self.skip_bias_add else None
        added = None if self.skip_bias_add else self.bias
        if not self.sequence_parallel:
            return gemm_ar(x, self.weight, added, **options), returned
        # The bias is added to this rank's rows, not given to gemm_rs. The gradient of a bias that gemm_rs adds is
        # complete on every rank. But bias.sequence_parallel is True, so Megatron sums the gradient over the ranks:
        # it would be W times too large. Clearing the attribute would be wrong with skip_bias_add, and for forwards
        # that run Megatron's code, because their gradient is partial.
        z = gemm_rs(x, self.weight, **options)
        return z if added is None else z + added, returned


# ---- specs ----


class SpecProvider(LocalSpecProvider):
    """The local modules of Megatron-Core, with linear layers that run tdkernels.

    A ``BackendSpecProvider`` for functions of Megatron-Core with an argument ``backend``.

    Example:
        mlp = get_mlp_module_spec_for_backend(megatron.SpecProvider())
    """

    def column_parallel_linear(self) -> type:
        """Return the class for column-parallel linear layers."""
        return ColumnParallelLinear

    def row_parallel_linear(self) -> type:
        """Return the class for row-parallel linear layers."""
        return RowParallelLinear


_REPLACED = {
    layers.ColumnParallelLinear: ColumnParallelLinear, layers.RowParallelLinear: RowParallelLinear,
    ColumnParallelLinear: ColumnParallelLinear, RowParallelLinear: RowParallelLinear,
}


class _Conversion:
    """Copy a spec with other linear layers, and record what was found."""

    def __init__(self) -> None:
        self.replaced = 0
        self.rejected: list[str] = []  # layers of other backends
        self.subclasses: list[str] = []  # other subclasses of Megatron's local layers, which are kept

    def convert(self, value: Any, path: str) -> Any:
        """Return a copy of a part of a spec; ``path`` is its place, for errors."""
        if isinstance(value, ModuleSpec):
            return self._convert_spec(value, path)
        if isinstance(value, type):
            return self._convert_class(value, path)
        if dataclasses.is_dataclass(value):
            copied = copy.copy(value)
            for field in dataclasses.fields(value):
                setattr(copied, field.name, self.convert(getattr(value, field.name), f"{path}.{field.name}"))
            return copied
        if isinstance(value, dict):
            return {key: self.convert(part, f"{path}[{key!r}]") for key, part in value.items()}
        if type(value) in (list, tuple):
            return type(value)(self.convert(part, f"{path}[{i}]") for i, part in enumerate(value))
        return value

    def _convert_spec(self, spec, path):
        copied = copy.copy(spec)
        module = get_module(spec)  # also of a tuple (place, name)
        if isinstance(module, type):
            converted = self._convert_class(module, path)
            copied.module = spec.module if converted is module else converted
        copied.params = self.convert(spec.params, f"{path}.params")
        copied.submodules = self.convert(spec.submodules, f"{path}.submodules")
        copied.metainfo = dict(spec.metainfo)
        return copied

    def _convert_class(self, kind, path):
        if kind in _REPLACED:
            self.replaced += 1
            return _REPLACED[kind]
        if _is_linear_of_other_backend(kind):
            self.rejected.append(f"{path} ({kind.__name__})")
        elif issubclass(kind, (layers.ColumnParallelLinear, layers.RowParallelLinear)):
            self.subclasses.append(f"{path} ({kind.__name__})")
        return kind


def _is_linear_of_other_backend(kind: type) -> bool:
    """Return whether a class is a linear layer or MLP of TransformerEngine, or of another extension of Megatron."""
    places = "transformer_engine", "megatron.core.extensions.", "megatron.core.tensor_parallel.inference_layers"
    return kind.__module__.startswith(places) and ("Linear" in kind.__name__ or "MLP" in kind.__name__)


def layer_spec(spec: Any) -> Any:
    """Return a copy of a spec in which the linear layers of Megatron-Core are those that run tdkernels.

    ``megatron.core.tensor_parallel.ColumnParallelLinear`` and ``RowParallelLinear`` are replaced, at any depth. Other
    modules are kept, and ``spec`` is not changed. Layers of experts are replaced, too, but run Megatron's forward.

    Args:
        spec: A ModuleSpec such as that of ``get_gpt_layer_local_spec()``, or the submodules of a block such as those of
            ``get_gpt_decoder_block_spec()``.

    Returns:
        The copy, of the same type.

    Raises:
        TypeError: If ``spec`` is no ModuleSpec and no dataclass.
        ValueError: If it has linear layers of TransformerEngine or of another extension, or no linear layer of
            Megatron-Core. The error names the layers.

    Warns:
        UserWarning: If the spec has other subclasses of the linear layers of Megatron-Core. They are kept.

    Contract:
        Local. All ranks of a tensor-parallel group must convert the spec, or none: the kernels of tdkernels and the
        collectives of Megatron-Core do not communicate with each other.

    Example:
        spec = megatron.layer_spec(get_gpt_layer_local_spec())
        model = GPTModel(config, transformer_layer_spec=spec, ...)
    """
    if isinstance(spec, type) or not dataclasses.is_dataclass(spec):
        raise TypeError(f"layer_spec: spec must be a ModuleSpec or a dataclass of submodules, not {spec!r}")
    conversion = _Conversion()
    converted = conversion.convert(spec, "spec")
    if conversion.rejected:
        raise ValueError(
            f"layer_spec: {', '.join(conversion.rejected)} cannot be replaced: such layers may fuse the layer norm or"
            " have other parameters. Build the spec with local modules, such as get_gpt_layer_local_spec(), or with"
            " backend=tdkernels.integrations.megatron.SpecProvider()"
        )
    if not conversion.replaced:
        raise ValueError("layer_spec: spec has no ColumnParallelLinear or RowParallelLinear of Megatron-Core")
    if conversion.subclasses:
        names = ", ".join(conversion.subclasses)
        warnings.warn(f"layer_spec keeps subclasses of Megatron's layers: {names}", UserWarning, stacklevel=2)
    return converted
