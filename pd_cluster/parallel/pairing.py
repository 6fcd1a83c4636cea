"""Two slots to a rank: what is least to move so that no rank is above a level.

With two slots a rank is a pair, and a pair that is above the level keeps one expert and needs a lighter partner than
the one it gives away. Put every load on a line. A rank that must change asks for cover from what it can still take up
to what it gives, `[level - stays, goes)`; a cool rank that joins gives cover from what it gives up to what it can take,
`[goes, level - stays)`. Experts can be handed on in rings within the level exactly when every point of the line is
covered as often as it is asked for, and the fewest ranks that cover it are found by one sweep from left to right that
always takes the rank which reaches furthest. A ring of n hot ranks and a cool one loads n + 1 experts, where swaps
would load 2n.

A further copy of an expert asks for cover from 0 up to its load; the slot of a copy that its expert can spare covers
from 0 up to what its rank can take.

The level is then bisected. Which copies exist is changed one at a time, from the expert that can spare it best to the
one with the most load for each copy.
"""

# E experts, R ranks, S = 2 slots of a rank; an empty slot holds E

from heapq import heappop, heappush
from typing import NamedTuple

import numpy as np

from pd_cluster.parallel.local_search import Floats, Ints
from pd_cluster.parallel.replicas import pour

CLOSE = 1e-3
"""Levels are bisected down to this share of the mean rank load."""

FIRST_COPIES, NEXT_COPIES = 10, 4
"""Most copies that change owner in the first round, from the slots as they are, and in every further one."""

MAX_ROUNDS = 6


class State(NamedTuple):
    """Slots, and how experts are split over their copies; loads are in mean rank loads."""

    slots_RS: Ints
    part_RS: Floats
    places_E: list[list[tuple[int, int]]]  # (rank, slot) of each copy
    hottest: float


class Spared(NamedTuple):
    """Copies that change owner: slots that are given up, and the experts that get further copies."""

    given: dict[int, int]  # rank: slot
    gets: dict[int, int]  # expert: further copies


class Pair(NamedTuple):
    """A rank that keeps what is in the other slot, and gives what is in `slot`, if anything is there."""

    room: float  # below the level, without what it gives
    rank: int
    slot: int


def follow_pairs(start_RS: Ints, load_E: Floats, *, max_moves: int | None, move_price: float) -> tuple[Ints, float]:
    """[R, 2] slots with a lower hottest rank, at most `max_moves` experts loaded to come there from `start_RS`, and
    that rank over the mean. Of what is found it is the one with the least hottest + `move_price` * experts loaded; it
    may be `start_RS`. Ranks are equally fast.
    """
    load_E = load_E * (len(start_RS) / load_E.sum())
    limit = start_RS.size if max_moves is None else max_moves
    best = _poured(start_RS, load_E)
    for turn in range(MAX_ROUNDS):
        copies = NEXT_COPIES if turn else FIRST_COPIES
        after = _round(start_RS, best, load_E, limit, move_price, copies, from_hottest=turn % 2 == 1)
        stuck = _cost(start_RS, after, move_price) >= _cost(start_RS, best, move_price) - CLOSE / 10
        best = min(best, after, key=lambda state: _cost(start_RS, state, move_price))
        if stuck and turn != 1:
            break
    return best.slots_RS, best.hottest


def num_moves(old_RS: Ints, new_RS: Ints, num_experts: int) -> int:
    """Experts that must be loaded: on a rank that lacked them."""
    return sum(
        len(set(new) - set(old) - {num_experts}) for old, new in zip(old_RS.tolist(), new_RS.tolist(), strict=True)
    )


def fewest_to_cover(
    asked: list[tuple[float, float]], free: list[float], given: list[tuple[float, float, int]], most: int
) -> list[int] | None:
    """Which of `given` (start, end, id) to take so that every point lies in as many of them as of `asked` (start, end),
    `free` covering from the left up to their ends anyway. None when that takes more than `most`, or cannot be. Of those
    with one id at most one is taken, the first that the sweep likes; with distinct ids this is the fewest there can be.
    Answers are indices of `given`.
    """
    asked = sorted(a for a in asked if a[0] < a[1])
    order = sorted(range(len(given)), key=lambda i: given[i][0])
    open_ends: list[float] = []  # of what is asked at `now`
    cover_ends = sorted(free)
    reach: list[tuple[float, int]] = []  # (-end, index) of what starts at or before `now`
    taken: list[int] = []
    taken_ids: set[int] = set()
    next_asked = next_given = 0
    now = asked[0][0] if asked else 0.0
    while True:
        while next_asked < len(asked) and asked[next_asked][0] <= now:
            heappush(open_ends, asked[next_asked][1])
            next_asked += 1
        for ends in (open_ends, cover_ends):
            while ends and ends[0] <= now:
                heappop(ends)
        while len(cover_ends) < len(open_ends):
            while next_given < len(order) and given[order[next_given]][0] <= now:
                heappush(reach, (-given[order[next_given]][1], order[next_given]))
                next_given += 1
            while reach and given[reach[0][1]][2] in taken_ids:
                heappop(reach)
            if not reach or -reach[0][0] <= now or len(taken) == most:
                return None
            end, index = heappop(reach)
            heappush(cover_ends, -end)
            taken.append(index)
            taken_ids.add(given[index][2])
        events = [ends[0] for ends in (open_ends, cover_ends) if ends and open_ends]
        if next_asked < len(asked):
            events.append(asked[next_asked][0])
        if not events:
            return taken
        now = min(events)


def _cost(start_RS: Ints, state: State, move_price: float) -> float:
    return state.hottest + move_price * num_moves(start_RS, state.slots_RS, len(state.places_E))


def _poured(slots_RS: Ints, load_E: Floats) -> State:
    places_E: list[list[tuple[int, int]]] = [[] for _ in load_E]
    for rank, row in enumerate(slots_RS.tolist()):
        for slot, expert in enumerate(row):
            if expert < len(load_E):
                places_E[expert].append((rank, slot))
    ranks_E = [[rank for rank, _ in places] for places in places_E]
    parts, loads_R = pour(load_E.tolist(), ranks_E, [1.0] * len(slots_RS))
    part_RS = np.zeros(slots_RS.shape)
    for places, part in zip(places_E, parts, strict=True):
        for place, load in zip(places, part, strict=True):
            part_RS[place] = load
    return State(slots_RS, part_RS, places_E, max(loads_R))


def _round(
    start_RS: Ints, first: State, load_E: Floats, limit: int, move_price: float, max_copies: int, from_hottest: bool
) -> State:
    """The cheapest state found from `first` by levels for none, one, two, ... copies that change owner."""
    best, least, lowest = first, _cost(start_RS, first, move_price), first.hottest
    spared, now = Spared({}, {}), first
    for _ in range(max_copies + 1):
        low, level = 1.0, lowest * (1 - 2 * CLOSE)
        while lowest - low > CLOSE:
            slots_RS = _within(level, now, load_E, spared, limit)
            found = None if slots_RS is None else _poured(slots_RS, load_E)
            if found and found.hottest < lowest and num_moves(start_RS, found.slots_RS, len(load_E)) <= limit:
                lowest = found.hottest
                cost = _cost(start_RS, found, move_price)
                if cost < least:
                    best, least = found, cost
            elif low == 1.0 and level > lowest * (1 - 3 * CLOSE):
                break  # not even a little below what is known
            else:
                low = level
            level = (low + lowest) / 2
        after_RS = _spare_one(now, load_E, spared, from_hottest)
        if after_RS is None:
            break
        now = _poured(after_RS, load_E)
    return best


def _spare_one(now: State, load_E: Floats, spared: Spared, from_hottest: bool) -> Ints | None:
    """One more copy changes owner, in `spared`; the slots without it, None when no expert would be better off."""
    copies_E = np.array([len(places) for places in now.places_E])
    for expert, further in spared.gets.items():
        copies_E[expert] += further
    share_E = load_E / copies_E
    gets = int(share_E.argmax())
    after_E = np.where(copies_E > 1, load_E / np.maximum(copies_E - 1, 1), np.inf)
    after_E[[gets, *spared.gets]] = np.inf
    gives = int(after_E.argmin())
    places = [place for place in now.places_E[gives] if place[0] not in spared.given]
    if after_E[gives] >= share_E[gets] or not places:
        return None
    # the hottest of its ranks is relieved, or the one with the lightest partner has room for anything
    rank, slot = (
        max(places, key=lambda place: now.part_RS[place[0]].sum())
        if from_hottest
        else min(places, key=lambda place: now.part_RS[place[0], 1 - place[1]])
    )
    spared.given[rank] = slot
    spared.gets[gets] = spared.gets.get(gets, 0) + 1
    slots_RS = now.slots_RS.copy()
    slots_RS[rank, slot] = len(load_E)
    return slots_RS


def _within(level: float, now: State, load_E: Floats, spared: Spared, limit: int) -> Ints | None:
    """Slots with no rank above `level`, by at most `limit` loads from `now`; None where none are found."""
    rows, stays, further = _split(level, now, load_E, spared)
    asked = [(0.0, load) for load, _ in further]
    given: list[tuple[float, float, int]] = []
    pairs: list[Pair] = []  # of `given`
    joined: list[Pair] = []
    free: list[float] = []
    num_hot = 0
    for rank, row in enumerate(rows):
        time = row[0] + row[1]
        if rank in spared.given:
            if time > level:
                return None
            free.append(level - time)
            joined.append(Pair(level - time, rank, spared.given[rank]))
        elif time > level * (1 + 1e-9):
            if max(row) > level:
                return None
            num_hot += 1
            slot = 1 - stays.get(rank, int(row[1] > row[0]))
            asked.append((level - row[1 - slot], row[slot]))
            joined.append(Pair(level - row[1 - slot], rank, slot))
        else:
            for slot in (0, 1):
                given.append((row[slot], level - row[1 - slot], rank))
                pairs.append(Pair(level - row[1 - slot], rank, slot))
    taken = fewest_to_cover(asked, free, given, limit - num_hot - len(further))
    if taken is None:
        return None
    return _hand_on(joined + [pairs[i] for i in taken], rows, now.slots_RS, further, spared, len(load_E))


def _split(
    level: float, now: State, load_E: Floats, spared: Spared
) -> tuple[list[list[float]], dict[int, int], list[tuple[float, int]]]:
    """[R][S] loads of copies, such that few ranks are above `level`: what an expert's copies cannot take below it goes
    to its further copies, or else to that one whose partner is heaviest, so that one rank must change and not all.
    Also, for ranks that must keep a certain slot, which; and the further copies, (load, expert) each.
    """
    part_RS, time_R = now.part_RS.copy(), now.part_RS.sum(1)
    stays: dict[int, int] = {}
    further: list[tuple[float, int]] = []
    hot_R = np.flatnonzero(time_R > level).tolist()
    several = {int(e) for e in now.slots_RS[hot_R].ravel() if e < len(load_E) and len(now.places_E[e]) > 1}
    for expert in sorted(several | set(spared.gets), key=lambda e: (-load_E[e], e)):
        surplus = 0.0
        relieved: list[tuple[float, int, int]] = []
        for rank, slot in now.places_E[expert]:
            less = min(time_R[rank] - level, part_RS[rank, slot])
            if less > 0:
                part_RS[rank, slot] -= less
                time_R[rank] -= less
                surplus += less
                relieved.append((float(part_RS[rank, 1 - slot]), rank, slot))
        if copies := spared.gets.get(expert, 0):
            load = surplus / copies
            if load >= level:  # too much for them
                load = float(load_E[expert]) / (copies + len(now.places_E[expert]))
            further += [(load, expert)] * copies
            surplus -= load * copies
        if surplus > 1e-9:
            _, rank, slot = max(relieved)
            part_RS[rank, slot] += surplus
            time_R[rank] += surplus
            stays[rank] = slot
    return part_RS.tolist(), stays, further


def _hand_on(
    pairs: list[Pair],
    rows: list[list[float]],
    slots_RS: Ints,
    further: list[tuple[float, int]],
    spared: Spared,
    num_experts: int,
) -> Ints | None:
    """What `pairs` give, and the further copies, the heaviest to the one with most room; None when a rank would get
    what it keeps, and none that could takes it instead.
    """
    pairs = sorted(pairs, reverse=True)
    held = [(rows[p.rank][p.slot], int(slots_RS[p.rank, p.slot])) for p in pairs if p.rank not in spared.given]
    gifts = sorted([*held, *further], reverse=True)
    kept = [int(slots_RS[p.rank, 1 - p.slot]) for p in pairs]

    def suits(pair: int, gift: int) -> bool:
        load, expert = gifts[gift]
        return load <= pairs[pair].room + 1e-9 and (expert != kept[pair] or expert == num_experts)

    for i, (_, expert) in enumerate(gifts):
        if expert == kept[i] and expert < num_experts:
            other = next((j for j in range(len(gifts)) if suits(j, i) and suits(i, j)), None)
            if other is None:
                return None
            gifts[i], gifts[other] = gifts[other], gifts[i]
    result = slots_RS.copy()
    for pair, (_, expert) in zip(pairs, gifts, strict=True):
        result[pair.rank, pair.slot] = expert
    return result
