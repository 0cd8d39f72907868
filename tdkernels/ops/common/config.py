"""Configs as text, for torch.library operators and for the consensus check of the ranks; validation of configs."""

import functools
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch

from tdkernels.ops.common.tile_config import Tiles


def _values(config):
    """Return the fields of a dataclass as a dict."""
    return {field.name: getattr(config, field.name) for field in fields(config)}


def to_text(config: Any) -> str:
    """Return a config as ``name=value`` pairs. The function only formats strings, so torch.compile can trace it.

    torch 2.11 cannot trace ``dataclasses.asdict``.
    """
    values = _values(config)
    tiles = values.pop("tiles", None)
    if tiles is not None:
        values.update(_values(tiles))
    return " ".join([f"{name}={value}" for name, value in values.items()])


# Methods of ag_gemm and gemm_rs: one kernel; torch's GEMM pipelined with copies; GEMM and collective in sequence.
METHODS = "fused", "parts", "torch"

text_of = functools.cache(to_text)  # for code that is not traced: formatting takes a fifth of the time of a small call


def with_config(fields: Mapping[str, Any], config: Any) -> dict[str, Any]:
    """Return ``fields`` with the config added, for the consensus check of ``Workspace.prepare``."""
    return {**fields, "config": text_of(config)}


def as_argument(config: Any) -> str:
    """Return a config as the argument of a torch.library operator; an empty string for None."""
    if config is None:
        return ""
    return to_text(config) if torch.compiler.is_compiling() else text_of(config)


@functools.cache
def from_text(cls: Any, text: str) -> Any:
    """Return the config of class ``cls`` from the result of ``to_text``."""
    pairs = dict(pair.split("=") for pair in text.split())
    values = {name: _value(text) for name, text in pairs.items()}
    if "tiles" in (field.name for field in fields(cls)):
        tiles = {field.name: values.pop(field.name) for field in fields(Tiles) if field.name in values}
        values["tiles"] = Tiles(**tiles) if tiles else None
    return cls(**values)


def _value(text):
    if text in ("True", "False"):
        return text == "True"
    return int(text) if text.isdigit() else text


_KINDS = {
    int: ("an integer", (int,)), bool: ("True or False", (bool,)), str: ("a string", (str,)),
    Tiles | None: ("a Tiles or None", (Tiles, type(None))),
}


@functools.lru_cache(1024)
def _mistyped_field(cls, kinds):
    """Return the first field of a dataclass whose value has the wrong type, or None. ``kinds``: types of the values."""
    for field, kind in zip(fields(cls), kinds, strict=True):
        if field.type in _KINDS and kind not in _KINDS[field.type][1]:
            return field
    return None


def mistyped(config: Any) -> str | None:
    """Return a description of a field of a config, or of its tiles, that has the wrong type, or None."""
    values = vars(config)
    field = _mistyped_field(type(config), tuple(map(type, values.values())))  # type: ignore[arg-type]
    if field is not None:
        return f"{field.name} must be {_KINDS[field.type][0]}, not {values[field.name]!r}"
    tiles = values.get("tiles")
    wrong = None if tiles is None else mistyped(tiles)
    return wrong and f"tiles: {wrong}"


def check_config(operator: str, config: Any, cls: Any, x: torch.Tensor, *use: Any) -> None:
    """Raise an error if ``config`` is neither None nor a valid config.

    Args:
        operator: The operator, for errors.
        config: The argument of the operator.
        cls: The config class of the operator.
        x: The operand whose device and dtype the config must support.
        use: Further arguments of ``config.illegal``.

    Raises:
        TypeError: If ``config`` is not a ``cls`` or has a field of the wrong type.
        ValueError: If ``config`` cannot run.
    """
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
