"""A prefill rank is stopped in mid-transfer, everybody gives it up, and it wakes: its late writes meet nobody's blocks.

Over TCP (`UCX_TLS=tcp,self`) not a byte lands while the target does not poll, and what was posted cannot be recalled:
stopping first the target and then the source leaves a transfer half-way.
"""

import asyncio
import signal
import time
from pathlib import Path

import numpy as np
import pytest
from living import LivingCluster, config_of
from wide_kv import VOCAB, write_config

from pd_cluster.ids import EngineId, WorkerId

pytestmark = pytest.mark.processes

NUM_BLOCKS = 160
LEASE_S = 1.0


def prompt_of(number: int, length: int) -> list[int]:
    return [3 + (number * 17 + i * i + 5 * i) % (VOCAB - 3) for i in range(length)]


class Memory:
    """The KV blocks of the decode rank, read from outside."""

    def __init__(self, cluster: LivingCluster) -> None:
        worker = cluster.pipeline.directory.get(WorkerId("decode-0/0"))
        assert worker is not None
        assert worker.info.endpoint is not None
        (self._rank,) = worker.info.endpoint.ranks
        self._path = Path(f"/proc/{cluster.pid('decode-0')}/mem")

    def blocks(self) -> "np.ndarray":  # [block, byte]
        with self._path.open("rb", buffering=0) as file:
            file.seek(self._rank.base_address)
            data = bytearray()
            while len(data) < self._rank.num_bytes:
                data += file.read(self._rank.num_bytes - len(data))
        size = self._rank.layout.block_bytes
        return np.frombuffer(data, np.uint8)[: NUM_BLOCKS * size].reshape(NUM_BLOCKS, size)


async def test_late_writes_of_a_stopped_prefill_rank_change_no_block_of_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp,self")
    for buffer in ("UCX_TCP_SNDBUF", "UCX_TCP_RCVBUF"):
        monkeypatch.setenv(buffer, "256k")  # or the kernel may take in all of the KV while both stand still
    config = config_of(
        str(write_config(tmp_path / "wide-kv")),
        model__load="random",
        prefill__instances=2,
        prefill__max_num_batched_tokens=128,
        kv__num_blocks=NUM_BLOCKS,
        kv__lease_s=LEASE_S,
    )
    prompt, other_prompt, long_prompt = prompt_of(1, 1000), prompt_of(2, 300), prompt_of(3, 1000)
    async with LivingCluster(config) as cluster:
        expected = await cluster.greedy(prompt, max_tokens=8)
        expected_other = await cluster.greedy(other_prompt, max_tokens=8)
        cluster.grants.clear()

        # half-way: the target stands still until everything is posted, then the source does
        running = asyncio.create_task(cluster.greedy(prompt, request_id="a", max_tokens=8))
        attempt = await cluster.in_mid_transfer("a")
        source = attempt.prefill.worker_id.partition("/")[0]
        stopped_s = cluster.signal(signal.SIGSTOP, source)
        cluster.resume(attempt)
        (quarantined,) = cluster.grants
        assert len(quarantined) == 63

        # everybody gives it up: the request ends elsewhere, its former blocks are nobody's
        output = await running
        assert output.token_ids == expected.token_ids
        assert output.timings.prefill_worker != f"{source}/0"
        print(f"\nthe request went on {time.monotonic() - stopped_s:.2f} s after its source was stopped")
        await cluster.settled("decode-0/0", lambda load: load.num_quarantined_blocks == len(quarantined))
        assert time.monotonic() - stopped_s > LEASE_S

        # others come for its blocks: one finds room beside them, one does not
        assert (await cluster.greedy(other_prompt, max_tokens=8)).token_ids == expected_other.token_ids
        blocked = asyncio.create_task(cluster.greedy(long_prompt, request_id="b", max_tokens=600))
        await asyncio.sleep(0)
        squeezed = asyncio.create_task(cluster.greedy(long_prompt, request_id="c", max_tokens=8))
        await asyncio.sleep(1.5)
        assert all(not set(blocks) & set(quarantined) for blocks in cluster.grants[1:])
        for task in (blocked, squeezed):
            task.cancel()
        await asyncio.gather(blocked, squeezed, return_exceptions=True)
        await cluster.settled("decode-0/0", lambda load: not load.num_reserved_blocks and not load.num_running)

        # it wakes
        memory = Memory(cluster)
        before = memory.blocks()
        cluster.signal(signal.SIGCONT, source)
        woken_s = time.monotonic()
        await cluster.settled("decode-0/0", lambda load: load.num_quarantined_blocks == 0)
        after = memory.blocks()
        changed = set(np.flatnonzero((before != after).any(axis=1)).tolist())
        assert changed, "no late write landed: the transfer was not half-way"
        assert changed <= set(quarantined)
        print(f"{len(changed)} of {len(quarantined)} blocks were written late, all of them in quarantine")
        print(f"free {time.monotonic() - woken_s:.2f} s after the source woke")

        assert cluster.deaths(source) == 0
        await cluster.until_healthy()
        assert cluster.cluster.supervisor.engines[EngineId(source)].life.num_restarts == 0
        outputs = await asyncio.gather(*(cluster.greedy(prompt, max_tokens=8) for _ in range(2)))
        assert [output.token_ids for output in outputs] == [expected.token_ids] * 2
