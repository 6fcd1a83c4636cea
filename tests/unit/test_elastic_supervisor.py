"""The supervisor of an elastic engine, with ranks that are plain objects and beat on a thread. The store is real."""

import asyncio
import threading
import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import pytest
from harness import until

from pd_cluster.config import ClusterConfig, load_config
from pd_cluster.errors import InvalidRequest, PdClusterError, Unavailable
from pd_cluster.ids import EngineId, Rank
from pd_cluster.launch.heartbeats import STILL_S
from pd_cluster.launch.launcher import NODE_LOST, RankHandle
from pd_cluster.launch.lifecycle import EngineDead, EngineEvent, EngineLost, EngineUp
from pd_cluster.launch.roles import engine_shape
from pd_cluster.launch.spec import Beat, LoadedModel, RankReport, RankSpec, Release
from pd_cluster.launch.store import RankStore
from pd_cluster.launch.supervised import Engine, Seen
from pd_cluster.launch.supervisor import Supervisor
from pd_cluster.parallel.roster import Roster

DECODE = EngineId("decode-0")
BEAT_S = 0.05


class FakeRank:
    def __init__(self, spec: RankSpec, model: LoadedModel) -> None:
        self.spec = spec
        self.model = model
        self.pid = 1000 + spec.rank
        self.code: int | None = None
        self.died_s = 0.0
        self.calls: list[str] = []
        self.deaf = False  # out of the launcher's reach
        self.beats = spec.role == "decode"
        self.suspects: list[Rank] = []
        self.store = RankStore(spec.store_host, spec.store_port, spec.epoch, spec.rank, spec.life)

    def report(self) -> None:
        spec = self.spec
        address = f"{spec.worker_id}@{spec.worker_epoch}" if spec.is_lead else None
        self.store.report(RankReport(rank=spec.rank, pid=self.pid, control_address=address, model=self.model))

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.calls.append("terminate")
        self.die(0)

    def kill(self) -> None:
        self.calls.append("kill")
        if not self.deaf:
            self.die(-9)

    def die(self, code: int) -> None:
        self.code, self.died_s, self.beats = code, time.monotonic(), False

    def wait(self, timeout_s: float) -> int | None:
        return self.code

    def log_tail(self, num_lines: int = 20) -> str:
        return ""


class FakeLauncher:
    """Ranks report as soon as they are started unless `late`; those of decode engines beat until they are dead."""

    host = "127.0.0.1"

    def __init__(self) -> None:
        self.ranks: list[FakeRank] = []
        self.starts: list[list[str]] = []
        self.late = False
        self.model = LoadedModel("/models/m", "aa", num_experts=12, expert_slots=12)
        self.errors: list[PdClusterError] = []
        self.gate = threading.Event()
        self.gate.set()
        self._over = threading.Event()
        self._beating = threading.Thread(target=self._beat)
        self._beating.start()

    def start(self, specs: list[RankSpec]) -> list[RankHandle]:
        self.gate.wait(10)
        if self.errors:
            raise self.errors.pop()
        started = [FakeRank(spec, self.model) for spec in specs]
        self.starts.append([spec.name for spec in specs])
        self.ranks += started
        if not self.late:
            for rank in started:
                rank.report()
        return list(started)

    def _beat(self) -> None:
        count = 0
        while not self._over.wait(BEAT_S):
            count += 1
            for rank in list(self.ranks):
                if rank.beats:
                    rank.store.beat(Beat(count, rank.suspects))

    def close(self) -> None:
        self._over.set()
        self._beating.join()

    def rank(self, rank: int) -> FakeRank:
        """The decode rank of that number that was started last."""
        return [each for each in self.ranks if each.spec.name == f"decode-0.{rank}"][-1]


class Running:
    """A supervisor of one prefill rank and one elastic decode engine."""

    def __init__(self, *overrides: str) -> None:
        self.launcher = FakeLauncher()
        self.events: list[EngineEvent] = []
        self.times_s: list[float] = []
        self.supervisor = Supervisor(config(*overrides), self.launcher, on_event=self._on_event)

    async def _on_event(self, event: EngineEvent) -> None:
        self.events.append(event)
        self.times_s.append(time.monotonic())

    async def __aenter__(self) -> Self:
        await self.supervisor.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.supervisor.__aexit__(kind, error, trace)

    async def until(self, condition: Callable[[], bool]) -> None:
        await until(condition, 20)

    def of(self, kind: type[EngineEvent]) -> list[EngineEvent]:
        return [event for event in self.events if isinstance(event, kind) and event.engine_id == DECODE]

    def roster(self, generation: int) -> Roster:
        """As a rank that waits for it gets it."""
        return self.launcher.rank(0).store.roster(generation)

    @property
    def generation(self) -> int:
        generation: int = self.supervisor.engines[DECODE].life.generation  # type: ignore[union-attr]
        return generation


def config(*overrides: str) -> ClusterConfig:
    return load_config(overrides=["decode.data_parallel=3", "decode.dispatcher=nixl", *overrides])


async def test_every_member_starts_with_a_life_of_its_own_and_the_first_roster() -> None:
    async with Running("decode.tensor_parallel=2") as running:
        decode = [rank.spec for rank in running.launcher.ranks if rank.spec.role == "decode"]
        assert len({spec.epoch for spec in decode}) == 1
        lives = [next(spec.worker_epoch for spec in decode if spec.dp_rank == dp_rank) for dp_rank in range(3)]
        assert len({*lives, decode[0].epoch}) == 4
        assert running.roster(0) == Roster(generation=0, tensor_parallel=2, lives=tuple(lives))
        assert running.of(EngineUp) == [
            EngineUp(DECODE, life, [f"decode-0/{dp_rank}@{life}"], dp_rank) for dp_rank, life in enumerate(lives)
        ]
        assert len(running.launcher.starts) == 1
        prefill = running.launcher.ranks[0].spec
        assert prefill.life is None
    assert all(rank.code is not None for rank in running.launcher.ranks)
    assert {event.epoch for event in running.of(EngineDead)} == set(lives)  # type: ignore[union-attr]


async def test_a_dead_rank_is_off_the_roster_long_before_a_heartbeat_is_missed_and_replaced_alone() -> None:
    async with Running() as running:
        victim = running.launcher.rank(1)
        before = running.roster(0)
        victim.die(-9)
        await running.until(lambda: running.generation == 1)
        took_s = time.monotonic() - victim.died_s
        print(f"off the roster after {1000 * took_s:.0f} ms")
        assert took_s < 2.5
        after = running.roster(1)
        assert after.lives == (before.lives[0], None, before.lives[2])
        await running.until(lambda: running.generation == 2)
        assert running.launcher.starts[1:] == [["decode-0.1"]]
        replaced = running.launcher.rank(1).spec
        assert running.roster(2).lives == (before.lives[0], replaced.life, before.lives[2])
        assert replaced.epoch == victim.spec.epoch
        lost, dead, up = running.events[-3:]
        assert isinstance(lost, EngineLost)
        assert (lost.epoch, lost.addresses) == (before.lives[1], [f"decode-0/1@{before.lives[1]}"])
        assert "decode-0.1 was killed by SIGKILL" in lost.reason
        assert dead == EngineDead(DECODE, victim.spec.worker_epoch, frozenset({Rank(1)}))
        assert isinstance(up, EngineUp)
        assert up.epoch == replaced.life


async def test_a_rank_that_is_lost_with_its_node_has_not_died_by_itself() -> None:
    async with Running() as running:
        victim = running.launcher.rank(1)
        victim.die(NODE_LOST)
        await running.until(lambda: running.generation == 2)
        (lost,) = running.of(EngineLost)
        assert isinstance(lost, EngineLost)
        assert "decode-0.1 was lost with its node" in lost.reason
        assert running.of(EngineDead) == [EngineDead(DECODE, victim.spec.worker_epoch, frozenset())]
        again = running.launcher.rank(1)
        again.die(1)
        await running.until(lambda: running.generation == 4)
        assert running.of(EngineDead)[1:] == [EngineDead(DECODE, again.spec.worker_epoch, frozenset({Rank(1)}))]


async def test_a_replacement_that_has_loaded_other_weights_is_refused_by_name(caplog: pytest.LogCaptureFixture) -> None:
    async with Running() as running:
        running.launcher.model = LoadedModel("/models/m", "bb")
        victim = running.launcher.rank(1)
        victim.die(-9)
        await running.until(lambda: any(record.message == "dp_rank_refused" for record in caplog.records))
        refused = running.launcher.rank(1)
        assert refused is not victim
        await running.until(lambda: EngineDead(DECODE, refused.spec.worker_epoch) in running.of(EngineDead))
        assert running.generation == 1, "no roster has it"
        assert running.roster(1).members == [0, 2]
        assert len(running.of(EngineUp)) == 3
        said = str([vars(record) for record in caplog.records])
        assert "/models/m has identity bb there, theirs, from /models/m, is aa" in said


async def test_a_rank_that_stands_still_is_killed_sooner_when_its_peers_wait_for_it() -> None:
    async with Running() as running:
        await asyncio.sleep(3 * BEAT_S)  # so that all have beaten
        stopped_s = time.monotonic()
        running.launcher.rank(0).suspects = [Rank(2)]
        victim = running.launcher.rank(2)
        victim.beats = False
        await running.until(lambda: running.generation == 1)
        assert 0.3 < time.monotonic() - stopped_s < 2.5
        assert running.roster(1).members == [0, 1]
        await running.until(lambda: victim.calls == ["kill"])
        await running.until(lambda: len(running.of(EngineDead)) == 1)
        assert running.of(EngineDead)[0].first == frozenset({Rank(2)})  # type: ignore[union-attr]


async def test_a_member_out_of_reach_is_revoked_and_not_replaced_before_it_is_dead() -> None:
    async with Running() as running:
        victim = running.launcher.rank(1)
        victim.deaf, victim.beats = True, False
        running.launcher.rank(0).suspects = [Rank(1)]
        await running.until(lambda: running.generation == 1)
        assert victim.store.lease_held(0.0) is False
        assert running.launcher.rank(0).store.lease_held(0.0) is True
        await asyncio.sleep(0.3)
        assert not running.of(EngineDead)
        assert len(running.launcher.starts) == 1
        victim.die(1)
        await running.until(lambda: running.generation == 2)
        assert running.launcher.starts[1] == ["decode-0.1"]


async def test_a_start_that_takes_long_keeps_nobody_from_noticing_a_death() -> None:
    async with Running() as running:
        running.launcher.gate.clear()
        running.launcher.rank(1).die(-9)
        await running.until(lambda: running.generation == 1)
        running.launcher.rank(2).die(-9)
        await running.until(lambda: running.generation == 2)
        assert running.roster(2).members == [0]
        running.launcher.gate.set()
        await running.until(lambda: running.generation == 4)
        assert running.roster(4).members == [0, 1, 2]


def test_what_is_taken_late_is_judged_by_the_time_of_the_look() -> None:
    made = config()
    engine = Engine(engine_shape("decode", 0, made), made)
    engine.life.tick(0.0)
    for rank in engine.life.missing:
        engine.life.reported(RankReport(rank=rank, pid=1, control_address="h:1"), 0.0)

    def seen(looked_s: float, *counts: int) -> Seen:
        beats = {Rank(rank): Beat(count) for rank, count in enumerate(counts)}
        return Seen(looked_s=looked_s, reports=[], progress={}, exits={}, beats=beats)

    assert engine.take(seen(1.0, 1, 1, 1), 1.0) == []
    assert engine.take(seen(1.1, 2, 1, 2), 1.1 + 5 * STILL_S) == [], "this process was held up, not rank 1"
    assert engine.take(seen(1.2, 3, 2, 3), 80.0) == []
    looks = [seen(1.2 + tick / 10, 3 + tick, 2, 3 + tick) for tick in range(1, 40)]
    assert any(engine.take(look, 80.0) for look in looks)


async def test_a_launcher_without_room_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.launch.lifecycle.BACKOFF_S", 0.05)
    async with Running() as running:
        running.launcher.errors = [Unavailable("no room"), Unavailable("no room")]
        running.launcher.rank(1).die(-9)
        await running.until(lambda: running.generation == 2)
        assert not running.launcher.errors
        assert len(running.of(EngineDead)) == 3


async def test_the_end_of_all_members_ends_the_engine_and_a_new_one_begins_at_generation_0() -> None:
    async with Running() as running:
        first = running.roster(0)
        for rank in range(3):
            running.launcher.rank(rank).die(-6)
        await running.until(lambda: len(running.of(EngineUp)) == 6)
        assert {event.epoch for event in running.of(EngineDead)} == set(first.lives)  # type: ignore[union-attr]
        assert running.generation == 0
        assert not set(running.roster(0).lives) & set(first.lives)


async def test_ranks_that_cannot_go_on_end_their_engine_by_name() -> None:
    async with Running() as running:
        running.launcher.rank(0).store.end("raise decode.expert_slots_per_rank")
        await running.until(lambda: len(running.of(EngineUp)) == 6)
        lost = running.of(EngineLost)
        assert len(lost) == 3
        assert all("raise decode.expert_slots_per_rank" in event.reason for event in lost)  # type: ignore[union-attr]


async def test_a_shrink_ends_members_once_the_group_lets_them_go_and_a_grow_brings_them_back() -> None:
    async with Running() as running:
        shrinking = asyncio.create_task(running.supervisor.resize(DECODE, 1))
        await running.until(lambda: running.generation == 1)
        assert running.roster(1).leaving == {1, 2}
        assert [rank.code for rank in running.launcher.ranks] == [None] * 4
        running.launcher.rank(0).store.release(Release(1))
        await asyncio.wait_for(shrinking, 20)
        assert running.roster(2).members == [0]
        assert running.launcher.rank(1).calls == ["terminate"]
        assert [event.expected for event in running.of(EngineLost)] == [True, True]  # type: ignore[union-attr]
        await asyncio.wait_for(running.supervisor.resize(DECODE, 3), 20)
        assert running.roster(running.generation).members == [0, 1, 2]
        assert running.launcher.starts[1:] == [["decode-0.1", "decode-0.2"]]


async def test_a_shrink_whose_experts_cannot_fit_is_refused_before_anybody_leaves() -> None:
    running = Running()
    running.launcher.model = LoadedModel("/models/m", "aa", num_experts=12, expert_slots=7)
    async with running:
        with pytest.raises(InvalidRequest) as refused:
            await running.supervisor.resize(DECODE, 1)
        assert refused.value.message == (
            "decode-0 keeps its 3 DP ranks: 12 experts do not fit 1 rank with expert_slots_per_rank 7: each would "
            "need 12; as it was started the engine needs at least 2 ranks"
        )
        shrinking = asyncio.create_task(running.supervisor.resize(DECODE, 2))
        await running.until(lambda: running.generation > 0)
        assert running.roster(1).leaving == {2}, "the first roster after the start is that of the shrink that fits"
        running.launcher.rank(0).store.release(Release(1))
        await asyncio.wait_for(shrinking, 20)


async def test_a_refused_shrink_says_why_and_changes_nothing() -> None:
    async with Running() as running:
        shrinking = asyncio.create_task(running.supervisor.resize(DECODE, 1))
        await running.until(lambda: running.generation == 1)
        running.launcher.rank(0).store.release(Release(1, "12 experts do not fit in 8 slots"))
        with pytest.raises(InvalidRequest, match="keeps its 3 DP ranks: 12 experts do not fit in 8 slots"):
            await asyncio.wait_for(shrinking, 20)
        assert running.roster(2).leaving == frozenset()
        assert running.roster(2).members == [0, 1, 2]
        assert all(rank.code is None for rank in running.launcher.ranks)


async def test_a_later_wish_takes_the_place_of_an_earlier_one() -> None:
    async with Running() as running:
        first = asyncio.create_task(running.supervisor.resize(DECODE, 1))
        await running.until(lambda: running.generation == 1)
        await asyncio.wait_for(running.supervisor.resize(DECODE, 3), 20)
        with pytest.raises(InvalidRequest, match="was told meanwhile to have 3"):
            await asyncio.wait_for(first, 20)


@pytest.mark.parametrize("end", ["retired", "failed"])
async def test_an_engine_that_ends_while_it_changes_its_size_says_so(end: str) -> None:
    async with Running("launch.max_restarts=0") as running:
        shrinking = asyncio.create_task(running.supervisor.resize(DECODE, 1))
        await running.until(lambda: running.generation == 1)
        if end == "retired":
            await running.supervisor.retire(DECODE)
        else:
            for rank in range(3):
                running.launcher.rank(rank).die(-9)
        with pytest.raises(Unavailable, match="decode-0 has ended"):
            await asyncio.wait_for(shrinking, 20)


def test_only_a_decode_group_with_the_one_sided_dispatcher_is_elastic() -> None:
    assert load_config(overrides=["decode.data_parallel=2", "decode.dispatcher=nixl"]).decode.elastic
    assert not load_config(overrides=["decode.data_parallel=2"]).decode.elastic
    assert not load_config(overrides=["decode.dispatcher=nixl"]).decode.elastic
