"""Integer rounding on the host. Kernels write ``//`` directly, see ``lang.kernel.jit``."""


def cdiv(a: int, b: int) -> int:
    """Return a / b, rounded up."""
    return -(-a // b)


def round_up(n: int, multiple: int) -> int:
    """Return the smallest multiple of ``multiple`` that is at least ``n``."""
    return -(-n // multiple) * multiple


def rounded_rows(rows: int, parts: int = 64, least: int = 16) -> int:
    """Round up to a multiple of the next power of two over ``parts``, and of ``least``, so that few sizes occur."""
    step = max(next_power_of_2(rows) // parts, least)
    return -(-rows // step) * step  # without a call: it is computed twice per call of an operator


def next_power_of_2(n: int) -> int:
    """Return the smallest power of two that is at least ``n``."""
    return 1 << max(n - 1, 0).bit_length()
