"""Checks of values that other ranks have put into the group's store.

Whoever reaches the store's port can write to it. A value that becomes a path, an address or an index is therefore
checked where it is read, as input from outside.
"""


def whole_number(value, what, below=1 << 63):
    """Return ``value`` if it is an integer from 0 to ``below - 1``.

    Args:
        value: as JSON gives it
        what: what it is, for the error

    Raises:
        ValueError
    """
    if type(value) is not int or not 0 <= value < below:
        raise ValueError(f"{what} must be an integer from 0 to {below - 1}, not {str(value)[:100]!r}")
    return value
