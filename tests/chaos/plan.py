"""The plan of a case of the fault campaign, derived from its seed."""

import random
from dataclasses import dataclass

from tests.chaos.problems import TABLE

# Faults and their frequency, in cases of 100. "raise": an exception in a kernel (CPU ranks). "between": an exception
# between two launches of a call. "type": an argument of a wrong type, so that the rank skips a collective.
FAULTS = {
    "none": 6, "kill": 14, "stop": 16, "delay": 18, "known shape": 10, "new shape": 8, "raise": 12, "between": 8,
    "type": 4, "ids": 4,
}
# From this seed on, each case has a rank that is slightly later than the timeout of one peer. The host of that peer has
# launched further calls by then, and the third rank still waits: it would read anything that the void launches store.
LATE_SEEDS = 100_000
WORLD_SIZES = (2, 3)
CONTROL_TIMEOUT_S = 60.0  # without a fault no rank may time out, even on a busy machine


@dataclass(frozen=True)
class Plan:
    """One case.

    Attributes:
        name: a key of ``problems.TABLE``.
        shape, other: the shape of correct calls, and of the faulty call if the fault is another shape.
        cold: whether the first call is made under the fault; otherwise the ranks warm up first.
        timeouts: of each rank, in seconds.
        faulty, fault, at: the faulty rank, its fault, and the number of the faulty call.
        moment: position of the fault in the call, from 0 to 1.
        counted_in: what ``moment`` of a kill or a stop counts: "stores" of kernels, "launches" or "time".
        pause: duration of a stop or a delay in seconds.
        ahead: the rank whose host does not check for recorded errors between calls, or None.
    """

    seed: int
    world_size: int
    name: str
    operator: str
    shape: int
    other: int
    backward: bool
    calls: int
    cold: bool
    timeouts: tuple
    faulty: int
    fault: str
    at: int
    moment: float
    counted_in: str
    pause: float
    ahead: int | None

    @property
    def cached_shapes(self):
        if self.cold:
            return []
        return [self.shape] + [self.other] * (self.fault == "known shape")


def _waits_for_device(name):
    """Return whether the host of a call waits for counts from the device, so that it cannot run ahead."""
    _, operator, changes = TABLE[name]
    return "max_tokens" not in str(changes) and operator in ("all_to_all", "ep_dispatch", "ep_moe")


def names_of(operators):
    """Return the keys of TABLE for these operators, or all keys if there are none; ValueError for an unknown one.

    "specialized" selects the problems of the warp-specialized kernels, which exist on Hopper GPUs only.
    """
    selecting = {name: {TABLE[name][1]} | ({"specialized"} if "specialized" in name else set()) for name in TABLE}
    known = set().union(*selecting.values())
    if unknown := set(operators) - known:
        raise ValueError(f"unknown operators: {', '.join(sorted(unknown))}; known: {', '.join(sorted(known))}")
    return [name for name in TABLE if not operators or selecting[name] & set(operators)]


def _late_plan(seed, rng, timeout, backward, world_sizes, names):
    """Return the plan of a seed >= LATE_SEEDS."""
    names = [name for name in names if not _waits_for_device(name)]
    world_sizes = [world_size for world_size in world_sizes if world_size >= 3]
    if not names or not world_sizes:
        raise ValueError(f"seeds from {LATE_SEEDS} on need three ranks and an operator whose host can run ahead")
    name = rng.choice(names)
    world_size = world_sizes[0] if len(world_sizes) == 1 else rng.choice(world_sizes)
    ahead, faulty, _ = rng.sample(range(world_size), 3)
    timeouts = tuple(timeout if rank == ahead else 3 * timeout for rank in range(world_size))
    return Plan(
        seed, world_size, name, TABLE[name][1], rng.choice([0, 3]), 1, backward and "halves" not in name, 8, False,
        timeouts, faulty, "delay", rng.randrange(5), 0.0, "time", round(timeout * rng.uniform(1.1, 1.6), 2), ahead,
    )


def plan_of(seed, device="cpu", world_sizes=WORLD_SIZES, operators=()):
    """Return the Plan of a seed. On GPUs "raise" becomes "between", since nothing can end a kernel there.

    Args:
        seed: of the case. The plan also depends on the other arguments.
        device: "cpu", "shared" or "cuda".
        world_sizes: the plan has one of these numbers of ranks.
        operators: as for ``names_of``: the plan has one of these operators; () for all.
    """
    rng = random.Random(f"chaos {seed}")
    names = names_of(operators)
    with_ids = [name for name in names if TABLE[name][0].has_ids()]
    frequency = {fault: count for fault, count in FAULTS.items() if with_ids or fault != "ids"}
    fault = rng.choices(list(frequency), frequency.values())[0]
    name = rng.choice(with_ids if fault == "ids" else names)
    operator = TABLE[name][1]
    world_size, calls = rng.choice(world_sizes), rng.randint(4, 8)
    shape = rng.choice([0, 0, 3])
    other = rng.choice([1, 2]) if fault == "known shape" else rng.choice([1, 2, 3 - shape])
    cold = rng.random() < 0.15 and fault not in ("none", "known shape", "new shape")
    faulty, at = rng.randrange(world_size), rng.randrange(calls)
    timeout = round(rng.uniform(0.5, 1.5) if not cold else rng.uniform(1.5, 3.0), 2)
    pause = round(timeout * rng.uniform(0.5, 1.5), 2)
    ahead = rng.randrange(world_size) if rng.random() < 0.3 else None
    patient = rng.random() < 0.5
    moment, counted_in = rng.random(), "stores" if rng.random() < 0.6 else "time"
    backward = rng.random() < 0.6
    if device != "cpu":
        # All calls of a GPU can end within the time in which a process starts that sends a signal.
        timeout, pause, counted_in = timeout + 0.5, pause + 0.5, "launches"
        fault = "between" if fault == "raise" else fault
    elif ahead is not None:
        if _waits_for_device(name) or cold or fault not in ("none", "kill", "stop", "delay", "known shape"):
            ahead = None  # the emulated host would continue where a real one waits or has seen the error
    if seed >= LATE_SEEDS:
        return _late_plan(seed, rng, timeout, backward, world_sizes, names)
    if fault == "none":
        timeout = CONTROL_TIMEOUT_S
    # A rank that times out early must not overwrite data that the other ranks, which still wait, will read.
    timeouts = [3 * timeout if patient and ahead not in (None, rank) else timeout for rank in range(world_size)]
    return Plan(
        seed, world_size, name, operator, shape, other, backward and "halves" not in name, calls, cold, tuple(timeouts),
        faulty, fault, at, moment, counted_in, pause, ahead,
    )


