"""Whole numbers that launches are cut by."""

import pytest

from dpamoe.kernels.sizes import cdiv, next_power_of_2


@pytest.mark.parametrize("whole, part, parts", [(0, 8, 0), (1, 8, 1), (8, 8, 1), (9, 8, 2), (2**40 + 1, 2, 2**39 + 1)])
def test_parts_that_hold_the_whole(whole, part, parts):
    assert cdiv(whole, part) == parts


@pytest.mark.parametrize("number, power", [(0, 1), (1, 1), (2, 2), (3, 4), (64, 64), (65, 128), (2**33 - 1, 2**33)])
def test_the_power_of_two_from_a_number_on(number, power):
    assert next_power_of_2(number) == power
