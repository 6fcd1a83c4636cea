"""The router under random weather: workers die, return, reconnect, preempt; clients cancel; messages wait and repeat.

Whatever happens, a client sees a beginning of what its request generates, each token once; and when the weather clears
every request ends, and nothing of any is left on any worker.
"""

import sys
from pathlib import Path

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

sys.path.insert(0, str(Path(__file__).parents[1] / "unit"))

from fake_worker import Cluster, FakeWorker, continuation, request

from pd_cluster import messages as m
from pd_cluster.errors import Cancelled, PdClusterError
from router.attempt import Limits
from router.stream import TokenStream

ENGINES = ["prefill-0", "prefill-1", "decode-0", "decode-1"]
MAX_TOKENS = 6

engines = st.sampled_from(ENGINES)


class PipelineMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        limits = Limits(max_retries=10_000, outage_patience_s=1e9, transfer_deadline_s=20.0, reserve_wait_s=5.0)
        self.cluster = Cluster(limits=limits, request_timeout_s=1e9)
        self.lives = dict.fromkeys(ENGINES, 0)
        self.present: dict[str, FakeWorker] = {}  # processes that live
        self.streams: list[TokenStream] = []
        self.seen: dict[str, list[int]] = {}
        self.errors: dict[str, PdClusterError] = {}
        self.cancelled: set[str] = set()
        for engine in ENGINES:
            self.start(engine)

    def start(self, engine: str) -> None:
        self.lives[engine] += 1
        worker = self.present[engine] = FakeWorker(engine, epoch=str(self.lives[engine]))
        self.cluster.attach(worker)

    def connected(self, engine: str) -> bool:
        return engine in self.present and self.present[engine].id in self.cluster.conversations

    # ---- what happens

    @rule(prompt=st.lists(st.integers(1, 250), min_size=1, max_size=40), max_tokens=st.integers(1, MAX_TOKENS))
    def submit(self, prompt: list[int], max_tokens: int) -> None:
        name = f"r{len(self.seen)}"
        try:
            stream = self.cluster.pipeline.submit(request(name, prompt=prompt, max_tokens=max_tokens))
        except PdClusterError:
            return
        self.streams.append(stream)
        self.seen[name] = []
        setattr(stream, "expected", continuation(prompt, max_tokens))  # noqa: B010

    @rule(engine=engines, repeat=st.booleans())
    def worker_hears_and_speaks(self, engine: str, repeat: bool) -> None:
        if not self.connected(engine):
            return
        worker = self.present[engine]
        conversation = self.cluster.conversations[worker.id]
        inbox, conversation.inbox = conversation.inbox, []
        worker.handle(inbox)
        out, worker.out = worker.out, []
        self.cluster.pipeline.on_messages(conversation, out)
        if repeat:
            self.cluster.pipeline.on_messages(conversation, out)

    @rule(engine=engines)
    def worker_decodes(self, engine: str) -> None:
        if engine in self.present:
            self.present[engine].step()

    @rule(engine=engines, stuck=st.booleans())
    def pushes_hang_or_go_on(self, engine: str, stuck: bool) -> None:
        if engine not in self.present:
            return
        worker = self.present[engine]
        worker.stuck_pushes = stuck
        if not stuck:
            for order in list(worker.orders.values()):
                if order.transfer_id in worker.held:
                    del worker.orders[order.transfer_id]
                    worker.push(order)

    @rule(engine=engines)
    def worker_preempts(self, engine: str) -> None:
        worker = self.present.get(engine)
        if worker is not None and worker.running:
            request_id = next(reversed(worker.running))
            del worker.running[request_id]
            worker.out.append(m.Preempted(request_id=request_id))

    @precondition(lambda self: len(self.present) > 1)
    @rule(engine=engines, proof=st.booleans())
    def engine_dies(self, engine: str, proof: bool) -> None:
        worker = self.present.pop(engine, None)
        if worker is None:
            return
        if worker.id in self.cluster.conversations:
            self.cluster.lose(worker)
        self.cluster.workers.pop(worker.id)
        if proof:
            self.cluster.pipeline.engine_dead(worker.epoch)
        else:
            self.dead_without_proof(worker)

    def dead_without_proof(self, worker: FakeWorker) -> None:
        """The supervisor is slow: its word comes at the end."""
        self.unproved = [*getattr(self, "unproved", []), worker]

    @rule(engine=engines)
    def engine_starts_again(self, engine: str) -> None:
        if engine not in self.present:
            self.start(engine)

    @rule(engine=engines)
    def connection_breaks_and_returns(self, engine: str) -> None:
        """The worker notices too, and gives up what the router had there."""
        if not self.connected(engine):
            return
        worker = self.present[engine]
        self.cluster.lose(worker)
        self.cluster.attach(worker)

    @rule(index=st.integers(0, 50))
    def client_cancels(self, index: int) -> None:
        if index < len(self.streams):
            self.streams[index].cancel()
            self.cancelled.add(self.streams[index].request_id)

    @rule(seconds=st.sampled_from([0.1, 1.0, 10.0]))
    def time_passes(self, seconds: float) -> None:
        self.cluster.clock.advance(seconds)
        self.cluster.pipeline.tick()

    # ---- what must hold

    @invariant()
    def clients_see_a_beginning_of_the_truth(self) -> None:
        for stream in self.streams:
            try:
                delta = stream.take()
            except PdClusterError as error:
                self.errors[stream.request_id] = error
                continue
            if delta is not None:
                self.seen[stream.request_id] += delta.token_ids
            tokens = self.seen[stream.request_id]
            assert tokens == stream.expected[: len(tokens)]

    def teardown(self) -> None:
        """The weather clears."""
        for worker in getattr(self, "unproved", []):
            self.cluster.pipeline.engine_dead(worker.epoch)
        for engine in ENGINES:
            self.engine_starts_again(engine)
            self.pushes_hang_or_go_on(engine, stuck=False)
        for _ in range(40):
            self.cluster.run()
            self.cluster.advance(3.0, tick_s=1.0)
            self.clients_see_a_beginning_of_the_truth()
        for stream in self.streams:
            name = stream.request_id
            if name in self.cancelled:
                assert name not in self.errors or isinstance(self.errors[name], Cancelled)
            else:
                assert name not in self.errors, self.errors[name]
                assert self.seen[name] == stream.expected
        self.cluster.check_nothing_is_left()


PipelineMachine.TestCase.settings = settings(max_examples=80, stateful_step_count=40, deadline=None)
TestPipeline = PipelineMachine.TestCase
