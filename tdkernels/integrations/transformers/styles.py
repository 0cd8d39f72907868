"""Tensor-parallel styles of transformers whose linear layers run the fused operators.

    style             operator         communication of transformers' own style
    rowwise           gemm_ar          all-reduce of the output, after the GEMM
    colwise           column_linear    all-reduce of the gradient of x, after the GEMM
    packed_colwise    column_linear    the same

A tensor-parallel plan of transformers, such as ``base_model_tp_plan`` of a config, maps the names of modules to names
of styles. The registry ``ALL_PARALLEL_STYLES`` maps these to style objects. ``install`` replaces three of them by
subclasses that override ``install_forward`` only. The methods that divide, load and save parameters are inherited.

The forward of transformers' style is kept for each module. It runs if the operators do not support the module, and
``tdkernels.nn.report`` shows the reason.
"""

import contextlib
import importlib
import inspect
import types
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from tdkernels.integrations.installation import during_block
from tdkernels.nn.parallel.styles import LinearStyle, column_forward, local_parameters, row_forward
from tdkernels.ops.common.validation import DTYPES
from tdkernels.ops.dense.local import linear
from tdkernels.runtime.autograd import DEVICES
from tdkernels.symm import resolve_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_OLDEST = "5.23"


@dataclass(frozen=True)
class _Kind:
    """Properties of a style of transformers and of its replacement.

    Attributes:
        base: Name of the class of transformers.
        operator: Name of the operator that the replacement runs.
        forward: Forward of a torch.nn.Linear with the operator.
        divided: The size of the module that the ranks divide.
        dim: Dimension of the weight that the ranks divide.
        layouts: The layouts of x and of the output that the operator has.
    """

    base: str
    operator: str
    forward: Callable[[Any, torch.Tensor], torch.Tensor]
    divided: str
    dim: int
    layouts: tuple[Any, Any]


def _column_forward(module: Any, x: torch.Tensor) -> torch.Tensor:
    """Forward with ``column_linear``. Without gradients it is local, and skips checks that take 10 us."""
    if torch.is_grad_enabled() or isinstance(x, DTensor):
        return column_forward(module, x)
    return linear(x, *local_parameters(module))


_COLUMN: Any = "column_linear", _column_forward, "out_features", 0, (Replicate(), Shard(-1))
_KINDS = {
    "colwise": _Kind("ColwiseParallel", *_COLUMN),
    "packed_colwise": _Kind("PackedColwiseParallel", *_COLUMN),
    "rowwise": _Kind("RowwiseParallel", "gemm_ar", row_forward, "in_features", 1, (Shard(-1), Replicate())),
}

# Methods of transformers' styles that are called or overridden, with their parameters.
_METHODS = {"install_forward": ["module", "mesh"], "shard_param": ["module", "param", "mesh"]}

# The styles that ``install`` has replaced: {name: (style before, style of tdkernels)}.
_replaced: dict[str, tuple[Any, Any]] = {}


# ---- modules ----


@dataclass(eq=False)
class _ModuleStyle(LinearStyle):
    """The style of a module of a transformers model, its attribute ``tdkernels_style``.

    Attributes:
        forward: Forward with the operator.
        fallback: Forward of transformers' style.
        weight_dim: Dimension of the weight that the ranks divide.
        why_never: Why the module always runs ``fallback``. It is known when the style is applied.
        checked: State of the parameters that was checked last, and why the module runs ``fallback`` in this state.
    """

    forward: Any = None
    fallback: Any = None
    weight_dim: int = 0
    why_never: str | None = None
    checked: tuple[Any, str | None] | None = None

    def why_torch(self, module: Any) -> str | None:
        """Return why ``module`` runs transformers' forward; None if it runs the operator.

        Parameters are loaded after the style is applied, and may be converted or quantized later. So they are checked
        in every call, and again only if their state has changed.
        """
        if self.why_never is not None:
            return self.why_never
        weight = module.weight
        quantized = module.__dict__.get("_hf_quantized_needs_local_tp", False)  # getattr is slow if it is missing
        state = type(weight), weight.dtype, getattr(weight, "placements", None), quantized
        if self.checked is None or self.checked[0] != state:
            self.checked = state, self._why_not_parameters(weight, quantized)
        return self.checked[1]

    def _why_not_parameters(self, weight, quantized):
        """Return why the operator does not support the parameters; None if it does."""
        if quantized:
            return "it is quantized"
        if not isinstance(weight, DTensor):
            return f"its weight is a {type(weight).__name__}, not a DTensor"
        local = type(weight.to_local().data)
        if local is not torch.Tensor:
            return f"its weight is a DTensor of {local.__name__}"
        if weight.dtype not in DTYPES:
            return f"its weight is {weight.dtype}, which the operators do not support"
        if len(weight.placements) != 1 or getattr(weight.placements[0], "dim", None) != self.weight_dim:
            return f"its weight has the placements {weight.placements}"
        return None


def _forward(module: Any, *args: Any, **kwargs: Any) -> torch.Tensor:
    """Forward of a module with one of the three styles."""
    style = module.tdkernels_style
    run = style.forward if style.why_torch(module) is None else style.fallback
    return run(module, *args, **kwargs) if run is style.forward else run(*args, **kwargs)


def _tensor_parallel_mesh(mesh: "DeviceMesh") -> "DeviceMesh | None":
    """Return the one-dimensional mesh that divides the weights; None if there is none."""
    if mesh.ndim == 1:
        return mesh
    return mesh["tp"] if "tp" in (mesh.mesh_dim_names or ()) else None


class _FusedStyle:
    """Mix-in in front of a style class of transformers."""

    tdkernels_kind: _Kind
    use_local_output: bool
    input_layouts: Any
    output_layouts: Any

    def _why_never(self, module: Any, mesh: Any) -> str | None:
        """Return why the operator cannot run for ``module``, whatever its parameters are; None if it can."""
        if type(module) is not torch.nn.Linear:
            return f"class {type(module).__name__} is not torch.nn.Linear"
        if "forward" in vars(module):
            return "its forward was replaced by another library"
        if mesh is None:
            return 'the mesh has several dimensions, none of which is "tp"'
        if mesh.device_type not in DEVICES:
            return f"the mesh is on {mesh.device_type}"
        kind, (x_layout, y_layout) = self.tdkernels_kind, self._layouts()
        if (x_layout, y_layout) != kind.layouts:
            return f"{kind.operator} does not have the layouts {x_layout!r} and {y_layout!r}"
        if not self.use_local_output:
            return "its output is a DTensor"
        size = getattr(module, kind.divided)
        return f"{mesh.size()} ranks do not divide {kind.divided} {size}" if size % mesh.size() else None

    def _layouts(self):
        """Return the layouts of x and of the output. PackedColwiseParallel has tuples, and a fixed output layout."""
        layouts = self.input_layouts, getattr(self, "output_layouts", Shard(-1))
        return tuple(one[0] if isinstance(one, (tuple, list)) else one for one in layouts)

    def install_forward(self, module: Any, mesh: Any) -> Any:
        kind, own_mesh = self.tdkernels_kind, _tensor_parallel_mesh(mesh)
        why_never = self._why_never(module, own_mesh)
        super().install_forward(module, mesh)  # type: ignore[misc]
        group: Any = resolve_group(own_mesh) if why_never is None else None
        module.tdkernels_style = _ModuleStyle(
            name=kind.base, operator=kind.operator, mesh=mesh if own_mesh is None else own_mesh, group=group,
            input_layout=kind.layouts[0], dim=None, use_local_output=True, config=None, forward=kind.forward,
            fallback=module.forward, weight_dim=kind.dim, why_never=why_never,
        )
        if why_never is None:
            module.forward = types.MethodType(_forward, module)
        return module


# ---- registry ----


def _transformers() -> Any:
    """Return transformers.distributed.tensor_parallel, or raise an error if it is not the one that is supported."""
    needs = f"tdkernels.integrations.transformers.install: transformers >= {_OLDEST} is needed"
    try:
        import transformers
    except ImportError as err:
        raise ImportError(f"{needs}, and it is not installed") from err
    version = getattr(transformers, "__version__", "unknown")
    try:
        tensor_parallel = importlib.import_module("transformers.distributed.tensor_parallel")
    except ImportError as err:
        raise ImportError(f"{needs}: version {version} has no transformers.distributed.tensor_parallel") from err
    missing = _missing_from(tensor_parallel)
    if missing is not None:
        raise RuntimeError(f"{needs}: transformers.distributed.tensor_parallel of version {version} has {missing}")
    return tensor_parallel


def _missing_from(tensor_parallel) -> str | None:
    """Return what the module does not have or has in another form; None if it is supported."""
    registry = getattr(tensor_parallel, "ALL_PARALLEL_STYLES", None)
    if registry is None or not hasattr(registry, "register"):
        return "no registry ALL_PARALLEL_STYLES"
    for name, kind in _KINDS.items():
        if name not in registry:
            return f"no style {name!r}"
        base = getattr(tensor_parallel, kind.base, None)
        if base is None:
            return f"no class {kind.base}"
        for method, parameters in _METHODS.items():
            found = getattr(base, method, None)
            if found is None or [*inspect.signature(found).parameters][1:] != parameters:
                return f"no {kind.base}.{method}({', '.join(parameters)})"
    return None


def _replacement(style: Any, kind: _Kind) -> Any:
    """Return an object that has the attributes of ``style``, and the class of it behind ``_FusedStyle``."""
    base = type(style)
    made: Any = object.__new__(type(f"Fused{base.__name__}", (_FusedStyle, base), {"tdkernels_kind": kind}))
    made.__dict__.update(style.__dict__)
    return made


def _register(registry: Any, name: str, style: Any) -> None:
    """Register a style."""
    registry.register(name, style)
    if registry[name] is not style:  # the name has an entry of this registry, which hides those of all registries
        registry[name] = style


def install() -> None:
    """Replace the styles "colwise", "rowwise" and "packed_colwise" of transformers in this process.

    Models that are parallelized afterwards, by ``from_pretrained(distributed_config=...)``, run ``gemm_ar`` and
    ``column_linear`` in the torch.nn.Linear layers that have these styles in their plan. Parameters, checkpoints and
    the types of the outputs stay as they are. Models that were parallelized before ``install`` are not affected, and
    ``uninstall`` does not affect those that were parallelized after it. A second call does nothing.

    A module runs transformers' forward if the operators do not support it: if it is not exactly a torch.nn.Linear, is
    quantized, has a dtype other than bf16, fp16 and fp32, the ranks do not divide its features, or a plan of your own
    has other layouts. ``tdkernels.nn.report(model)`` lists the operator of each module, or the reason.

    Raises:
        ImportError: If transformers is not installed, or is too old to have ``transformers.distributed``.
        RuntimeError: If the registry of transformers has another form than that of version 5.23.

    Warns:
        UserWarning: If another library has replaced one of the styles. The style of tdkernels is then a subclass of the
            class of that library.

    Contract:
        Local. All ranks must call it before the model is created, because the kernels of tdkernels and torch do not
        communicate with each other. Forwards of row-parallel layers and backwards of column-parallel layers are
        collective over the ranks of the tensor-parallel mesh, and raise the errors of the operators.

    Source:
        Tensor parallelism in transformers (transformers.distributed.tensor_parallel).

    Example:
        >>> install()
        >>> model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=8))
        >>> print(tdkernels.nn.report(model))
    """
    if _replaced:
        return
    tensor_parallel = _transformers()
    registry = tensor_parallel.ALL_PARALLEL_STYLES
    replaced = {}
    for name, kind in _KINDS.items():
        style = registry[name]
        if type(style) is not getattr(tensor_parallel, kind.base):
            own = f"{type(style).__module__}.{type(style).__qualname__}"
            warnings.warn(
                f"tdkernels replaces the style {name!r} of transformers, which another library has set to {own}; "
                f"modules that tdkernels does not support run the forward of {own}", UserWarning, stacklevel=2,
            )
        replaced[name] = style, _replacement(style, kind)
    for name, (_, fused) in replaced.items():
        _register(registry, name, fused)
    _replaced.update(replaced)


def uninstall() -> None:
    """Restore the styles that ``install`` has replaced. It does nothing if they are not installed.

    Models that are parallelized already keep their forwards. A style that another library has set since ``install``
    stays.
    """
    if not _replaced:
        return
    registry = _transformers().ALL_PARALLEL_STYLES
    for name, (before, fused) in _replaced.items():
        if registry[name] is fused:
            _register(registry, name, before)
    _replaced.clear()


def installed() -> contextlib.AbstractContextManager[None]:
    """Install the styles for a ``with`` block. If they are installed already, they stay so after the block.

    Example:
        >>> with installed():
        ...     model = AutoModelForCausalLM.from_pretrained(name, distributed_config=DistributedConfig(tp_size=8))
    """
    return during_block(install, uninstall, lambda: bool(_replaced))
