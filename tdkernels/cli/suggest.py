"""Suggestions for mistyped words."""

import difflib
from collections.abc import Iterable


def did_you_mean(word: object, words: Iterable) -> str:
    """Return "; did you mean ...?" if one of the words is similar, and an empty string otherwise."""
    found = difflib.get_close_matches(str(word), [str(one) for one in words], n=1, cutoff=0.6)
    return f"; did you mean {found[0]!r}?" if found else ""


def check_known(argument: str, names: Iterable[str], known: Iterable[str]) -> None:
    """Raise ValueError, with a suggestion, if one of the names given for an argument is not known."""
    known = list(known)
    for name in names:
        if name not in known:
            raise ValueError(f"{argument} must be one of {', '.join(known)}, not {name!r}{did_you_mean(name, known)}")
