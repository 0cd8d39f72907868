"""Base class of tunables whose configs are dataclasses, and config selection for a call."""

import functools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import asdict, fields
from typing import TYPE_CHECKING, Any

from tdkernels.autotune import tunable as tunables
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.selection import choice_of_call, choose
from tdkernels.ops.common import validation
from tdkernels.ops.common.tile_config import Tiles
from tdkernels.symm.group import group_state

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist

DTYPES = [str(dtype).removeprefix("torch.") for dtype in validation.DTYPES]


class ConfigTunable(tunables.Tunable):
    """Base class of operators whose configs are one dataclass, with a field ``method`` and optionally ``tiles``.

    ``method`` may be "torch", the torch baseline.

    Attributes:
        config_class: Class of the configs.
        dtypes: Names of the dtypes that the first operand may have.
        across_nodes: Whether the operator has another method than "torch" for groups on several nodes.
    """

    config_class: type
    dtypes = DTYPES
    across_nodes = True

    def why_not(self, problem: Problem) -> str | None:
        if problem.world_size < 2 and not self.alone:
            return "one rank has nothing to tune"
        if problem.num_nodes > 1 and not self.across_nodes:
            return 'on several nodes it supports only method "torch", so there is nothing to tune'
        names = " x ".join(size.upper() for size in self.sizes)
        if len(problem.shape) != len(self.sizes) or not all(type(n) is int and n >= 1 for n in problem.shape):
            return f"the shape must be {len(self.sizes)} positive sizes, {names}, not {problem.shape}"
        if problem.dtype not in self.dtypes:
            return f"dtype must be one of {', '.join(self.dtypes)}, not {problem.dtype}"
        if problem.layout not in self.layouts:
            return f"layout must be one of {', '.join(self.layouts)}, not {problem.layout!r}"
        return None

    def why_not_divided(self, problem: Problem, divided: Sequence[int]) -> str | None:
        """Return why the ranks cannot divide the sizes with these indices, or None if they can."""
        for number in divided:
            if problem.shape[number] % problem.world_size:
                name, size = self.sizes[number].upper(), problem.shape[number]
                return f"{name} = {size} is not divisible by {problem.world_size} ranks"
        return None

    def config_to_dict(self, config: Any) -> dict:
        if config.method == "torch":
            return {"method": "torch"}  # "torch" uses no other field
        # Without flags that are off: entries from before a flag existed have the same form.
        return {name: value for name, value in asdict(config).items() if value is not None and value is not False}

    def config_from_dict(self, values: dict) -> Any:
        values = dict(values)
        known = {field.name: field.type for field in fields(self.config_class)}
        tiles = values.pop("tiles", None)
        needs_tiles = "tiles" in known and values.get("method") not in ("torch", "parts")
        if not isinstance(tiles, dict) and (needs_tiles or tiles is not None):
            raise ValueError(f"tiles must be an object, not {tiles!r}")
        tiles = tiles or {}
        for name, value in (*values.items(), *tiles.items()):
            if type(value) not in ((bool,) if known.get(name) is bool else (int, str)):
                raise TypeError(f"{name} is {value!r}")
        if not values.keys() <= known.keys() or not tiles.keys() <= {field.name for field in fields(Tiles)}:
            raise ValueError(f"no {self.config_class.__name__}: {values}, {tiles}")
        return self.config_class(**values, **({"tiles": Tiles(**tiles)} if tiles else {}))

    def illegal(self, config: Any, problem: Problem, device: "torch.device") -> str | None:
        if not isinstance(config, self.config_class):
            return f"it must be a {self.config_class.__name__}, not {type(config).__name__}"
        return config.illegal(device, problem.torch_dtype)  # type: ignore[attr-defined]

    def plain(self) -> Any:
        return self.config_class(method="torch")

    def compiled(self, config: Any) -> Any:
        if config.method in ("torch", "parts"):
            return None
        tiles = config.tiles
        return tiles.block_m, tiles.block_n, tiles.block_k, tiles.num_warps, tiles.num_stages


@functools.lru_cache(1024)
def _problem(device, operator, sizes, dtype, layout, world_size, local_world_size):
    return Problem.on(device, operator, sizes, dtype, layout, world_size, local_world_size)


def problem_of(
    operator: str, sizes: tuple[int, ...], layout: str, x: "torch.Tensor", group: "dist.ProcessGroup | None",
    dtype: "torch.dtype | None" = None,
) -> Problem:
    """Return the Problem of a call.

    Args:
        operator: Name of the operator.
        sizes: Sizes of the whole problem.
        layout: Layout of the operands.
        x: The first operand.
        group: The group of the call. None: this process alone.
        dtype: The dtype of the problem. None: the dtype of x.
    """
    ranks = local = 1
    if group is not None:
        ranks, local = group.size(), group_state(group).local_world_size
    return _problem(x.device, operator, sizes, dtype or x.dtype, layout, ranks, local)


def select(
    operator: str, x: "torch.Tensor", group: "dist.ProcessGroup | None", call: Hashable,
    describe: "Callable[[], tuple[tuple[int, ...], str, dict[str, Any]]]", dtype: "torch.dtype | None" = None,
) -> Any:
    """Return the ``Choice`` of a config for a call that is made without one.

    The first call with a problem is collective.

    Args:
        operator: Name of the operator.
        x: The operand whose device and dtype determine the selection.
        group: The group of the call. None: this process alone.
        call: Hashable; determines the problem and the fields, together with x's device and dtype.
        describe: () -> (sizes, layout, fields that must be equal on all ranks); only called if the call is new.
        dtype: The dtype of the problem. None: the dtype of x.
    """

    def make():
        sizes, layout, fields = describe()
        problem = problem_of(operator, sizes, layout, x, group, dtype)
        return choose(tunables.tunable(operator), problem, x.device, group, fields)

    return choice_of_call(operator, group, (x.dtype, x.device, call), make)
