"""What the router does with a request, message by message, with fake workers and a fake clock."""

import asyncio

import pytest
from fake_worker import Cluster, FakeWorker, continuation, request

from pd_cluster import messages as m
from pd_cluster.errors import (
    Cancelled,
    ContextTooLong,
    DeadlineExceeded,
    DuplicateRequest,
    EngineError,
    InvalidRequest,
    Overloaded,
    PeerIncompatible,
    TransferFailed,
    Unavailable,
    WorkerLost,
)
from pd_cluster.ids import RequestId, TransferId
from pd_cluster.request import FinishReason, Phase
from router.attempt import Delta, Leg, Limits, Link
from router.links import Links
from router.stream import TokenStream


async def collect(stream: TokenStream) -> list[Delta]:
    return [delta async for delta in stream]


async def tokens(stream: TokenStream) -> list[int]:
    return [token_id for delta in await collect(stream) for token_id in delta.token_ids]


def pair(**options: object) -> Cluster:
    return Cluster(FakeWorker("prefill-0"), FakeWorker("decode-0"), **options)  # type: ignore[arg-type]


def started(message: m.Prefill) -> m.Started:
    return m.Started(request_id=message.request.id, transfer_id=message.transfer_id, num_cached_tokens=0, queued_s=0.0)


PROMPT = [5, 6, 7]


# ---- the ordinary way


async def test_prefill_then_decode_gives_every_token_once_and_leaves_nothing():
    cluster = pair()
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=5))
    cluster.run()
    deltas = await collect(stream)
    assert [t for delta in deltas for t in delta.token_ids] == continuation(PROMPT, 5)
    assert deltas[-1].finish is FinishReason.LENGTH
    timings = deltas[-1].timings
    assert timings is not None
    assert (timings.prefill_worker, timings.decode_worker) == ("prefill-0/0", "decode-0/0")
    assert (timings.transfer_bytes, timings.transfer_s) == (128, 0.002)
    assert (timings.num_prompt_tokens, timings.num_output_tokens, timings.num_retries) == (3, 5, 0)
    cluster.check_nothing_is_left()


async def test_reservation_is_asked_for_only_when_prefill_starts():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode)
    orders: list[m.Prefill] = []
    prefill.replace[m.Prefill] = lambda message: orders.append(message) or []
    cluster.pipeline.submit(request())
    cluster.settle()
    assert decode.seen == []
    prefill.prefill(orders[0])
    cluster.settle()
    assert decode.kinds() == [m.Reserve]


async def test_the_first_token_reaches_the_client_before_any_kv_has_moved():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    decode.ignored.add(m.Reserve)
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.settle()
    assert (await anext(stream)).token_ids == continuation(PROMPT, 1)


async def test_a_first_token_that_ends_the_request_needs_no_handoff():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=1))
    cluster.run()
    (delta,) = await collect(stream)
    assert (delta.token_ids, delta.finish) == (continuation(PROMPT, 1), FinishReason.LENGTH)
    assert decode.running == {}
    cluster.check_nothing_is_left()


async def test_a_stop_token_as_first_token_ends_the_request_in_the_middle_of_its_push():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    orders: list[m.Prefill] = []

    def start_only(message):
        orders.append(message)
        return [
            m.Started(request_id=message.request.id, transfer_id=message.transfer_id, num_cached_tokens=0, queued_s=0)
        ]

    prefill.replace[m.Prefill] = start_only
    cluster = Cluster(prefill, decode)
    stop = continuation(PROMPT, 1)[0]
    stream = cluster.pipeline.submit(request(prompt=PROMPT, stop_token_ids=(stop,)))
    cluster.settle()
    assert m.Push in prefill.kinds()  # chunks are being written while prefill runs
    (order,) = orders
    prefill.out.append(
        m.Prefilled(request_id=order.request.id, transfer_id=order.transfer_id, token_id=stop, logprobs=None,
                    finish=FinishReason.STOP, prefill_s=0.1, num_cached_tokens=0)
    )  # fmt: skip
    cluster.run()
    (delta,) = await collect(stream)
    assert (delta.token_ids, delta.finish) == ([stop], FinishReason.STOP)
    cluster.check_nothing_is_left()


async def test_the_endpoint_of_a_target_travels_once_for_each_source():
    prefill = FakeWorker("prefill-0")
    cluster = Cluster(prefill, FakeWorker("decode-0"))
    for i in range(3):
        cluster.pipeline.submit(request(f"r{i}"))
        cluster.run()
    endpoints = [message.endpoint is not None for message in prefill.seen if isinstance(message, m.Push)]
    assert endpoints == [True, False, False]
    cluster.lose(prefill)
    cluster.attach(prefill)
    cluster.pipeline.submit(request("again"))
    cluster.run()
    assert [message.endpoint is not None for message in prefill.seen if isinstance(message, m.Push)][3:] == [True]


async def test_a_colocated_worker_does_the_whole_request():
    worker = FakeWorker("engine-0", can_prefill=True, can_decode=True)
    cluster = Cluster(worker)
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 4)
    assert worker.kinds() == [m.Generate]
    cluster.check_nothing_is_left()


async def test_logprobs_arrive_with_their_tokens():
    cluster = pair()
    stream = cluster.pipeline.submit(request(max_tokens=3, logprobs=2))
    cluster.run()
    deltas = await collect(stream)
    assert sum(len(delta.logprobs or []) for delta in deltas) == 3


async def test_many_requests_are_shared_evenly_between_equal_workers():
    workers = [FakeWorker(name, dp_rank=rank) for name in ("prefill-0", "prefill-1") for rank in (0, 1)]
    workers += [FakeWorker("decode-0", dp_rank=rank) for rank in range(4)]
    cluster = Cluster(*workers)
    for i in range(64):
        cluster.pipeline.submit(request(f"r{i}"))
    cluster.settle()
    for worker in workers:
        count = sum(isinstance(message, m.Prefill | m.Reserve) for message in worker.seen)
        assert 12 <= count <= 20, (worker.id, count)
    cluster.run()
    cluster.check_nothing_is_left()


# ---- out of order, late, repeated


async def test_decode_tokens_that_overtake_the_first_token_wait_for_it():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode)
    late: list[m.ToRouterMessage] = []
    on_messages = cluster.pipeline.on_messages

    def delay_prefilled(conversation, messages):
        late.extend(message for message in messages if isinstance(message, m.Prefilled))
        on_messages(conversation, [message for message in messages if not isinstance(message, m.Prefilled)])

    cluster.pipeline.on_messages = delay_prefilled
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=5))
    cluster.run()
    assert decode.running == {}  # decode is long done
    on_messages(cluster.conversations[prefill.id], late)
    assert await tokens(stream) == continuation(PROMPT, 5)
    cluster.check_nothing_is_left()


async def test_repeated_messages_change_nothing():
    cluster = pair()
    on_messages = cluster.pipeline.on_messages
    cluster.pipeline.on_messages = lambda conversation, messages: on_messages(
        conversation, [message for message in messages for _ in range(2)]
    )
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=6))
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 6)
    cluster.check_nothing_is_left()


async def test_a_gap_in_the_tokens_is_noticed_and_closed_by_a_resume():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=6))
    cluster.settle()
    decode.step()
    decode.out.clear()  # lost
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 6)
    assert stream.timings.num_retries == 1
    cluster.check_nothing_is_left()


async def test_words_about_a_former_attempt_are_ignored():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=6))
    cluster.settle()
    (former,) = decode.running
    decode.running.clear()
    decode.out.append(m.Preempted(request_id=former))
    cluster.settle()
    decode.out.append(m.Tokens(deltas=[m.TokenDelta(former, 1, [99], FinishReason.STOP)]))
    decode.out.append(m.Failed(request_id=former, transfer_id=None, error=EngineError("late").info()))
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 6)


# ---- resumption


@pytest.mark.parametrize("num_steps", [0, 1, 2])
async def test_a_preempted_request_resumes_without_a_seam(num_steps):
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=6, seed=9))
    cluster.settle()
    for _ in range(num_steps):
        decode.step()
    (wire_id,) = decode.running
    decode.running.clear()
    decode.out.append(m.Preempted(request_id=wire_id))
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 6)
    assert (stream.timings.num_preemptions, stream.timings.num_retries) == (1, 0)
    again = [message for message in prefill.seen if isinstance(message, m.Prefill)][-1].request
    assert again.token_ids == PROMPT + continuation(PROMPT, 1 + num_steps)
    assert (again.num_prompt_tokens, again.sampling.seed) == (3, 9)
    assert again.id != wire_id
    cluster.check_nothing_is_left()


@pytest.mark.parametrize("num_steps", [0, 1, 3])
async def test_a_lost_decode_worker_costs_no_token(num_steps):
    prefill, first, second = FakeWorker("prefill-0"), FakeWorker("decode-0"), FakeWorker("decode-1")
    cluster = Cluster(prefill, first)
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=6))
    cluster.settle()
    for _ in range(num_steps):
        first.step()
        cluster.settle()
    cluster.attach(second)
    cluster.lose(first)
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 6)
    assert stream.timings.num_retries == 1
    assert second.empty
    assert prefill.empty


async def test_a_lost_prefill_worker_is_replaced_while_it_computes():
    first, second, decode = FakeWorker("prefill-0"), FakeWorker("prefill-1"), FakeWorker("decode-0")
    first.ignored.add(m.Prefill)
    cluster = Cluster(first, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.settle()
    cluster.attach(second)
    cluster.lose(first)
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 4)
    cluster.check_nothing_is_left()


async def test_losing_prefill_in_the_middle_of_a_push_quarantines_until_its_death_is_known():
    first, second, decode = FakeWorker("prefill-0"), FakeWorker("prefill-1"), FakeWorker("decode-0")
    first.stuck_pushes = True
    cluster = Cluster(first, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.settle()
    cluster.attach(second)
    cluster.lose(first)
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 4)
    assert len(decode.quarantined) == 1  # a lost connection proves nothing
    assert not cluster.pipeline.idle()
    cluster.pipeline.engine_dead(first.epoch)
    del cluster.workers[first.id]
    cluster.check_nothing_is_left()


async def test_losing_prefill_after_everything_was_pushed_matters_to_nobody():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=6))
    cluster.settle()
    cluster.lose(prefill)
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 6)
    assert stream.timings.num_retries == 0


async def test_decode_lost_before_any_push_costs_no_second_prefill():
    prefill, first, second = FakeWorker("prefill-0"), FakeWorker("decode-0"), FakeWorker("decode-1")
    first.ignored.add(m.Reserve)
    cluster = Cluster(prefill, first)
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.settle()
    cluster.attach(second)
    cluster.lose(first)
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 4)
    assert prefill.kinds().count(m.Prefill) == 1
    assert prefill.empty
    assert second.empty


async def test_a_started_request_waits_for_its_workers_to_come_back():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=6))
    cluster.settle()
    cluster.lose(decode)
    cluster.advance(5.0)
    cluster.attach(FakeWorker("decode-0", epoch="2"))
    cluster.advance(2.0)
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 6)
    cluster.check_nothing_is_left()


async def test_an_outage_that_lasts_ends_the_request():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode, limits=Limits(outage_patience_s=10.0))
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=6))
    cluster.settle()
    cluster.lose(decode)
    cluster.advance(12.0)
    with pytest.raises(Unavailable, match="no decode worker is ready"):
        await tokens(stream)
    assert cluster.pipeline.idle()


# ---- errors and limits


async def test_prefill_that_answers_errors_repeatedly_never_dispatches_decode():
    prefills, decode = [FakeWorker("prefill-0"), FakeWorker("prefill-1")], FakeWorker("decode-0")
    for worker in prefills:
        worker.replace[m.Prefill] = lambda message, worker=worker: [
            worker.failed(message.request.id, message.transfer_id, WorkerLost("broken"))
        ]
    cluster = Cluster(*prefills, decode, limits=Limits(max_retries=3))
    stream = cluster.pipeline.submit(request())
    cluster.run()
    with pytest.raises(WorkerLost, match="broken"):
        await collect(stream)
    assert decode.seen == []
    assert sum(worker.kinds().count(m.Prefill) for worker in prefills) == 4
    cluster.check_nothing_is_left()


async def test_a_worker_that_failed_a_request_is_asked_last():
    bad, good, decode = FakeWorker("prefill-0"), FakeWorker("prefill-1"), FakeWorker("decode-0")
    bad.replace[m.Prefill] = lambda message: [bad.failed(message.request.id, message.transfer_id, WorkerLost("broken"))]
    cluster = Cluster(bad, good, decode)
    cluster.pipeline.directory.get(good.id).add_prefill(100_000)  # so that the policy would choose the bad one again
    for i in range(4):
        stream = cluster.pipeline.submit(request(f"r{i}", prompt=PROMPT))
        cluster.run()
        assert await tokens(stream) == continuation(PROMPT, 4)
        assert stream.timings.num_retries <= 1


async def test_a_request_that_breaks_engines_is_tried_only_twice():
    prefills = [FakeWorker(f"prefill-{i}") for i in range(4)]
    for worker in prefills:
        worker.replace[m.Prefill] = lambda message, worker=worker: [
            worker.failed(message.request.id, message.transfer_id, EngineError("NaN"))
        ]
    cluster = Cluster(*prefills, FakeWorker("decode-0"))
    stream = cluster.pipeline.submit(request())
    cluster.run()
    with pytest.raises(EngineError):
        await collect(stream)
    assert sum(worker.kinds().count(m.Prefill) for worker in prefills) == 2


async def test_a_workers_verdict_on_the_request_itself_is_final():
    prefill = FakeWorker("prefill-0")
    prefill.replace[m.Prefill] = lambda message: [
        prefill.failed(message.request.id, message.transfer_id, InvalidRequest("no"))
    ]
    cluster = Cluster(prefill, FakeWorker("decode-0"))
    stream = cluster.pipeline.submit(request())
    cluster.run()
    with pytest.raises(InvalidRequest, match="no"):
        await collect(stream)
    assert prefill.kinds().count(m.Prefill) == 1


async def test_a_failed_transfer_is_tried_again_under_a_new_name():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    pushes: list[m.Push] = []

    def fail_once(message):
        pushes.append(message)
        if len(pushes) > 1:
            prefill.push(message)
            return []
        prefill.held.pop(message.transfer_id)
        return [
            prefill.failed(message.request_id, message.transfer_id, TransferFailed("write 3 of 7 failed")),
            m.Stopped(request_id=message.request_id, transfer_id=message.transfer_id),
        ]

    prefill.replace[m.Push] = fail_once
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT, max_tokens=5))
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 5)
    assert pushes[0].transfer_id != pushes[1].transfer_id
    cluster.check_nothing_is_left()


async def test_a_transfer_that_hangs_meets_its_deadline_and_quiesces():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    prefill.stuck_pushes = True
    cluster = Cluster(prefill, decode, limits=Limits(transfer_deadline_s=5.0, max_retries=0))
    stream = cluster.pipeline.submit(request())
    cluster.settle()
    cluster.advance(5.5)
    assert cluster.pipeline.num_in_flight == 1
    cluster.advance(1.0)
    with pytest.raises(TransferFailed, match="within 5 s"):
        await collect(stream)
    cluster.check_nothing_is_left()  # the source said Stopped, the target was told


async def test_quarantined_blocks_are_freed_only_after_the_source_has_stopped():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    prefill.stuck_pushes = True
    prefill.ignored.add(m.Abort)  # it hangs
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request())
    cluster.settle()
    stream.cancel()
    cluster.settle()
    assert len(decode.quarantined) == 1
    assert m.SourceStopped not in decode.kinds()
    (transfer_id,) = decode.quarantined
    prefill.orders.clear()
    prefill.held.clear()
    prefill.out.append(m.Stopped(request_id=RequestId("r"), transfer_id=transfer_id))
    cluster.check_nothing_is_left()
    assert m.SourceStopped in decode.kinds()


async def test_a_push_that_ends_while_it_is_aborted_counts_as_stopped():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    prefill.stuck_pushes = True
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request())
    cluster.settle()
    (order,) = prefill.orders.values()
    prefill.orders.clear()
    prefill.out.append(m.Pushed(request_id=order.request_id, transfer_id=order.transfer_id, num_bytes=1, seconds=0.1))
    stream.cancel()  # the Abort and the Pushed cross each other
    cluster.check_nothing_is_left()


async def test_an_incompatible_pair_is_marked_and_another_is_tried():
    prefill, bad, good = FakeWorker("prefill-0"), FakeWorker("decode-0"), FakeWorker("decode-1")
    cluster = Cluster(prefill, bad)
    bad.replace[m.Reserve] = lambda message: [
        bad.failed(message.request.id, message.transfer_id, PeerIncompatible("block layouts differ"))
    ]
    cluster.attach(good)
    for i in range(6):
        stream = cluster.pipeline.submit(request(f"r{i}", prompt=PROMPT))
        cluster.run()
        assert await tokens(stream) == continuation(PROMPT, 4)
    assert bad.kinds().count(m.Reserve) == 1  # never again on the same pair


async def test_a_pair_found_incompatible_at_the_push_is_not_used_again():
    prefill, first, second = FakeWorker("prefill-0"), FakeWorker("decode-0"), FakeWorker("decode-1")
    refused: list[m.Push] = []

    def refuse_first(message):
        if message.target != first.id:
            prefill.push(message)
            return []
        refused.append(message)
        prefill.held.pop(message.transfer_id, None)
        return [
            prefill.failed(message.request_id, message.transfer_id, PeerIncompatible("rope differs")),
            m.Stopped(request_id=message.request_id, transfer_id=message.transfer_id),
        ]

    prefill.replace[m.Push] = refuse_first
    cluster = Cluster(prefill, first, second)
    for i in range(6):
        stream = cluster.pipeline.submit(request(f"r{i}", prompt=PROMPT))
        cluster.run()
        assert await tokens(stream) == continuation(PROMPT, 4)
    assert len(refused) == 1
    cluster.check_nothing_is_left()


async def test_when_no_compatible_pair_is_left_the_error_says_what_differs():
    prefill, decode = FakeWorker("prefill-0", weights="v1"), FakeWorker("decode-0", weights="v2")
    cluster = Cluster(prefill, decode)
    with pytest.raises(PeerIncompatible, match="weights 'v1' against 'v2'"):
        cluster.pipeline.submit(request())
    assert prefill.seen == []
    assert cluster.pipeline.idle()


async def test_a_full_decode_worker_is_asked_again_while_prefill_goes_on():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    decode.replace[m.Reserve] = lambda message: [
        decode.failed(message.request.id, message.transfer_id, Overloaded("no blocks"))
    ]
    cluster = Cluster(prefill, decode)
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.settle()
    cluster.advance(3.0)
    assert decode.kinds().count(m.Reserve) > 2
    del decode.replace[m.Reserve]
    cluster.advance(2.0)
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 4)
    assert prefill.kinds().count(m.Prefill) == 1
    assert stream.timings.num_retries == 0
    cluster.check_nothing_is_left()


async def test_a_decode_worker_that_never_answers_is_left_for_another():
    prefill, silent, good = FakeWorker("prefill-0"), FakeWorker("decode-0"), FakeWorker("decode-1")
    silent.ignored.add(m.Reserve)
    cluster = Cluster(prefill, silent, limits=Limits(reserve_wait_s=5.0))
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.settle()
    cluster.attach(good)
    cluster.advance(8.0)
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 4)
    assert m.Abort in silent.kinds()
    cluster.check_nothing_is_left()


async def test_a_full_prefill_worker_turns_the_client_away():
    prefill = FakeWorker("prefill-0")
    prefill.replace[m.Prefill] = lambda message: [
        prefill.failed(message.request.id, message.transfer_id, Overloaded("the queue is full"))
    ]
    cluster = Cluster(prefill, FakeWorker("decode-0"), limits=Limits(max_retries=2))
    stream = cluster.pipeline.submit(request())
    cluster.settle()
    cluster.advance(2.0)
    with pytest.raises(Overloaded, match="queue is full"):
        await collect(stream)


async def test_the_deadline_ends_a_request_that_nobody_answers():
    prefill = FakeWorker("prefill-0")
    prefill.ignored.add(m.Prefill)
    cluster = Cluster(prefill, FakeWorker("decode-0"))
    stream = cluster.pipeline.submit(request(), timeout_s=3.0)
    cluster.advance(2.5)
    assert cluster.pipeline.num_in_flight == 1
    cluster.advance(1.0)
    with pytest.raises(DeadlineExceeded):
        await collect(stream)
    assert m.Abort in prefill.kinds()
    cluster.check_nothing_is_left()


async def test_the_deadline_holds_while_decoding():
    cluster = pair()
    stream = cluster.pipeline.submit(request(max_tokens=100), timeout_s=3.0)
    cluster.settle()
    cluster.advance(3.5)
    with pytest.raises(DeadlineExceeded):
        await collect(stream)
    cluster.check_nothing_is_left()


async def test_leases_of_unfinished_transfers_are_extended_and_no_others():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    prefill.stuck_pushes = True
    cluster = Cluster(prefill, decode, limits=Limits(transfer_deadline_s=1000.0))
    cluster.pipeline.submit(request())
    cluster.settle()
    (transfer_id,) = decode.reserved
    cluster.advance(35.0)
    assert 3 <= len(decode.leases) <= 5
    assert all(lease == m.ExtendLease(transfer_ids=[transfer_id], lease_s=30.0) for lease in decode.leases)
    decode.leases.clear()
    prefill.stuck_pushes = False
    prefill.push(prefill.orders.pop(transfer_id))
    cluster.settle()
    cluster.advance(35.0)
    assert decode.leases == []


# ---- cancel


def stop_at(cluster: Cluster, phase: Phase) -> TokenStream:
    """A request that has come as far as `phase`."""
    prefill = cluster.workers["prefill-0/0"]
    if phase is Phase.QUEUED:
        prefill.ignored.add(m.Prefill)
    elif phase is Phase.PREFILLING:
        prefill.replace[m.Prefill] = lambda message: [started(message)]
    elif phase is Phase.TRANSFERRING:
        prefill.stuck_pushes = True
    stream = cluster.pipeline.submit(request(max_tokens=50))
    cluster.settle()
    flight = cluster.pipeline._flights[stream.request_id]
    assert flight.phase is phase
    return stream


PHASES = [Phase.QUEUED, Phase.PREFILLING, Phase.TRANSFERRING, Phase.DECODING]


@pytest.mark.parametrize("phase", PHASES)
async def test_cancelling_frees_both_sides_in_any_phase(phase):
    cluster = pair()
    stream = stop_at(cluster, phase)
    stream.cancel()
    cluster.settle()
    with pytest.raises(Cancelled):
        await collect(stream)
    cluster.check_nothing_is_left()


@pytest.mark.parametrize("phase", PHASES)
async def test_leaving_the_stream_cancels(phase):
    cluster = pair()
    async with stop_at(cluster, phase):
        pass
    cluster.check_nothing_is_left()


@pytest.mark.parametrize("phase", PHASES[1:])
async def test_stopping_early_is_a_finish_and_frees_both_sides(phase):
    cluster = pair()
    stream = stop_at(cluster, phase)
    stream.stop()
    deltas = await collect(stream)
    assert deltas[-1].finish is FinishReason.STOP
    assert deltas[-1].timings is not None
    cluster.check_nothing_is_left()


@pytest.mark.parametrize("phase", PHASES)
@pytest.mark.parametrize("victim", ["prefill-0/0", "decode-0/0"])
async def test_a_worker_that_dies_in_any_phase_and_comes_back_loses_no_token(phase, victim):
    cluster = pair()
    prefill = cluster.workers["prefill-0/0"]
    stream = stop_at(cluster, phase)
    prefill.ignored.clear()
    prefill.replace.clear()
    prefill.stuck_pushes = False
    dead = cluster.workers.pop(victim)
    cluster.lose(dead)
    cluster.pipeline.engine_dead(dead.epoch)
    cluster.advance(1.0)
    engine = victim.partition("/")[0]
    cluster.attach(FakeWorker(engine, epoch="2"))
    cluster.advance(3.0)
    if phase is Phase.QUEUED and victim == "decode-0/0":
        stream.cancel()  # prefill still has it, and never answers
        return
    if phase is Phase.PREFILLING and victim == "decode-0/0":
        cluster.run()
        stream.cancel()
        cluster.check_nothing_is_left()
        return
    cluster.run()
    assert await tokens(stream) == continuation([5, 6, 7], 50)
    cluster.check_nothing_is_left()


@pytest.mark.parametrize("broken", ["prefill-0/0", "decode-0/0"])
@pytest.mark.parametrize("phase", [Phase.PREFILLING, Phase.TRANSFERRING, Phase.DECODING])
async def test_words_swallowed_by_a_broken_stream_are_said_again(broken, phase):
    cluster = pair()
    stream = stop_at(cluster, phase)
    stream.cancel()
    worker = cluster.workers[broken]
    cluster.lose(worker)  # with the Abort on its way
    cluster.settle()
    cluster.attach(worker)  # the same life: only the connection had broken
    cluster.check_nothing_is_left()


async def test_a_push_that_never_arrived_leaves_nothing_in_quarantine():
    cluster = pair()
    prefill, decode = cluster.workers["prefill-0/0"], cluster.workers["decode-0/0"]
    stream = stop_at(cluster, Phase.PREFILLING)
    (transfer_id,) = decode.reserved
    prefill.seen = [message for message in prefill.seen if not isinstance(message, m.Push)]
    prefill.orders.clear()  # as if the stream had broken under it
    cluster.lose(prefill)
    stream.cancel()
    cluster.settle()
    assert list(decode.quarantined) == [transfer_id]
    cluster.attach(prefill)
    cluster.check_nothing_is_left()


async def test_death_is_told_to_every_worker_that_lives_and_to_those_that_come_later():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode)
    cluster.lose(prefill)
    cluster.pipeline.engine_dead(prefill.epoch)
    cluster.settle()
    assert decode.dead_epochs == [prefill.epoch]
    late = FakeWorker("decode-1")
    cluster.attach(late)
    cluster.settle()
    assert late.dead_epochs == [prefill.epoch]


async def test_workers_added_and_removed_under_load_lose_no_request():
    cluster = Cluster(FakeWorker("prefill-0"), FakeWorker("decode-0"), limits=Limits(max_retries=100))
    streams = []
    for round_ in range(1, 12):
        streams += [cluster.pipeline.submit(request(f"r{round_}-{i}", prompt=[round_, i + 1])) for i in range(3)]
        cluster.deliver()
        cluster.attach(FakeWorker(f"prefill-{round_}"))
        cluster.attach(FakeWorker(f"decode-{round_}"))
        cluster.deliver()
        for engine in (f"prefill-{round_ - 1}", f"decode-{round_ - 1}"):
            worker_id = f"{engine}/0"
            gone = cluster.workers.pop(worker_id)
            cluster.conversations.pop(worker_id)
            cluster.pipeline.remove_worker(gone.id)
            cluster.pipeline.engine_dead(gone.epoch)
        for worker in cluster.workers.values():
            worker.step()
    cluster.run()
    for stream in streams:
        name = stream.request_id.removeprefix("r").split("-")
        assert await tokens(stream) == continuation([int(name[0]), int(name[1]) + 1], 4)
    cluster.check_nothing_is_left()


# ---- admission


async def test_without_workers_a_request_is_unavailable_and_leaves_nothing():
    cluster = Cluster()
    with pytest.raises(Unavailable, match="no prefill worker is known"):
        cluster.pipeline.submit(request())
    assert cluster.pipeline.idle()


async def test_a_draining_worker_gets_nothing_new_and_finishes_what_it_has():
    first, second, decode = FakeWorker("prefill-0"), FakeWorker("prefill-1"), FakeWorker("decode-0")
    cluster = Cluster(first, second, decode)
    cluster.pipeline.drain(first.id)
    for i in range(4):
        cluster.pipeline.submit(request(f"r{i}"))
    cluster.run()
    assert first.kinds() == [m.Drain]
    assert second.kinds().count(m.Prefill) == 4


async def test_too_many_waiting_requests_are_turned_away():
    prefill = FakeWorker("prefill-0")
    prefill.ignored.add(m.Prefill)
    cluster = Cluster(prefill, FakeWorker("decode-0"), max_queue=2)
    cluster.pipeline.submit(request("a"))
    cluster.pipeline.submit(request("b"))
    with pytest.raises(Overloaded):
        cluster.pipeline.submit(request("c"))


async def test_a_request_id_in_flight_is_refused():
    cluster = pair()
    cluster.pipeline.submit(request("same"))
    with pytest.raises(DuplicateRequest):
        cluster.pipeline.submit(request("same"))


async def test_a_prompt_beyond_the_context_is_refused_before_any_worker_sees_it():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0", max_model_len=32)
    cluster = Cluster(prefill, decode)
    with pytest.raises(ContextTooLong, match="context is 32"):
        cluster.pipeline.submit(request(prompt=[1] * 32))
    cluster.pipeline.submit(request(prompt=[1] * 31))
    cluster.settle()
    assert prefill.kinds().count(m.Prefill) == 1


async def test_metrics_tell_what_happened():
    cluster = pair()
    cluster.pipeline.submit(request("a", max_tokens=4))
    cluster.run()
    cluster.pipeline.submit(request("b", max_tokens=50)).cancel()
    text = cluster.pipeline.metrics.render().decode()
    assert 'pd_cluster_requests_total{outcome="length"} 1.0' in text
    assert 'pd_cluster_requests_total{outcome="cancelled"} 1.0' in text
    assert "pd_cluster_generation_tokens_total 4.0" in text
    assert "pd_cluster_kv_transfer_bytes_total 128.0" in text
    assert "pd_cluster_time_to_first_token_seconds_count 1.0" in text
    for phase in Phase:
        if f'requests_in_phase{{phase="{phase}"}}' in text:
            assert f'pd_cluster_requests_in_phase{{phase="{phase}"}} 0.0' in text


async def test_closing_the_generator_cancels_the_request():
    cluster = pair()
    deltas = cluster.pipeline.generate(request(max_tokens=50))
    first = anext(deltas)
    task = asyncio.ensure_future(first)
    await asyncio.sleep(0)
    cluster.settle()
    assert (await task).token_ids == continuation([5, 6, 7], 1)
    await deltas.aclose()
    cluster.check_nothing_is_left()


def test_a_link_is_not_told_of_by_a_stranger():
    sent: list[object] = []
    links = Links(lambda leg, message: sent.append(message))
    source, target = Leg("p/0", "e1"), Leg("d/0", "e2")
    link = Link(transfer_id=TransferId("t"), source=source, target=target, wire_id=RequestId("r"), push_sent=True)
    links.open(link)
    links.close(link)
    links.quiet(Leg("p/0", "e0"), TransferId("t"))  # a former life of the source
    assert [type(message) for message in sent] == [m.Abort]
    links.quiet(source, TransferId("t"))
    assert [type(message) for message in sent] == [m.Abort, m.SourceStopped]
    assert len(links) == 0


async def test_a_process_that_wakes_up_after_its_engine_was_declared_dead_gets_nothing():
    prefill, decode = FakeWorker("prefill-0"), FakeWorker("decode-0")
    cluster = Cluster(prefill, decode)
    cluster.lose(prefill)
    cluster.pipeline.engine_dead(prefill.epoch)
    conversation = cluster.attach(prefill)
    with pytest.raises(Unavailable):
        cluster.pipeline.submit(request())
    assert conversation.inbox == []
    cluster.attach(FakeWorker("prefill-0", epoch="2"))
    stream = cluster.pipeline.submit(request(prompt=PROMPT))
    cluster.run()
    assert await tokens(stream) == continuation(PROMPT, 4)
