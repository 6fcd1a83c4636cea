"""When an elastic engine grows or shrinks by itself."""

import asyncio

import pytest
from fake_worker import FakeWorker
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs
from test_elastic_supervisor import DECODE, Running, config

from pd_cluster import messages as m
from pd_cluster.clock import FakeClock
from pd_cluster.config import AutoscaleSection, load_config
from pd_cluster.errors import ConfigError, Unavailable
from pd_cluster.launch.autoscale import REFUSED_FACTOR, Autoscaler, Policy, RankLoad, load_of
from pd_cluster.launch.cluster import note_failure
from pd_cluster.launch.group_life import GroupLife
from pd_cluster.launch.spec import Release
from router.directory import Directory

SECTION = AutoscaleSection(enabled=True, low=0.3, high=0.7, hold_s=10.0)


def loads(usage: float, count: int, waiting: int = 0) -> list[RankLoad]:
    return [RankLoad(usage, waiting)] * count


def after(policy: Policy, seen: list[RankLoad], seconds: float = 10.0) -> int | None:
    """What is decided when the load has been so for so long."""
    for now_s in (100.0, 100.0 + seconds):
        wanted = policy.decide(seen, now_s)
    return wanted


@pytest.mark.parametrize(
    ("usage", "count", "wanted"),
    [(0.8, 2, 4), (0.8, 4, 7), (0.71, 1, 2), (1.0, 7, 8), (0.9, 8, None), (0.1, 4, 1), (0.29, 4, 3), (0.0, 8, 1)],
)
def test_it_goes_to_the_number_that_leaves_its_ranks_half_full(usage: float, count: int, wanted: int | None) -> None:
    assert after(Policy(SECTION, 8, 1), loads(usage, count)) == wanted


@pytest.mark.parametrize(("usage", "count"), [(0.5, 4), (0.3, 4), (0.7, 4), (0.29, 1), (0.29, 2)])
def test_it_stays_where_another_number_would_be_no_better(usage: float, count: int) -> None:
    assert after(Policy(SECTION, 8, 1), loads(usage, count)) is None


def test_requests_that_wait_for_room_make_it_grow_whatever_the_load() -> None:
    assert after(Policy(SECTION, 8, 1), loads(0.4, 2, waiting=1)) == 3
    assert after(Policy(SECTION, 2, 1), loads(0.4, 2, waiting=1)) is None


def test_a_load_that_does_not_last_changes_nothing() -> None:
    policy = Policy(SECTION, 8, 1)
    for now_s in range(0, 100, 5):
        assert policy.decide(loads(0.9 if now_s % 10 else 0.5, 2), float(now_s)) is None


def test_after_a_change_or_a_refusal_it_waits_again() -> None:
    policy = Policy(SECTION, 8, 1)
    assert after(policy, loads(0.1, 4)) == 1
    assert policy.decide(loads(0.1, 4), 111.0) is None
    policy.refused(111.0)
    assert policy.decide(loads(0.1, 4), 112.0) is None
    assert policy.decide(loads(0.1, 4), 110.0 + REFUSED_FACTOR * 10) is None
    assert policy.decide(loads(0.1, 4), 111.0 + REFUSED_FACTOR * 10) == 2, "not what was refused"


def test_it_shrinks_to_what_has_room_for_all_experts_and_learns_the_rest_from_refusals() -> None:
    policy, now_s = Policy(SECTION, 8, 1), 0.0

    def decided(usage: float, count: int, least: int = 1) -> int | None:
        nonlocal now_s
        now_s += 1000.0
        policy.decide(loads(usage, count), now_s, least)
        return policy.decide(loads(usage, count), now_s + 10.0, least)

    assert decided(0.0, 8, least=3) == 3
    assert decided(0.0, 3, least=3) is None, "an idle engine of the least size stays"
    for wanted in (1, 2, 3):
        assert decided(0.0, 4) == wanted
        policy.refused(now_s)
    assert decided(0.0, 4) is None
    assert decided(0.9, 4) == 8
    policy.refused(now_s)
    assert decided(0.0, 4) == 1, "it has grown, or wanted to: things are no longer as they were"


def test_there_are_never_fewer_than_asked_for() -> None:
    assert after(Policy(structs.replace(SECTION, min_ranks=5), 8, 2), loads(0.0, 8)) == 3


@given(st.lists(st.floats(0, 1), min_size=1, max_size=8), st.integers(0, 3), st.integers(1, 8))
def test_a_decision_is_another_possible_number(usages: list[float], waiting: int, least: int) -> None:
    policy = Policy(structs.replace(SECTION, min_ranks=least), 8, 1)
    wanted = after(policy, [RankLoad(usage, waiting) for usage in usages])
    assert wanted is None or (wanted != len(usages) and min(least, 8) <= wanted <= 8)


def test_the_load_of_a_rank_is_what_is_scarcest() -> None:
    directory = Directory()
    worker = directory.welcome(FakeWorker("decode-0", num_blocks=64).info, FakeWorker("decode-0").epoch)
    worker.observe_load(m.WorkerLoad(num_running=2, num_free_blocks=16, num_pending_reservations=3))
    assert load_of(worker) == RankLoad(0.75, 3)
    worker.observe_load(m.WorkerLoad(num_running=8, num_free_blocks=64))
    assert load_of(worker) == RankLoad(1.0, 0)


async def test_an_idle_engine_shrinks_and_a_refusal_is_respected() -> None:
    async with Running() as running:
        clock, directory = FakeClock(), Directory()
        for dp_rank in range(3):
            info = FakeWorker("decode-0", dp_rank=dp_rank).info
            directory.welcome(info, FakeWorker("decode-0", epoch=f"{dp_rank}").epoch)
        scaler = Autoscaler(running.supervisor, directory, lambda role: SECTION, clock, change_timeout_s=900.0)
        scaler.look()
        clock.advance(10.0)
        scaler.look()
        await running.until(lambda: running.generation == 1)
        assert running.roster(1).leaving == {1, 2}
        running.launcher.rank(0).store.release(Release(1, "no room for their experts"))
        await running.until(lambda: running.generation == 2 and not scaler._changing)
        for _ in range(5):
            clock.advance(10.0)
            scaler.look()
            await asyncio.sleep(0.02)
        assert running.generation == 2


async def test_a_growth_for_which_there_is_no_room_is_given_up_and_tried_again_later() -> None:
    async with Running() as running:
        shrinking = asyncio.create_task(running.supervisor.resize(DECODE, 1))
        await running.until(lambda: running.generation == 1)
        running.launcher.rank(0).store.release(Release(1))
        await asyncio.wait_for(shrinking, 20)
        clock, directory = FakeClock(), Directory()
        worker = directory.welcome(FakeWorker("decode-0").info, FakeWorker("decode-0").epoch)
        worker.observe_load(m.WorkerLoad(num_running=8, num_free_blocks=64))
        scaler = Autoscaler(running.supervisor, directory, lambda role: SECTION, clock, change_timeout_s=900.0)
        life = running.supervisor.engines[DECODE].life
        assert isinstance(life, GroupLife)

        def grows() -> None:
            scaler.look()
            clock.advance(10.0)
            scaler.look()

        running.launcher.errors = [Unavailable("no room")] * 1000
        grows()
        await running.until(lambda: len(running.launcher.errors) < 1000 and life.num_wanted == 2)
        clock.advance(899.0)
        scaler.look()
        assert life.num_wanted == 2, "nodes may come"
        clock.advance(1.0)
        scaler.look()
        assert life.num_wanted == 1
        await running.until(lambda: not scaler._changing and life.settled)
        grows()
        assert life.num_wanted == 1, "what did not fit will not fit soon"
        running.launcher.errors = []
        clock.advance(REFUSED_FACTOR * 10.0)
        grows()
        await running.until(lambda: life.num_up == 2)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("decode.autoscale.low=0.8", "low below high"),
        ("decode.autoscale.hold_s=0", r"decode\.autoscale\.hold_s must be above 0"),
        ("decode.autoscale.min_ranks=9", r"decode\.autoscale\.min_ranks must be between 1 and 3"),
        ("prefill.autoscale.enabled=true", r"prefill\.autoscale needs ranks that come and go"),
        ("decode.autoscale.lowest=1", "lowest"),
    ],
)
def test_a_section_that_cannot_work_is_refused_by_name(override: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        config(override)
    assert not load_config().decode.autoscale.enabled


async def test_an_end_that_nobody_waits_for_is_logged_and_a_cancel_is_not(caplog: pytest.LogCaptureFixture) -> None:
    async def fail() -> None:
        raise RuntimeError("no such load")

    for work in (asyncio.sleep(60.0), fail()):
        task = asyncio.create_task(work, name="autoscale")
        task.add_done_callback(note_failure)
        asyncio.get_running_loop().call_later(0.01, task.cancel)
        await asyncio.wait([task])
        await asyncio.sleep(0)
    (record,) = caplog.records
    assert record.message == "task_failed"
    assert "no such load" in caplog.text
