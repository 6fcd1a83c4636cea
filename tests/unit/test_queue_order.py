"""Who is prefilled next: as many in time as possible, in the order they came, and nobody left for ever."""

import itertools
import random

from pd_cluster.engine.queue_order import LATE_TURN, STRETCH, Waiting, next_to_start
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.ids import RequestId
from pd_cluster.request import Request, SamplingParams

TARGET_S = 3.0


def head(*line: tuple[float, float], busy_s: float = 0.0, num_starts: int = 0) -> int:
    return next_to_start(
        [Waiting(waited, takes) for waited, takes in line], target_s=TARGET_S, busy_s=busy_s, num_starts=num_starts
    )


def test_while_all_are_in_time_the_first_comes_first() -> None:
    assert head((1.0, 0.9), (0.5, 0.1), (0.0, 0.2)) == 0


def test_one_that_is_late_already_lets_those_in_time_pass() -> None:
    assert head((2.9, 0.5), (0.2, 1.0), (0.1, 0.1)) == 1
    assert head((0.2, 1.0), (0.1, 0.1), busy_s=2.5) == 1


def test_of_too_many_the_longest_steps_aside() -> None:
    # one after the other they end at 1.4, 2.0, 3.2: the longest gives way, and the others are in time
    assert head((0.5, 1.4), (0.4, 0.6), (0.3, 1.2)) == 1


def test_when_all_are_late_the_one_that_waited_longest_goes() -> None:
    assert head((4.0, 1.0), (9.0, 1.0), (5.0, 0.1)) == 1


def test_a_long_prompt_is_not_late_for_its_length() -> None:
    assert head((1.0, 20.0)) == 0
    assert head((1.0, 20.0), (0.5, 30.0)) == 0
    assert head((STRETCH * 20.0, 20.0), (0.0, 0.1)) == 1


def test_every_so_many_starts_a_late_one_has_its_turn() -> None:
    line = (4.0, 1.0), (0.1, 0.1)
    assert [head(*line, num_starts=n) for n in range(2 * LATE_TURN)].count(0) == 2


def test_as_many_are_in_time_as_any_order_allows() -> None:
    rng = random.Random(4)
    for _ in range(60):
        line = [Waiting(rng.uniform(0, 2.5), rng.uniform(0.2, 1.4)) for _ in range(5)]
        best = max(served_in_time(line, list(order)) for order in itertools.permutations(range(5)))
        ours: list[int] = []
        left, busy_s = list(range(5)), 0.0
        while left:
            waiting = [Waiting(line[i].waited_s + busy_s, line[i].prefill_s) for i in left]
            index = left.pop(next_to_start(waiting, target_s=TARGET_S, busy_s=0.0, num_starts=0))
            ours.append(index)
            busy_s += line[index].prefill_s
        assert served_in_time(line, ours) == best, line


def served_in_time(line: list[Waiting], order: list[int]) -> int:
    end_s, count = 0.0, 0
    for index in order:
        end_s += line[index].prefill_s
        count += line[index].waited_s + end_s <= max(TARGET_S, STRETCH * line[index].prefill_s)
    return count


def scheduler(ttft_target_s: float | None) -> Scheduler:
    return Scheduler(
        num_blocks=100,
        block_size=16,
        max_num_seqs=8,
        max_num_batched_tokens=16,
        max_model_len=512,
        eos_token_ids=frozenset({0}),
        prefix_cache=False,
        ttft_target_s=ttft_target_s,
    )


def started(schedule: Scheduler, now_s: float) -> list[RequestId]:
    schedule.plan(1, now_s)
    return [start.request_id for start in schedule.take_started()]


def add(schedule: Scheduler, name: str, num_tokens: int, now_s: float) -> None:
    request = Request(
        id=RequestId(name), token_ids=[1] * num_tokens, num_prompt_tokens=num_tokens, sampling=SamplingParams()
    )
    schedule.add(request, prefill_only=True, now_s=now_s)


def test_the_scheduler_starts_who_can_be_in_time_once_it_knows_the_speed() -> None:
    for target_s, rate, first in ((1.0, 100.0, "short"), (1.0, 0.0, "long"), (None, 100.0, "long")):
        schedule = scheduler(target_s)
        schedule.prefill_tok_s = rate
        add(schedule, "long", 80, 0.0)
        add(schedule, "short", 16, 1.0)
        assert started(schedule, 1.4) == [first], (target_s, rate)
        schedule.check()


def test_who_was_passed_over_starts_when_the_others_have() -> None:
    schedule = scheduler(1.0)
    schedule.prefill_tok_s = 100.0
    add(schedule, "long", 80, 0.0)
    for index in range(3):
        add(schedule, f"short-{index}", 8, 1.0)
    assert started(schedule, 1.4) == ["short-0", "short-1"]
    assert started_next(schedule, 1.5) == ["short-2", "long"]
    schedule.check()


def started_next(schedule: Scheduler, now_s: float) -> list[RequestId]:
    schedule.plan(2, now_s)
    return [start.request_id for start in schedule.take_started()]
