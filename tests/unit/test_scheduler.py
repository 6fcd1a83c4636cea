"""The scheduler, step by step, with the toy engine drawing the tokens."""

from collections import deque

import pytest

from pd_cluster.engine.outcome import Progress, StartedRequest, StepOutcome
from pd_cluster.engine.plan import Sampled, StepPlan, StepResult, Work
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.toy import ToyEngine, toy_tokens
from pd_cluster.errors import ContextTooLong, DuplicateRequest, EngineError, InvalidRequest
from pd_cluster.ids import BlockId, RequestId
from pd_cluster.kv.hashing import unit_hashes
from pd_cluster.request import FinishReason, Request, SamplingParams

STOP, LENGTH = FinishReason.STOP, FinishReason.LENGTH


def request(
    name: str, prompt: list[int], output: list[int] | None = None, salt: str = "", **sampling: object
) -> Request:
    sampling.setdefault("max_tokens", 8)
    return Request(
        id=RequestId(name),
        token_ids=prompt + (output or []),
        num_prompt_tokens=len(prompt),
        sampling=SamplingParams(**sampling),  # type: ignore[arg-type]
        cache_salt=salt,
    )


def prompt_of(num_tokens: int, first: int = 1) -> list[int]:
    return [(first * 31 + 7 * i) % 250 for i in range(num_tokens)]


class Worker:
    """A scheduler and a toy engine, `depth` steps in flight."""

    def __init__(self, depth: int = 1, role: str = "both", **options: object) -> None:
        settings: dict[str, object] = {
            "num_blocks": 32,
            "block_size": 16,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 64,
            "max_model_len": 400,
            "eos_token_ids": frozenset(),
            "prefix_cache": True,
        }
        settings |= options
        self.scheduler = Scheduler(**settings)  # type: ignore[arg-type]
        self.engine = ToyEngine(num_blocks=settings["num_blocks"], block_size=settings["block_size"], role=role)  # type: ignore[arg-type]
        self.depth = depth
        self.step = 0
        self.output: dict[str, list[int]] = {}
        self.finish: dict[str, FinishReason] = {}
        self.started: list[StartedRequest] = []
        self._plans: deque[StepPlan] = deque()

    def launch(self) -> StepPlan:
        plan = self.scheduler.plan(self.step, float(self.step))
        self.scheduler.check()
        self.started += self.scheduler.take_started()
        self.step += 1
        if plan.work:
            self.engine.launch(plan, [plan.num_tokens])
            self._plans.append(plan)
        return plan

    def complete(self) -> StepOutcome:
        self._plans.popleft()
        outcome = self.scheduler.complete(self.engine.collect())
        self.scheduler.check()
        for delta in outcome.tokens:
            tokens = self.output.setdefault(delta.request_id, [])
            if not tokens:
                self.first_index = delta.first_index
            tokens += delta.token_ids
            if delta.finish is not None:
                assert delta.request_id not in self.finish
                self.finish[delta.request_id] = delta.finish
        return outcome

    def run(self) -> tuple[StepPlan, StepOutcome]:
        plan = self.launch()
        return plan, self.complete()

    def run_all(self, max_steps: int = 1000) -> list[StepPlan]:
        plans: list[StepPlan] = []
        for _ in range(max_steps):
            if not self._plans and not self.scheduler.has_work(0.0):
                return plans
            plans.append(self.launch())
            if self._plans and (len(self._plans) >= self.depth or not plans[-1].work):
                self.complete()
        raise AssertionError(f"still at work after {max_steps} steps")

    def assert_idle(self) -> None:
        self.scheduler.check()
        self.scheduler.clear_prefix_cache()
        load = self.scheduler.load()
        assert load.num_free_blocks == self.scheduler_blocks
        assert (load.num_waiting, load.num_running, load.num_held_blocks, load.num_reserved_blocks) == (0, 0, 0, 0)

    @property
    def scheduler_blocks(self) -> int:
        return self.engine.arena.num_blocks


# ---- steps


def test_decodes_come_first_and_prefill_chunks_take_the_rest_of_the_budget() -> None:
    worker = Worker(max_num_batched_tokens=20)
    worker.scheduler.add(request("a", prompt_of(5)), prefill_only=False, now_s=0.0)
    worker.run()
    worker.scheduler.add(request("b", prompt_of(30, 2)), prefill_only=False, now_s=1.0)
    worker.scheduler.add(request("c", prompt_of(12, 3)), prefill_only=False, now_s=1.0)
    a, b, c = RequestId("a"), RequestId("b"), RequestId("c")
    assert worker.run()[0].work == [Work(a, 1, True), Work(b, 19, False)]
    assert worker.run()[0].work == [Work(a, 1, True), Work(b, 11, True), Work(c, 8, False)]
    assert worker.run()[0].work == [Work(a, 1, True), Work(b, 1, True), Work(c, 4, True)]


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("budget", [1, 5, 16, 64])
@pytest.mark.parametrize("prefix_cache", [False, True])
def test_requests_draw_the_same_tokens_whatever_the_budget_and_depth(
    depth: int, budget: int, prefix_cache: bool
) -> None:
    worker = Worker(depth=depth, max_num_batched_tokens=budget, prefix_cache=prefix_cache)
    prompts = {name: prompt_of(n, i) for i, (name, n) in enumerate([("a", 1), ("b", 15), ("c", 16), ("d", 33)])}
    for name, prompt in prompts.items():
        worker.scheduler.add(request(name, prompt, max_tokens=20), prefill_only=False, now_s=0.0)
    plans = worker.run_all()
    assert worker.output == {name: toy_tokens(prompt, 20) for name, prompt in prompts.items()}
    assert set(worker.finish.values()) == {LENGTH}
    # no token is computed twice, and none beyond what max_tokens needs
    assert sum(plan.num_tokens for plan in plans) == 1 + 15 + 16 + 33 + 4 * 19
    worker.assert_idle()


def test_empty_plan_of_an_idle_worker_needs_no_completion() -> None:
    worker = Worker()
    assert not worker.scheduler.has_work(0.0)
    for step in range(3):
        assert worker.scheduler.plan(step, 0.0) == StepPlan(step=step)
    assert worker.scheduler.complete(StepResult(step=2, sampled=[])) == StepOutcome()
    worker.scheduler.add(request("a", [1]), prefill_only=False, now_s=0.0)
    worker.step = 3
    worker.run_all()
    assert worker.output["a"] == toy_tokens([1], 8)


def test_plan_that_runs_later_than_it_was_made_completes_under_its_new_number() -> None:
    scheduler = Worker().scheduler
    scheduler.add(request("a", [1]), prefill_only=False, now_s=0.0)
    scheduler.plan(4, 0.0)
    outcome = scheduler.complete(StepResult(step=5, sampled=[Sampled(RequestId("a"), 9)]))
    assert outcome.tokens[0].token_ids == [9]


def test_engine_is_told_of_drops_only_by_a_plan_that_runs() -> None:
    worker = Worker()
    worker.scheduler.add(request("a", [1], max_tokens=1), prefill_only=False, now_s=0.0)
    worker.run_all()
    assert worker.scheduler.plan(9, 0.0).drop == []
    worker.scheduler.add(request("a", [2], max_tokens=1), prefill_only=False, now_s=0.0)
    plan = worker.launch()
    assert plan.drop == [RequestId("a")]
    assert plan.add[0].token_ids == [2]


def test_result_without_a_planned_token_is_an_engine_error() -> None:
    worker = Worker()
    worker.scheduler.add(request("a", [1]), prefill_only=False, now_s=0.0)
    worker.scheduler.plan(0, 0.0)
    with pytest.raises(EngineError, match="no token for request a"):
        worker.scheduler.complete(StepResult(step=0, sampled=[]))


def test_more_sequences_than_the_engine_takes_wait_their_turn() -> None:
    worker = Worker(max_num_seqs=2)
    for index in range(5):
        worker.scheduler.add(request(f"r{index}", prompt_of(3, index)), prefill_only=False, now_s=0.0)
    plans = worker.run_all()
    assert max(len(plan.work) for plan in plans) == 2
    assert len(worker.finish) == 5
    worker.assert_idle()


def test_start_is_reported_once_with_its_time_in_line() -> None:
    worker = Worker(max_num_seqs=1)
    worker.scheduler.add(request("a", prompt_of(3), max_tokens=2), prefill_only=False, now_s=-1.0)
    worker.scheduler.add(request("b", prompt_of(3), max_tokens=2), prefill_only=False, now_s=0.5)
    worker.run_all()
    assert worker.started == [StartedRequest(RequestId("a"), 0, 1.0), StartedRequest(RequestId("b"), 0, 1.5)]


# ---- ends


def draw(scheduler: Scheduler, *token_ids: int | None) -> StepOutcome:
    """Run steps of a sole request that draws these tokens; the last step's outcome."""
    outcome = StepOutcome()
    for step, token_id in enumerate(token_ids):
        plan = scheduler.plan(step, 0.0)
        outcome = scheduler.complete(
            StepResult(step=step, sampled=[Sampled(w.request_id, token_id) for w in plan.work if w.sample])
        )
        scheduler.check()
    return outcome


@pytest.mark.parametrize(
    ("sampling", "tokens", "finish"),
    [
        ({}, [2], STOP),
        ({"ignore_eos": True}, [2], None),
        ({"stop_token_ids": (5,)}, [4, 5], STOP),
        ({"stop_token_ids": (5,), "ignore_eos": True}, [5], STOP),
        ({"min_tokens": 1}, [2], None),
        ({"min_tokens": 1}, [4, 2], STOP),
        ({"min_tokens": 2, "max_tokens": 2}, [4, 2], LENGTH),
        ({"max_tokens": 2}, [4], None),
        ({"max_tokens": 2}, [4, 4], LENGTH),
        ({"max_tokens": 1}, [2], STOP),
    ],
)
def test_finish_reason(sampling: dict[str, object], tokens: list[int], finish: FinishReason | None) -> None:
    scheduler = Worker(eos_token_ids=frozenset({2})).scheduler
    scheduler.add(request("a", [1, 1], **sampling), prefill_only=False, now_s=0.0)
    outcome = draw(scheduler, *tokens)
    assert outcome.tokens[0].finish == finish
    assert outcome.tokens[0].token_ids == tokens[-1:]
    assert scheduler.has_work(0.0) == (finish is None)


@pytest.mark.parametrize("options", [{"max_model_len": 32}, {"num_blocks": 2}])
def test_request_ends_when_context_or_pool_is_full(options: dict[str, object]) -> None:
    worker = Worker(**options)
    worker.scheduler.add(request("a", prompt_of(20), max_tokens=100), prefill_only=False, now_s=0.0)
    worker.run_all()
    assert worker.output["a"] == toy_tokens(prompt_of(20), 12)
    assert worker.finish["a"] == LENGTH
    worker.assert_idle()


@pytest.mark.parametrize("options", [{"max_model_len": 32}, {"num_blocks": 2}])
def test_request_that_can_never_fit_is_refused(options: dict[str, object]) -> None:
    scheduler = Worker(**options).scheduler
    scheduler.add(request("a", prompt_of(31)), prefill_only=False, now_s=0.0)
    with pytest.raises(ContextTooLong, match="32 tokens and this worker takes at most 31"):
        scheduler.add(request("b", prompt_of(32)), prefill_only=True, now_s=0.0)
    with pytest.raises(ContextTooLong):
        scheduler.reserve(request("b", prompt_of(32)), 0.0)


def test_wrong_requests_are_refused() -> None:
    scheduler = Worker().scheduler
    scheduler.add(request("a", [1]), prefill_only=False, now_s=0.0)
    with pytest.raises(DuplicateRequest):
        scheduler.add(request("a", [1]), prefill_only=False, now_s=0.0)
    with pytest.raises(DuplicateRequest):
        scheduler.reserve(request("a", [1]), 0.0)
    with pytest.raises(InvalidRequest, match="empty"):
        scheduler.add(request("b", []), prefill_only=False, now_s=0.0)
    with pytest.raises(InvalidRequest, match="max_tokens is 2 and 2"):
        scheduler.add(request("b", [1], [5, 6], max_tokens=2), prefill_only=False, now_s=0.0)


def test_request_whose_logits_are_not_numbers_fails_alone() -> None:
    scheduler = Worker().scheduler
    for name in ("a", "b"):
        scheduler.add(request(name, [1, 2]), prefill_only=name == "b", now_s=0.0)
    scheduler.plan(0, 0.0)
    outcome = scheduler.complete(
        StepResult(step=0, sampled=[Sampled(RequestId("a"), 3), Sampled(RequestId("b"), None)])
    )
    assert [(f.request_id, f.error.code) for f in outcome.failed] == [("b", "engine_error")]
    assert [d.request_id for d in outcome.tokens] == ["a"]
    assert outcome.prefilled == []
    scheduler.check()
    scheduler.abort(RequestId("a"))
    assert scheduler.load().num_free_blocks == 32


def test_resumed_request_counts_on_from_its_output() -> None:
    worker = Worker()
    tokens = toy_tokens(prompt_of(20), 8)
    worker.scheduler.add(request("a", prompt_of(20), tokens[:5], max_tokens=8), prefill_only=False, now_s=0.0)
    worker.run_all()
    assert worker.output["a"] == tokens[5:]
    assert worker.first_index == 5
    assert worker.finish["a"] == LENGTH


@pytest.mark.parametrize("depth", [1, 2])
def test_abort_in_any_state_frees_everything(depth: int) -> None:
    for num_steps in range(6):
        worker = Worker(depth=depth, max_num_batched_tokens=16)
        worker.scheduler.add(request("a", prompt_of(40)), prefill_only=False, now_s=0.0)
        worker.scheduler.add(request("b", prompt_of(9)), prefill_only=False, now_s=0.0)
        for _ in range(num_steps):
            worker.run()
        for _ in range(depth):
            worker.launch()
        assert worker.scheduler.abort(RequestId("a"))
        assert not worker.scheduler.abort(RequestId("a"))
        worker.scheduler.check()
        for _ in range(depth):
            worker.complete()
        worker.run_all()
        assert worker.finish == {RequestId("b"): LENGTH}
        assert "a" not in worker.output or len(worker.output["a"]) <= num_steps
        worker.assert_idle()


def test_aborted_request_keeps_its_blocks_until_the_step_in_flight_completes() -> None:
    worker = Worker(num_blocks=4)
    worker.scheduler.add(request("a", prompt_of(40)), prefill_only=False, now_s=0.0)
    worker.launch()
    worker.scheduler.abort(RequestId("a"))
    assert worker.scheduler.load().num_free_blocks == 1
    assert worker.scheduler.reserve(request("b", prompt_of(40, 2)), 0.0) is None
    outcome = worker.complete()
    assert outcome == StepOutcome()
    assert worker.scheduler.reserve(request("b", prompt_of(40, 2)), 0.0) is not None


def test_id_used_again_while_its_former_step_is_in_flight_gets_only_its_own_tokens() -> None:
    worker = Worker(depth=2)
    worker.scheduler.add(request("a", prompt_of(5)), prefill_only=False, now_s=0.0)
    worker.launch()
    worker.scheduler.abort(RequestId("a"))
    worker.scheduler.add(request("a", prompt_of(6, 3)), prefill_only=False, now_s=0.0)
    worker.run_all()
    assert worker.output["a"] == toy_tokens(prompt_of(6, 3), 8)
    worker.assert_idle()


# ---- prefix cache


def test_equal_prompts_share_full_blocks_but_compute_the_last_token() -> None:
    worker = Worker()
    for name, num_tokens, salt in [("a", 32, ""), ("b", 32, ""), ("c", 33, ""), ("d", 33, "other")]:
        worker.scheduler.add(request(name, prompt_of(num_tokens), salt=salt), prefill_only=False, now_s=0.0)
        worker.run_all()
        assert worker.output[name] == toy_tokens(prompt_of(num_tokens), 8)
    assert [s.num_cached_tokens for s in worker.started] == [0, 16, 32, 0]
    worker.assert_idle()


def test_output_is_cached_for_the_next_turn() -> None:
    worker = Worker()
    worker.scheduler.add(request("a", prompt_of(10), max_tokens=30), prefill_only=False, now_s=0.0)
    worker.run_all()
    next_turn = prompt_of(10) + worker.output["a"] + [1, 2, 3]
    worker.scheduler.add(request("b", next_turn), prefill_only=False, now_s=0.0)
    worker.run_all()
    assert worker.started[1].num_cached_tokens == 32
    # the tokens of the cached output were decoded, of the prompt prefilled: b's prompt mixes both
    stored, removed = worker.scheduler.take_cache_events()
    assert stored == unit_hashes((next_turn + worker.output["b"])[:50])
    assert stored == worker.scheduler.cached_units()
    assert removed == []


def test_without_prefix_cache_nothing_is_shared_or_reported() -> None:
    worker = Worker(prefix_cache=False)
    for name in ("a", "b"):
        worker.scheduler.add(request(name, prompt_of(40)), prefill_only=False, now_s=0.0)
        worker.run_all()
    assert [s.num_cached_tokens for s in worker.started] == [0, 0]
    assert worker.scheduler.take_cache_events() == ([], [])
    assert worker.scheduler.load().num_free_blocks == 32


def test_block_is_shared_only_when_it_is_computed() -> None:
    worker = Worker(depth=2, max_num_batched_tokens=16)
    worker.scheduler.add(request("a", prompt_of(40)), prefill_only=False, now_s=0.0)
    worker.launch()
    worker.launch()
    assert worker.scheduler.cached_units() == []
    worker.complete()
    assert worker.scheduler.cached_units() == unit_hashes(prompt_of(16))
    worker.complete()
    assert worker.scheduler.cached_units() == unit_hashes(prompt_of(32))


# ---- preemption


@pytest.mark.parametrize("depth", [1, 2])
def test_newest_request_gives_way_and_starts_again_with_its_tokens(depth: int) -> None:
    worker = Worker(depth=depth, num_blocks=6)
    for index, name in enumerate(("old", "new")):
        prompt = prompt_of(30, index)
        worker.scheduler.add(request(name, prompt, max_tokens=60), prefill_only=False, now_s=0.0)
    plans = worker.run_all()
    drops = [request_id for plan in plans for request_id in plan.drop]
    assert drops[0] == "new"
    assert worker.output == {n: toy_tokens(prompt_of(30, i), 60) for i, n in enumerate(("old", "new"))}
    assert [s.request_id for s in worker.started] == ["old", "new"]
    worker.assert_idle()


def test_evicted_request_is_reported_and_can_be_resumed_here() -> None:
    worker = Worker(num_blocks=6, preempt="evict")
    for index, name in enumerate(("old", "new")):
        worker.scheduler.add(request(name, prompt_of(30, index), max_tokens=60), prefill_only=False, now_s=0.0)
    while True:
        worker.launch()
        preempted = worker.scheduler.take_preempted()
        worker.complete()
        if preempted:
            break
    assert preempted == ["new"]
    so_far = worker.output["new"]
    worker.scheduler.add(request("new", prompt_of(30, 1), so_far, max_tokens=60), prefill_only=False, now_s=0.0)
    worker.run_all()
    assert worker.output == {n: toy_tokens(prompt_of(30, i), 60) for i, n in enumerate(("old", "new"))}
    worker.assert_idle()


@pytest.mark.parametrize("preempt", ["requeue", "evict"])
def test_sole_request_gives_way_to_reserved_blocks_without_spinning(preempt: str) -> None:
    worker = Worker(num_blocks=4, preempt=preempt)
    worker.scheduler.add(request("a", prompt_of(30), max_tokens=20), prefill_only=False, now_s=0.0)
    worker.run()
    reservation = worker.scheduler.reserve(request("b", prompt_of(16, 2)), 0.0)
    assert reservation is not None
    assert worker.scheduler.reserve(request("c", prompt_of(16, 3)), 0.0) is None  # the watermark
    for _ in range(18):
        worker.run()
    assert worker.launch().work == []
    assert not worker.scheduler.has_work(0.0)
    assert worker.scheduler.take_preempted() == (["a"] if preempt == "evict" else [])
    worker.scheduler.cancel(reservation.block_ids)
    assert worker.scheduler.has_work(0.0) == (preempt == "requeue")
    worker.run_all()
    worker.assert_idle()


def test_prefill_only_request_is_never_preempted() -> None:
    worker = Worker(num_blocks=9, max_num_batched_tokens=20)
    worker.scheduler.add(request("d1", prompt_of(15), max_tokens=30), prefill_only=False, now_s=0.0)
    worker.run()
    worker.scheduler.add(request("d2", prompt_of(15), max_tokens=30), prefill_only=False, now_s=0.0)
    worker.scheduler.add(request("prefill", prompt_of(90, 2)), prefill_only=True, now_s=0.0)
    worker.run()
    block_ids = worker.scheduler.block_ids(RequestId("prefill"))
    worker.run()  # d1 takes the last block
    plan, _ = worker.run()  # d2 needs one more
    assert plan.drop == [RequestId("d2")]
    worker.run_all()
    assert worker.scheduler.block_ids(RequestId("prefill")) == block_ids
    assert worker.scheduler.load().num_held_blocks == 6
    worker.scheduler.release(RequestId("prefill"))
    worker.run_all()
    assert worker.output == {name: toy_tokens(prompt_of(15), 30) for name in ("d1", "d2")}


# ---- prefill for others


def test_prefill_only_request_reports_progress_and_is_held_until_released() -> None:
    worker = Worker(max_num_batched_tokens=16, role="prefill")
    a = RequestId("a")
    worker.scheduler.add(request("a", prompt_of(40)), prefill_only=True, now_s=0.0)
    outcomes = [worker.run()[1] for _ in range(3)]
    assert [o.progress for o in outcomes] == [[Progress(a, 16)], [Progress(a, 32)], [Progress(a, 40)]]
    [prefilled] = outcomes[-1].prefilled
    assert (prefilled.request_id, prefilled.token_id, prefilled.finish) == (a, toy_tokens(prompt_of(40), 1)[0], None)
    assert all(o.tokens == [] for o in outcomes)
    assert not worker.scheduler.has_work(0.0)
    assert worker.scheduler.load().num_held_blocks == 3
    assert worker.scheduler.load().num_free_blocks == 29
    worker.scheduler.release(a)
    worker.scheduler.release(a)
    assert worker.scheduler.load().num_free_blocks == 32
    worker.scheduler.add(request("b", prompt_of(40)), prefill_only=True, now_s=0.0)
    assert worker.run()[1].progress == [Progress(RequestId("b"), 40)]
    assert worker.scheduler.abort(RequestId("b"))
    worker.assert_idle()


def test_release_before_the_first_token_changes_nothing() -> None:
    worker = Worker(max_num_batched_tokens=16)
    worker.scheduler.add(request("a", prompt_of(40)), prefill_only=True, now_s=0.0)
    worker.run()
    worker.scheduler.release(RequestId("a"))
    worker.scheduler.release(RequestId("unknown"))
    worker.run_all()
    assert worker.scheduler.load().num_held_blocks == 3


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_prefill_only_request_draws_one_token_at_any_depth(depth: int) -> None:
    worker = Worker(depth=depth, max_num_batched_tokens=16)
    worker.scheduler.add(request("a", prompt_of(20)), prefill_only=True, now_s=0.0)
    plans = worker.run_all()
    assert sum(plan.num_tokens for plan in plans) == 20
    assert worker.scheduler.load().num_held_blocks == 2


@pytest.mark.parametrize("depth", [1, 2])
def test_prefill_only_request_that_ends_with_its_first_token_is_not_held(depth: int) -> None:
    worker = Worker(depth=depth)
    worker.scheduler.add(request("a", prompt_of(20), max_tokens=1), prefill_only=True, now_s=0.0)
    _, outcome = worker.run()
    assert outcome.prefilled[0].finish == LENGTH
    assert not worker.scheduler.abort(RequestId("a"))
    worker.assert_idle()


def test_no_prefill_starts_while_too_many_blocks_are_held() -> None:
    worker = Worker(max_held_blocks=3, max_num_batched_tokens=60)
    for index in range(4):
        worker.scheduler.add(request(f"r{index}", prompt_of(30, index)), prefill_only=True, now_s=0.0)
    worker.run_all()  # r0 and r1 fill the first step, 4 blocks
    assert worker.scheduler.load().num_held_blocks == 4
    assert not worker.scheduler.has_work(0.0)
    assert worker.scheduler.plan(99, 0.0).work == []
    worker.scheduler.release(RequestId("r0"))
    assert worker.scheduler.has_work(0.0)
    worker.step = 100
    worker.run_all()
    for index in range(4):
        worker.scheduler.release(RequestId(f"r{index}"))
        worker.run_all()
    worker.scheduler.release(RequestId("r3"))
    worker.assert_idle()


@pytest.mark.parametrize("state", ["waiting", "in flight", "held"])
def test_blocks_kept_at_an_abort_stay_until_they_are_given_back(state: str) -> None:
    worker = Worker(num_blocks=4)
    worker.scheduler.add(request("a", prompt_of(40)), prefill_only=True, now_s=0.0)
    if state != "waiting":
        worker.launch()
    if state == "held":
        worker.complete()
    kept = worker.scheduler.abort_keeping_blocks(RequestId("a"))
    worker.scheduler.check()
    if state == "in flight":
        worker.complete()
    assert len(kept) == (0 if state == "waiting" else 3)
    assert worker.scheduler.load().num_free_blocks == 4 - len(kept)
    assert worker.scheduler.load().num_held_blocks == 0
    assert worker.scheduler.abort_keeping_blocks(RequestId("a")) == []
    worker.scheduler.cancel(kept)
    worker.run_all()
    worker.assert_idle()


# ---- decode for others


def push(
    source: Worker, source_blocks: list[BlockId], target: Worker, target_blocks: list[BlockId], start: int, end: int
) -> None:
    """Copy the KV of tokens [start, end), as a transfer would."""
    for position in range(start, end):
        src = source.engine.arena.index(source_blocks, position)
        dst = target.engine.arena.index(target_blocks, position)
        for offset in (0, 16):
            target.engine.arena.words[dst + offset] = source.engine.arena.words[src + offset]


@pytest.mark.parametrize("num_tokens", [1, 15, 16, 17, 31, 32, 33, 64])
@pytest.mark.parametrize("block_sizes", [(16, 16), (16, 32), (32, 16)])
def test_request_moves_from_prefill_to_decode(num_tokens: int, block_sizes: tuple[int, int]) -> None:
    prefill = Worker(role="prefill", block_size=block_sizes[0])
    decode = Worker(role="decode", block_size=block_sizes[1])
    prompt = prompt_of(num_tokens)
    cached: list[int] = []
    for name in ("a", "b", "c"):
        prefill.scheduler.add(request(name, prompt, max_tokens=40), prefill_only=True, now_s=0.0)
        outcomes = [prefill.run()[1] for _ in range(1 + (num_tokens > 64))]
        [done] = outcomes[-1].prefilled
        reservation = decode.scheduler.reserve(request(name, prompt, max_tokens=40), 0.0)
        assert reservation is not None
        source_blocks = prefill.scheduler.block_ids(RequestId(name))
        push(prefill, source_blocks, decode, reservation.block_ids, reservation.num_cached_tokens, num_tokens)
        prefill.scheduler.release(RequestId(name))
        cached.append(reservation.num_cached_tokens)
        decode.scheduler.check()
        decode.scheduler.adopt(request(name, prompt, [done.token_id], max_tokens=40), reservation.block_ids, 1.0)
        decode.scheduler.check()
        decode.run_all()
        assert [done.token_id, *decode.output[name]] == toy_tokens(prompt, 40)
        assert decode.first_index == 1
        assert decode.finish[name] == LENGTH
    full = num_tokens // block_sizes[1] * block_sizes[1]
    assert cached == [0, full, full]
    prefill.assert_idle()
    decode.assert_idle()


def test_adopted_prompt_is_cached_at_once() -> None:
    decode = Worker(role="decode")
    prompt = prompt_of(40)
    first = decode.scheduler.reserve(request("a", prompt), 0.0)
    assert first is not None
    assert decode.scheduler.take_cache_events() == ([], [])
    decode.scheduler.adopt(request("a", prompt, [1]), first.block_ids, 0.0)
    assert decode.scheduler.take_cache_events() == (unit_hashes(prompt), [])
    second = decode.scheduler.reserve(request("b", prompt), 0.0)
    assert second is not None
    assert second.num_cached_tokens == 32
    assert second.block_ids[:2] == first.block_ids[:2]
    decode.scheduler.check()
    decode.scheduler.cancel(second.block_ids)
    decode.scheduler.abort(RequestId("a"))
    decode.assert_idle()


def test_cancelled_reservation_is_not_cached_and_can_be_given_back_in_parts() -> None:
    scheduler = Worker().scheduler
    reservation = scheduler.reserve(request("a", prompt_of(40)), 0.0)
    assert reservation is not None
    assert scheduler.load().num_reserved_blocks == 3
    scheduler.cancel(reservation.block_ids[:1])
    scheduler.check()
    scheduler.cancel(reservation.block_ids[1:])
    scheduler.check()
    assert scheduler.cached_units() == []
    assert scheduler.load().num_free_blocks == 32
    with pytest.raises(AssertionError, match="not reserved"):
        scheduler.cancel(reservation.block_ids)


def test_reservation_waits_for_blocks_but_not_for_the_watermark_when_it_needs_the_whole_pool() -> None:
    scheduler = Worker(num_blocks=4).scheduler
    small = scheduler.reserve(request("a", prompt_of(10)), 0.0)
    assert small is not None
    whole = request("b", prompt_of(63, 2))
    assert scheduler.reserve(whole, 0.0) is None
    assert scheduler.reserve(whole, 0.0) is None
    scheduler.cancel(small.block_ids)
    assert scheduler.reserve(whole, 0.0) is not None
    scheduler.check()


def test_adopting_a_request_twice_is_refused_and_leaves_the_blocks_reserved() -> None:
    scheduler = Worker().scheduler
    first = scheduler.reserve(request("a", prompt_of(20)), 0.0)
    second = scheduler.reserve(request("a", prompt_of(20)), 0.0)
    assert first is not None
    assert second is not None
    scheduler.adopt(request("a", prompt_of(20), [1]), first.block_ids, 0.0)
    with pytest.raises(DuplicateRequest):
        scheduler.adopt(request("a", prompt_of(20), [1]), second.block_ids, 0.0)
    scheduler.cancel(second.block_ids)
    scheduler.check()


def test_adopted_requests_beyond_the_engines_limit_wait_with_their_blocks() -> None:
    worker = Worker(max_num_seqs=2, role="decode")
    for index in range(4):
        reservation = worker.scheduler.reserve(request(f"r{index}", [index]), 0.0)
        assert reservation is not None
        worker.scheduler.adopt(request(f"r{index}", [index], [9]), reservation.block_ids, 0.0)
    plans = worker.run_all()
    assert max(len(plan.work) for plan in plans) == 2
    assert len(worker.finish) == 4
    worker.assert_idle()


def test_load_counts_what_waits_runs_and_is_free() -> None:
    worker = Worker(max_num_batched_tokens=16)
    worker.scheduler.add(request("a", prompt_of(40)), prefill_only=False, now_s=0.0)
    worker.scheduler.add(request("b", prompt_of(7, 2)), prefill_only=False, now_s=0.0)
    worker.run()
    load = worker.scheduler.load()
    assert (load.num_running, load.num_waiting) == (1, 1)
    assert (load.num_waiting_tokens, load.num_context_tokens) == (24 + 7, 16)
    assert load.num_free_blocks == 32 - 3
    worker.run()
    worker.run()
    worker.run()
    load = worker.scheduler.load()
    assert (load.num_waiting_tokens, load.num_context_tokens) == (0, 41 + 8)
