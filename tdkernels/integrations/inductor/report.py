"""Report of the collectives of compiled graphs: which run on tdkernels, and why others do not."""

from collections import Counter
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Entry:
    """One collective of a graph.

    Attributes:
        graph: Number of the graph, from 0 in the order of compilation.
        collective: Name of the collective, with the shape and dtype of its input.
        runs: Name of the operator that it is a part of, such as "ag_gemm"; None if it runs torch.
        reason: Why it runs torch, or why some products of the gathered rows do; empty if none does.
    """

    graph: int
    collective: str
    runs: str | None
    reason: str = ""


@dataclass
class Report:
    """The collectives of the graphs that a pass has seen. ``str()`` formats it.

    Attributes:
        graphs: Number of graphs.
        entries: The collectives, in the order of the graphs.
    """

    graphs: int = 0
    entries: list[Entry] = field(default_factory=list)

    @property
    def fused(self) -> int:
        """Number of collectives that run on tdkernels."""
        return sum(entry.runs is not None for entry in self.entries)

    def __str__(self) -> str:
        if not self.graphs:
            return "no graph was compiled with the pass in this process; graphs from inductor's cache are not counted"
        graphs = f"{self.graphs} graph{'s' if self.graphs > 1 else ''}"
        lines = [f"{self.fused} of {len(self.entries)} collectives fused in {graphs}"]
        operators = Counter(entry.runs for entry in self.entries if entry.runs)
        if operators:
            lines[0] += f": {', '.join(f'{number} {name}' for name, number in sorted(operators.items()))}"
        for entry in self.entries:
            if entry.reason:
                runs = f"{entry.runs}, but not all products: " if entry.runs else ""
                lines.append(f"graph {entry.graph}: {entry.collective}: {runs}{entry.reason}")
        return "\n".join(lines)
