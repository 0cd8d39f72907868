"""Which config a call runs with, and how the ranks come to the same one.

In this order: the config that the call was given; the user's cache; the table that came with the package; the nearest
shape of either; the table that came for a kindred GPU; the default. An entry of the user's cache counts only for the
versions that it was measured with, the package's tables count for all: what was best elsewhere is a better guess than a
default. Rank 0 looks up and the others follow, so that it does not matter what is in their files.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from tdkernels.autotune import disk_cache, table
from tdkernels.autotune.hardware import KIN
from tdkernels.autotune.modes import get_mode
from tdkernels.autotune.tunable import versions
from tdkernels.symm.group import alone, caches_of, group_state

# Where a config came from.
EXPLICIT, CACHE, SHIPPED, NEAREST, DEFAULT = "explicit", "cache", "shipped", "nearest", "default"
KINDRED = "kindred"
_GUESSES = NEAREST, KINDRED, DEFAULT  # worth tuning instead, where that is wished

# (tunable, problem, device, group) -> Choice or None, and (tunable, problem, device, choice) -> None: see ``on_demand``
tune_on_demand: Callable | None = None
report_choice: Callable | None = None


@dataclass(frozen=True)
class Choice:
    """A config, where it came from, and the entry that says how fast it was there, if any."""

    config: object
    source: str
    entry: table.Entry | None = None


def choose(tunable, problem, device, group, fields):
    """The Choice for a call without a config, the same on all ranks; collective at the first call with a problem.

    Args:
        problem: as this rank has it; the ranks agree for its ``Tunable.key``, and rank 0 looks up the problem that it
            has itself
        group: None for this process alone, which asks nobody and never tunes
        fields: what must be the same on all ranks, for the error that names who differs

    Raises:
        ValueError: when the ranks disagree on fields or mode
        PeerTimeoutError
    """
    choices = caches_of(group).choices
    key = tunable.key(problem), get_mode()
    choice = choices.get(key)
    if choice is None:
        final = True
        if group is None:
            choice = look_up(tunable, problem, device, get_mode())
        else:
            choice, final = _agree(tunable, problem, device, group, fields)
        if final:
            choices[key] = choice
        else:
            choices.version += 1  # so that nothing is kept of what follows from it
        if group is None or group_state(group).rank == 0:
            assert report_choice is not None  # set by the package
            report_choice(tunable, problem, device, choice)
    return choice


def choice_of_call(operator, group, call, make):
    """The Choice of a call, from those that were made before if it is still valid; ``make``: () -> Choice, if not.

    Args:
        call: hashable; all that problem, fields and device of the call follow from, and cheaper to have
    """
    caches = caches_of(group)
    key = "config", caches.choices.version, get_mode(), operator, call
    choice = caches.calls[key]
    if choice is None:
        choice = make()
        caches.calls[key] = choice
    return choice


def forget(tunable, problem, choices):
    """Let the next call with a problem choose anew; to be done on all ranks."""
    for known in (choices, alone.choices):
        for key in [key for key in known if key[0] == tunable.key(problem)]:
            del known[key]
    alone.choices.version += 1  # a group_gemm looks up without an entry there


def look_up(tunable, problem, device, mode):
    """What this rank would choose by itself."""
    if mode == "off":
        return Choice(tunable.default(problem, device), DEFAULT)
    current = versions(tunable)
    name = problem.operator, problem.gpu
    mine = [entry for entry in disk_cache.user_entries(*name) if entry.versions == current]
    shipped = disk_cache.shipped_entries(*name)
    for source, entries in ((CACHE, mine), (SHIPPED, shipped)):
        choice = _exact(tunable, problem, device, source, entries)
        if choice is not None:
            return choice
    choice = _similar(tunable, problem, device, NEAREST, mine + shipped) or _of_kin(tunable, problem, device)
    return choice or Choice(tunable.fallback(problem, device), DEFAULT)


def _exact(tunable, problem, device, source, entries):
    """The Choice that entries have for this very problem, or None."""
    exact = [entry for entry in entries if entry.problem == problem]
    return _usable(tunable, problem, device, source, exact[-1]) if exact else None


def _similar(tunable, problem, device, source, entries):
    """The Choice of the nearest shape, or None."""
    similar = table.nearest(entries, problem)
    choice = _usable(tunable, problem, device, source, similar) if similar is not None else None
    return choice if choice is not None and tunable.suits(choice.config, problem, device) else None


def _of_kin(tunable, problem, device):
    """The Choice that would be made on a kindred GPU, which has the same ways to lose time, or None."""
    kin = KIN.get(problem.gpu)
    if kin is None:
        return None
    theirs = replace(problem, gpu=kin)
    shipped = disk_cache.shipped_entries(problem.operator, kin)
    return _exact(tunable, theirs, device, KINDRED, shipped) or _similar(tunable, theirs, device, KINDRED, shipped)


def _usable(tunable, problem, device, source, entry):
    """The Choice of an entry, or None, reported once, if its config cannot run here."""
    try:
        config = tunable.config_from_dict(entry.config)
        reason = tunable.illegal(config, problem, device)
    except (TypeError, ValueError) as error:
        reason = str(error)
    if reason is None:
        return Choice(config, source, entry)
    disk_cache.report(f"the {source} entry", f"for {entry.problem} is not used: {reason}")
    return None


def _agree(tunable, problem, device, group, fields):
    """The Choice of all ranks, and whether it is to be kept: not if it is worth tuning when that will be possible."""
    state, mode = group_state(group), get_mode()
    offer = {"tune": not _capturing(device)}
    own = None
    if state.rank == 0:
        try:
            own = look_up(tunable, problem, device, mode)
            offer |= {**_to_offer(tunable, own), "shape": problem.shape, "layout": problem.layout}
        except Exception as error:  # the others are on their way to the agreement, and shall hear of it
            offer["error"] = f"{type(error).__name__}: {error}"
    # A rank whose operands lie otherwise, or whose GPU is another, would look its choice up under another key later.
    key = tunable.key(problem)
    fields = {**fields, "layout": key.layout, "gpu": key.gpu, "config": f"left to autotune ({mode})"}
    offers = state.check_consensus(tunable.name, fields, offer)
    if "error" in offers[0]:
        raise RuntimeError(f"{tunable.name}: rank 0 could not choose a config: {offers[0]['error']}")
    choice = own or _from_offer(tunable, offers[0])
    if mode != "on" or choice.source not in _GUESSES:
        return choice, True
    if not all(offer["tune"] for offer in offers):
        return choice, False
    of_rank_0 = replace(problem, shape=tuple(offers[0]["shape"]), layout=offers[0]["layout"])
    assert tune_on_demand is not None  # set by the package
    return tune_on_demand(tunable, of_rank_0, device, group) or choice, True


def _to_offer(tunable, choice):
    entry = table.to_json([choice.entry]) if choice.entry is not None else None
    return {"config": tunable.config_to_dict(choice.config), "source": choice.source, "entry": entry}


def _from_offer(tunable, offer):
    entry = table.from_json(offer["entry"])[0][0] if offer["entry"] is not None else None
    return Choice(tunable.config_from_dict(offer["config"]), offer["source"], entry)


def _capturing(device):
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
