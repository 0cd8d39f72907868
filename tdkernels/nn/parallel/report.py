"""Report: which operator each linear layer of a model runs, and why others run torch."""

from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.tensor import DTensor, Replicate

from tdkernels.autotune.explain import explain, settings
from tdkernels.nn.linear import ColumnParallelLinear, RowParallelLinear
from tdkernels.nn.moe import EPMoE, TPMoE
from tdkernels.nn.parallel.styles import LinearStyle
from tdkernels.nn.swiglu import SwiGLU


@dataclass(frozen=True)
class Entry:
    """One row of a Report.

    Attributes:
        module: Name of the module in the model, or a pattern that matches no module.
        kind: Name of its class; empty for a pattern.
        runs: The operators that it runs; None if it runs torch.
        reason: Why it runs torch; empty if it does not.
        config: The configs of the operators for the given number of rows; empty if none was given.
    """

    module: str
    kind: str
    runs: str | None
    reason: str = ""
    config: str = ""


@dataclass(frozen=True)
class Report:
    """The result of ``parallelize`` and ``report``. ``str()`` formats it as a table.

    Attributes:
        entries: The rows, in the order of the model.
    """

    entries: list[Entry]

    def __getitem__(self, module: str) -> Entry:
        """Return the entry of a module by name. Raises KeyError if there is none."""
        for entry in self.entries:
            if entry.module == module:
                return entry
        raise KeyError(module)

    def __str__(self) -> str:
        rows = [("module", "class", "runs", "why not", "config")]
        rows += [
            (entry.module or "(model)", entry.kind, entry.runs or "torch", entry.reason, entry.config)
            for entry in self.entries
        ]
        columns = [column for column in zip(*rows, strict=True) if any(column[1:])]
        widths = [max(map(len, column)) for column in columns]
        lines = [
            " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
            for row in zip(*columns, strict=True)
        ]
        return "\n".join([lines[0], "-+-".join("-" * width for width in widths), *lines[1:]])


def report(model: torch.nn.Module, *, rows: int | None = None) -> Report:
    """Return which operator each linear layer and mixture-of-experts layer of a model runs.

    Args:
        model: A model with modules of tdkernels.nn, or with the styles of tdkernels.nn.parallel.
        rows: Number of tokens of a rank: those of its shard with sequence parallelism, otherwise all. If given, the
            entries of linear layers have the config that would be selected (see ``tdkernels.explain``).

    Returns:
        The Report. ``str()`` of it is a table.

    Example:
        >>> print(tdkernels.nn.parallel.report(model))
    """
    entries: list[Entry] = []
    inside: tuple[str, ...] = ()
    for name, module in model.named_modules():
        if name.startswith(inside) or "" in inside:
            continue
        entry = _entry_of(name, module, rows)
        if entry is not None:
            entries.append(entry)
            inside += (f"{name}." if name else "",)  # the parts of the module have no rows of their own
    return Report(entries)


def _entry_of(name, module, rows):
    """Return the Entry of a module; None for a module that has no row in a report."""
    kind = type(module).__name__
    style = getattr(module, "tdkernels_style", None)
    if isinstance(style, LinearStyle):
        reason = style.why_torch(module)
        if reason is not None:
            return Entry(name, kind, None, reason)
        sizes = module.in_features, module.out_features
        config = _config(style.operator, *sizes, style.group, module.weight.dtype, rows, style.config)
        return Entry(name, kind, runs_of(style), config=config)
    if isinstance(module, (ColumnParallelLinear, RowParallelLinear)):
        return Entry(name, kind, _operator_of(module), config=_config_of(module, rows))
    if isinstance(module, SwiGLU):
        parts = module.gate_up, module.down
        configs = "; ".join(_config_of(part, rows) for part in parts) if rows is not None else ""
        return Entry(name, kind, ", ".join(map(_operator_of, parts)), config=configs)
    if isinstance(module, (EPMoE, TPMoE)):
        return Entry(name, kind, "ep_moe" if isinstance(module, EPMoE) else "tp_moe")
    if hasattr(module, "tdkernels_runs"):  # a layer of another framework, from tdkernels.integrations
        operator, reason = module.tdkernels_runs
        config = _config(operator, *module.tdkernels_problem, rows, None) if operator else ""
        return Entry(name, kind, operator, reason, config)
    if isinstance(module, torch.nn.Linear):
        divided = isinstance(module.weight, DTensor)
        reason = "a DTensor parameter: parallel by torch" if divided else "not parallel"
        return Entry(name, kind, None, f"torch.nn.Linear: {reason}")
    return None


def runs_of(style: LinearStyle) -> str:
    """Return what a linear layer with a style runs, including an all-gather that is not fused or is shared."""
    shared = len(style.gather.members) - 1 if style.gather is not None else 0
    if style.operator == "column_linear" and style.input_layout != Replicate():
        return f"column_linear, x redistributed from {style.input_layout!r} by torch"
    collective = "gather" if style.operator == "ag_gemm" else "all-reduce of the gradient of x"
    return f"{style.operator}, {collective} shared with {shared} more" if shared else style.operator


def _operator_of(module):
    if isinstance(module, ColumnParallelLinear):
        return "ag_gemm" if module.sequence_parallel else "column_linear"
    return "gemm_rs" if module.sequence_parallel else "gemm_ar"


def _config_of(module, rows):
    sizes = module.in_features, module.out_features
    return _config(_operator_of(module), *sizes, module.group, module.weight.dtype, rows, module.config)


def _config(operator, k, n, group, dtype, rows, config) -> str:
    """Return the config of an operator for ``rows`` tokens of a rank, in one line; empty if rows is None."""
    if rows is None:
        return ""
    ranks = group.size()
    shapes: dict[str, Any] = {
        "ag_gemm": ((rows, k), (n // ranks, k)),
        "gemm_rs": ((rows * ranks, k // ranks), (n, k // ranks)),
        "gemm_ar": ((rows, k // ranks), (n, k // ranks)),
        "column_linear": ((rows, n // ranks), (k, n // ranks)),  # the gradient of x
    }
    name, layout = ("gemm_ar", "kn") if operator == "column_linear" else (operator, None)
    found = explain(name, *shapes[operator], dtype=dtype, layout=layout, group=group, config=config)
    return f"{found.source}: {settings(name, found.config)}"
