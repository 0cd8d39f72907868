"""Explain the selection of a call: its method and config, their source, and how close it comes to the hardware limits.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from tdkernels.autotune.hardware import hardware
from tdkernels.autotune.invariance import check_invariant, selection_mode
from tdkernels.autotune.modes import get_mode
from tdkernels.autotune.problem import Problem, device_of
from tdkernels.autotune.selection import CACHE, EXPLICIT, SHIPPED, Choice, look_up
from tdkernels.autotune.tunable import plain_ms as current_plain_ms
from tdkernels.autotune.tunable import tunable as tunable_by_name
from tdkernels.symm import resolve_group
from tdkernels.symm.group import caches_of, group_state

if TYPE_CHECKING:
    from tdkernels.symm.group import GroupLike


@dataclass(frozen=True)
class Explanation:
    """The result of ``explain``. ``str()`` formats it for reading.

    Times are those of one call in ms. On CPU ranks they are None if they were not measured, because an interpreter runs
    the kernels there.

    Attributes:
        problem: The problem: operator, shape, dtype, layout, GPU and number of ranks.
        config: The config that runs.
        source: Where the config came from: "explicit", "cache", "shipped", "modelled" (tuned on one GPU with a model
            of the link), "nearest", "similar_gpu" (a similar GPU), "default" or "batch_invariant".
        tuned_for: The problem that the config was tuned for; None for a default or explicit config.
        expected_ms: Expected time.
        measured: Whether ``expected_ms`` was measured for exactly this problem. Otherwise it is estimated.
        plain_ms: Time of the baseline, torch's collective and matmul in sequence; None if not measured, or if an
            earlier version measured another baseline.
        local_ms: Lower bound for the computation: the library alone, or the peak rate.
        local_measured: Whether ``local_ms`` was measured with the library alone.
        bound_by: What the peak rate refers to: "flops" or "bytes of memory".
        wire_ms: Lower bound for the communication: the bytes at the peak rate of a link.
        rates_measured: Whether the peak rates were measured on this GPU model. Otherwise they are estimated from its
            properties.
        in_graph: Whether the measured calls ran in a CUDA graph.
    """

    problem: Problem
    config: object
    source: str
    tuned_for: Problem | None
    expected_ms: float | None
    measured: bool
    plain_ms: float | None
    local_ms: float | None
    local_measured: bool
    bound_by: str
    wire_ms: float | None
    rates_measured: bool
    in_graph: bool

    @property
    def how(self) -> str:
        """How ``expected_ms`` was obtained: "estimated", "measured" or "measured in a CUDA graph"."""
        if not self.measured:
            return "estimated"
        return "measured in a CUDA graph" if self.in_graph else "measured"

    @property
    def method(self) -> str:
        """The method of the config."""
        return self.config.method  # type: ignore[attr-defined]

    @property
    def floor_ms(self) -> float | None:
        """The larger of the known lower bounds in ms; None if none is known."""
        return max((ms for ms in (self.local_ms, self.wire_ms) if ms is not None), default=None)

    def line(self) -> str:
        """Return the explanation in one line, for a log."""
        text = f"{self.problem}: {self.method} ({self.source}), {settings(self.problem.operator, self.config)}"
        if self.expected_ms is not None:
            text += f"; {self.expected_ms:.3f} ms {self.how}"
        if self.plain_ms is not None:
            text += f", unfused baseline {self.plain_ms:.3f} ms"
        floors = {"computation": self.local_ms, "wire": self.wire_ms}
        known = [f"{name} {ms:.3f} ms" for name, ms in floors.items() if ms is not None]
        return text + ("; floors: " + ", ".join(known) if known else "")

    def __str__(self) -> str:
        tunable = tunable_by_name(self.problem.operator)
        plain_runs, plain = tunable.plain_words_of(self.problem)
        lines = [
            *self._title(),
            f"  runs        {plain_runs if self.method == 'torch' else self.method}",
            f"  config      {settings(self.problem.operator, self.config)}",
            f"  came from   {_ORIGIN[self.source]}",
        ]
        if self.tuned_for is not None and self.tuned_for != self.problem:
            lines.append(f"  tuned for   {self.tuned_for}")
        if self.expected_ms is None:
            return "\n".join([*lines, "  expected    unknown: an interpreter runs the kernels on CPU ranks"])
        lines.append(f"  expected    {self.expected_ms:.4f} ms, {self.how}")
        if self.plain_ms is not None:
            ratio = self.plain_ms / self.expected_ms
            lines.append(f"  unfused     {self.plain_ms:.4f} ms, {plain}; {ratio:.2f} x ours")
        rate = "the best rate" if self.rates_measured else "a rate guessed from the GPU's properties"
        local = f"{tunable.local_words}, measured" if self.local_measured else f"{self.bound_by} at {rate}"
        for name, ms, what in (("computation", self.local_ms, local), ("wire", self.wire_ms, f"bytes at {rate}")):
            if ms is not None:
                share = ms / self.expected_ms
                lines.append(f"  {name:11} {ms:.4f} ms at least ({what}), {share:.0%} of the expected time")
        return "\n".join(lines)

    def _title(self):
        """Return the lines for the problem. If it has more than three sizes, a second line has their names."""
        names = tunable_by_name(self.problem.operator).sizes
        if len(names) <= 3:
            return [str(self.problem)]
        sizes = " ".join(f"{name}={size}" for name, size in zip(names, self.problem.shape, strict=True))
        return [str(self.problem), f"  sizes       {sizes}"]


_ORIGIN = {
    "explicit": "the call",
    "cache": "the cache on disk: tuned here",
    "shipped": "the table shipped with tdkernels",
    "modelled": "the table shipped with tdkernels: tuned on one GPU with a model of the link",
    "nearest": "the nearest tuned shape",
    "similar_gpu": "the table shipped with tdkernels for a similar GPU",
    "default": "the built-in heuristic: no entry of a similar shape is better",
    "batch_invariant": "the batch-invariant mode",
}


def explain(
    operator: str | Callable, *shapes: torch.Tensor | Sequence[int] | int | None, dtype: torch.dtype = torch.bfloat16,
    layout: str | None = None, group: "GroupLike" = None, world_size: int | None = None, config: Any = None,
) -> Explanation:
    """Return the method and config that a call would run with, their source, and the limits of its speed.

    This is a local function, not a collective. For a problem that is new to the group, it returns the config that this
    rank would propose.

    Args:
        operator: The operator or its name: ``tdkernels.ag_gemm`` or "ag_gemm".
        shapes: This rank's operands in the order of the call, as tensors or as their shapes. Alternatively, the sizes
            of the whole problem as integers, such as M, N, K for ``explain("ag_gemm", 8192, 57344, 8192)``.
        dtype: Dtype of operands that are not tensors.
        layout: Layout of operands that are not tensors, or a property that operands do not show, such as
            "causal zigzag" for ``ag_attention``. None means the layout of the tensors, or else the operator's default.
        group: The group of ranks: a ProcessGroup, a one-dimensional DeviceMesh, or None for the world.
        world_size: Number of ranks. Pass it instead of ``group`` if torch.distributed is not initialized.
        config: A config of the operator; None for the one that a call without a config would select.

    Returns:
        The Explanation. Its ``str()`` is a report for reading.

    Raises:
        ValueError: If the operator does not exist, the sizes are invalid, or the config cannot run.

    Example:
        >>> print(tdkernels.explain(tdkernels.ag_gemm, x, weight))
    """
    name = operator if isinstance(operator, str) else getattr(operator, "__name__", None)
    if name is None:
        raise ValueError(
            'operator must be a name such as "ag_gemm", or an operator such as tdkernels.ag_gemm, not a '
            f"{type(operator).__name__}"
        )
    tunable = tunable_by_name(name)
    state, device = None, torch.device("cuda" if torch.cuda.is_available() else "cpu", 0)
    if world_size is None:
        group = resolve_group(group)
        state, device = group_state(group), device_of(group)
        world_size = state.world_size
    if shapes and isinstance(shapes[0], torch.Tensor):
        device, dtype = shapes[0].device, shapes[0].dtype
    if not all(isinstance(shape, int) for shape in shapes):
        layout = layout or tunable.layout_of(*shapes)
        # An operand is None if the call has no bias.
        shapes = [tuple(getattr(shape, "shape", shape)) for shape in shapes if shape is not None]  # type: ignore
        shapes = tunable.sizes_of(*shapes, world_size=world_size)
    local_world_size = world_size if state is None else state.likely_local_world_size
    layout = layout or tunable.default_layout(dtype)
    problem = Problem.on(device, name, shapes, dtype, layout, world_size, local_world_size)  # type: ignore[arg-type]
    reason = tunable.why_not(problem)
    if reason is not None:
        raise ValueError(f"{name}: {reason}")
    if config is not None:
        reason = tunable.illegal(config, problem, device)
        if reason is not None:
            raise ValueError(f"{name}: config cannot run: {reason}")
        check_invariant(name, config)
        return explanation(tunable, problem, device, Choice(tunable.completed(config, problem, device), EXPLICIT))
    mode, choices = get_mode(), {}
    if state is not None or world_size == 1:
        choices = caches_of(group if state is not None else None).choices
    agreed = choices.get((tunable.key(problem), selection_mode()))
    return explanation(tunable, problem, device, agreed or look_up(tunable, problem, device, mode))


def explanation(tunable, problem, device, choice):
    """Return the Explanation of a Choice."""
    rates = hardware(device, problem.torch_dtype)
    floors, entry = tunable.floors(problem), choice.entry
    config = tunable.completed(choice.config, problem, device)
    # The entry may be for another problem with the same ``Tunable.key``, which leaves out sizes that differ by rank.
    measured = choice.source in (CACHE, SHIPPED) and entry.problem == problem
    expected_ms = plain_ms = local_ms = wire_ms = None
    if device.type != "cpu":
        expected_ms = tunable.estimate_ms(config, problem, rates)
        local_ms, wire_ms = floors.computation_ms(rates), floors.wire_bytes / rates.link * 1e3
    bound_by = "flops" if floors.flops / rates.flops >= floors.memory_bytes / rates.memory else "bytes of memory"
    local_measured = measured and entry.local_ms is not None
    if measured:
        expected_ms, plain_ms = entry.ms, current_plain_ms(entry)
        local_ms = entry.local_ms if entry.local_ms is not None else local_ms
        wire_ms = entry.wire_ms if entry.wire_ms is not None else wire_ms
    return Explanation(
        problem, config, choice.source, entry.problem if entry is not None else None, expected_ms, measured,
        plain_ms, local_ms, local_measured, bound_by, wire_ms, rates.measured, measured and entry.graph,
    )


def settings(operator: str, config: Any) -> str:
    """Return the fields of a config in one line of text."""
    values = tunable_by_name(operator).config_to_dict(config)
    return " ".join(f"{name}={_format_value(value)}" for name, value in values.items())


def _format_value(value):
    return "/".join(str(v) for v in value.values()) if isinstance(value, dict) else value
