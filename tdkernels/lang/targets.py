"""Target of a kernel, known at compile time, and helpers that exist only in the interpreter."""

import time

import triton.language as tl


def _builtin(fn):
    """Mark ``fn`` as a function that the compiler calls while it builds a kernel, like the functions of tl."""
    fn.__triton_builtin__ = True
    return fn


@_builtin
def target(_semantic=None):
    """Return the target: ``"cuda"``, ``"hip"`` or ``"interpreter"``.

    It is known at compile time, so an ``if`` on it removes the other branches from the kernel.
    """
    if _semantic is None:
        return "interpreter"
    return tl.constexpr(_semantic.builder.options.backend_name)


@_builtin
def number_of(word, words, _semantic=None):
    """Return the index of a word in a string of words, known at compile time."""
    number = getattr(words, "value", words).split().index(getattr(word, "value", word))
    return number if _semantic is None else tl.constexpr(number)


@_builtin
def interpreter_clock_ns(_semantic=None):
    """Return nanoseconds of this machine's monotonic clock. Interpreter only."""
    return time.monotonic_ns()


@_builtin
def interpreter_yield(start_ns, _semantic=None):
    """Sleep so that another rank can use the core, in a wait that began at ``start_ns``. Interpreter only.

    There may be fewer cores than ranks, and the interpreter takes most of a millisecond to check a signal. So the
    longer a rank has waited, the less often it checks: it notices a signal late by at most a quarter of the time
    waited.
    """
    waited_s = (time.monotonic_ns() - int(start_ns)) * 1e-9
    time.sleep(min(max(waited_s / 4, 0.0002), 0.01))
