"""What operators whose configs are dataclasses have in common for the tuner."""

from dataclasses import asdict, fields

from tdkernels.autotune import operator as tunables
from tdkernels.ops import _operands
from tdkernels.ops._tiles import Tiles

DTYPES = [str(dtype).removeprefix("torch.") for dtype in _operands.DTYPES]


class ConfigTunable(tunables.Tunable):
    """An operator whose configs are of one dataclass, with a ``method`` that may be "torch", and perhaps ``tiles``.

    config_class:  of its configs
    dtypes:        names of those that its first operand may have
    """

    config_class: type
    dtypes = DTYPES

    def why_not(self, problem):
        if problem.world_size < 2:
            return "one rank has nothing to tune"
        names = " x ".join(size.upper() for size in self.sizes)
        if len(problem.shape) != len(self.sizes) or not all(type(n) is int and n >= 1 for n in problem.shape):
            return f"the shape must be {len(self.sizes)} positive sizes, {names}, not {problem.shape}"
        if problem.dtype not in self.dtypes:
            return f"dtype must be one of {', '.join(self.dtypes)}, not {problem.dtype}"
        if problem.layout not in self.layouts:
            return f"layout must be one of {', '.join(self.layouts)}, not {problem.layout!r}"
        return None

    def config_to_dict(self, config):
        if config.method == "torch":
            return {"method": "torch"}  # it takes none of the rest
        return {name: value for name, value in asdict(config).items() if value is not None}

    def config_from_dict(self, values):
        values = dict(values)
        tiles = values.pop("tiles", None)
        if tiles is not None and not isinstance(tiles, dict):
            raise ValueError(f"tiles must be an object, not {tiles!r}")
        tiles = tiles or {}
        for name, value in (*values.items(), *tiles.items()):
            if type(value) not in (int, str):
                raise TypeError(f"{name} is {value!r}")
        known = {field.name for field in fields(self.config_class)}
        if not values.keys() <= known or not tiles.keys() <= {field.name for field in fields(Tiles)}:
            raise ValueError(f"no {self.config_class.__name__}: {values}, {tiles}")
        return self.config_class(**values, **({"tiles": Tiles(**tiles)} if tiles else {}))

    def illegal(self, config, problem, device):
        if not isinstance(config, self.config_class):
            return f"it must be a {self.config_class.__name__}, not {type(config).__name__}"
        return config.illegal(device, problem.torch_dtype)

    def plain(self):
        return self.config_class(method="torch")
