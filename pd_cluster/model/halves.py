"""A step computed in two halves that take turns, so that one half's tokens travel while the other's are computed.

    half 1: attention, dispatch |            | experts, reply |           | combine, attention, dispatch | ...
    half 2:                     | attention, |                | experts,  |                              | ...
                                | dispatch   |                | reply     |

A model is a generator of *stages*: it pauses wherever it has sent something and would next wait for others. Whether a
step is halved depends on what all ranks know of it, so all of them enter the same exchanges in the same order.
"""

from collections.abc import Generator, Sequence
from typing import Literal

from torch import Tensor

from pd_cluster.model.batch import Span

Stages = Generator[None, None, Tensor]
"""Pauses at each exchange; what it returns is the result."""

MicroBatches = Literal["auto", "off"]

HALVE_FROM = 64
"""Tokens of the fullest DP rank. Fewer are computed faster together: each half reads all weights."""


def finish(stages: Stages) -> Tensor:
    """The result, without a pause."""
    while True:
        try:
            next(stages)
        except StopIteration as end:
            result: Tensor = end.value
            return result


def in_turns(several: Sequence[Stages]) -> list[Tensor]:
    """The results of several, each going on where another pauses."""
    results: dict[int, Tensor] = {}
    while len(results) < len(several):
        for index, stages in enumerate(several):
            if index in results:
                continue
            try:
                next(stages)
            except StopIteration as end:
                results[index] = end.value
    return [results[index] for index in range(len(several))]


def takes_halves(step_tokens: Sequence[int]) -> bool:
    """Whether a step of so many tokens on each DP rank is worth halving."""
    return max(step_tokens) >= HALVE_FROM


def halve(spans: Sequence[Span]) -> tuple[list[Span], list[Span]]:
    """Two lists of spans in their order with tokens as equal as can be; a span of several tokens may be cut. Its second
    part sees the KV of its first, which is written earlier in every layer.
    """
    left = (sum(span.end - span.start for span in spans) + 1) // 2
    first: list[Span] = []
    second: list[Span] = []
    for span in spans:
        num_tokens = span.end - span.start
        if left >= num_tokens:
            first.append(span)
        elif left <= 0:
            second.append(span)
        else:
            middle = span.start + left
            first.append(Span(span.start, middle, span.token_ids[:left], span.units, False))
            second.append(Span(middle, span.end, span.token_ids[left:], span.units, span.sample))
        left -= num_tokens
    return first, second
