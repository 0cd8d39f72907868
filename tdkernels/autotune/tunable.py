"""What an operator tells the tuner of itself. The tuner, the cache and the command line know operators only by this."""

import functools
import hashlib
import importlib
from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
import triton

from tdkernels.autotune.sources import kernel_sources
from tdkernels.exports import TUNERS

_registry: dict[str, "Tunable"] = {}
_modules = {name: module for module, names in TUNERS.items() for name in names}  # which register them


@dataclass(frozen=True)
class Floors:
    """What a rank must do at least.

    Attributes:
        flops: arithmetic; memory_bytes: read from its memory, where that can take longer than the arithmetic
        wire_bytes: come in from its peers, and as many go out
    """

    flops: int
    wire_bytes: int
    memory_bytes: int = 0

    def computation_ms(self, hardware):
        """What flops and memory take at the best rates."""
        return max(self.flops / hardware.flops, self.memory_bytes / hardware.memory) * 1e3


class Tunable(ABC):
    """One operator. ``operands`` are a tuple of tensors of one rank, made for a Problem.

    Attributes: ``name``; ``sizes``, the names of the problem's sizes; ``layouts``, the first being the usual one: how
    operands lie, and whatever else of a call is no size and matters; ``alone``, whether one rank by itself has
    something to tune. Its class is in the package of the operator.
    """

    name: str
    sizes: tuple
    layouts: tuple
    alone = False
    # The plain config, as explain() calls it: what runs, and what was measured.
    plain_words = "torch collective, then matmul", "torch's collective and matmul"
    local_words = "the library alone"  # and what ``local`` is, where it was measured

    @abstractmethod
    def why_not(self, problem):
        """Why there is no such problem (a size that the ranks do not divide, say), or None."""

    def key(self, problem):
        """The problem without what of its sizes and layout is each rank's own business: the ranks choose for that."""
        return problem

    def suits(self, config, problem, device):
        """Whether a config that was tuned for a similar problem is to run for this one; else the default does."""
        return True

    def goes_in_graphs(self, problem):
        """Whether every config of a problem can be captured in a CUDA graph."""
        return False

    @abstractmethod
    def sizes_of(self, *shapes, world_size):
        """The sizes of the whole problem, from the shapes of a rank's operands; ValueError if they do not fit."""

    @abstractmethod
    def layout_of(self, *operands):
        """The layout of operands, each a tensor or a mere shape."""

    @abstractmethod
    def config_to_dict(self, config):
        """A config as a dict that JSON can hold."""

    @abstractmethod
    def config_from_dict(self, values):
        """The config that ``config_to_dict`` has made a dict of; TypeError or ValueError if it is none."""

    def completed(self, config, problem, device):
        """The config with what it leaves open filled in."""
        return config

    @abstractmethod
    def illegal(self, config, problem, device):
        """Why a config cannot run, or None."""

    @abstractmethod
    def plain(self):
        """The config by which the operator is torch's collective and matmul in sequence; None if there is none."""

    @abstractmethod
    def default(self, problem, device):
        """The overlapping config for a device and a size."""

    def recordable(self, problem, device):
        """The default config of those in which there is something to record (``trace``)."""
        return self.default(problem, device)

    def fallback(self, problem, device):
        """What to run where nobody has tuned: the default, or the plain sequence where that is a safer guess."""
        return self.default(problem, device)

    @abstractmethod
    def space(self, problem, device):
        """Configs worth trying, legal or not; the plain sequence need not be among them."""

    @abstractmethod
    def estimate_ms(self, config, problem, hardware):
        """About how long a call takes: only the order of configs matters, and their ratios."""

    @abstractmethod
    def floors(self, problem):
        """The Floors of a rank."""

    @abstractmethod
    def operands(self, problem, device, generator):
        """Random operands of this rank."""

    @abstractmethod
    def reference_bytes(self, problem):
        """At most how much memory ``reference`` takes for operands of a wider type, its result included."""

    @abstractmethod
    def reference(self, operands, problem, group):
        """The operator's specification, in any dtype: one tensor, of the dtype of the first operand."""

    @abstractmethod
    def local(self, operands, problem):
        """A function of no arguments: the computation alone, on operands of the size that a rank computes with."""

    def prepared(self, operands, problem, group, config):
        """What ``run`` takes of operands for a config; it is made outside of what is timed. Collective if need be."""
        return operands

    @abstractmethod
    def run(self, operands, problem, group, config):
        """One call with a config, of what ``prepared`` has given; what ``comparable`` makes a tensor of."""

    def comparable(self, output, problem):
        """What ``reference`` gives, of the output of ``run``; outside of what is timed, as ``prepared``."""
        return output

    @abstractmethod
    def compiled(self, config):
        """Something hashable that is equal for configs which run the same compiled kernels; None: they need none."""

    @abstractmethod
    def compile(self, operands, problem, config):
        """Compile what ``run`` in a group like the problem's would launch, without launching it."""


def register(tunable):
    """Make an operator known to the tuner and the commands."""
    _registry[tunable.name] = tunable
    return tunable


def operators():
    """The names of all operators that can be tuned."""
    return sorted({*_registry, *_modules})


def tunable(name):
    """The operator of that name; ValueError if there is none."""
    if name not in _registry and name in _modules:
        importlib.import_module(_modules[name])
    if name not in _registry:
        raise ValueError(f"operator must be one of {', '.join(operators())}, not {name!r}")
    return _registry[name]


@functools.cache
def versions(tunable):
    """What an entry depends on besides its problem: torch, triton and a hash of the kernels' source."""
    digest = hashlib.sha256()
    for file in kernel_sources(type(tunable).__module__.rpartition(".")[0]):
        digest.update(file.read_bytes())
    return {"torch": torch.__version__, "triton": triton.__version__, "kernels": digest.hexdigest()[:12]}
