"""A decode worker whose group is to do without it: what it has goes on elsewhere, and costs nobody a retry."""

from types import SimpleNamespace

from fake_worker import request

from decode_worker.service import DecodeWorker
from pd_cluster import messages as m
from pd_cluster.clock import FakeClock
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.errors import Unavailable, from_info
from pd_cluster.ids import EngineEpoch, RequestId, RouterId, TransferId, WorkerId

ROUTER = RouterId("router")
SOURCE = EngineEpoch("prefill-epoch")


class Outgoing:
    def __init__(self) -> None:
        self.sent: list[m.ToRouterMessage] = []

    def send(self, router_id: RouterId, messages: list[m.ToRouterMessage]) -> bool:
        self.sent += messages
        return True

    def broadcast(self, messages: list[m.ToRouterMessage]) -> None:
        self.sent += messages

    def take(self) -> list[m.ToRouterMessage]:
        sent, self.sent = self.sent, []
        return sent


def made() -> tuple[DecodeWorker, Outgoing]:
    """With room for two requests of three blocks each, and a little for them to grow."""
    scheduler = Scheduler(
        num_blocks=8,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=64,
        max_model_len=96,
        eos_token_ids=frozenset(),
        prefix_cache=False,
        preempt="evict",
    )
    worker = DecodeWorker(
        scheduler=scheduler,
        sync=SimpleNamespace(num_followers=0, on_tell=None, tell_followers=lambda payload: None),  # type: ignore[arg-type]
        clock=FakeClock(),
        vocab_size=257,
        max_model_len=96,
        block_size=16,
        lease_s=30.0,
        expert_load=list,
    )
    loop = SimpleNamespace(wake=lambda: None, step_s=0.0, num_steps=0)
    outgoing = Outgoing()
    worker.attach(loop, outgoing, SimpleNamespace(apply=lambda message: None))  # type: ignore[arg-type]
    return worker, outgoing


def reserve(worker: DecodeWorker, name: str, num_tokens: int = 40) -> None:
    worker.on_messages(
        ROUTER,
        [
            m.Reserve(
                request=request(name, prompt=range(1, 1 + num_tokens)),
                transfer_id=TransferId(f"t-{name}"),
                source=WorkerId("prefill-0/0"),
                source_epoch=SOURCE,
                deadline_s=30.0,
            )
        ],
    )


def test_requests_on_their_way_are_resumed_and_those_in_line_ask_elsewhere() -> None:
    worker, outgoing = made()
    for name in ("a", "b", "c"):
        reserve(worker, name)
    reserve(worker, "d", num_tokens=8)  # would fit, but c is in front of it
    assert [(type(message), message.request_id) for message in outgoing.take()] == [(m.Granted, "a"), (m.Granted, "b")]
    worker.leave()
    told = outgoing.take()
    said = {message.request_id: message for message in told}
    assert len(said) == len(told), "nothing is granted on the way out"
    assert said["a"] == m.Preempted(request_id=said["a"].request_id)
    assert said["b"] == m.Preempted(request_id=said["b"].request_id)
    for name in ("c", "d"):
        failed = said[RequestId(name)]
        assert isinstance(failed, m.Failed)
        assert isinstance(from_info(failed.error), Unavailable)
    assert worker.load().draining
    assert not worker.idle, "their sources may still write"
    worker.on_messages(ROUTER, [m.EngineDead(dead=SOURCE)])
    assert worker.idle


def test_it_takes_nothing_new_until_it_stays() -> None:
    worker, outgoing = made()
    worker.leave()
    reserve(worker, "a")
    (refused,) = outgoing.take()
    assert isinstance(refused, m.Failed)
    worker.stay()
    assert not worker.load().draining
    reserve(worker, "b")
    assert [type(message) for message in outgoing.take()] == [m.Granted]
