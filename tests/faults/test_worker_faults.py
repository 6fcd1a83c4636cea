"""Workers die, come back and rise from the dead under running requests: every client sees its tokens once, in order."""

import asyncio
from typing import Any

import pytest
from harness import (
    CHECKPOINTS,
    Hold,
    LocalCluster,
    Output,
    config_of,
    push_unit_by_unit,
    request,
    until,
)

from pd_cluster.errors import Unavailable
from pd_cluster.request import Phase
from router.attempt import Leg
from router.flight import Flight

MODEL = CHECKPOINTS / "deepseek_v3_yarn"
PROMPTS = [[3 + (11 * n + i * i + 3 * i) % 500 for i in range(60 + n)] for n in range(8)]
SMALL_STEPS = {"prefill__max_num_batched_tokens": 16, "kv__prefix_cache": False, "kv__num_blocks": 96}
NUM_TOKENS = 24
FREE_WITHIN_S = 1.0


@pytest.fixture(autouse=True)
def many_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    push_unit_by_unit(monkeypatch)


@pytest.fixture(scope="module")
def expected() -> list[list[int]]:
    async def alone() -> list[list[int]]:
        async with LocalCluster(config_of(MODEL, colocated=True)) as cluster:
            return [(await cluster.greedy(prompt, max_tokens=NUM_TOKENS)).token_ids for prompt in PROMPTS]

    return asyncio.run(alone())


def ask_all(cluster: LocalCluster) -> "asyncio.Future[list[Output]]":
    asked = (cluster.greedy(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS)
    return asyncio.ensure_future(cluster.served(asked))


def on(cluster: LocalCluster, victim: str, phase: Phase) -> list[Flight]:
    """Requests in that phase that the engine has a part in."""

    def takes_part(leg: Leg | None) -> bool:
        return leg is not None and leg.worker_id.startswith(victim)

    return [
        flight
        for flight in cluster.router.pipeline._flights.values()
        if flight.phase is phase
        and flight.attempt is not None
        and (takes_part(flight.attempt.prefill) or takes_part(flight.attempt.decode))
    ]


@pytest.mark.parametrize(
    ("phase", "news_first"),
    [(Phase.PREFILLING, False), (Phase.TRANSFERRING, False), (Phase.DECODING, False), (Phase.DECODING, True)],
)
@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_what_a_dead_worker_was_doing_goes_on_elsewhere(
    victim: str, phase: Phase, news_first: bool, expected: list[list[int]]
) -> None:
    """`news_first`: the supervisor has seen the death before the router notices that a stream broke."""
    hold = Hold()
    pools: dict[str, Any] = {"prefill__instances": 2, "decode__instances": 2}
    async with LocalCluster(config_of(MODEL, **SMALL_STEPS, **pools), wrap=hold.wrap) as cluster:
        hold.on = phase is Phase.TRANSFERRING
        outputs = ask_all(cluster)
        await until(lambda: len(on(cluster, f"{victim}-0", phase)) >= 2)
        struck = {flight.id for flight in on(cluster, f"{victim}-0", phase)}
        dead = cluster.engine(f"{victim}-0")
        if news_first:
            cluster.bury(dead)
        await cluster.kill(dead)
        hold.on = False
        finished = await outputs
        assert [output.token_ids for output in finished] == expected
        resumed = {f"r{number + 1}" for number, output in enumerate(finished) if output.timings.num_retries}
        if victim == "prefill" and phase is Phase.DECODING:
            assert not resumed & struck, "decode had all it needed"
        else:
            assert resumed & struck
        if not news_first:
            cluster.bury(dead)
        free_s = await cluster.until_free()
        print(f"{victim} dies {phase}: {len(resumed)} of 8 resumed, free {1000 * free_s:.1f} ms after its burial")
        assert free_s < FREE_WITHIN_S
        await cluster.start_engine(f"{victim}-0")
        again = [await cluster.greedy(prompt, max_tokens=NUM_TOKENS) for prompt in PROMPTS[:2]]
        assert [output.token_ids for output in again] == expected[:2]


@pytest.mark.parametrize("victim", ["prefill", "decode"])
async def test_requests_wait_for_the_only_worker_of_its_kind_to_come_back(
    victim: str, expected: list[list[int]]
) -> None:
    async with LocalCluster(config_of(MODEL, **SMALL_STEPS)) as cluster:
        outputs = ask_all(cluster)
        phase = Phase.PREFILLING if victim == "prefill" else Phase.DECODING
        await until(lambda: len(on(cluster, f"{victim}-0", phase)) >= 1)
        dead = cluster.engine(f"{victim}-0")
        await cluster.kill(dead)
        cluster.bury(dead)
        with pytest.raises(Unavailable, match=f"no {victim} worker"):
            await cluster.generate(request(PROMPTS[0], "newcomer"))
        await asyncio.sleep(0.2)
        assert not outputs.done()
        await cluster.start_engine(f"{victim}-0")
        assert [output.token_ids for output in await outputs] == expected
        assert await cluster.until_free() < FREE_WITHIN_S


@pytest.mark.parametrize("zombie", ["prefill", "decode"])
async def test_a_former_life_that_speaks_on_is_not_heard(zombie: str, expected: list[list[int]]) -> None:
    """A new life has the worker's name while the old one computes and reports on: only its writes are known to be over,
    for no new life begins before.
    """
    async with LocalCluster(config_of(MODEL, **SMALL_STEPS)) as cluster:
        outputs = ask_all(cluster)
        phase = Phase.PREFILLING if zombie == "prefill" else Phase.DECODING
        await until(lambda: len(on(cluster, f"{zombie}-0", phase)) >= 1)
        old = cluster.engine(f"{zombie}-0")
        part = old[0].part
        assert part is not None
        assert part.loop is not None
        part.worker.on_detach = lambda router_id: None  # type: ignore[union-attr, method-assign]  # it does not notice
        old[0]._transfers._backend.post = lambda write: None  # type: ignore[method-assign]
        num_steps = part.loop.num_steps
        await cluster.start_engine(f"{zombie}-0")
        assert [output.token_ids for output in await outputs] == expected
        assert part.loop.num_steps >= num_steps + 5, "the old life went on"
        await cluster.kill(old)
        cluster.bury(old)
        assert await cluster.until_free() < FREE_WITHIN_S


async def test_workers_that_die_again_and_again_under_load_lose_no_request(expected: list[list[int]]) -> None:
    """No request meets two deaths, for which it would be blamed."""
    pools = {"prefill__instances": 2, "decode__instances": 2}
    async with LocalCluster(config_of(MODEL, **SMALL_STEPS, **pools)) as cluster:
        done: list[Output] = []
        is_over = False

        async def client(number: int) -> None:
            while not is_over:
                made = request(PROMPTS[number], f"c{number}-{len(done)}", max_tokens=NUM_TOKENS)
                output = await cluster.generate(made)
                assert output.token_ids == expected[number], made.id
                done.append(output)

        clients = [asyncio.create_task(client(number)) for number in range(8)]
        victims = ["decode-0", "prefill-1", "prefill-0", "decode-1", "decode-0"]
        for engine_id in victims:
            flights = cluster.router.pipeline._flights
            await until(lambda: len(flights) >= 4)  # noqa: B023
            witnesses = set(flights)
            dead = cluster.engine(engine_id)
            await cluster.kill(dead)
            cluster.bury(dead)
            await cluster.start_engine(engine_id)
            await until(lambda: not witnesses & flights.keys())  # noqa: B023
        is_over = True
        await asyncio.gather(*clients)
        print(f"{len(victims)} deaths, {sum(output.timings.num_retries for output in done)} retries of {len(done)}")
        assert len(done) >= 4 * len(victims)
        assert sum(output.timings.num_retries for output in done) > 0
        assert await cluster.until_free() < FREE_WITHIN_S
