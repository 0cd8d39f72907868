"""Cells and tables in Markdown, shared by the pages of the report. A missing value is "–"."""

import re


def markdown(lines):
    """Return a Markdown table; the second line is the rule below the titles."""
    return "\n".join("| " + " | ".join(line) + " |" for line in lines) + "\n"


def ms(value):
    """Show a time in ms."""
    return "–" if value is None else f"{value:.{3 if value >= 0.1 else 4}f}"


def us(value):
    """Show a time in ms as microseconds."""
    return f"{value * 1e3:.1f}" if value else "–"


def share(value):
    """Show an efficiency."""
    return "–" if value is None else f"{value:.2f}"


def factor(value):
    """Show a ratio. A loss is marked; a ratio that rounds to 1.00 is no loss."""
    return "–" if value is None else f"{value:.2f}{' ▼' if is_loss(value) else ''}"


def is_loss(value):
    """Return whether the printed ratio is below 1.00."""
    return round(value, 2) < 1


def short_revision(revision):
    """Return 7 digits of a revision and its "+"; a note in place of a revision stays whole."""
    return re.sub(r"\b([0-9a-f]{7})[0-9a-f]+", r"\1", revision)
