"""The corners of a handoff: where it ends before it begins, and what must not change on the way across."""

import asyncio
import contextlib
import json
from typing import Any

import httpx
import pytest
from harness import CHECKPOINTS, Hold, LocalCluster, config_of, push_unit_by_unit, request, until

from pd_cluster.errors import DeadlineExceeded, DuplicateRequest
from pd_cluster.request import FinishReason
from router.app import Router

MODEL = "deepseek_v3_yarn"
PROMPT = [3 + (13 * i + i * i) % 500 for i in range(37)]


def split(**keys: Any) -> LocalCluster:
    return LocalCluster(config_of(CHECKPOINTS / MODEL, **keys))


def whole(**keys: Any) -> LocalCluster:
    return LocalCluster(config_of(CHECKPOINTS / MODEL, colocated=True, **keys))


async def test_a_first_token_that_stops_or_is_the_last_ends_the_request_without_a_handoff() -> None:
    async with split() as cluster:
        first, second = (await cluster.greedy(PROMPT, max_tokens=2)).token_ids
        await cluster.until_free()
        num_steps = cluster.load("decode").num_steps
        stopped = await cluster.greedy(PROMPT, stop_token_ids=(first,))
        one = await cluster.greedy(PROMPT, max_tokens=1)
        assert (stopped.token_ids, stopped.finish) == ([first], FinishReason.STOP)
        assert (one.token_ids, one.finish) == ([first], FinishReason.LENGTH)
        assert stopped.timings.transfer_bytes == one.timings.transfer_bytes == 0
        assert await cluster.until_free() < 1.0
        assert cluster.load("decode").num_steps == num_steps, "decode never ran"
        crossing = await cluster.greedy(PROMPT, stop_token_ids=(second,))
        assert (crossing.token_ids, crossing.finish) == ([first, second], FinishReason.STOP)


async def test_a_first_token_that_stops_while_its_blocks_are_being_filled_is_no_failure(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The record that prefill writes no more may reach decode before its word that the request is done the router."""
    push_unit_by_unit(monkeypatch)
    async with split(prefill__max_num_batched_tokens=16, kv__prefix_cache=False) as cluster:
        prompts = [[number + 3, *PROMPT] for number in range(16)]
        firsts = [output.token_ids[0] for output in await cluster.all_greedy(prompts, max_tokens=1)]
        for _ in range(2):
            asked = (
                cluster.greedy(prompt, stop_token_ids=(first,)) for prompt, first in zip(prompts, firsts, strict=True)
            )
            for output, first in zip(await asyncio.gather(*asked), firsts, strict=True):
                assert (output.token_ids, output.finish) == ([first], FinishReason.STOP)
                assert output.timings.num_retries == 0
            assert await cluster.until_free() < 1.0


@pytest.mark.parametrize("min_tokens", [0, 1, 2, 3, 7])
async def test_min_tokens_counts_across_the_handoff(min_tokens: int) -> None:
    """Every token that greedy would draw stops, so the request ends as soon as it may."""
    async with whole() as one, split() as pools:
        free = await one.greedy(PROMPT, max_tokens=12)
        stops = tuple(sorted(set(free.token_ids)))
        sampling = {"max_tokens": 12, "min_tokens": min_tokens, "stop_token_ids": stops}
        expected, output = await one.greedy(PROMPT, **sampling), await pools.greedy(PROMPT, **sampling)
    assert output.token_ids == expected.token_ids
    assert output.finish is expected.finish
    assert len(output.token_ids) > min_tokens, "the token that stops comes after so many others"
    assert not set(output.token_ids[:min_tokens]) & set(stops)


async def test_penalties_and_seeded_noise_go_on_where_prefill_left_them() -> None:
    sampling = {"temperature": 0.9, "top_p": 0.9, "presence_penalty": 1.5, "repetition_penalty": 1.2, "max_tokens": 24}
    async with whole() as one, split() as pools:
        for seed in range(3):
            made = request(PROMPT, f"s{seed}", seed=seed, **sampling)
            assert (await pools.generate(made)).token_ids == (await one.generate(made)).token_ids


async def test_the_same_request_id_twice_is_refused_and_the_first_goes_on() -> None:
    async with split() as cluster:
        expected = (await cluster.greedy(PROMPT)).token_ids
        first = asyncio.create_task(cluster.generate(request(PROMPT, "same")))
        await asyncio.sleep(0)
        with pytest.raises(DuplicateRequest, match="same"):
            await cluster.generate(request(PROMPT, "same"))
        assert (await first).token_ids == expected
        assert (await cluster.generate(request(PROMPT, "same"))).token_ids == expected, "ids may be used again"


async def test_two_routers_share_the_workers_and_one_that_leaves_takes_only_its_own_requests() -> None:
    async with split() as cluster:
        expected = (await cluster.greedy(PROMPT)).token_ids
        other = Router(cluster.config, cluster.model, http=False, addresses=cluster.addresses)
        await other.start()
        await asyncio.wait_for(other.until_ready(2), 10)
        abandoned = [other.pipeline.submit(request(PROMPT, f"x{index}")) for index in range(6)]
        ours = [asyncio.create_task(cluster.greedy(PROMPT)) for _ in range(6)]
        await asyncio.sleep(0.03)
        twice = asyncio.create_task(cluster.generate(request(PROMPT, "x0")))
        await asyncio.sleep(0.01)
        await other.stop()
        assert all(stream._ended for stream in abandoned)
        assert all(output.token_ids == expected for output in await asyncio.gather(*ours))
        with contextlib.suppress(DuplicateRequest):  # while the other router's request of that name is still there
            assert (await twice).token_ids == expected
        assert await cluster.until_free() < 1.0


async def test_a_decode_worker_that_refuses_is_passed_over_and_when_all_refuse_the_deadline_says_so() -> None:
    async with split(decode__instances=2) as cluster:
        expected = (await cluster.greedy(PROMPT)).token_ids
        refusing, other = (lead.part.worker for lead in cluster.leads("decode"))  # type: ignore[union-attr]
        refusing._draining = True  # type: ignore[union-attr]
        outputs = await cluster.all_greedy([PROMPT] * 6)
        assert all(output.token_ids == expected for output in outputs)
        assert {output.timings.decode_worker for output in outputs} == {"decode-1/0"}
        other._draining = True  # type: ignore[union-attr]
        with pytest.raises(DeadlineExceeded, match="within its time"):
            async for _ in cluster.router.pipeline.generate(request(PROMPT, "late"), timeout_s=0.5):
                pass
        assert await cluster.until_free() < 1.0


async def test_a_sequence_that_waits_for_its_blocks_meets_its_deadline_and_frees_both_sides() -> None:
    hold = Hold()
    config = config_of(CHECKPOINTS / MODEL, decode__num_blocks=4)
    async with LocalCluster(config, wrap=hold.wrap) as cluster:
        hold.on = True
        first = asyncio.create_task(cluster.greedy(PROMPT, max_tokens=8))  # has all of decode, and keeps it
        await until(lambda: hold.num_kept > 0)
        with pytest.raises(DeadlineExceeded):
            async for _ in cluster.router.pipeline.generate(request(PROMPT, "waits"), timeout_s=0.4):
                pass
        assert await until(lambda: cluster.load("decode").num_pending_reservations == 0) < 1.0
        hold.on = False
        assert len((await first).token_ids) == 8


class Api:
    def __init__(self, cluster: LocalCluster, model: str) -> None:
        self.http = httpx.AsyncClient(base_url=f"http://127.0.0.1:{cluster.router.http_port}", timeout=30)
        self.model = model

    async def complete(self, **body: Any) -> dict[str, Any]:
        response = await self.http.post("/v1/completions", json={"model": self.model, "temperature": 0, **body})
        assert response.status_code == 200, response.text
        return response.json()  # type: ignore[no-any-return]

    async def stream(self, **body: Any) -> list[dict[str, Any]]:
        body = {"model": self.model, "temperature": 0, "stream": True, "stream_options": {"include_usage": True}} | body
        async with self.http.stream("POST", "/v1/completions", json=body) as response:
            lines = [line[6:] async for line in response.aiter_lines() if line.startswith("data: ")]
        assert lines.pop() == "[DONE]"
        return [json.loads(line) for line in lines]


async def test_samples_share_one_prefill_and_usage_counts_each_token_once() -> None:
    async with LocalCluster(config_of(CHECKPOINTS / MODEL), http=True) as cluster:
        api = Api(cluster, MODEL)
        prompt = PROMPT[:33]  # two whole blocks, and one token that must be computed
        sampling = {"prompt": prompt, "temperature": 1.0, "max_tokens": 9, "ignore_eos": True, "return_token_ids": True}
        answer = await api.complete(**sampling, n=4, seed=5)
        counts = {"prompt_tokens": 33, "completion_tokens": 36, "total_tokens": 69}
        assert answer["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 0}}
        samples = [choice["token_ids"] for choice in answer["choices"]]
        assert len({tuple(sample) for sample in samples}) == 4
        load = cluster.leads("prefill")[0].engine.expert_load()  # type: ignore[union-attr]
        per_token = cluster.model.config.moe.num_experts_per_tok  # type: ignore[union-attr]
        assert sum(load[0]) == (33 + 3) * per_token, "the prompt was computed once, its last token for each sample"
        for index, sample in enumerate(samples):
            alone = await api.complete(**sampling, seed=5 + index)
            assert alone["choices"][0]["token_ids"] == sample
            assert alone["usage"]["prompt_tokens_details"] == {"cached_tokens": 32}
        events = await api.stream(**sampling, n=4, seed=5)
        assert events[-1]["usage"] == counts | {"prompt_tokens_details": {"cached_tokens": 32}}
        streamed: list[list[int]] = [[], [], [], []]
        for event in events[:-1]:
            for choice in event["choices"]:
                streamed[choice["index"]] += choice["token_ids"]
        assert streamed == samples
        await api.http.aclose()


async def test_a_stop_string_over_the_seam_leaks_none_of_its_beginning() -> None:
    """It begins in the token that prefill draws and ends in one that decode draws."""
    async with LocalCluster(config_of("demo", kv__block_size=64), http=True) as cluster:
        api = Api(cluster, "demo")
        body = {"prompt": "Once upon a time there was a little", "max_tokens": 24, "ignore_eos": True}
        text = (await api.complete(**body))["choices"][0]["text"]
        pieces = [event["choices"][0]["text"] for event in await api.stream(**body) if event["choices"]]
        assert "".join(pieces) == text
        seam = len(next(piece for piece in pieces if piece))
        for start, end in ((seam - 1, seam + 1), (max(0, seam - 2), seam + 4), (0, seam + 2)):
            stop = text[start:end]
            shown = text[: text.index(stop)]
            stopped = (await api.complete(**body, stop=stop))["choices"][0]
            assert (stopped["text"], stopped["finish_reason"]) == (shown, "stop")
            pieces = [event["choices"][0]["text"] for event in await api.stream(**body, stop=stop) if event["choices"]]
            assert "".join(pieces) == shown
        assert await cluster.until_free() < 1.0
        await api.http.aclose()
