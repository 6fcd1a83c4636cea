"""Which waiting request starts next when not all can have their first token in time.

First come, first served is right as long as everybody is served in time; past that it makes everybody late. Here those
that can still be in time go first, in the order they came, as many of them as possible: whenever one would be late,
the longest so far steps aside (Moore and Hodgson 1968: the fewest late jobs on one machine). The late ones follow when
nobody in time waits, and every `LATE_TURN`th start is theirs whatever waits, so that none waits for ever.

A request is in time when its first token comes within the target, or within `STRETCH` times what it takes alone: a long
prompt is not late because it is long.
"""

import heapq
from collections.abc import Sequence

from msgspec import Struct

STRETCH = 2.0
LATE_TURN = 8
MAX_LOOK = 256
"""As many of the oldest are compared; the others are too far back in line to be next."""


class Waiting(Struct, frozen=True):
    """A request in line: how long it has waited, and the time that its prefill is going to take, seconds."""

    waited_s: float
    prefill_s: float


def next_to_start(line: Sequence[Waiting], *, target_s: float, busy_s: float, num_starts: int) -> int:
    """The index in `line`, oldest first and not empty, of the request to start now.

    `busy_s`: until what has started is prefilled. `num_starts`: how many have started before.
    """
    line = line[:MAX_LOOK]
    due_s = [max(target_s, STRETCH * one.prefill_s) - one.waited_s for one in line]
    order = sorted(range(len(line)), key=due_s.__getitem__)
    kept: list[tuple[float, int]] = []  # a heap, the longest first
    end_s = busy_s
    for index in order:
        heapq.heappush(kept, (-line[index].prefill_s, index))
        end_s += line[index].prefill_s
        if end_s > due_s[index]:
            end_s += heapq.heappop(kept)[0]
    in_time = {index for _, index in kept}
    late = [index for index in range(len(line)) if index not in in_time]
    if late and (not in_time or num_starts % LATE_TURN == LATE_TURN - 1):
        return max(late, key=lambda index: line[index].waited_s)
    return next(index for index in order if index in in_time)
