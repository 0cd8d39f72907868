"""Integer rounding on the host. Kernels write ``//`` directly, see ``lang.kernel.jit``."""


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def round_up_to_part(n: int, parts: int, least: int) -> int:
    """Round up to a multiple of the next power of two over ``parts``, and of ``least``, so that few sizes occur."""
    return round_up(n, max(next_power_of_2(n) // parts, least))


def rounded_rows(rows: int) -> int:
    """Return the number of rows for which a launch of any number of rows selects its config and grid.

    It is rounded up to a multiple of 1/64 of the next power of two, and to a multiple of 16 or a smaller power of two.
    So numbers with the same result have the same next power of two, by which tuned configs are selected.
    """
    power = next_power_of_2(rows)
    step = max(power // 64, min(power, 16))
    return -(-rows // step) * step  # without a call: it is computed twice per call of an operator


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()
