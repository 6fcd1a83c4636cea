"""The network breaks in mid-transfer, in silence: every request ends or goes on within its deadline, and all is well
once it is mended.

The prefill and the decode rank live in network namespaces of their own and exchange KV over TCP.
"""

import asyncio
import time
from collections.abc import AsyncIterator, Iterator

import pytest
import pytest_asyncio
from harness import request
from living import LivingCluster, config_of, generate
from namespaces import NamespaceLauncher, Namespaces, unavailable
from wide_kv import VOCAB, write_config

from pd_cluster.errors import DeadlineExceeded, TransferFailed

REASON = unavailable()
pytestmark = [
    pytest.mark.processes,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(REASON is not None, reason=REASON or ""),
]

TRANSFER_DEADLINE_S, NUM_ATTEMPTS = 2.0, 2
PROMPT = [3 + (i * i + 5 * i) % (VOCAB - 3) for i in range(1000)]


@pytest.fixture(scope="module")
def net() -> Iterator[Namespaces]:
    with Namespaces() as net:
        yield net


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def cluster(net: Namespaces, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[LivingCluster]:
    config = config_of(
        str(write_config(tmp_path_factory.mktemp("wide-kv"))),
        model__load="random",
        prefill__max_num_batched_tokens=128,
        kv__num_blocks=160,
        kv__lease_s=2.0,
        kv__transfer_deadline_s=TRANSFER_DEADLINE_S,
        kv__late_write_s=3.0,
        router__max_retries=NUM_ATTEMPTS - 1,
        security__allow_insecure=True,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("UCX_TLS", "tcp,self")
        patch.setenv("UCX_NET_DEVICES", "data")
        for buffer in ("UCX_TCP_SNDBUF", "UCX_TCP_RCVBUF"):
            patch.setenv(buffer, "256k")  # so that a transfer in its middle is not all in the kernel's hands
        patch.setattr("pd_cluster.launch.cluster.create_launcher", lambda _: NamespaceLauncher(net))
        async with LivingCluster(config) as cluster:
            yield cluster


async def test_a_cut_between_prefill_and_decode_alone(cluster: LivingCluster, net: Namespaces) -> None:
    """The router reaches both, so that only deadlines can tell."""
    expected = await cluster.greedy(PROMPT, max_tokens=8)
    running = asyncio.create_task(cluster.greedy(PROMPT, request_id="cut", max_tokens=8))
    attempt = await cluster.in_mid_transfer("cut")
    net.cut_data()
    cut_s = time.monotonic()
    cluster.resume(attempt)
    with pytest.raises((TransferFailed, DeadlineExceeded)) as caught:
        await running
    outcome_s = time.monotonic() - cut_s
    assert outcome_s < NUM_ATTEMPTS * (TRANSFER_DEADLINE_S + 2.0)
    assert (await cluster.greedy(PROMPT[:20], max_tokens=1)).finish is not None, "what needs no transfer is served"
    assert sum(load.num_quarantined_blocks for load in cluster.loads()) > 0
    net.mend_data()
    mended_s = time.monotonic()
    assert (await cluster.greedy(PROMPT, max_tokens=8)).token_ids == expected.token_ids
    served_s = time.monotonic() - mended_s
    await cluster.until_accounted()
    print(f"\nthe outcome comes {outcome_s:.2f} s after the cut: {caught.value.message}")
    print(f"mended: the next answer takes {served_s:.2f} s, all is free after {time.monotonic() - mended_s:.2f} s")


async def test_a_decode_rank_cut_off_from_everybody(cluster: LivingCluster, net: Namespaces) -> None:
    """In mid-transfer of one request and in mid-decode of another: those with time left go on once it is back."""
    expected, expected_long = await asyncio.gather(
        cluster.greedy(PROMPT, max_tokens=8), cluster.greedy(PROMPT[:40], max_tokens=500)
    )
    decoding = asyncio.create_task(cluster.greedy(PROMPT[:40], request_id="decoding", max_tokens=500))
    await cluster.in_mid_decode("decoding")
    impatient = request(PROMPT[:60], "impatient", max_tokens=800)  # with the others it just fits
    ending = asyncio.create_task(generate(cluster.pipeline, impatient, timeout_s=5.0))
    moving = asyncio.create_task(cluster.greedy(PROMPT, request_id="moving", max_tokens=8))
    attempt = await cluster.in_mid_transfer("moving")
    net.isolate_decode()
    cut_s = time.monotonic()
    cluster.resume(attempt)
    with pytest.raises(DeadlineExceeded):
        await ending
    assert time.monotonic() - cut_s < 5.5
    await asyncio.sleep(1.0)
    assert cluster.cluster.router.num_ready == 1
    assert not decoding.done()
    assert not moving.done()
    net.rejoin_decode()
    mended_s = time.monotonic()
    assert (await moving).token_ids == expected.token_ids
    assert (await decoding).token_ids == expected_long.token_ids
    await cluster.until_accounted()
    assert cluster.deaths("decode-0") == 0, "a worker out of reach is not dead"
    print(f"\nall requests with time left are done {time.monotonic() - mended_s:.2f} s after the network is mended")
