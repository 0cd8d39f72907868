"""Select the config of a call, the same on all ranks.

The sources are, in this order: the config that was passed to the call, the user's cache, the table shipped with the
package, the nearest shape in either, the shipped table of a similar GPU, and the heuristic config. An entry of the
user's cache is used only with the versions that it was measured with. The shipped tables are used with all versions: a
config that was best with other versions is a better guess than the heuristic. For the same problem, an entry that was
measured with the current kernels or not before the modelled one comes first, then the modelled one. A measured entry of
other kernels gives way to the heuristic config if that runs a newer kind of kernel. So does a modelled one of another
shape and other kernels.
Rank 0 looks up the config and the other ranks follow, so their files may differ.
"""

from collections.abc import Callable, Hashable, MutableMapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from tdkernels.autotune import disk_cache, table
from tdkernels.autotune.hardware import KIN
from tdkernels.autotune.invariance import is_batch_invariant, selection_mode
from tdkernels.autotune.modes import get_mode
from tdkernels.autotune.tunable import versions
from tdkernels.symm.group import alone, caches_of, group_state

if TYPE_CHECKING:
    import torch.distributed as dist

    from tdkernels.autotune.problem import Problem
    from tdkernels.autotune.tunable import Tunable

# Sources of a config. MODELLED is an entry of the shipped table that was not measured on all ranks, SIMILAR_GPU the
# table of a similar GPU.
EXPLICIT, CACHE, SHIPPED, NEAREST, DEFAULT = "explicit", "cache", "shipped", "nearest", "default"
MODELLED, SIMILAR_GPU = "modelled", "similar_gpu"
INVARIANT = "batch_invariant"  # the only source in the batch-invariant mode
_CLEARLY_FASTER = 0.97  # time over that of the default config; above it the difference may be chance
_GUESSES = MODELLED, NEAREST, SIMILAR_GPU, DEFAULT  # in mode "on" a problem is tuned instead of using one of these

# (tunable, problem, device, group) -> Choice or None, and (tunable, problem, device, choice) -> None. They are set by
# the package to functions of ``on_demand``.
tune_on_demand: Callable | None = None
report_choice: Callable | None = None


@dataclass(frozen=True)
class Choice:
    """The selected config of a problem.

    Attributes:
        config: The config.
        source: Where it came from: "explicit", "cache", "shipped", "modelled", "nearest", "similar_gpu", "default"
            or "batch_invariant".
        entry: The table entry with its measurements; None for "explicit", "default" and "batch_invariant".
    """

    config: object
    source: str
    entry: table.Entry | None = None


def choose(
    tunable: "Tunable", problem: "Problem", device: torch.device, group: "dist.ProcessGroup | None", fields: dict,
) -> Choice:
    """Return the Choice for a call without a config, the same on all ranks.

    The first call with a problem is collective.

    Args:
        tunable: The operator.
        problem: The problem on this rank. It may differ between ranks as long as ``Tunable.key`` does not. Rank 0 looks
            up its own problem.
        device: The device of this rank.
        group: The group of ranks; None for this process alone, which then communicates with no peer and never tunes.
        fields: Properties that must be the same on all ranks. The error names the ranks that differ.

    Raises:
        ValueError: If ``fields`` or the mode differ between ranks.
        PeerTimeoutError: If a rank does not take part in time.
    """
    choices = caches_of(group).choices
    key = tunable.key(problem), selection_mode()
    choice = choices.get(key)
    if choice is None:
        final = True
        if is_batch_invariant():
            # Before the consensus check, so that every rank raises the error of an operator that is not supported.
            choice = look_up(tunable, problem, device, get_mode())
            if group is not None:
                _check_problem(tunable, problem, group, fields)
        elif group is None:
            choice = look_up(tunable, problem, device, get_mode())
        else:
            choice, final = _select_on_all_ranks(tunable, problem, device, group, fields)
        if final:
            choices[key] = choice
        else:
            choices.version += 1  # invalidates cached results that depend on this choice
        if group is None or group_state(group).rank == 0:
            assert report_choice is not None  # set by the package
            report_choice(tunable, problem, device, choice)
    return choice


def choice_of_call(
    operator: str, group: "dist.ProcessGroup | None", call: Hashable, make: Callable[[], Choice],
) -> Choice:
    """Return the cached Choice of a call if it is still valid; otherwise compute it with ``make`` and cache it.

    Args:
        operator: Name of the operator.
        group: The group of ranks, or None for this process alone.
        call: Key of the call, which determines its problem, fields and device, and is cheaper to compute than these.
        make: Function that returns the Choice.
    """
    caches = caches_of(group)
    key = "config", caches.choices.version, selection_mode(), operator, call
    choice = caches.calls[key]
    if choice is None:
        choice = make()
        caches.calls[key] = choice
    return choice


def forget(tunable: "Tunable", problem: "Problem", choices: MutableMapping) -> None:
    """Drop the cached choices of a problem, so that the next call selects again. Call it on all ranks."""
    for known in (choices, alone.choices):
        for key in [key for key in known if key[0] == tunable.key(problem)]:
            del known[key]
    alone.choices.version += 1  # group_gemm looks up configs without an entry in these choices


def look_up(tunable: "Tunable", problem: "Problem", device: torch.device, mode: str) -> Choice:
    """Return the Choice of this rank, without communication."""
    if is_batch_invariant():
        return Choice(tunable.invariant(problem, device), INVARIANT)
    if mode == "off":
        return Choice(tunable.default(problem, device), DEFAULT)
    name = problem.operator, problem.gpu
    # The versions of the kernels take up to 0.4 s to compute: only if the user has tuned the operator on this GPU.
    mine = [entry for entry in disk_cache.user_entries(*name) if entry.versions == versions(tunable)]
    shipped = disk_cache.shipped_entries(*name)
    for source, entries in ((CACHE, mine), (SHIPPED, shipped)):
        choice = _exact(tunable, problem, device, source, entries)
        if choice is not None:
            return choice
    choice = _similar(tunable, problem, device, NEAREST, mine, shipped) or _from_similar_gpu(tunable, problem, device)
    return choice or Choice(tunable.fallback(problem, device), DEFAULT)


def _exact(tunable, problem, device, source, entries):
    """Return the Choice of the entry for exactly this problem, or None."""
    exact = [entry for entry in entries if entry.problem == problem]
    if not exact:
        return None
    entry = _preferred(tunable, exact)
    modelled = entry.modelled and source == SHIPPED
    return _usable(tunable, problem, device, MODELLED if modelled else source, entry)


def _preferred(tunable, entries):
    """Return the entry of a problem to use.

    A measured entry comes first, unless it is of other kernels and older than a modelled one.
    """
    modelled = [entry for entry in entries if entry.modelled]
    if not modelled or len(modelled) == len(entries):
        return entries[-1]
    measured = [entry for entry in entries if not entry.modelled]
    later = [entry for entry in measured if entry.when >= modelled[-1].when]
    if later:
        return later[-1]
    current = versions(tunable)["kernels"]  # takes up to 0.4 s to compute, so only if the choice depends on it
    return ([entry for entry in measured if entry.versions.get("kernels") == current] or modelled)[-1]


def _similar(tunable, problem, device, source, mine, shipped):
    """Return the Choice of an entry with the nearest shape, or None. The user's own entry of that shape comes first.

    It is the default config if the tuned one was hardly faster for that shape, see ``Tunable.prefers_default``.
    """
    similar = table.nearest([*mine, *(shipped if tunable.trusts_similar(problem, device) else [])], problem)
    if similar is None:
        return None
    own, others = ([entry for entry in of if entry.problem == similar.problem] for of in (mine, shipped))
    entry = _preferred(tunable, own or others)
    if tunable.prefers_default and _is_as_fast_as_default(entry):
        return Choice(tunable.default(problem, device), DEFAULT)
    choice = _usable(tunable, problem, device, source, entry)
    return choice if choice is not None and tunable.suits(choice.config, problem, device) else None


def _is_as_fast_as_default(entry):
    """Return whether the default config, which was another one, took about as long. False if that is not known."""
    return entry.default_ms is not None and _CLEARLY_FASTER * entry.default_ms < entry.ms < entry.default_ms


def _from_similar_gpu(tunable, problem, device):
    """Return the Choice for a similar GPU, where the same configs are likely to be fast, or None."""
    kin = KIN.get(problem.gpu)
    if kin is None:
        return None
    theirs = replace(problem, gpu=kin)
    shipped = disk_cache.shipped_entries(problem.operator, kin)
    exact = _exact(tunable, theirs, device, SIMILAR_GPU, shipped)
    return exact or _similar(tunable, theirs, device, SIMILAR_GPU, [], shipped)


def _usable(tunable, problem, device, source, entry):
    """Return the Choice of an entry, or None if it is superseded. If its config cannot run here, warn once, too."""
    try:
        config = tunable.config_from_dict(entry.config)
        reason = tunable.illegal(config, problem, device)
    except (TypeError, ValueError) as error:
        reason = str(error)
    if reason is None:
        is_exact_model = entry.modelled and entry.problem.shape == problem.shape
        superseded = not is_exact_model and _is_superseded(tunable, problem, device, config, entry)
        return None if superseded else Choice(config, source, entry)
    disk_cache.report(f"the {source} entry", f"for {entry.problem} is not used: {reason}")
    return None


def _is_superseded(tunable, problem, device, config, entry):
    """Return ``Tunable.is_superseded`` for an entry of other kernels."""
    if not tunable.is_superseded(config, problem, device):
        return False
    return entry.versions.get("kernels") != versions(tunable)["kernels"]


def _select_on_all_ranks(tunable, problem, device, group, fields):
    """Return (the Choice of all ranks, whether to cache it).

    It is not cached if the problem should be tuned, but cannot be tuned now because of a CUDA-graph capture.
    """
    mode = get_mode()
    offer = {"tune": not _capturing(device)}
    own = None
    if group_state(group).rank == 0:
        try:
            own = look_up(tunable, problem, device, mode)
            offer |= {**_to_offer(tunable, own), "shape": problem.shape, "layout": problem.layout}
        except Exception as error:  # the other ranks wait in the consensus check, which passes the error on to them
            offer["error"] = f"{type(error).__name__}: {error}"
    offers = _check_problem(tunable, problem, group, fields, offer)
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


def _check_problem(tunable, problem, group, fields, offer=None):
    """Check that all ranks select a config for the same problem and with the same mode, and return their offers."""
    # Layout and GPU must be the same on all ranks: a rank that differs would use another key for its choice.
    key = tunable.key(problem)
    fields = {**fields, "layout": key.layout, "gpu": key.gpu, "config": f"left to autotune ({get_mode()})"}
    return group_state(group).check_consensus(tunable.name, fields, offer)


def _to_offer(tunable, choice):
    entry = table.to_json([choice.entry]) if choice.entry is not None else None
    return {"config": tunable.config_to_dict(choice.config), "source": choice.source, "entry": entry}


def _from_offer(tunable, offer):
    entry = table.from_json(offer["entry"])[0][0] if offer["entry"] is not None else None
    return Choice(tunable.config_from_dict(offer["config"]), offer["source"], entry)


def _capturing(device):
    return device.type == "cuda" and torch.cuda.is_current_stream_capturing()
