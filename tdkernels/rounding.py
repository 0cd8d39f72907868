"""Integers rounded up, on the host. Kernels write ``//`` themselves, see ``lang.kernel.jit``."""


def cdiv(a, b):
    """a / b, rounded up."""
    return -(-a // b)


def round_up(n, multiple):
    """The least multiple of ``multiple`` that is no less than n."""
    return -(-n // multiple) * multiple


def next_power_of_2(n):
    """The least power of two that is no less than n."""
    return 1 << max(n - 1, 0).bit_length()
