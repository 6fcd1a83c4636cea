"""A request whose workers die under it: once may be chance, twice is refused, and a broken stream is no death."""

import itertools

import pytest
from fake_worker import Cluster, FakeWorker, continuation, request

from pd_cluster import messages as m
from pd_cluster.errors import PoisonRequest
from pd_cluster.ids import TransferId, WorkerId
from router.stream import TokenStream

PROMPT = [5, 6, 7]


def lives(engine: str, num: int, **options: object) -> list[FakeWorker]:
    """The same engine in several lives."""
    return [FakeWorker(engine, epoch=str(life), **options) for life in range(num)]  # type: ignore[arg-type]


def never_answer(worker: FakeWorker, kind: type) -> FakeWorker:
    """It takes a message of that kind, begins, and gets no further."""

    def begin(message: m.ToWorkerMessage) -> list[m.ToRouterMessage]:
        assert isinstance(message, m.Prefill)
        return [
            m.Started(request_id=message.request.id, transfer_id=message.transfer_id, num_cached_tokens=0, queued_s=0.0)
        ]

    worker.replace[kind] = begin
    return worker


def die(cluster: Cluster, worker: FakeWorker, first: frozenset[WorkerId] | None = None) -> None:
    """The stream breaks, then the supervisor has seen the process dead."""
    cluster.lose(worker)
    cluster.settle()
    cluster.pipeline.engine_dead(worker.epoch, first)
    cluster.settle()


async def answer(stream: TokenStream) -> list[int]:
    return [token_id async for delta in stream for token_id in delta.token_ids]


async def test_a_request_under_which_two_prefill_workers_died_is_refused_and_names_them() -> None:
    prefills = [never_answer(FakeWorker(f"prefill-{index}"), m.Prefill) for index in range(3)]
    cluster = Cluster(*prefills, FakeWorker("decode-0"))
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.settle()
    for _ in range(2):
        (victim,) = [worker for worker in prefills if any(isinstance(s, m.Prefill) for s in worker.seen)]
        victim.seen.clear()
        die(cluster, victim)
    with pytest.raises(PoisonRequest, match=r"prefill-./0 and prefill-./0 died while they computed it"):
        await answer(stream)
    assert sum(isinstance(message, m.Prefill) for worker in prefills for message in worker.seen) == 0


async def test_a_request_under_which_two_decode_workers_died_is_refused() -> None:
    decodes = [FakeWorker(f"decode-{index}") for index in range(3)]
    cluster = Cluster(FakeWorker("prefill-0"), *decodes)
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=50))
    for _ in range(2):
        cluster.settle()
        (running,) = [worker for worker in decodes if worker.running]
        running.step()
        cluster.settle()
        running.running.clear()
        die(cluster, running)
    delta = stream.take()
    assert delta is not None
    assert delta.token_ids == continuation(PROMPT, len(delta.token_ids)), "what the client had stays right"
    assert len(delta.token_ids) >= 3
    with pytest.raises(PoisonRequest):
        stream.take()


async def test_the_third_worker_is_not_asked_before_the_second_death_is_known() -> None:
    prefills = [never_answer(FakeWorker(f"prefill-{index}"), m.Prefill) for index in range(3)]
    cluster = Cluster(*prefills, FakeWorker("decode-0"))
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.settle()

    def asked() -> list[FakeWorker]:
        return [worker for worker in prefills if any(isinstance(s, m.Prefill) for s in worker.seen)]

    (one,) = asked()
    die(cluster, one)
    (two,) = [worker for worker in asked() if worker is not one]
    cluster.lose(two)
    cluster.advance(0.5, tick_s=0.1)
    assert len(asked()) == 2
    cluster.pipeline.engine_dead(two.epoch)
    with pytest.raises(PoisonRequest):
        await answer(stream)


async def test_without_a_verdict_the_request_goes_on() -> None:
    prefills = [never_answer(FakeWorker(f"prefill-{index}"), m.Prefill) for index in range(2)]
    cluster = Cluster(*prefills, FakeWorker("prefill-2"), FakeWorker("decode-0"))
    stream = cluster.pipeline.submit(request(prompt=PROMPT), prefer=WorkerId("prefill-0/0"))
    cluster.settle()
    for worker in prefills:
        if any(isinstance(message, m.Prefill) for message in worker.seen):
            cluster.lose(worker)
            cluster.settle()
    cluster.advance(3.0)
    cluster.run()
    assert await answer(stream) == continuation(PROMPT, 4)


@pytest.mark.parametrize("num_breaks", [1, 2])
async def test_a_stream_that_breaks_and_comes_back_is_no_death(num_breaks: int) -> None:
    prefill, decode = never_answer(FakeWorker("prefill-0"), m.Prefill), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    for _ in range(num_breaks):
        cluster.settle()
        cluster.lose(prefill)
        cluster.settle()
        cluster.attach(prefill)
    prefill.replace.clear()
    cluster.lose(prefill)
    cluster.attach(prefill)
    cluster.run()
    assert await answer(stream) == continuation(PROMPT, 4)


async def test_a_request_that_only_waited_at_the_dead_is_not_blamed() -> None:
    cluster = Cluster(FakeWorker("decode-0"))
    *before, last = lives("prefill-0", 3)
    for worker in before:
        worker.ignored.add(m.Prefill)  # it stays in line there
        cluster.attach(worker)
        if worker is before[0]:
            stream = cluster.pipeline.submit(request(prompt=PROMPT))
        cluster.settle()
        assert m.Prefill in worker.kinds()
        die(cluster, worker)
    cluster.attach(last)
    cluster.run()
    assert await answer(stream) == continuation(PROMPT, 4)


async def test_workers_ended_for_the_sake_of_another_are_not_held_against_their_requests() -> None:
    """Ranks of one engine share their experts: when one dies all are ended, and only its own requests are suspect."""
    cluster = Cluster(FakeWorker("prefill-0"))
    engines = lives("decode-0", 4)
    cluster.attach(engines[0])
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=8))
    for before, after in itertools.pairwise(engines):
        cluster.settle()
        assert before.running
        die(cluster, before, first=frozenset({WorkerId("decode-0/7")}))
        cluster.attach(after)
    cluster.run()
    assert await answer(stream) == continuation(PROMPT, 8)


async def test_a_colocated_worker_counts_from_the_start_of_prefill() -> None:
    def start_only(message: m.ToWorkerMessage) -> list[m.ToRouterMessage]:
        assert isinstance(message, m.Generate)
        return [
            m.Started(
                request_id=message.request.id,
                transfer_id=TransferId(""),
                num_cached_tokens=0,
                queued_s=0.0,
            )
        ]

    workers = [FakeWorker(f"colocated-{index}", can_prefill=True, can_decode=True) for index in range(3)]
    for worker in workers:
        worker.replace[m.Generate] = start_only
    cluster = Cluster(*workers)
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.settle()
    for _ in range(2):
        (victim,) = [worker for worker in workers if m.Generate in worker.kinds()]
        victim.seen.clear()
        die(cluster, victim)
    with pytest.raises(PoisonRequest):
        await answer(stream)


async def test_a_new_worker_ends_the_wait_of_those_that_had_none() -> None:
    cluster = Cluster(*(workers := [FakeWorker("prefill-0"), FakeWorker("decode-0")]))
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=6))
    cluster.settle()
    die(cluster, workers[1])
    cluster.advance(5.0)
    cluster.attach(FakeWorker("decode-0", epoch="2"))
    cluster.run()  # without any time passing
    assert await answer(stream) == continuation(PROMPT, 6)
