"""What operators whose configs are dataclasses have in common for the tuner."""

import functools
from dataclasses import asdict, fields

from tdkernels.autotune import tunable as tunables
from tdkernels.autotune.problem import Problem
from tdkernels.autotune.selection import choice_of_call, choose
from tdkernels.ops.common import validation
from tdkernels.ops.common.tile_config import Tiles
from tdkernels.symm.group import group_state

DTYPES = [str(dtype).removeprefix("torch.") for dtype in validation.DTYPES]


class ConfigTunable(tunables.Tunable):
    """An operator whose configs are of one dataclass, with a ``method`` that may be "torch", and perhaps ``tiles``.

    Attributes:
        config_class: of its configs

    dtypes:        names of those that its first operand may have
    across_nodes:  whether it runs by something else than torch's sequence in a group on several nodes
    """

    config_class: type
    dtypes = DTYPES
    across_nodes = True

    def why_not(self, problem):
        if problem.world_size < 2 and not self.alone:
            return "one rank has nothing to tune"
        if problem.num_nodes > 1 and not self.across_nodes:
            return "on several nodes it runs by torch's sequence, and there is nothing to tune"
        names = " x ".join(size.upper() for size in self.sizes)
        if len(problem.shape) != len(self.sizes) or not all(type(n) is int and n >= 1 for n in problem.shape):
            return f"the shape must be {len(self.sizes)} positive sizes, {names}, not {problem.shape}"
        if problem.dtype not in self.dtypes:
            return f"dtype must be one of {', '.join(self.dtypes)}, not {problem.dtype}"
        if problem.layout not in self.layouts:
            return f"layout must be one of {', '.join(self.layouts)}, not {problem.layout!r}"
        return None

    def why_not_divided(self, problem, divided):
        """Why the ranks cannot divide these of the sizes, by number, or None."""
        for number in divided:
            if problem.shape[number] % problem.world_size:
                name, size = self.sizes[number].upper(), problem.shape[number]
                return f"{name} = {size} is not divisible by {problem.world_size} ranks"
        return None

    def config_to_dict(self, config):
        if config.method == "torch":
            return {"method": "torch"}  # it takes none of the rest
        return {name: value for name, value in asdict(config).items() if value is not None}

    def config_from_dict(self, values):
        values = dict(values)
        known = {field.name for field in fields(self.config_class)}
        tiles = values.pop("tiles", None)
        needs_tiles = "tiles" in known and values.get("method") not in ("torch", "parts")
        if not isinstance(tiles, dict) and (needs_tiles or tiles is not None):
            raise ValueError(f"tiles must be an object, not {tiles!r}")
        tiles = tiles or {}
        for name, value in (*values.items(), *tiles.items()):
            if type(value) not in (int, str):
                raise TypeError(f"{name} is {value!r}")
        if not values.keys() <= known or not tiles.keys() <= {field.name for field in fields(Tiles)}:
            raise ValueError(f"no {self.config_class.__name__}: {values}, {tiles}")
        return self.config_class(**values, **({"tiles": Tiles(**tiles)} if tiles else {}))

    def illegal(self, config, problem, device):
        if not isinstance(config, self.config_class):
            return f"it must be a {self.config_class.__name__}, not {type(config).__name__}"
        return config.illegal(device, problem.torch_dtype)

    def plain(self):
        return self.config_class(method="torch")

    def compiled(self, config):
        """Of a config with tiles."""
        if config.method in ("torch", "parts"):
            return None
        tiles = config.tiles
        return tiles.block_m, tiles.block_n, tiles.block_k, tiles.num_warps, tiles.num_stages


@functools.lru_cache(1024)
def _problem(device, operator, sizes, dtype, layout, world_size, local_world_size):
    return Problem.on(device, operator, sizes, dtype, layout, world_size, local_world_size)


def problem_of(operator, sizes, layout, x, group, dtype=None):
    """The Problem of a call; ``x`` is its first operand, ``dtype`` None that of x, ``group`` None this process."""
    ranks = local = 1
    if group is not None:
        ranks, local = group.size(), group_state(group).local_world_size
    return _problem(x.device, operator, sizes, dtype or x.dtype, layout, ranks, local)


def select(operator, x, group, call, describe, dtype=None):
    """Return the Choice of a config for a call without one; collective at the first call with a problem.

    Args:
        x: the operand whose device and dtype decide
        group: None for this process alone
        call: hashable; everything that the problem and the fields follow from, except x's device and dtype
        describe: () -> (sizes, layout, fields that must be the same on all ranks); only called if the call is new
        dtype: of the problem; None: that of x
    """

    def make():
        sizes, layout, fields = describe()
        problem = problem_of(operator, sizes, layout, x, group, dtype)
        return choose(tunables.tunable(operator), problem, x.device, group, fields)

    return choice_of_call(operator, group, (x.dtype, x.device, call), make)
