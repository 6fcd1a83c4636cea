"""How a cost grows with its work: the curve a + b x^p through what was measured, and a verdict on it.

A cost that is linear in its work has a fixed part and the same price for every further unit. Two things say that it is
worse: the price of a unit of work rises (y / x at one x is above what it was at a smaller one), or the curve beyond its
fixed part bends upwards (p above 1, where a straight line misses what was measured).

A cost that follows no straight line and is not worse either is no worse than linear: economies of scale, or a limit
that takes over from another.
"""

from collections.abc import Sequence
from typing import Literal

import numpy as np
from msgspec import Struct
from numpy.typing import NDArray

Verdict = Literal["linear", "no worse than linear", "worse than linear"]

UNIT_PRICE_TOLERANCE = 1.15
EXPONENT_TOLERANCE = 1.25
MISFIT_TOLERANCE = 0.10
"""Relative: measurements on a shared machine scatter by so much."""

MIN_POINTS_OF_A_BEND = 5
"""Through fewer, some power fits any noise."""

_EXPONENTS = np.round(np.arange(0.1, 3.01, 0.02), 2)


class Growth(Struct, frozen=True, kw_only=True):
    """`fixed` and `price` belong to the straight line fixed + price x through the points."""

    fixed: float
    price: float
    misfit: float  # of that line: the largest relative distance from a point
    exponent: float  # p of the curve a + b x^p that fits best
    unit_price_growth: float  # the largest (y_j / x_j) / (y_i / x_i) of two points with x_i < x_j
    verdict: Verdict


def growth(work: Sequence[float], cost: Sequence[float]) -> Growth:
    """Judge `cost` of ascending, positive `work`; at least three points. Distances count relative to each point."""
    x, y = np.asarray(work, np.float64), np.asarray(cost, np.float64)
    assert len(x) == len(y) >= 3, (work, cost)
    assert (np.diff(x) > 0).all(), work
    assert x[0] > 0, work
    assert (y > 0).all(), cost
    fixed, price, misfit = _fit(x, y)
    scaled = x / x[-1]
    errors = [_error(scaled**p, y) for p in _EXPONENTS]
    exponent = float(_EXPONENTS[int(np.argmin(errors))])
    unit_price = y / x
    rise = max(float(unit_price[j] / unit_price[:j].min()) for j in range(1, len(x)))
    bends_up = len(x) >= MIN_POINTS_OF_A_BEND and exponent > EXPONENT_TOLERANCE and misfit > MISFIT_TOLERANCE
    verdict: Verdict = "linear"
    if rise > UNIT_PRICE_TOLERANCE or bends_up:
        verdict = "worse than linear"
    elif misfit > MISFIT_TOLERANCE:
        verdict = "no worse than linear"
    return Growth(fixed=fixed, price=price, misfit=misfit, exponent=exponent, unit_price_growth=rise, verdict=verdict)


def _fit(x: NDArray[np.float64], y: NDArray[np.float64]) -> tuple[float, float, float]:
    """(a, b, largest relative distance) of y = a + b x with a, b >= 0, least squares of relative distances."""
    rows = np.stack([1 / y, x / y], axis=1)
    ones = np.ones_like(y)
    best, least = (0.0, 0.0), np.inf
    for columns in ([0, 1], [0], [1]):
        solution, *_ = np.linalg.lstsq(rows[:, columns], ones, rcond=None)
        candidate = np.zeros(2)
        candidate[columns] = solution
        error = float(((rows @ candidate - 1) ** 2).sum())
        if (candidate >= 0).all() and error < least:
            best, least = (float(candidate[0]), float(candidate[1])), error
    distances = np.abs((best[0] + best[1] * x) / y - 1)
    return *best, float(distances.max())


def _error(x: NDArray[np.float64], y: NDArray[np.float64]) -> float:
    a, b, _ = _fit(x, y)
    return float((((a + b * x) / y - 1) ** 2).sum())
