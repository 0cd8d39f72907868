"""parallelize: apply a plan of torch's parallel styles with the fused operators."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatch
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor import parallel as torch_parallel
from torch.distributed.tensor.parallel import (
    ParallelStyle,
    PrepareModuleInput,
    PrepareModuleInputOutput,
    parallelize_module,
)

from tdkernels.nn.parallel.norms import SequenceParallel
from tdkernels.nn.parallel.report import Entry, Report, runs_of
from tdkernels.nn.parallel.shared_gather import SharedGather
from tdkernels.nn.parallel.styles import (
    ColwiseParallel,
    RowwiseParallel,
    sequence_dim,
)
from tdkernels.symm import resolve_group

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

PreparesInput = PrepareModuleInput, PrepareModuleInputOutput
_FUSED: dict[type, Any] = {
    torch_parallel.ColwiseParallel: ColwiseParallel,
    torch_parallel.RowwiseParallel: RowwiseParallel,
}


# ---- plan ----


def _matches(module, pattern, prefix=""):
    """Return the names of the modules that a pattern of a plan matches, as ``parallelize_module`` matches them."""
    if not pattern:
        return [prefix]
    token, _, rest = pattern.partition(".")
    children = [(name, child) for name, child in module.named_children() if fnmatch(name, token)]
    return [
        found for name, child in children for found in _matches(child, rest, f"{prefix}.{name}" if prefix else name)
    ]


class _Plan:
    """The modules of a model with their styles.

    Attributes:
        steps: List of (name of a module, style), in the order of the plan.
        unmatched: The patterns that match no module.
    """

    def __init__(self, model: torch.nn.Module, plan: ParallelStyle | Mapping[str, ParallelStyle]) -> None:
        self.model = model
        self.steps: list[tuple[str, Any]] = []
        self.unmatched: list[str] = []
        for pattern, style in plan.items() if isinstance(plan, Mapping) else [("", plan)]:
            if not isinstance(style, ParallelStyle):
                raise TypeError(f"parallelize: plan[{pattern!r}] is a {type(style).__name__}, not a ParallelStyle")
            names = _matches(model, pattern)
            self.steps += [(name, style) for name in names]
            if not names:
                self.unmatched.append(pattern)
        if not self.steps:
            names = [name for name, _ in model.named_children()]
            raise ValueError(f"parallelize: {self.unmatched} match no module; children of the model: {names}")

    def styles_of(self, name: str) -> list[Any]:
        return [style for other, style in self.steps if other == name]

    def preparing_inputs(self) -> list[str]:
        return [name for name, style in self.steps if isinstance(style, PreparesInput)]

    def linears_below(self, parent: str) -> list[str]:
        """Return the names of the linear layers below a module."""
        below = self.model.get_submodule(parent).named_modules(prefix=parent)
        return [name for name, module in below if isinstance(module, torch.nn.Linear)]


def fused_style(style: ParallelStyle, **changes: Any) -> Any:
    """Return the style of tdkernels for torch's ColwiseParallel or RowwiseParallel; None for other styles."""
    if not isinstance(style, (ColwiseParallel, RowwiseParallel)):
        kind = _FUSED.get(type(style))
    elif changes:
        kind = type(style)
    else:
        return style
    if kind is None:
        return None
    given: Any = style
    options = {
        "input_layouts": given.input_layouts[0], "output_layouts": given.output_layouts[0],
        "use_local_output": given.use_local_output, "config": getattr(given, "config", None), **changes,
    }
    return kind(**options)


# ---- gathers of PrepareModuleInput ----


class _PrepareShardedInput(PrepareModuleInput):
    """PrepareModuleInput without the all-gather, which the linear layers of the module share instead."""

    def __init__(self, **options: Any) -> None:
        super().__init__(**options)
        self.gather = SharedGather()

    def _prepare_input_arg(self, input, mesh, input_layout, desired_layout):
        if isinstance(input, DTensor) and desired_layout is not None and input.placements != (desired_layout,):
            input = input.redistribute(placements=(desired_layout,))
        return super()._prepare_input_arg(input, mesh, input_layout, desired_layout)

    def _apply(self, module, device_mesh):
        super()._apply(module, device_mesh)
        module.register_forward_pre_hook(self.gather.begin)
        module.register_forward_hook(self.gather.end, always_call=True)
        return module


def _gathers(style):
    """Return [(position or keyword, layout, desired layout)] of the inputs that PrepareModuleInput redistributes."""
    style = getattr(style, "prepare_module_input", style)
    pairs = list(enumerate(zip(style.input_layouts or (), style.desired_input_layouts or ())))
    for keyword, layout in style.input_kwarg_layouts.items():
        pairs.append((keyword, (layout, style.desired_input_kwarg_layouts.get(keyword))))
    changed = [(where, *layouts) for where, layouts in pairs if None not in layouts]
    return [(where, layout, desired) for where, layout, desired in changed if layout != desired]


def _is_gather(_where, layout, desired):
    return sequence_dim(layout) is not None and desired == Replicate()


def _without_gather(style, where):
    """Return a PrepareModuleInput as ``style`` that leaves the input at ``where`` divided."""
    desired = list(style.desired_input_layouts or ())
    desired_keywords = dict(style.desired_input_kwarg_layouts)
    if isinstance(where, str):
        desired_keywords[where] = style.input_kwarg_layouts[where]
    else:
        desired[where] = style.input_layouts[where]
    return _PrepareShardedInput(
        input_layouts=style.input_layouts, desired_input_layouts=tuple(desired) if style.input_layouts else None,
        input_kwarg_layouts=style.input_kwarg_layouts if style.with_kwargs else None,
        desired_input_kwarg_layouts=desired_keywords if style.with_kwargs else None,
        use_local_output=style.use_local_output,
    )


def _columns_below(plan, parent, style, world_size):
    """Return the ColwiseParallel linears that can share the gather of a PrepareModuleInput, and why there are none."""
    if type(style) is not PrepareModuleInput:
        return [], f"class {type(style).__name__} is not supported"
    gathers = _gathers(style)
    if len(gathers) != 1 or not _is_gather(*gathers[0]):
        return [], "it does not redistribute exactly one input from Shard(0) or Shard(1) to Replicate()"
    columns = []
    for name in plan.linears_below(parent):
        styles = [fused_style(one) for one in plan.styles_of(name)]
        if len(styles) != 1 or styles[0] is None:
            return [], f"{name} below it is neither ColwiseParallel nor RowwiseParallel"
        inner = [other for other in plan.preparing_inputs() if f"{name}.".startswith(f"{other}.") and other != parent]
        if any(len(other) > len(parent) for other in inner):
            return [], f"{name} is below another module with PrepareModuleInput, too"
        if isinstance(styles[0], RowwiseParallel):
            continue
        reason = styles[0].why_not(plan.model.get_submodule(name), world_size)
        if reason is None and styles[0].input_layouts != (Replicate(),):
            reason = "its input layout is not Replicate()"
        if reason is not None:
            return [], f"{name}: {reason}"
        columns.append(name)
    return columns, "" if columns else "no linear layer below it is ColwiseParallel"


@dataclass
class _FusedInput:
    """A PrepareModuleInput whose all-gather is left to linear layers.

    Attributes:
        style: The style that replaces it.
        dim: The divided dimension.
        columns: Names of the linear layers.
    """

    style: _PrepareShardedInput
    dim: int
    columns: list[str]


def _fuse_inputs(plan, patterns, world_size):
    """Select the PrepareModuleInput styles whose all-gather is fused.

    Returns:
        {name of the parent: _FusedInput}, {name of a parent with an all-gather: Entry}, and entries of patterns that
        match no such parent.
    """
    given = [patterns] if isinstance(patterns, str) else [] if isinstance(patterns, bool) else list(patterns)
    matched = {pattern: _matches(plan.model, pattern) for pattern in given}
    fused, parents = {}, {}
    for parent, style in plan.steps:
        if not isinstance(style, PreparesInput) or not any(_is_gather(*one) for one in _gathers(style)):
            continue
        kind = type(plan.model.get_submodule(parent)).__name__
        columns, reason = _columns_below(plan, parent, style, world_size)
        layers = ", ".join(name.rpartition(".")[2] for name in columns)
        if reason:
            reason = f"gather kept in PrepareModuleInput: {reason}"
        elif patterns is not True and not any(parent in names for names in matched.values()):
            reason = f"gather kept in PrepareModuleInput; pass fuse_inputs to fuse it with {layers}"
        else:
            where, layout, _ = _gathers(style)[0]
            fused[parent] = _FusedInput(_without_gather(style, where), layout.dim, columns)
        parents[parent] = Entry(parent, kind, None if reason else f"ag_gemm of {layers}", reason)
    missed = [pattern for pattern, names in matched.items() if not any(name in parents for name in names)]
    reason = "fuse_inputs: matches no module with an all-gather in PrepareModuleInput"
    return fused, parents, [Entry(pattern, "", None, reason) for pattern in missed]


# ---- parallelize ----


def parallelize(
    model: torch.nn.Module, mesh: "DeviceMesh", plan: ParallelStyle | Mapping[str, ParallelStyle], *,
    fuse_inputs: bool | str | Sequence[str] = False, src_data_rank: int | None = 0,
) -> Report:
    """Apply a plan of torch's parallel styles, in place, with the fused operators for its linear layers.

    ColwiseParallel and RowwiseParallel of torch are replaced by those of ``tdkernels.nn.parallel`` where an operator
    has the layouts and would not communicate more than torch. So is SequenceParallel, whose norms then compute with
    local tensors. All other styles are applied as they are. Parameters, checkpoints and results are those of
    ``torch.distributed.tensor.parallel.parallelize_module``.

    In most plans ``PrepareModuleInput(input_layouts=Shard(1), desired_input_layouts=Replicate())`` of a parent module
    gathers the input of q, k and v, or of w1 and w3. With ``fuse_inputs`` that all-gather is removed, and the linear
    layers gather x once, with ``ag_gemm`` of all their weights. The forward of the parent then gets a divided x: a
    DTensor with the global shape, or the local shard with ``use_local_output=True``. This is wrong if the forward uses
    the complete x for anything but the linear layers, which cannot be checked. So it is off by default, and the report
    names the parents for which it is possible. The linear layers share the gather if they get the same tensor object.
    With FSDP2, apply ``fully_shard`` to the parent or to a module around it, since it hands copies of x to its modules.

    Args:
        model: The model. It is modified.
        mesh: One-dimensional DeviceMesh, such as mesh["tp"].
        plan: {pattern of module names: style} as for ``parallelize_module``, or one style for the model.
        fuse_inputs: Patterns of the parents with a PrepareModuleInput whose all-gather is fused with their linear
            layers, such as ["layers.*.feed_forward"], or True for all.
        src_data_rank: As for ``parallelize_module``.

    Returns:
        The Report: an Entry for each linear layer, each module with ColwiseParallel or RowwiseParallel, each
        PrepareModuleInput with an all-gather, and each pattern that matches no module.

    Raises:
        TypeError: If the plan has a value that is not a ParallelStyle.
        ValueError: If the mesh has several dimensions, or no pattern matches a module.

    Contract:
        Collective over the mesh, since torch broadcasts or scatters the parameters.

    Example:
        >>> plan = {"layers.*.feed_forward": PrepareModuleInput(input_layouts=Shard(1),
        ...             desired_input_layouts=Replicate()),
        ...         "layers.*.feed_forward.w1": ColwiseParallel(), "layers.*.feed_forward.w3": ColwiseParallel(),
        ...         "layers.*.feed_forward.w2": RowwiseParallel(output_layouts=Shard(1))}
        >>> print(tdkernels.nn.parallel.parallelize(model, mesh["tp"], plan, fuse_inputs=True))
    """
    if mesh.ndim != 1:
        raise ValueError(f"parallelize: the mesh must have one dimension, such as mesh['tp'], not {mesh.ndim}")
    resolved = _Plan(model, plan)
    world_size = resolve_group(mesh).size()
    notes = [Entry(pattern, "", None, "matches no module") for pattern in resolved.unmatched]
    fused, parents, missed = _fuse_inputs(resolved, fuse_inputs, world_size)
    steps, reasons = _resolve(resolved, fused, parents, world_size)
    for name, style in steps:
        parallelize_module(model.get_submodule(name), mesh, style, src_data_rank=src_data_rank)
    for one in fused.values():
        one.style.gather.join([model.get_submodule(name) for name in one.columns])
    return Report(_entries(model, parents, reasons) + notes + missed)


def _resolve(plan, fused, parents, world_size):
    """Return the steps with the styles to apply, and {name of a module: why it runs torch}.

    Below a PrepareModuleInput that gathers, ColwiseParallel stays torch's. With it, the gradients of x of q, k and v
    are added before one reduce-scatter, but each ``column_linear`` would all-reduce its own.
    """
    dims = {name: one.dim for one in fused.values() for name in one.columns}
    outer_first = sorted(parents.keys() - fused.keys(), key=len)
    kept = {name: parent for parent in outer_first for name in plan.linears_below(parent) if name not in dims}
    steps, reasons = [], {}
    for name, style in plan.steps:
        module, ours = plan.model.get_submodule(name), fused_style(style)
        if name in fused and isinstance(style, PrepareModuleInput):
            style = fused[name].style
        elif type(style) is torch_parallel.SequenceParallel:
            layout = style.sequence_sharding[0]
            style = SequenceParallel(sequence_dim=layout.dim, use_local_output=style.use_local_output)
        elif ours is None:
            if isinstance(module, torch.nn.Linear):
                reasons[name] = f"style {type(style).__name__} is not replaced"
        elif (reason := ours.why_not(module, world_size)) is not None:
            reasons[name] = reason
        elif name in kept and type(style) is torch_parallel.ColwiseParallel and ours.operator()[0] == "column_linear":
            reasons[name] = f"its input is gathered by PrepareModuleInput of {kept[name] or 'the model'}"
        else:
            style = fused_style(style, input_layouts=Shard(dims[name])) if name in dims else ours
        steps.append((name, style))
    return steps, reasons


def _entries(model, parents, reasons):
    """Return the entries of the modules of a model to which a plan was applied, in the order of the model."""
    entries = []
    for name, module in model.named_modules():
        kind, style = type(module).__name__, getattr(module, "tdkernels_style", None)
        if name in parents:
            entries.append(parents[name])
        if style is not None:
            entries.append(Entry(name, kind, runs_of(style)))
        elif name in reasons:
            entries.append(Entry(name, kind, None, reasons[name]))
        elif isinstance(module, torch.nn.Linear):
            entries.append(Entry(name, kind, None, "not in the plan"))
    return entries
