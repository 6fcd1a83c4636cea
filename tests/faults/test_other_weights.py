"""A checkpoint that changes while an elastic group serves from it: the replacement of a dead member has loaded other
weights than the members that live, which must never be heard by a client.
"""

import asyncio
import signal

import pytest
from harness import until
from living import LivingCluster
from losing import elastic, prompt_of

from pd_cluster.ids import EngineId
from pd_cluster.launch.group_life import GroupLife
from pd_cluster.model.shards import SINGLE_NAME, read_header
from pd_cluster.model.source import DEMO

NUM_EXPERTS = 32
"""Of the demo model: one DP rank may hold them all."""

pytestmark = [pytest.mark.processes, pytest.mark.timeout(180)]


async def test_a_replacement_with_a_damaged_checkpoint_waits_outside_until_it_is_whole(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pd_cluster.launch.group_member.MISMATCH_S", 0.5)
    directory = tmp_path_factory.mktemp("model")
    for file in DEMO.iterdir():
        if file.is_file():
            (directory / file.name).write_bytes(file.read_bytes())
    path = directory / SINGLE_NAME
    whole = path.read_bytes()
    damaged = bytearray(whole)
    start = min(entry.start for entry in read_header(path).values())
    for at in range(start + 3, len(damaged), 997):
        damaged[at] ^= 0x55

    def put(content: bytes) -> None:
        (directory / "new").write_bytes(content)
        (directory / "new").rename(path)

    shape = {"decode__data_parallel": 2, "decode__expert_slots_per_rank": NUM_EXPERTS}
    async with LivingCluster(elastic(**shape | {"model": str(directory)})) as cluster:
        prompts = [prompt_of(number) for number in range(4)]

        async def said() -> list[list[int]]:
            outputs = await asyncio.gather(*(cluster.greedy(prompt, max_tokens=24) for prompt in prompts))
            return [output.token_ids for output in outputs]

        expected = await said()
        put(bytes(damaged))
        life = cluster.cluster.supervisor.engines[EngineId("decode-0")].life
        assert isinstance(life, GroupLife)
        member = life.members[1]
        cluster.signal(signal.SIGKILL, "decode-0", 1)
        await until(lambda: "has loaded other weights" in member.reason and member.num_restarts >= 3, 90)
        assert await said() == expected
        assert (life.num_up, life.generation) == (1, 1)
        put(whole)
        await until(lambda: life.num_up == 2, 90)
        assert await said() == expected
        await cluster.until_accounted()
