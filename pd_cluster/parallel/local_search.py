"""One layer's slots improved step by step from where they are: swap two copies, or give a spare slot to another expert.

Every step looks at the hottest rank and at every way to relieve it: swap one of its copies with one of another rank,
move it to an empty slot, or load another copy of one of its experts over a copy elsewhere that its own expert can
spare. It takes the one that lowers the squared excess of the ranks over the mean most *for each expert that must be
loaded*, so that a few moves reach most of what a full plan would; then loads are poured again over all copies.

Copies carry the parts of their expert's load that `replicas.pour` gives them. No rank ever holds two copies of one
expert.
"""

# E experts, R ranks, S slots of a rank, V spare slots; an empty slot holds E

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from pd_cluster.parallel.replicas import Pouring, pour, pour_on

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

ROUNDS_AFTER_STEP = 3


class Change(NamedTuple):
    """(rank, slot, expert, its load there) for every slot that changes hands, and what that brings."""

    puts: tuple[tuple[int, int, int, float], ...]
    gain: float  # squared excess saved
    num_moves: int  # experts to load


class LayerSearch:
    """`slots_RS` is changed in place; an empty slot holds `len(load_E)`. `speed_R` are relative speeds."""

    def __init__(self, slots_RS: Ints, load_E: Floats, speed_R: Floats) -> None:
        num_ranks, self.num_experts = len(slots_RS), len(load_E)
        self.slots_RS = slots_RS
        self.speed_R = speed_R
        self.mean = float(load_E.sum() / speed_R.sum())
        self._load_E: list[float] = load_E.tolist()
        self._speeds: list[float] = speed_R.tolist()
        self._holds_RE = np.zeros((num_ranks, self.num_experts + 1), bool)
        self._holds_RE[np.arange(num_ranks)[:, None], slots_RS] = True
        self._holds_RE[:, -1] = False
        self._copies_E = np.bincount(slots_RS.ravel(), minlength=self.num_experts + 1)
        self._ranks_E: list[list[int]] = [[] for _ in range(self.num_experts)]
        self._slots_E: list[list[int]] = [[] for _ in range(self.num_experts)]
        for rank, row in enumerate(slots_RS.tolist()):
            for slot, expert in enumerate(row):
                if expert < self.num_experts:
                    self._ranks_E[expert].append(rank)
                    self._slots_E[expert].append(slot)
        self._pouring: Pouring = pour(self._load_E, self._ranks_E, self._speeds)

    def hottest(self) -> float:
        """The hottest rank's time over the mean."""
        loads, speeds = self._pouring.loads_R, self._speeds
        return max(load / speed for load, speed in zip(loads, speeds, strict=True)) / self.mean

    def step(self) -> Change | None:
        """Take the best change; None when none helps."""
        part_RS = self._parts()
        time_R = part_RS.sum(1) / self.speed_R
        hot = int(time_R.argmax())
        found = [c for c in (self._best_swap(hot, time_R, part_RS), self._best_copy(hot, time_R, part_RS)) if c]
        worth = 1e-9 * float(self._excess(time_R).sum())
        best = max(found, key=lambda c: c.gain / c.num_moves, default=None)
        if best is None or best.gain <= worth:
            return None
        touched = {expert for _, _, expert, _ in best.puts}
        for rank, slot, expert, load in best.puts:
            touched.add(int(self.slots_RS[rank, slot]))
            self._put(rank, slot, expert, load)
        for expert in touched - {self.num_experts}:
            self._make_whole(expert)
        pour_on(self._pouring, self._load_E, self._ranks_E, self._speeds, ROUNDS_AFTER_STEP)
        return best

    def _parts(self) -> Floats:
        part_RS = np.zeros(self.slots_RS.shape)
        for ranks, slots, parts in zip(self._ranks_E, self._slots_E, self._pouring.parts, strict=True):
            for rank, slot, part in zip(ranks, slots, parts, strict=True):
                part_RS[rank, slot] = part
        return part_RS

    def _put(self, rank: int, slot: int, expert: int, load: float) -> None:
        """`expert` into a slot, with `load` of its own."""
        parts, loads_R = self._pouring
        old = int(self.slots_RS[rank, slot])
        if old < self.num_experts:
            index = list(zip(self._ranks_E[old], self._slots_E[old], strict=True)).index((rank, slot))
            loads_R[rank] -= parts[old].pop(index)
            self._ranks_E[old].pop(index)
            self._slots_E[old].pop(index)
            self._copies_E[old] -= 1
            self._holds_RE[rank, old] = rank in self._ranks_E[old]
        self.slots_RS[rank, slot] = expert
        if expert < self.num_experts:
            self._ranks_E[expert].append(rank)
            self._slots_E[expert].append(slot)
            parts[expert].append(load)
            loads_R[rank] += load
            self._copies_E[expert] += 1
            self._holds_RE[rank, expert] = True

    def _make_whole(self, expert: int) -> None:
        """What a copy that is gone carried goes to the coolest of the others."""
        parts, loads_R = self._pouring
        ranks = self._ranks_E[expert]
        index = min(range(len(ranks)), key=lambda i: loads_R[ranks[i]] / self._speeds[ranks[i]])
        missing = self._load_E[expert] - sum(parts[expert])
        parts[expert][index] += missing
        loads_R[ranks[index]] += missing

    def _excess(self, time: Floats) -> Floats:
        return np.maximum(time - self.mean, 0.0) ** 2

    def _best_swap(self, hot: int, time_R: Floats, part_RS: Floats) -> Change:
        """Slot s of the hot rank against slot t of rank r."""
        mine_S = self.slots_RS[hot]
        shift_SRT = part_RS[hot][:, None, None] - part_RS[None]
        excess_R = self._excess(time_R)
        gain_SRT = excess_R[hot] + excess_R[None, :, None]
        gain_SRT = gain_SRT - self._excess(time_R[hot] - shift_SRT / self.speed_R[hot])
        gain_SRT -= self._excess(time_R[None, :, None] + shift_SRT / self.speed_R[None, :, None])
        clash_SRT = self._holds_RE[:, mine_S].T[:, :, None] | self._holds_RE[hot, self.slots_RS][None]
        gain_SRT[clash_SRT | (mine_S == self.num_experts)[:, None, None]] = -np.inf
        empty_RT = self.slots_RS == self.num_experts
        per_move = gain_SRT / np.where(empty_RT, 1.0, 2.0)[None]
        s, r, t = (int(i) for i in np.unravel_index(int(per_move.argmax()), per_move.shape))
        puts = (
            (hot, s, int(self.slots_RS[r, t]), float(part_RS[r, t])),
            (r, t, int(mine_S[s]), float(part_RS[hot, s])),
        )
        return Change(puts, float(gain_SRT[s, r, t]), 1 if empty_RT[r, t] else 2)

    def _best_copy(self, hot: int, time_R: Floats, part_RS: Floats) -> Change | None:
        """Another copy of an expert of the hot rank, over an empty slot or a copy that its expert can spare.

        What the spare copy carried goes to the coolest other rank that holds that expert; the new copy takes what
        levels its rank with the hot one.
        """
        empty_RS = self.slots_RS == self.num_experts
        rank_V, slot_V = np.nonzero(empty_RS | (self._copies_E[self.slots_RS] > 1))
        rank_V, slot_V = rank_V[rank_V != hot], slot_V[rank_V != hot]
        if not len(rank_V):
            return None
        old_V, freed_V = self.slots_RS[rank_V, slot_V], part_RS[rank_V, slot_V]
        rows = np.arange(len(rank_V))
        takes_VR = np.where(self._holds_RE.T[old_V], time_R[None], np.inf)
        takes_VR[rows, rank_V] = np.inf
        taker_V = takes_VR.argmin(1)
        taken_V = self._excess(time_R[taker_V] + freed_V / self.speed_R[taker_V]) - self._excess(time_R[taker_V])
        hot_V = np.full(len(rank_V), time_R[hot])
        hot_V[taker_V == hot] += freed_V[taker_V == hot] / self.speed_R[hot]  # no other rank holds that expert
        taken_V[(taker_V == hot) | (old_V == self.num_experts)] = 0.0
        under_V = time_R[rank_V] - freed_V / self.speed_R[rank_V]
        width_V = 1.0 / (1.0 / self.speed_R[hot] + 1.0 / self.speed_R[rank_V])
        load_VS = np.clip(((hot_V - under_V) * width_V)[:, None], 0.0, part_RS[hot][None])
        excess_R = self._excess(time_R)
        gain_VS = excess_R[hot] + (excess_R[rank_V] - taken_V)[:, None]
        gain_VS = gain_VS - self._excess(hot_V[:, None] - load_VS / self.speed_R[hot])
        gain_VS -= self._excess(under_V[:, None] + load_VS / self.speed_R[rank_V][:, None])
        mine_S = self.slots_RS[hot]
        gain_VS[self._holds_RE[rank_V[:, None], mine_S[None]] | (mine_S == self.num_experts)[None]] = -np.inf
        v, s = (int(i) for i in np.unravel_index(int(gain_VS.argmax()), gain_VS.shape))
        # the new copy is poured full after the step
        puts = ((int(rank_V[v]), int(slot_V[v]), int(mine_S[s]), 0.0),)
        return Change(puts, float(gain_VS[v, s]), 1)


def shaken(slots_RS: Ints, num_experts: int, rng: np.random.Generator) -> Ints:
    """A copy with a few changes at random that keep the rules: where a search that is stuck may start again."""
    slots_RS = slots_RS.copy()
    num_ranks, per_rank = slots_RS.shape
    for _ in range(3):
        one, other = rng.permutation(num_ranks)[:2] if num_ranks > 1 else (0, 0)
        s, t = rng.integers(per_rank, size=2)
        given, taken = slots_RS[one, s], slots_RS[other, t]
        if given == num_experts or given in slots_RS[other]:
            continue
        copies = np.count_nonzero(slots_RS == taken)
        if taken == num_experts or (copies > 1 and rng.random() < 0.5):
            slots_RS[other, t] = given
        elif taken not in slots_RS[one]:
            slots_RS[one, s], slots_RS[other, t] = taken, given
    return slots_RS
