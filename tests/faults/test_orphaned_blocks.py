"""A router dies between two of its words: another one on the same workers settles what it left behind."""

import asyncio

import pytest
from harness import CHECKPOINTS, LocalCluster, address_of, config_of, request, until

from pd_cluster import messages as m
from pd_cluster.ids import TransferId, WorkerId
from pd_cluster.request import Phase
from router.app import Router
from router.pipeline import Pipeline

MODEL = CHECKPOINTS / "deepseek_v3_yarn"
PROMPT = [3 + (i * i + 5 * i) % 500 for i in range(60)]
DECODE = WorkerId("decode-0/0")


def die(router: Router) -> None:
    """Its streams end, and it has no last word."""
    for client in router._clients.values():
        assert client._task is not None
        client._task.cancel()


async def second_router(cluster: LocalCluster) -> Router:
    router = Router(cluster.config, cluster.model, http=False, addresses=[address_of(lead) for lead in cluster.leads()])
    await router.start()
    await router.until_ready(len(cluster.leads()))
    return router


def loads(cluster: LocalCluster) -> m.WorkerLoad:
    return cluster.load("decode")


async def test_blocks_that_were_granted_to_a_router_which_died_before_it_said_push(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Only that router knew that nobody would write."""
    async with LocalCluster(config_of(MODEL)) as cluster:
        expected = await cluster.greedy(PROMPT, max_tokens=60)
        other = await second_router(cluster)
        with monkeypatch.context() as patch:
            patch.setattr(other.pipeline, "push", lambda *_: None)
            lost = asyncio.create_task(consume(other.pipeline))
            await until(lambda: loads(cluster).num_reserved_blocks > 0)
            ours = asyncio.create_task(cluster.generate(request(PROMPT, "r", "salt", max_tokens=60)))
            await asyncio.sleep(0)
            assert await cluster.in_phase("r", Phase.DECODING)
            die(other)
            await until(lambda: loads(cluster).num_quarantined_blocks > 0)
            waited_s = await until(lambda: loads(cluster).num_quarantined_blocks == 0)
        assert (await ours).token_ids == expected.token_ids
        print(f"another router freed the blocks {waited_s:.2f} s after they went into quarantine")
        lost.cancel()
        await asyncio.gather(lost, return_exceptions=True)
        await other.stop()


async def consume(pipeline: Pipeline) -> None:
    async for _ in pipeline.generate(request(PROMPT, "lost", "other")):
        pass


async def test_a_router_asks_only_about_transfers_that_it_does_not_follow_and_sources_that_it_reaches() -> None:
    async with LocalCluster(config_of(MODEL)) as cluster:
        pipeline = cluster.router.pipeline
        prefill = cluster.lead(WorkerId("prefill-0/0")).spec
        (client,) = [client for client in cluster.router._clients.values() if client.info.worker_id == DECODE]  # type: ignore[union-attr]
        for worker_id, epoch in ((WorkerId("prefill-9/0"), prefill.epoch), (prefill.worker_id, DECODE)):
            told = m.Quarantine(TransferId("t"), request(PROMPT).id, worker_id, epoch)  # type: ignore[arg-type]
            pipeline.on_messages(client, [m.Quarantined(transfers=[told])])
            assert pipeline.idle(), "nobody could answer"
        told = m.Quarantine(TransferId("t"), request(PROMPT).id, prefill.worker_id, prefill.epoch)
        pipeline.on_messages(client, [m.Quarantined(transfers=[told])])
        assert not pipeline.idle()
        await until(pipeline.idle)
        running = asyncio.create_task(cluster.generate(request(PROMPT, "own", max_tokens=40)))
        await asyncio.sleep(0)
        assert await cluster.in_phase("own", Phase.DECODING)
        flight = pipeline.flights[0]
        assert flight.attempt is not None
        told = m.Quarantine(flight.attempt.transfer_id, flight.attempt.wire_id, prefill.worker_id, prefill.epoch)
        pipeline.on_messages(client, [m.Quarantined(transfers=[told])])
        assert len((await running).token_ids) == 40
