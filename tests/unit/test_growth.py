"""The verdict on a curve: what is linear passes whatever its fixed part and its noise, and what is not is found."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pd_cluster.bench.growth import growth

SIZES = [1, 2, 4, 8, 16, 17, 32, 33, 48, 64]


@settings(max_examples=25, deadline=None)
@given(
    fixed=st.floats(0, 1000),
    price=st.floats(0.1, 10),
    noise=st.lists(st.floats(0.97, 1.03), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_a_fixed_cost_and_a_price_per_unit_is_linear(fixed: float, price: float, noise: list[float]) -> None:
    found = growth(SIZES, [(fixed + price * x) * n for x, n in zip(SIZES, noise, strict=True)])
    assert found.verdict == "linear"
    assert found.misfit < 0.07


@settings(max_examples=25, deadline=None)
@given(
    power=st.floats(1.4, 2.5),
    noise=st.lists(st.floats(0.97, 1.03), min_size=len(SIZES), max_size=len(SIZES)),
)
def test_a_power_above_one_is_worse_than_linear(power: float, noise: list[float]) -> None:
    found = growth(SIZES, [x**power * n for x, n in zip(SIZES, noise, strict=True)])
    assert found.verdict == "worse than linear"
    assert found.exponent == pytest.approx(power, abs=0.15)


def test_a_bend_behind_a_large_fixed_cost_is_found() -> None:
    found = growth(SIZES, [4000 + x**2 for x in SIZES])
    assert found.unit_price_growth < 1.01  # hidden from the unit price
    assert found.exponent == pytest.approx(2, abs=0.05)
    assert found.verdict == "worse than linear"


def test_a_cliff_between_two_sizes_is_found() -> None:
    costs = [1.0 * x for x in SIZES[:5]] + [2.0 * x for x in SIZES[5:]]
    found = growth(SIZES, costs)
    assert found.unit_price_growth == pytest.approx(2)
    assert found.verdict == "worse than linear"


def test_economies_of_scale_are_no_worse_than_linear() -> None:
    found = growth(SIZES, [10 * x**0.5 for x in SIZES])
    assert found.verdict == "no worse than linear"
    assert found.exponent == pytest.approx(0.5, abs=0.02)


def test_the_line_is_the_one_that_was_drawn() -> None:
    found = growth([1, 2, 3, 10], [5 + 2 * x for x in (1, 2, 3, 10)])
    assert (found.fixed, found.price, found.misfit) == (pytest.approx(5), pytest.approx(2), pytest.approx(0, abs=1e-9))
