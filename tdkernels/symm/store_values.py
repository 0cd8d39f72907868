"""Validation of values that other ranks have written to the group's store.

Any process that can reach the store's port can write to it. A value that becomes a path, an address or an index is
therefore validated where it is read, as untrusted input.
"""


def whole_number(value: object, what: str, below: int = 1 << 63) -> int:
    """Return ``value`` if it is an integer from 0 to ``below - 1``.

    Args:
        value: A value parsed from JSON.
        what: A description of the value, for the error.
        below: The exclusive upper bound.

    Raises:
        ValueError: If it is another value.
    """
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{what} must be an integer from 0 to {below - 1}, not {str(value)[:100]!r}")
    return value
