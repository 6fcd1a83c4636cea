"""Where ranks lie on a Ray cluster: one placement group for each life, given back when the life is over.

    asked for -> taken -> given back
         ^ v
       in line, when there is no room where ranks serve already: a cluster that grows has it at the next try

A prefill instance is packed, for its ranks talk to each other most. A decode group that lives as a whole is spread over
nodes. A DP rank that lives on its own goes, whole, to the node with the fewest of its engine, so that a lost node takes
few of them with it.
"""

import math
import threading
import time
from collections import Counter
from collections.abc import Iterable, Mapping

import ray
from msgspec import Struct
from ray.exceptions import GetTimeoutError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from pd_cluster.devices import gpu_share
from pd_cluster.errors import Unavailable
from pd_cluster.ids import EngineEpoch, EngineId
from pd_cluster.launch.spec import RankSpec

Place = tuple[EngineId, int | None]
"""Of an engine, or of one of its DP ranks where these live and die one by one."""

Resources = Mapping[str, float]

PLACE_TIMEOUT_S = 10.0
REPLACE_TIMEOUT_S = 1.0
"""For a place in a cluster that serves: the supervisor asks again later."""

PATIENCE_S = 120.0
"""Whoever stands in line so long without a new try is not wanted any more: pauses between tries are shorter."""


class InLine(Struct, frozen=True):
    group: PlacementGroup
    asked_s: float


class Places:
    """`spare_cpus` of the cluster are left to others. One thread takes places; any may give them back."""

    def __init__(self, spare_cpus: float = 0.0) -> None:
        self._spare_cpus = spare_cpus
        self._taken: dict[EngineEpoch, PlacementGroup] = {}
        self._in_line: dict[Place, InLine] = {}
        self._has_served = False

    @property
    def taken(self) -> frozenset[EngineEpoch]:
        """The lives that have a place."""
        return frozenset(self._taken)

    @property
    def in_line(self) -> list[PlacementGroup]:
        return [waiting.group for waiting in self._in_line.values()]

    def take(
        self, lives: Mapping[EngineEpoch, list[RankSpec]], nodes_of: Iterable[tuple[EngineId, str]]
    ) -> dict[EngineEpoch, PlacementGroup]:
        """A place for each of these lives with a bundle for each rank, or none at all. `nodes_of`: where DP ranks of
        engines run, as (engine, node id). Raises Unavailable and RayError.
        """
        specs = [spec for ranks in lives.values() for spec in ranks]
        share = self._cpu_share(specs)
        bundles = {
            life: [bundle(spec, share, gpu_share_of(spec, specs)) for spec in ranks] for life, ranks in lives.items()
        }
        alone = {life: total(bundles[life]) for life, ranks in lives.items() if ranks[0].is_elastic}
        nodes = {node["NodeID"]: node["Resources"] for node in ray.nodes() if node["Alive"]}
        targets = spread(alone, {life: lives[life][0].engine_id for life in alone}, nodes, Counter(nodes_of))
        groups: dict[EngineEpoch, PlacementGroup] = {}
        try:
            for life, ranks in lives.items():
                groups[life] = self._ask(ranks[0], bundles[life], targets.get(life))
            self._wait_placed(groups, lives)
        except BaseException:
            in_line = self.in_line
            for group in groups.values():
                if group not in in_line:
                    remove_placement_group(group)
            raise
        self._taken |= groups
        return groups

    def give_back(self, lives: Iterable[EngineEpoch]) -> None:
        for life in list(lives):
            group = self._taken.pop(life, None)
            if group is not None:
                remove_placement_group(group)

    def close(self) -> None:
        self.give_back(self._taken)
        for group in self.in_line:
            remove_placement_group(group)
        self._in_line.clear()

    def _cpu_share(self, specs: list[RankSpec]) -> float:
        """CPUs asked of Ray for each thread of a rank: 1 where that fits, else an even share of what is there."""
        wanted = sum(spec.threads for spec in specs)
        free = max(ray.available_resources().get("CPU", 0.0) - self._spare_cpus, 0.0)
        return 1.0 if wanted <= free else max(math.floor(free / wanted * 1000) / 1000, 0.001)

    def _ask(self, spec: RankSpec, bundles: list[dict[str, float]], target: str | None) -> PlacementGroup:
        """In line already, unless that was for more than is asked for now and is not there yet."""
        waiting = self._in_line.pop(place_of(spec), None)
        if waiting is not None:
            is_less = total(bundles)["CPU"] < total(waiting.group.bundle_specs)["CPU"]
            if not is_less or placement_group_table(waiting.group)["state"] == "CREATED":
                return waiting.group
            remove_placement_group(waiting.group)
        if target is not None:  # one node: a soft target is for such groups only
            return placement_group(bundles, strategy="STRICT_PACK", _soft_target_node_id=target)
        is_packed = spec.role == "prefill" or spec.is_elastic
        return placement_group(bundles, strategy="PACK" if is_packed else "SPREAD")

    def _wait_placed(
        self, groups: dict[EngineEpoch, PlacementGroup], lives: Mapping[EngineEpoch, list[RankSpec]]
    ) -> None:
        """Raises Unavailable; where ranks serve already, the groups stay in line for the next try."""
        timeout_s = REPLACE_TIMEOUT_S if self._has_served else PLACE_TIMEOUT_S
        try:
            ray.get([group.ready() for group in groups.values()], timeout=timeout_s)
        except GetTimeoutError as error:
            if self._has_served:
                for life, group in groups.items():
                    self._stand_in_line(place_of(lives[life][0]), group)
            free = ray.available_resources()
            gpus = any("GPU" in each for group in groups.values() for each in group.bundle_specs)
            what = f"{free.get('CPU', 0.0):g} CPUs" + (f" and {free.get('GPU', 0.0):g} GPUs" if gpus else "")
            num_ranks = sum(map(len, lives.values()))
            raise Unavailable(
                f"the Ray cluster found no place for {num_ranks} ranks in {timeout_s:g} s ({what} are free): "
                "add nodes, end other jobs or shrink the pools"
            ) from error
        self._has_served = True

    def _stand_in_line(self, place: Place, group: PlacementGroup) -> None:
        waiting = self._in_line[place] = InLine(group, time.monotonic())
        timer = threading.Timer(PATIENCE_S, self._leave_line, (place, waiting))
        timer.daemon = True
        timer.start()

    def _leave_line(self, place: Place, waiting: InLine) -> None:
        """Its engine was ended or has shrunk: what it asked for would be kept from others, and used by nobody."""
        if self._in_line.get(place) is waiting and self._in_line.pop(place, None) is waiting:
            remove_placement_group(waiting.group)


def place_of(spec: RankSpec) -> Place:
    return spec.engine_id, spec.dp_rank if spec.is_elastic else None


def bundle(spec: RankSpec, cpu_share: float, gpu_share: float) -> dict[str, float]:
    """What a placement group sets aside for a rank: CPUs for its threads, and its part of a GPU."""
    return {"CPU": spec.threads * cpu_share} | ({"GPU": gpu_share} if gpu_share else {})


def gpu_share_of(spec: RankSpec, specs: list[RankSpec]) -> float:
    """The part of a GPU that a rank gets where these start together."""
    num_gpus = int(ray.cluster_resources().get("GPU", 0.0))
    largest = max(each.num_ranks for each in specs)
    return gpu_share(spec.section.device, spec.ranks_on_host, largest, num_gpus)


def total(bundles: Iterable[Resources]) -> dict[str, float]:
    """What these ask for together."""
    found: Counter[str] = Counter()
    for each in bundles:
        found.update(each)
    return dict(found)


def spread(
    wanted: Mapping[EngineEpoch, Resources],
    engine_of: Mapping[EngineEpoch, EngineId],
    nodes: Mapping[str, Resources],
    num_there: Mapping[tuple[EngineId, str], int],
) -> dict[EngineEpoch, str]:
    """The node for each of these lives: of those that are large enough, the one with the fewest of its engine.

    A life that no node can hold is left out. `nodes`: what each has, used or not; `num_there`: DP ranks by engine and
    node.
    """
    counts = Counter(num_there)
    targets: dict[EngineEpoch, str] = {}
    for life, needs in wanted.items():
        able = [node for node, has in nodes.items() if all(has.get(key, 0.0) >= need for key, need in needs.items())]
        if able:
            targets[life] = min(able, key=lambda node: counts[engine_of[life], node])
            counts[engine_of[life], targets[life]] += 1
    return targets
