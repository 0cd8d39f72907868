"""The race checker finds planted bugs, most of which do not change the values that the interpreter computes."""

import pytest
import torch

from tdkernels.lang import memory
from tdkernels.ops.collectives.async_collective import AsyncCollective
from tdkernels.sanitizer import RaceError, record
from tests.ops.attention.flash_decode import cases as decoding
from tests.ops.attention.flash_decode.oracle import Decode
from tests.ops.collectives import norm_cases
from tests.ops.dense import gemm_ar_norm_cases
from tests.ops.dense.cases import config_for
from tests.ops.dense.gemm_ar_norm_oracle import NormCase
from tests.ops.dense.scaled_cases import ScaledCase
from tests.sanitizer.mutants import MUTANTS, mutated
from tests.support.dense_oracle import Case
from tests.support.ranks import DEVICE, on_ranks
from tests.support.simulated_nodes import on_nodes
from tests.support.variants import SCALED_SHAPE, VARIANTS, scaled

pytestmark = pytest.mark.skipif(DEVICE == "cuda", reason="the race checker runs on CPU ranks")


def run_calls(variant, number, backward):
    """Call an operator without checking its results, which some mutants make wrong."""
    if variant.function is norm_cases.computes:
        operator, dtype, (shape,), changes = variant.args
        case = norm_cases.NormCase(operator, shape, dtype)
        for _ in range(number):
            case.call(changes)
        return
    if variant.function is gemm_ar_norm_cases.computes:
        operator, dtype, (shape,), config = variant.args
        case = NormCase(operator, dtype, *shape)
        for _ in range(number):
            case.call(config=gemm_ar_norm_cases.CONFIGS[config])
        return
    if variant.function is decoding.computes:
        spec, config = variant.args
        case = Decode(**spec)
        for _ in range(number):
            case.call(config=decoding.config_of(config))
        return
    if variant.function is scaled:
        operator, scaling, changes = variant.args
        case = ScaledCase(operator, *SCALED_SHAPE, (scaling, scaling))
        for _ in range(number):
            case.run(case.config_for(**changes))
        return
    operator, shape, changes = variant.args
    case = Case(operator, torch.float32, *shape, exact=True)
    for _ in range(number):
        if backward:
            case.run(True, config=config_for(case, **changes))
        else:
            with torch.no_grad():
                case.call(config=config_for(case, **changes))


def races_of(mutant):
    """Return the races of a mutant. The first call runs without the bug, so that the consensus checks have passed."""
    variant = VARIANTS[mutant.variant]

    def run():
        run_calls(variant, 1, mutant.backward)
        with record(check=False) as races, mutant.planted():
            run_calls(variant, mutant.calls, mutant.backward)
        return list(races)

    return run() if variant.local is None else on_nodes(variant.local, run)


@pytest.mark.parametrize("name", MUTANTS)
def test_mutant_is_caught(name):
    mutant = MUTANTS[name]
    first, *others = on_ranks(VARIANTS[mutant.variant].world_size, races_of, mutant)
    assert first, "no race was found"
    assert all([str(race) for race in other] == [str(race) for race in first] for other in others)
    files = {access.file.rpartition("/")[2] for race in first for access in (race.first, race.second)}
    assert mutant.file in files, first[0]


def signals_first(self, _key, find, sources):
    """A faulty ``AsyncCollective._copy_to_peers``: it sets the signals before it copies the data."""
    found = find()
    for _, *signal in found:
        if signal[0] != self.rank:
            self._announce(*signal)
    for (destination, *_), source in zip(found, sources, strict=True):
        self._copy(destination, source)


def races_of_signals_first(name):
    variant = VARIANTS[name]
    variant.run()
    with record(check=False) as races, pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncCollective, "_copy_to_peers", signals_first)
        variant.run()
    return list(map(str, races))


@pytest.mark.parametrize("name", ["ag_gemm parts 2", "column_linear pipelined backward"])
def test_signals_before_copies_to_several_peers_are_races(name):
    for races in on_ranks(VARIANTS[name].world_size, races_of_signals_first, name):
        assert races, "no race was found"


def copies_to_several_peers(name):
    """Return [(number of copies, number of calls of ``AsyncCollective._copy``)] of all calls of ``_copy_to_peers``."""
    variant, seen, found = VARIANTS[name], [], []
    copy, copy_to_peers = AsyncCollective._copy, AsyncCollective._copy_to_peers

    def counted(self, key, find, sources):
        before = len(seen)
        copy_to_peers(self, key, find, sources)
        found.append((len(sources), len(seen) - before))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncCollective, "_copy", lambda self, *args: (seen.append(args), copy(self, *args)))
        patch.setattr(AsyncCollective, "_copy_to_peers", counted)
        variant.run()
    return found


def test_copies_to_several_peers_are_seen():
    """The race checker observes ``AsyncCollective._copy``."""
    name = "ag_gemm parts 2"
    for found in on_ranks(VARIANTS[name].world_size, copies_to_several_peers, name):
        assert found and all(expected == seen > 0 for expected, seen in found)


def raise_race_error():
    variant = VARIANTS["gemm_ar one_shot"]
    run_calls(variant, 1, True)
    with pytest.raises(RaceError, match="race in workspace 'gemm_ar one shot' of rank") as caught:
        with record(), MUTANTS["L: an acquire load is relaxed"].planted():
            run_calls(variant, 1, True)
    race = caught.value.races[0]
    with record() as races:
        run_calls(variant, 1, True)
    return race, list(races)


def test_report_names_both_accesses_and_the_signal():
    for race, after in on_ranks(3, raise_race_error):
        assert not after, "the mutation was not reverted"
        write, read = race.first, race.second
        assert {write.kind, read.kind} == {"write", "read"} and write.rank != read.rank
        for access in (write, read):
            assert access.kernel == "gemm_one_shot_kernel" and access.program is not None
            with open(access.file) as file:
                line = file.read().splitlines()[access.line - 1]
            assert f"tl.{'store' if access.kind == 'write' else 'load'}(" in line or access.function in line, line
        assert "data of half" in race.place
        assert "signal" in race.released and "kernel_one_shot.py" in race.released
        assert f"no signal from rank {write.rank} was acquired" in race.acquired


def test_mutant_without_a_match_fails():
    with pytest.raises(AssertionError, match="0 times in load_acquire"):
        with mutated(memory.load_acquire, "no such line", ""):
            pass
