"""Interface between operators and the tuner, and the registry of operators.

The tuner, the disk cache and the command line access operators only through ``Tunable``.
"""

import functools
import importlib
from abc import ABC, abstractmethod
from collections.abc import Callable, Hashable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import triton

from tdkernels.autotune.sources import hash_of, kernel_sources
from tdkernels.exports import TUNERS

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.hardware import Hardware
    from tdkernels.autotune.problem import Problem
    from tdkernels.autotune.table import Entry

_registry: dict[str, "Tunable"] = {}
_modules = {name: module for module, names in TUNERS.items() for name in names}  # {operator: module that registers it}


@dataclass(frozen=True)
class Floors:
    """Lower bounds of the work of one rank.

    Attributes:
        flops: Arithmetic operations.
        wire_bytes: Bytes received from the peers; as many are sent.
        memory_bytes: Bytes read from the rank's memory. Only given if reading can take longer than the arithmetic.
    """

    flops: int
    wire_bytes: int
    memory_bytes: int = 0

    def computation_ms(self, hardware: "Hardware") -> float:
        """Return the time of the computation in ms at the peak rates of ``hardware``."""
        return max(self.flops / hardware.flops, self.memory_bytes / hardware.memory) * 1e3


class Tunable(ABC):
    """Interface of a tunable operator. Each operator implements it in its own package.

    Methods with ``operands`` take a tuple of one rank's tensors, which were created for a Problem.

    Attributes:
        name: Name of the operator.
        sizes: Names of the sizes in ``Problem.shape``.
        layouts: Names of the layouts, the most common first. A layout encodes the memory layout of the operands, and
            other properties of a call that are not sizes but affect performance, such as the mask.
        alone: Whether there is something to tune for a single rank.
        prefers_default: Whether the config of another shape that was hardly faster there than the default is not used.
            The default depends on the shape. Only if the entries were compared with defaults like today's.
        plain_words: How ``explain`` describes the torch baseline: (what runs, what was measured).
        local_words: How ``explain`` describes ``local`` if it was measured.
        baseline: Name of the torch baseline, which is stored with its time. A new name, when a better baseline replaces
            it, hides the times of the old one.
    """

    name: str
    sizes: tuple
    layouts: tuple
    alone = False
    prefers_default = False
    plain_words = "torch collective, then matmul", "torch's collective and matmul"
    local_words = "the library alone"
    baseline = ""

    @abstractmethod
    def why_not(self, problem: "Problem") -> str | None:
        """Return why a problem is invalid, such as a size that the ranks do not divide, or None if it is valid."""

    def key(self, problem: "Problem") -> "Problem":
        """Return the problem without properties that may differ between ranks. The ranks select a config for this key.

        Otherwise ranks could select different configs.
        """
        return problem

    def suits(self, config: Any, problem: "Problem", device: torch.device) -> bool:
        """Return whether a config that was tuned for a similar problem is used for this one.

        If not, the default config is used.
        """
        return True

    def trusts_similar(self, problem: "Problem", device: torch.device) -> bool:
        """Return whether shipped configs of problems with another shape are used for this one.

        If not, the default config is used.
        """
        return True

    def is_superseded(self, config: Any, problem: "Problem", device: torch.device) -> bool:
        """Return whether the default config runs a newer kind of kernel than a config from a table.

        If the entry of that config is of other kernels than the current ones, the default config is then used.
        """
        return False

    def goes_in_graphs(self, problem: "Problem") -> bool:
        """Return whether every config of a problem can be captured in a CUDA graph."""
        return False

    @abstractmethod
    def sizes_of(self, *shapes, world_size: int) -> tuple[int, ...]:
        """Return the sizes of the whole problem for the shapes of a rank's operands.

        Raises:
            ValueError: If the shapes do not fit together.
        """

    def default_layout(self, dtype: torch.dtype) -> str:
        """Return the layout of a problem that is given by its sizes and dtype alone."""
        return self.layouts[0]

    @abstractmethod
    def layout_of(self, *operands) -> str:
        """Return the layout of operands. Each operand is a tensor or only a shape."""

    @abstractmethod
    def config_to_dict(self, config: Any) -> dict:
        """Return a config as a dict that JSON can represent."""

    @abstractmethod
    def config_from_dict(self, values: dict) -> Any:
        """Return the config for a dict from ``config_to_dict``.

        Raises:
            TypeError, ValueError: If the dict is not a config.
        """

    def completed(self, config: Any, problem: "Problem", device: torch.device) -> Any:
        """Return the config with its open fields filled in."""
        return config

    @abstractmethod
    def illegal(self, config: Any, problem: "Problem", device: torch.device) -> str | None:
        """Return why a config cannot run, or None if it can."""

    @abstractmethod
    def plain(self) -> Any:
        """Return the config of the torch baseline (collective and matmul in sequence), or None if there is none."""

    def plain_words_of(self, problem: "Problem") -> tuple[str, str]:
        """Return ``plain_words`` for a problem."""
        return self.plain_words

    @abstractmethod
    def default(self, problem: "Problem", device: torch.device) -> Any:
        """Return the heuristic config of the overlapping operator for a problem and a device."""

    def invariant(self, problem: "Problem", device: torch.device) -> Any:
        """Return the config of the batch-invariant mode, which does not depend on the number of rows.

        Raises:
            NotImplementedError: If the operator, or a problem like this one, is not supported in this mode.
        """
        raise NotImplementedError(f"{self.name}: the operator is not supported in the batch-invariant mode")

    def recordable(self, problem: "Problem", device: torch.device) -> Any:
        """Return the default among the configs that ``trace`` can record."""
        return self.default(problem, device)

    def is_recordable(self, config: Any) -> bool:
        """Return whether ``trace`` can record a call with a config: whether it launches kernels that record events."""
        return self.compiled(config) is not None

    def fallback(self, problem: "Problem", device: torch.device) -> Any:
        """Return the config for a problem without tuned configs.

        This is the default config, or the torch baseline if that is the safer guess.
        """
        return self.default(problem, device)

    @abstractmethod
    def space(self, problem: "Problem", device: torch.device) -> Iterable[Any]:
        """Return the search space: configs that may or may not be legal. It need not contain the torch baseline."""

    @abstractmethod
    def estimate_ms(self, config: Any, problem: "Problem", hardware: "Hardware") -> float:
        """Estimate the time of a call in ms. Only the order and the ratios of the estimates matter."""

    @abstractmethod
    def floors(self, problem: "Problem") -> Floors:
        """Return the Floors of one rank."""

    @abstractmethod
    def operands(
        self, problem: "Problem", device: torch.device, generator: torch.Generator,
    ) -> tuple[torch.Tensor, ...]:
        """Return random operands of this rank."""

    @abstractmethod
    def reference_bytes(self, problem: "Problem") -> int:
        """Return an upper bound for the bytes that ``reference`` needs in a wider dtype, including its result."""

    @abstractmethod
    def reference(
        self, operands: Sequence[torch.Tensor], problem: "Problem", group: "dist.ProcessGroup",
    ) -> torch.Tensor:
        """Compute the operator's specification with torch, in any dtype.

        The result is one tensor with the dtype of the first operand. Collective.
        """

    @abstractmethod
    def local(self, operands: tuple[torch.Tensor, ...], problem: "Problem") -> Callable[[], object]:
        """Return a function without arguments that runs only the computation, at the size that one rank computes."""

    def prepared(
        self, operands: tuple[torch.Tensor, ...], problem: "Problem", group: "dist.ProcessGroup", config: Any,
    ) -> Any:
        """Return the input of ``run`` for operands and a config. This is not timed, and may be collective."""
        return operands

    @abstractmethod
    def run(self, operands: Any, problem: "Problem", group: "dist.ProcessGroup", config: Any) -> Any:
        """Call the operator with a config on the result of ``prepared``, and return its output for ``comparable``."""

    def comparable(self, output: Any, problem: "Problem") -> torch.Tensor:
        """Return the output of ``run`` in the form of the result of ``reference``. This is not timed."""
        return output

    @abstractmethod
    def compiled(self, config: Any) -> Hashable | None:
        """Return a key that is equal for configs with the same compiled kernels; None for configs without kernels."""

    @abstractmethod
    def compile(self, operands: tuple[torch.Tensor, ...], problem: "Problem", config: Any) -> None:
        """Compile the kernels that ``run`` would launch in the problem's group, without launching them."""


def register(tunable: Tunable) -> Tunable:
    """Register an operator for the tuner and the command line, and return it."""
    _registry[tunable.name] = tunable
    return tunable


def operators() -> list[str]:
    """Return the sorted names of all operators that can be tuned."""
    return sorted({*_registry, *_modules})


def tunable(name: str) -> Tunable:
    """Return the operator with a name.

    Raises:
        ValueError: If there is no such operator.
    """
    if name not in _registry and name in _modules:
        importlib.import_module(_modules[name])
    if name not in _registry:
        raise ValueError(f"operator must be one of {', '.join(operators())}, not {name!r}")
    return _registry[name]


def plain_ms(entry: "Entry") -> float | None:
    """Return the time of the torch baseline of an entry; None if another baseline than today's was measured."""
    operator = entry.problem.operator
    return entry.plain_ms if operator not in operators() or tunable(operator).baseline == entry.baseline else None


@functools.cache
def versions(tunable: Tunable) -> dict[str, str]:
    """Return the versions that a tuned entry depends on: torch, triton and a hash of the kernels' source."""
    files = kernel_sources(type(tunable).__module__.rpartition(".")[0])
    return {"torch": torch.__version__, "triton": triton.__version__, "kernels": hash_of(files)}
