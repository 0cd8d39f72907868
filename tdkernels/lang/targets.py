"""What a kernel is being built for, known at compile time, and what only the interpreter can do."""

import time

import triton.language as tl


def _builtin(fn):
    """Let the compiler call ``fn`` itself while it builds a kernel (as it does with the functions of tl)."""
    fn.__triton_builtin__ = True
    return fn


@_builtin
def target(_semantic=None):
    """``"cuda"``, ``"hip"`` or ``"interpreter"``: an ``if`` on it keeps the other branches out of the kernel."""
    if _semantic is None:
        return "interpreter"
    return tl.constexpr(_semantic.builder.options.backend_name)


@_builtin
def number_of(word, words, _semantic=None):
    """The place of a word in a text of words, known at compile time."""
    number = getattr(words, "value", words).split().index(getattr(word, "value", word))
    return number if _semantic is None else tl.constexpr(number)


@_builtin
def interpreter_clock_ns(_semantic=None):
    """Nanoseconds on this machine's monotonic clock; interpreter only."""
    return time.monotonic_ns()


@_builtin
def interpreter_yield(start_ns, _semantic=None):
    """Let another rank have the core, after a wait since ``start_ns``; interpreter only.

    There may be fewer cores than ranks, and to look takes the interpreter most of a millisecond, so who has waited for
    long looks less often: what came meanwhile is seen late by at most a quarter of the wait.
    """
    waited_s = (time.monotonic_ns() - int(start_ns)) * 1e-9
    time.sleep(min(max(waited_s / 4, 0.0002), 0.01))
