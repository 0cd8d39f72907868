"""Which path a call takes, why, and how near it comes to what the hardware allows."""

from dataclasses import dataclass

import torch

from tdkernels.autotune.hardware import hardware
from tdkernels.autotune.modes import get_mode
from tdkernels.autotune.problem import Problem, device_of
from tdkernels.autotune.selection import CACHE, EXPLICIT, SHIPPED, Choice, look_up
from tdkernels.autotune.tunable import tunable as tunable_by_name
from tdkernels.symm import resolve_group
from tdkernels.symm.group import caches_of, group_state


@dataclass(frozen=True)
class Explanation:
    """What would run; ``str()`` of it is meant to be read.

    Attributes:
        problem, config, source: source is "explicit", "cache", "shipped", "nearest", "kindred" or "default"
        tuned_for: the problem for which the config was tuned; None for a default or explicit one
        expected_ms, measured: of a call; measured for this very problem, or estimated
        plain_ms: of torch's collective and matmul in sequence, where it was measured
        local_ms, local_measured: floor of the computation: by the library alone, or at the best rate
        bound_by: of what that rate is: "flops", or "bytes of memory"
        wire_ms: floor of the communication: bytes at the best rate of a link
        rates_measured: whether the best rates were measured on such a GPU, or guessed from its properties
        in_graph: whether what was measured are calls in a CUDA graph

    Without a measurement the times of CPU ranks are None: an interpreter runs the kernels there.
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
    def how(self):
        """Where ``expected_ms`` is from, in words."""
        if not self.measured:
            return "estimated"
        return "measured in a CUDA graph" if self.in_graph else "measured"

    @property
    def method(self):
        return self.config.method

    @property
    def floor_ms(self):
        """The larger of the two floors, as far as they are known."""
        return max((ms for ms in (self.local_ms, self.wire_ms) if ms is not None), default=None)

    def line(self):
        """All of it in one line, for a log."""
        text = f"{self.problem}: {self.method} ({self.source}), {settings(self.problem.operator, self.config)}"
        if self.expected_ms is not None:
            text += f"; {self.expected_ms:.3f} ms {self.how}"
        if self.plain_ms is not None:
            text += f", torch's sequence {self.plain_ms:.3f} ms"
        floors = {"computation": self.local_ms, "wire": self.wire_ms}
        known = [f"{name} {ms:.3f} ms" for name, ms in floors.items() if ms is not None]
        return text + ("; floors: " + ", ".join(known) if known else "")

    def __str__(self):
        tunable = tunable_by_name(self.problem.operator)
        plain_runs, plain = tunable.plain_words
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
            lines.append(f"  sequence    {self.plain_ms:.4f} ms, {plain}; {ratio:.2f} x ours")
        rate = "the best rate" if self.rates_measured else "a rate guessed from the GPU's properties"
        local = f"{tunable.local_words}, measured" if self.local_measured else f"{self.bound_by} at {rate}"
        for name, ms, what in (("computation", self.local_ms, local), ("wire", self.wire_ms, f"bytes at {rate}")):
            if ms is not None:
                share = ms / self.expected_ms
                lines.append(f"  {name:11} {ms:.4f} ms at least ({what}), {share:.0%} of the expected time")
        return "\n".join(lines)

    def _title(self):
        """The problem; where there are more than the three sizes of a product, with their names."""
        names = tunable_by_name(self.problem.operator).sizes
        if len(names) <= 3:
            return [str(self.problem)]
        sizes = " ".join(f"{name}={size}" for name, size in zip(names, self.problem.shape, strict=True))
        return [str(self.problem), f"  sizes       {sizes}"]


_ORIGIN = {
    "explicit": "the call",
    "cache": "the cache on disk: tuned here",
    "shipped": "the table that comes with tdkernels",
    "nearest": "the nearest shape that was tuned",
    "kindred": "the table that comes with tdkernels, of a GPU of the same kind",
    "default": "nowhere: the default, nobody has tuned anything near it",
}


def explain(operator, *shapes, dtype=torch.bfloat16, layout=None, group=None, world_size=None, config=None):
    """Say which method and config a call would run with, where they come from, and what limits it.

    Args:
        operator: its name or the function, "ag_gemm" or tdkernels.ag_gemm
        shapes: this rank's operands as they go into the call (tensors, or their shapes), or the sizes of the whole
            problem as integers: explain("ag_gemm", 8192, 57344, 8192) is M, N, K
        dtype: of operands that are not tensors
        layout: of operands that are not tensors, and what operands do not show, such as "causal zigzag" of
            ag_attention; None is what the tensors show, or else the usual one
        group: as for the operators
        world_size: instead of a group, where torch.distributed is not initialised
        config: as for the operators

    Returns:
        Explanation

    Raises:
        ValueError

    Contract:
        local, not collective: for a problem that the group has not met yet it says what this rank would propose
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
        shapes = [tuple(getattr(shape, "shape", shape)) for shape in shapes if shape is not None]  # None: no bias
        shapes = tunable.sizes_of(*shapes, world_size=world_size)
    local_world_size = world_size if state is None else state.likely_local_world_size
    layout = layout or tunable.layouts[0]
    problem = Problem.on(device, name, shapes, dtype, layout, world_size, local_world_size)
    reason = tunable.why_not(problem)
    if reason is not None:
        raise ValueError(f"{name}: {reason}")
    if config is not None:
        reason = tunable.illegal(config, problem, device)
        if reason is not None:
            raise ValueError(f"{name}: config cannot run: {reason}")
        return explanation(tunable, problem, device, Choice(tunable.completed(config, problem, device), EXPLICIT))
    mode, choices = get_mode(), {}
    if state is not None or world_size == 1:
        choices = caches_of(group if state is not None else None).choices
    agreed = choices.get((tunable.key(problem), mode))
    return explanation(tunable, problem, device, agreed or look_up(tunable, problem, device, mode))


def explanation(tunable, problem, device, choice):
    """The Explanation of a choice."""
    rates = hardware(device, problem.torch_dtype)
    floors, entry = tunable.floors(problem), choice.entry
    config = tunable.completed(choice.config, problem, device)
    # What the ranks have agreed on may be of a problem that differs in a size which is each rank's own.
    measured = choice.source in (CACHE, SHIPPED) and entry.problem == problem
    expected_ms = plain_ms = local_ms = wire_ms = None
    if device.type != "cpu":
        expected_ms = tunable.estimate_ms(config, problem, rates)
        local_ms, wire_ms = floors.computation_ms(rates), floors.wire_bytes / rates.link * 1e3
    bound_by = "flops" if floors.flops / rates.flops >= floors.memory_bytes / rates.memory else "bytes of memory"
    local_measured = measured and entry.local_ms is not None
    if measured:
        expected_ms, plain_ms = entry.ms, entry.plain_ms
        local_ms = entry.local_ms if entry.local_ms is not None else local_ms
        wire_ms = entry.wire_ms if entry.wire_ms is not None else wire_ms
    return Explanation(
        problem, config, choice.source, entry.problem if entry is not None else None, expected_ms, measured,
        plain_ms, local_ms, local_measured, bound_by, wire_ms, rates.measured, measured and entry.graph,
    )


def settings(operator, config):
    """A config of an operator in a few words."""
    values = tunable_by_name(operator).config_to_dict(config)
    return " ".join(f"{name}={_plainly(value)}" for name, value in values.items())


def _plainly(value):
    return "/".join(str(v) for v in value.values()) if isinstance(value, dict) else value
