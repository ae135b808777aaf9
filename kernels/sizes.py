"""Whole numbers that launches are cut by; Triton's own functions cost 6 µs a call outside of kernels, some 30 calls a layer."""


def cdiv(whole: int, part: int) -> int:
    """How many parts it takes to hold the whole."""
    return -(-whole // part)


def next_power_of_2(number: int) -> int:
    """The smallest power of two from `number` on, 1 for none."""
    return 1 << max(0, number - 1).bit_length()
