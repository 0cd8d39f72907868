"""Configs as text: what goes through torch.library, into the agreement of the ranks and, later, on disk."""

import functools
from dataclasses import asdict, fields

import torch

from tdkernels.ops._tiles import Tiles


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


def check_config(operator, config, cls, x):
    """Raise unless ``config`` is None or a ``cls`` that can run on the device of x, in its dtype."""
    if config is None:
        return
    if not isinstance(config, cls):
        raise TypeError(f"{operator}: config must be a {cls.__name__} or None, not {type(config).__name__}")
    reason = config.illegal(x.device, x.dtype)
    if reason is not None:
        raise ValueError(f"{operator}: config cannot run: {reason}")
