"""Mutation testing: check that a run of modified source fails."""

import pytest


def mutated(source, changes):
    """Return the source with ``changes``: (text, its replacement, …). Each text is in the source once."""
    for before, after in zip(changes[::2], changes[1::2], strict=True):
        assert source.count(before) == 1
        source = source.replace(before, after)
    return source


def check_found(run, source, changes, seeds=200):
    """Check that a run of the mutated source fails for one of the seeds. ``run``: (seed, source) -> a run."""
    source = mutated(source, changes)
    with pytest.raises(AssertionError):
        for seed in range(seeds):
            run(seed, source)()
