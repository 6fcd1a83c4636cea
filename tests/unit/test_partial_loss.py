"""A decode group whose DP ranks live and die one by one, as a router sees it."""

import pytest
from fake_worker import Cluster, FakeWorker, continuation, request
from msgspec import structs
from test_pipeline import PROMPT, tokens

from pd_cluster import messages as m
from pd_cluster.ids import EngineEpoch, WorkerId
from router.directory import Directory, Health
from router.lives import Lives


def member(dp_rank: int, life: str, engine_epoch: str = "g1") -> FakeWorker:
    return FakeWorker("decode-0", dp_rank=dp_rank, epoch=life, engine_epoch=engine_epoch)


def begun(lives: Lives, dp_rank: int, life: str, engine_epoch: str | None) -> list[str]:
    info = FakeWorker("decode-0", dp_rank=dp_rank, engine_epoch=engine_epoch).info
    return list(lives.begun(info, EngineEpoch(life)))


def test_a_new_life_of_a_member_proves_the_death_of_its_last_one_only() -> None:
    lives = Lives()
    assert [begun(lives, dp_rank, f"a{dp_rank}", "g1") for dp_rank in range(3)] == [[], [], []]
    assert begun(lives, 1, "b1", "g1") == ["a1"]
    assert begun(lives, 1, "b1", "g1") == [], "it only attached again"
    assert begun(lives, 0, "a0", "g1") == []


def test_a_new_life_of_the_engine_proves_the_death_of_every_member_of_the_last_one() -> None:
    lives = Lives()
    for dp_rank in range(3):
        begun(lives, dp_rank, f"a{dp_rank}", "g1")
    begun(lives, 1, "b1", "g1")
    assert sorted(begun(lives, 2, "c2", "g2")) == ["a0", "a2", "b1"]
    assert begun(lives, 0, "c0", "g2") == []


def test_an_engine_that_lives_as_a_whole_dies_as_a_whole() -> None:
    lives = Lives()
    for dp_rank in range(2):
        begun(lives, dp_rank, "e1", None)
    assert begun(lives, 1, "e2", None) == ["e1"]
    assert begun(lives, 0, "e2", None) == []


async def test_the_loss_of_a_member_resumes_its_requests_and_leaves_the_others_alone() -> None:
    prefill, first, second = FakeWorker("prefill-0"), member(0, "a0"), member(1, "a1")
    cluster = Cluster(prefill, first, second)
    streams = [cluster.pipeline.submit(request(f"r{i}", prompt=PROMPT, max_tokens=8)) for i in range(4)]
    cluster.settle()
    assert (len(first.running), len(second.running)) == (2, 2)
    untouched = set(second.running)
    cluster.lose(first)
    cluster.pipeline.engine_dead(first.epoch, {first.id})
    cluster.run()
    assert [await tokens(stream) for stream in streams] == [continuation(PROMPT, 8)] * 4
    assert sorted(stream.timings.num_retries for stream in streams) == [0, 0, 1, 1]
    assert not any(isinstance(message, m.Abort) and message.request_id in untouched for message in second.seen)
    assert second.dead_epochs == prefill.dead_epochs == [first.epoch]
    assert cluster.pipeline.idle()


async def test_a_replaced_member_takes_requests_and_its_group_is_not_taken_for_dead() -> None:
    prefill, first, second = FakeWorker("prefill-0"), member(0, "a0"), member(1, "a1")
    cluster = Cluster(prefill, first, second)
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=8))
    cluster.settle()
    holder, other = (first, second) if first.running else (second, first)
    cluster.lose(other)
    cluster.attach(again := member(other.info.dp_rank, "b"))
    cluster.settle()
    assert prefill.dead_epochs == [other.epoch], "a router that hears of no death concludes it from the greeting"
    worker = cluster.pipeline.directory.get(holder.id)
    assert worker is not None
    assert worker.health is Health.READY
    later = [cluster.pipeline.submit(request(f"later{i}", prompt=[*PROMPT, 9])) for i in range(3)]
    cluster.settle()
    assert len(again.running) > 0
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 8)
    assert stream.timings.num_retries == 0
    assert [await tokens(each) for each in later] == [continuation([*PROMPT, 9], 4)] * 3


@pytest.mark.parametrize("life", ["a0", "b0"])
async def test_a_transfer_to_a_dead_member_is_over_whether_it_comes_back_or_not(life: str) -> None:
    prefill, first = FakeWorker("prefill-0"), member(0, "a0")
    prefill.stuck_pushes = True
    cluster = Cluster(prefill, first)
    cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.settle()
    assert len(cluster.pipeline._links) == 1
    cluster.lose(first)
    if life == "a0":
        cluster.pipeline.engine_dead(first.epoch, {first.id})
    else:
        cluster.attach(member(0, life))
    assert all(link.target.epoch != first.epoch for link in cluster.pipeline._links._links.values())
    assert cluster.pipeline.directory.get(WorkerId("decode-0/0")) is not None


def test_dp_ranks_of_an_engine_share_what_was_measured_of_their_steps() -> None:
    """Else the one that measured in a quiet moment looks faster than its peers for as long as these have no work."""
    directory = Directory()
    infos = [structs.replace(member(dp_rank, "a").info, data_parallel=2) for dp_rank in range(2)]
    first, second = (directory.welcome(info, EngineEpoch(f"a{info.dp_rank}")) for info in infos)
    second.observe_load(m.WorkerLoad(num_running=4, num_context_tokens=64, step_s=0.2))
    first.observe_load(m.WorkerLoad(num_running=4, num_context_tokens=64, step_s=0.05))
    assert first.costs.step_s(1, 32) == second.costs.step_s(1, 32)
    again = directory.welcome(infos[1], EngineEpoch("b1"))
    assert again.costs.step_s(1, 32) == first.costs.step_s(1, 32)
    other = directory.welcome(FakeWorker("decode-1").info, EngineEpoch("c"))
    other.observe_load(m.WorkerLoad(num_running=4, num_context_tokens=64, step_s=0.01))
    assert other.costs.step_s(1, 32) < first.costs.step_s(1, 32)
