"""Configs as text: what goes through torch.library, into the agreement of the ranks and, later, on disk."""

import functools
from dataclasses import asdict, fields

import torch

from tdkernels.ops.common.tile_config import Tiles


def to_text(config):
    """``name=value`` pairs; no more than string formatting, so that torch.compile can trace it."""
    values = asdict(config)
    tiles = values.pop("tiles", None)
    if tiles is not None:
        values.update(tiles)
    return " ".join([f"{name}={value}" for name, value in values.items()])


# Of the dense operators that have all of them: one kernel; products of torch's beside copies; one after the other.
METHODS = "fused", "parts", "torch"

text_of = functools.cache(to_text)  # for what torch.compile does not see: writing it anew is a fifth of a small call


def with_config(fields, config):
    """The fields of a call that all ranks agree on, with its config among them; see ``Workspace.prepare``."""
    return {**fields, "config": text_of(config)}


def as_argument(config):
    """A config, or None, as the text that goes through torch.library."""
    if config is None:
        return ""
    return to_text(config) if torch.compiler.is_compiling() else text_of(config)


@functools.cache
def from_text(cls, text):
    """The config that ``to_text`` has written."""
    pairs = dict(pair.split("=") for pair in text.split())
    values = {name: int(value) if value.isdigit() else value for name, value in pairs.items()}
    if "tiles" in (field.name for field in fields(cls)):
        tiles = {field.name: values.pop(field.name) for field in fields(Tiles) if field.name in values}
        values["tiles"] = Tiles(**tiles) if tiles else None
    return cls(**values)


_KINDS = {
    int: ("an integer", (int,)), str: ("a string", (str,)), Tiles | None: ("a Tiles or None", (Tiles, type(None))),
}


@functools.lru_cache(1024)
def _mistyped_field(cls, kinds):
    """The first field of a dataclass whose value, of these types, is of another than it says; None if there is none."""
    for field, kind in zip(fields(cls), kinds, strict=True):
        if field.type in _KINDS and kind not in _KINDS[field.type][1]:
            return field
    return None


def mistyped(config):
    """Which field of a config, or of its tiles, is of another type than it says, in words; None if none is."""
    values = vars(config)
    field = _mistyped_field(type(config), tuple(map(type, values.values())))
    if field is not None:
        return f"{field.name} must be {_KINDS[field.type][0]}, not {values[field.name]!r}"
    tiles = values.get("tiles")
    wrong = None if tiles is None else mistyped(tiles)
    return wrong and f"tiles: {wrong}"


def check_config(operator, config, cls, x, *use):
    """Raise unless ``config`` is None or a ``cls`` that can run on the device of x, in its dtype, for ``use``."""
    if config is None:
        return
    if not isinstance(config, cls):
        article = "an" if cls.__name__[0] in "AEIO" else "a"
        raise TypeError(f"{operator}: config must be {article} {cls.__name__} or None, not {type(config).__name__}")
    wrong = None if torch.compiler.is_compiling() else mistyped(config)
    if wrong is not None:
        raise TypeError(f"{operator}: config cannot run: {wrong}")
    reason = config.illegal(x.device, x.dtype, *use)
    if reason is not None:
        raise ValueError(f"{operator}: config cannot run: {reason}")
