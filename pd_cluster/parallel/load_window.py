"""How much work each expert had lately, and whether that calls for another placement.

Every rank counts the tokens that it routed to each expert of each layer, from its start on; the engine's hub reads
these totals now and then. `LoadWindow` turns them into the counts of the last seconds. `Trigger` looks at what the
current placement makes of those counts and says when planning is due and whether a plan is worth its loads:

    quiet --ratio >= threshold--> rising --for sustain_s--> due --plan--> judged --> quiet for cooldown_s
              ^                     |
              +--ratio < release----+

Both are plain state with time as an argument.
"""

# L MoE layers, E experts, R ranks

import math
from collections import deque
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from msgspec import Struct

from pd_cluster.errors import ConfigError
from pd_cluster.ids import Rank
from pd_cluster.parallel.placement import Placement
from pd_cluster.parallel.placement_status import HotExpert, LayerLoad
from pd_cluster.parallel.replicas import rank_loads

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]

Totals = Sequence[Sequence[int]] | Ints
"""[L][E] tokens that one source has routed to every expert since its start."""


class LoadWindow:
    """Tokens per layer and expert of the last `window_s` seconds, over all sources.

    A source is whoever keeps totals: a DP rank's lead, or each rank. Tokens belong to the moment at which they are
    reported, to within `window_s / num_buckets`.
    """

    def __init__(self, num_layers: int, num_experts: int, *, window_s: float = 30.0, num_buckets: int = 15) -> None:
        if not (window_s > 0 and num_buckets >= 1):
            raise ConfigError(f"a window needs a length and buckets, got {window_s} s and {num_buckets}")
        self._shape = (num_layers, num_experts)
        self._window_s = window_s
        self._bucket_s = window_s / num_buckets
        self._totals: dict[int, tuple[str, Ints]] = {}
        self._buckets: deque[tuple[int, Ints]] = deque()  # (its number in time, counts), ascending
        self._sum_LE: Ints = np.zeros(self._shape, np.int64)

    def observe(self, source: int, totals_LE: Totals, now_s: float, *, life: str = "") -> int:
        """The totals of `source` as of now; how many (token, expert) pairs are new.

        What a source had counted before it was first seen belongs to no window. A source that restarts, by another
        `life` or by a total that shrank, begins at zero: all that it reports is new. Time must not go backwards.
        """
        totals_LE = np.array(totals_LE, np.int64)
        assert totals_LE.shape == self._shape, f"counts of {totals_LE.shape} for a model of {self._shape}"
        before = self._totals.get(source)
        self._totals[source] = (life, totals_LE)
        if before is None:
            return 0
        new_LE = totals_LE - before[1]
        if before[0] != life or (new_LE < 0).any():
            new_LE = totals_LE
        number = int(now_s // self._bucket_s)
        self._expire(now_s)
        if not self._buckets or self._buckets[-1][0] < number:
            self._buckets.append((number, np.zeros(self._shape, np.int64)))
        self._buckets[-1][1].__iadd__(new_LE)
        self._sum_LE += new_LE
        return int(new_LE.sum())

    def forget(self, source: int) -> None:
        """It is gone. What it counted lately stays in the window; when it is seen again, that is the first time."""
        self._totals.pop(source, None)

    def loads(self, now_s: float) -> Ints:
        """[L, E] tokens of the window that ends now."""
        self._expire(now_s)
        return self._sum_LE.copy()

    def _expire(self, now_s: float) -> None:
        oldest = int((now_s - self._window_s) // self._bucket_s)
        while self._buckets and self._buckets[0][0] <= oldest:
            self._sum_LE -= self._buckets.popleft()[1]


class TriggerPolicy(Struct, frozen=True, kw_only=True):
    """When another placement is worth it. Ratios are of the hottest rank's load to the mean, averaged over layers: the
    layers of a step run one after the other, and each takes as long as its hottest rank.
    """

    threshold: float = 1.2  # a ratio from which on something should change
    release: float | None = None  # below it all is well again; default: three quarters of the way up
    sustain_s: float = 10.0  # how long the ratio must not have been below `release`
    cooldown_s: float = 60.0  # from one plan to the next, whatever became of the first
    noise: float = 0.05  # counts are too few while chance alone makes a ratio of 1 plus this
    margin: float = 0.05  # the least by which a plan must lower the ratio
    horizon_s: float = 300.0  # how long loads are taken to stay alike: within it the loads must have paid
    experts_share: float = 0.5  # the part of a step that lasts as long as its hottest rank needs
    load_bytes_s: float = 1e9  # how fast a rank loads experts while it steps
    slowdown: float = 0.2  # by how much steps are longer meanwhile


class Verdict(Struct, frozen=True, kw_only=True):
    """What is made of a plan. `before` and `after` are the ratios of the current and the planned placement."""

    worth_it: bool
    reason: str
    before: float
    after: float
    moved_bytes: int  # over all ranks


class Trigger:
    """Asked by the hub now and then: `ratio` of the window's counts, `due`, then `judge` of what was planned.

    `ratio` and `judge` pour loads over copies in every layer: milliseconds for a small engine, up to a second for a
    wide one. They belong on the thread that plans.
    """

    def __init__(self, policy: TriggerPolicy | None = None) -> None:
        self.policy = policy or TriggerPolicy()
        threshold = self.policy.threshold
        self._release = 1.0 + 0.75 * (threshold - 1.0) if self.policy.release is None else self.policy.release
        if not 1.0 <= self._release <= threshold:
            raise ConfigError(f"a threshold of {threshold} needs a release between 1 and it, got {self._release}")
        self._rising_since_s: float | None = None
        self._quiet_until_s = -math.inf

    def ratio(
        self,
        current: Placement,
        loads_LE: Floats | Ints,
        weights_LEC: list[list[list[float]]] | None = None,
        *,
        live: Sequence[int] | None = None,
    ) -> float | None:
        """`predicted_ratio`, or None while there are too few counts to say anything."""
        if not enough(loads_LE, current.num_ranks if live is None else len(live), self.policy.noise):
            return None
        return predicted_ratio(current, loads_LE, weights_LEC, live=live)

    def due(self, ratio: float | None, now_s: float) -> bool:
        """Whether to plan now, `ratio` being what the call of that name said just now."""
        if ratio is None or ratio < self._release:
            self._rising_since_s = None
            return False
        if self._rising_since_s is None:
            if ratio < self.policy.threshold:
                return False
            self._rising_since_s = now_s
        sustained = now_s - self._rising_since_s >= self.policy.sustain_s
        return sustained and ratio >= self.policy.threshold and now_s >= self._quiet_until_s

    def judge(
        self,
        current: Placement,
        planned: Placement,
        loads_LE: Floats | Ints,
        *,
        expert_bytes: int,
        now_s: float,
        weights_LEC: list[list[list[float]]] | None = None,
        live: Sequence[int] | None = None,
    ) -> Verdict:
        """Whether `planned` pays for the experts that must be loaded, `expert_bytes` each; the cooldown begins.

        `weights_LEC`: those that the current placement runs with, so that a plan that only changes weights, which moves
        nothing, counts as well.
        """
        before = predicted_ratio(current, loads_LE, weights_LEC, live=live)
        after = predicted_ratio(planned, loads_LE, live=live)
        self.planned(now_s)
        per_rank = [_moved_to(current, planned, Rank(rank)) for rank in range(planned.num_ranks)]
        policy = self.policy
        saved_s = policy.horizon_s * policy.experts_share * (1.0 - after / before)
        loading_s = max(per_rank) * expert_bytes / policy.load_bytes_s
        gain = before - after
        if gain < policy.margin:
            reason = f"it lowers the ratio from {before:.3f} to {after:.3f}, less than {policy.margin:g}"
        elif policy.slowdown * loading_s >= saved_s:
            reason = f"{loading_s:.1f} s of loading cost more than the {saved_s:.1f} s saved in {policy.horizon_s:g} s"
        else:
            reason = f"from {before:.3f} to {after:.3f}"
        return Verdict(
            worth_it=gain >= policy.margin and policy.slowdown * loading_s < saved_s,
            reason=reason,
            before=before,
            after=after,
            moved_bytes=sum(per_rank) * expert_bytes,
        )

    def planned(self, now_s: float) -> None:
        """A plan was made, or a change of placement has ended one way or another: nothing more for a while."""
        self._quiet_until_s = max(self._quiet_until_s, now_s + self.policy.cooldown_s)
        self._rising_since_s = None


def predicted_ratios(
    placement: Placement,
    loads_LE: Floats | Ints,
    weights_LEC: list[list[list[float]]] | None = None,
    *,
    live: Sequence[int] | None = None,
) -> Floats:
    """[L] the hottest rank's load over the mean of the `live` ones (default all); 1 for a layer without load.

    Copies take the shares of `weights_LEC` (`replicas.weights` of each layer), or without it the best there are.
    """
    num_live = placement.num_ranks if live is None else len(set(live))
    ratios = np.ones(len(placement.layers))
    for layer, load_E in enumerate(np.asarray(loads_LE, np.float64)):
        loads_R = rank_loads(placement, layer, load_E.tolist(), None if weights_LEC is None else weights_LEC[layer])
        if total := sum(loads_R):
            ratios[layer] = max(loads_R) * num_live / total
    return ratios


def predicted_ratio(
    placement: Placement,
    loads_LE: Floats | Ints,
    weights_LEC: list[list[list[float]]] | None = None,
    *,
    live: Sequence[int] | None = None,
) -> float:
    """`predicted_ratios` averaged over the layers that had any load; 1 when none had."""
    ratios_L = predicted_ratios(placement, loads_LE, weights_LEC, live=live)
    busy_L = np.asarray(loads_LE).sum(1) > 0
    return float(ratios_L[busy_L].mean()) if busy_L.any() else 1.0


def layer_loads(
    placement: Placement,
    loads_LE: Floats | Ints,
    weights_LEC: list[list[list[float]]] | None = None,
    *,
    live: Sequence[int] | None = None,
    most: int = 3,
) -> list[LayerLoad]:
    """What people are told of a window; empty when it holds nothing."""
    if not np.asarray(loads_LE).any():
        return []
    result = []
    ratios_L = predicted_ratios(placement, loads_LE, weights_LEC, live=live)
    for layer, load_E in enumerate(np.asarray(loads_LE, np.float64)):
        total, copies = max(float(load_E.sum()), 1.0), placement.copies(layer)
        hottest = [int(e) for e in np.argsort(-load_E, kind="stable")[:most] if load_E[e]]
        experts = [HotExpert(e, round(float(load_E[e]) / total, 4), len(copies[e])) for e in hottest]
        result.append(LayerLoad(round(float(ratios_L[layer]), 4), experts))
    return result


def enough(loads_LE: Floats | Ints, num_ranks: int, noise: float = 0.05) -> bool:
    """Whether the counts say something: the hottest of `num_ranks` equal ranks stands sqrt(2 ln R / n) above the mean
    of n pairs by chance alone (extreme of R Gaussians), and that must be below `noise`.
    """
    busy_L = np.asarray(loads_LE).sum(1)
    busy_L = busy_L[busy_L > 0]
    if not len(busy_L):
        return False
    return bool(2 * math.log(max(num_ranks, 2)) * num_ranks <= noise**2 * float(np.median(busy_L)))


def _moved_to(current: Placement, planned: Placement, rank: Rank) -> int:
    return sum(
        len(set(planned.rank_slots(layer, rank)) - set(current.rank_slots(layer, rank)) - {None})
        for layer in range(len(current.layers))
    )
