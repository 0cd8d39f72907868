"""Configs as text: what goes through torch.library, into the agreement of the ranks and, later, on disk."""

import dataclasses
import functools
import json

from tdkernels.ops._tiles import Tiles


@functools.cache
def to_text(config):
    return json.dumps(dataclasses.asdict(config))


@functools.cache
def from_text(cls, text):
    fields = json.loads(text)
    return cls(**{**fields, "tiles": Tiles(**fields["tiles"])})


def check_config(operator, config, cls, x):
    """Raise unless ``config`` is a ``cls`` that can run on the device of x, in its dtype."""
    if not isinstance(config, cls):
        raise TypeError(f"{operator}: config must be a {cls.__name__} or None, not {type(config).__name__}")
    reason = config.illegal(x.device, x.dtype)
    if reason is not None:
        raise ValueError(f"{operator}: config cannot run: {reason}")
