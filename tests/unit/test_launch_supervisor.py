"""The supervisor with ranks that are plain objects: what it starts, ends and says. The store is the real one."""

import asyncio
from collections.abc import Callable

import pytest

from pd_cluster.config import ClusterConfig, load_config
from pd_cluster.errors import ConfigError, ErrorInfo, PdClusterError, Unavailable
from pd_cluster.ids import EngineId, Rank
from pd_cluster.launch.launcher import RankHandle
from pd_cluster.launch.lifecycle import EngineDead, EngineEvent, EngineFailed, EngineLost, EngineUp
from pd_cluster.launch.spec import RankProgress, RankReport, RankSpec
from pd_cluster.launch.store import RankStore
from pd_cluster.launch.supervisor import Supervisor


class FakeRank:
    def __init__(self, spec: RankSpec, stubborn: bool) -> None:
        self.spec = spec
        self.pid = 1000 + spec.rank
        self.code: int | None = None
        self.stubborn = stubborn
        self.calls: list[str] = []

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.calls.append("terminate")
        if not self.stubborn:
            self.code = 0

    def kill(self) -> None:
        self.calls.append("kill")
        self.code = -9

    def wait(self, timeout_s: float) -> int | None:
        return self.code

    def log_tail(self, num_lines: int = 20) -> str:
        return ""


class FakeLauncher:
    """Ranks report as soon as they are started, unless `behave` does something else with them."""

    host = "127.0.0.1"

    def __init__(self, behave: Callable[[FakeRank, RankStore], None] | None = None, stubborn: bool = False) -> None:
        self.behave = behave or (lambda rank, store: store.report(serving(rank.spec)))
        self.stubborn = stubborn
        self.ranks: list[FakeRank] = []
        self.error: PdClusterError | None = None
        self.closed = False

    def start(self, specs: list[RankSpec]) -> list[RankHandle]:
        if self.error is not None:
            raise self.error
        started = [FakeRank(spec, self.stubborn) for spec in specs]
        for rank in started:
            self.behave(rank, RankStore(rank.spec.store_host, rank.spec.store_port, rank.spec.epoch, rank.spec.rank))
        self.ranks += started
        return list(started)

    def close(self) -> None:
        self.closed = True

    def named(self, name: str) -> list[FakeRank]:
        return [rank for rank in self.ranks if rank.spec.name == name]


def serving(spec: RankSpec, error: ErrorInfo | None = None) -> RankReport:
    address = f"h:{spec.engine_id}:{spec.rank}" if spec.is_lead else None
    return RankReport(rank=spec.rank, pid=1, control_address=address, error=error)


def config(*overrides: str) -> ClusterConfig:
    return load_config(overrides=["prefill.tensor_parallel=2", "decode.data_parallel=2", *overrides])


class Heard(list[EngineEvent]):
    def __init__(self) -> None:
        super().__init__()
        self._news = asyncio.Event()

    async def __call__(self, event: EngineEvent) -> None:
        self.append(event)
        self._news.set()

    async def until(self, condition: Callable[["Heard"], bool]) -> None:
        async with asyncio.timeout(20):
            while not condition(self):
                self._news.clear()
                await self._news.wait()


async def test_all_engines_come_up_and_stop_ends_every_rank() -> None:
    launcher, heard = FakeLauncher(), Heard()
    async with Supervisor(config(), launcher, on_event=heard):
        assert [(e.engine_id, e.addresses) for e in heard if isinstance(e, EngineUp)] == [
            ("prefill-0", ["h:prefill-0:0"]),
            ("decode-0", ["h:decode-0:0", "h:decode-0:1"]),
        ]
        assert {r.spec.ranks_on_host for r in launcher.ranks} == {4}
        assert len({r.spec.epoch for r in launcher.ranks}) == 2
    assert launcher.closed
    assert [r.calls for r in launcher.ranks] == [["terminate"]] * 4
    assert [type(e) for e in heard[2:]].count(EngineDead) == 2


async def test_a_rank_that_ignores_terminate_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.launch.lifecycle.GRACE_S", 0.2)
    launcher = FakeLauncher(stubborn=True)
    async with Supervisor(config(), launcher):
        pass
    assert [r.calls for r in launcher.ranks] == [["terminate", "kill"]] * 4


async def test_a_dead_rank_takes_its_engine_only_and_a_new_life_follows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.launch.lifecycle.BACKOFF_S", 0.01)
    launcher, heard = FakeLauncher(), Heard()
    async with Supervisor(config(), launcher, on_event=heard):
        (victim,) = launcher.named("decode-0.1")
        victim.code = -11
        await heard.until(lambda events: sum(isinstance(e, EngineUp) for e in events) == 3)
        lost, dead, up = heard[2:]
        assert isinstance(lost, EngineLost)
        assert lost.addresses == ["h:decode-0:0", "h:decode-0:1"]
        assert "decode-0.1 was killed by SIGSEGV" in lost.reason
        assert dead == EngineDead(EngineId("decode-0"), victim.spec.epoch, frozenset({Rank(1)}))
        assert isinstance(up, EngineUp)
        assert up.epoch != victim.spec.epoch
        assert [r.calls for r in launcher.named("decode-0.0")] == [["kill"], []]
        assert len(launcher.named("prefill-0.0")) == 1


async def test_an_error_that_a_rank_reports_is_raised_by_start_and_nothing_is_left() -> None:
    def behave(rank: FakeRank, store: RankStore) -> None:
        error = ConfigError("decode.num_blocks must be at least 3").info() if rank.spec.name == "decode-0.0" else None
        store.report(serving(rank.spec, error))
        rank.code = 1 if error else None

    launcher = FakeLauncher(behave)
    with pytest.raises(ConfigError, match=r"decode\.num_blocks must be at least 3"):
        async with Supervisor(config(), launcher):
            pytest.fail("must not come up")
    assert launcher.closed
    assert all(rank.code is not None for rank in launcher.ranks)


async def test_a_start_that_fails_in_the_launcher_is_raised() -> None:
    launcher = FakeLauncher()
    launcher.error = Unavailable("the Ray cluster has no room for 4 ranks")
    with pytest.raises(Unavailable, match="no room"):
        async with Supervisor(config(), launcher):
            pytest.fail("must not come up")
    assert launcher.closed


async def test_a_role_without_any_engine_left_ends_the_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.launch.lifecycle.BACKOFF_S", 0.01)
    launcher, heard = FakeLauncher(), Heard()
    async with Supervisor(
        config("decode.instances=2", "launch.max_restarts=0"), launcher, on_event=heard
    ) as supervisor:
        waiting = asyncio.create_task(supervisor.wait_failed())
        launcher.named("decode-0.0")[0].code = 1
        await heard.until(lambda events: any(isinstance(e, EngineFailed) for e in events))
        assert not waiting.done(), "decode-1 still serves"
        launcher.named("decode-1.0")[0].code = 3
        with pytest.raises(Unavailable, match=r"decode-1\.0 exited with code 3"):
            await asyncio.wait_for(waiting, 20)


async def test_progress_of_loading_is_passed_on_once_for_each_change() -> None:
    seen: list[tuple[str, int, int]] = []

    def behave(rank: FakeRank, store: RankStore) -> None:
        store.progress("weights", 1, 2)

    def listen(engine_id: EngineId, rank: Rank, progress: RankProgress) -> None:
        seen.append((f"{engine_id}.{rank}", progress.done, progress.total))
        if len(seen) == 4:
            for each in launcher.ranks:
                spec = each.spec
                RankStore(spec.store_host, spec.store_port, spec.epoch, spec.rank).report(serving(spec))

    launcher = FakeLauncher(behave)
    async with Supervisor(config(), launcher, on_progress=listen):
        pass
    assert sorted(seen) == [("decode-0.0", 1, 2), ("decode-0.1", 1, 2), ("prefill-0.0", 1, 2), ("prefill-0.1", 1, 2)]


async def test_cancelling_a_start_leaves_nothing() -> None:
    loop, started = asyncio.get_running_loop(), asyncio.Event()
    launcher = FakeLauncher(lambda rank, store: loop.call_soon_threadsafe(started.set) and None)
    starting = asyncio.create_task(Supervisor(config(), launcher).__aenter__())
    async with asyncio.timeout(20):
        await started.wait()
        starting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await starting
    assert launcher.closed
    assert [r.code for r in launcher.ranks] == [0] * 4


async def test_a_subscriber_that_fails_is_not_ignored() -> None:
    async def broken(event: EngineEvent) -> None:
        raise RuntimeError("no router")

    launcher = FakeLauncher()
    with pytest.raises(RuntimeError, match="no router"):
        async with Supervisor(config(), launcher, on_event=broken):
            pytest.fail("must not come up")
    assert launcher.closed


async def test_pools_grow_and_shrink_one_engine_at_a_time() -> None:
    launcher, heard = FakeLauncher(), Heard()
    async with Supervisor(config(), launcher, on_event=heard) as supervisor:
        added = supervisor.add("prefill")
        assert added == "prefill-1"
        await heard.until(lambda h: sum(isinstance(e, EngineUp) for e in h) == 3)
        assert [engine.shape.engine_id for engine in supervisor.pool("prefill")] == ["prefill-0", "prefill-1"]
        assert {r.spec.ranks_on_host for r in launcher.named("prefill-1.0")} == {6}
        await supervisor.retire(EngineId("prefill-0"))
        assert [engine.shape.engine_id for engine in supervisor.pool("prefill")] == ["prefill-1"]
        assert [r.calls for r in launcher.named("prefill-0.0")] == [["terminate"]]
        lost = next(e for e in heard if isinstance(e, EngineLost))
        assert (lost.engine_id, lost.expected, lost.reason) == ("prefill-0", True, "its pool shrinks")
        assert [e.engine_id for e in heard if isinstance(e, EngineDead)] == ["prefill-0"]
        assert supervisor.add("prefill") == "prefill-0"  # the name is free again
        await heard.until(lambda h: sum(isinstance(e, EngineUp) for e in h) == 4)
    assert all(r.code is not None for r in launcher.ranks)


async def test_an_added_engine_that_cannot_start_leaves_the_others_alone() -> None:
    launcher, heard = FakeLauncher(), Heard()
    async with Supervisor(config(), launcher, on_event=heard) as supervisor:
        broken = ConfigError("no memory for it").info()
        launcher.behave = lambda rank, store: store.report(serving(rank.spec, broken))
        supervisor.add("decode")
        await heard.until(lambda h: any(isinstance(e, EngineFailed) for e in h))
        assert [engine.shape.engine_id for engine in supervisor.pool("decode")] == ["decode-0"]
        assert not any(isinstance(e, EngineLost) for e in heard)
