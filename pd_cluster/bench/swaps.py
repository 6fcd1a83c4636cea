"""What moving experts costs the steps that run meanwhile: an engine of several ranks decodes, each rank a process of
this host, while its hub exchanges experts between ranks at random, again and again with pauses between.

A step's time is the interval from one result to the next on rank 0, whatever it waited for. Steps that ended while a
change was on, from the first Prepare until the old slots were free, are set against all others of the same run.
"""

import asyncio
import random
import statistics
import time
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

import msgspec
import torch
from msgspec import Struct
from torch._C._distributed_c10d import TCPStore

from pd_cluster.bench.rank_processes import rank_processes
from pd_cluster.bench.roofline import MODEL
from pd_cluster.clock import SystemClock
from pd_cluster.config import load_config
from pd_cluster.engine.loop import EngineLoop, EngineThread
from pd_cluster.engine.outcome import StepOutcome
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.step_sync import Meeting, StepSync
from pd_cluster.engine.torch_engine import build_engine
from pd_cluster.errors import ConfigError, EngineError
from pd_cluster.ids import EngineEpoch, EngineId, Rank, RequestId
from pd_cluster.launch.placements import Placements
from pd_cluster.launch.spec import RankSpec
from pd_cluster.model.random_weights import RandomSource
from pd_cluster.model.source import open_model
from pd_cluster.parallel.groups import Groups
from pd_cluster.parallel.placement import LayerPlacement, Placement
from pd_cluster.parallel.planner import Stage
from pd_cluster.parallel.stages import stages
from pd_cluster.parallel.transition import Decision
from pd_cluster.request import Request, SamplingParams

TIMEOUT_S = 240.0
PAUSE_S = 0.4
CONTEXT = 64
LARGER = msgspec.structs.replace(
    MODEL,
    num_layers=4,
    moe_layers=(1, 2, 3),
    moe=msgspec.structs.replace(MODEL.moe, num_experts=32, intermediate_size=512) if MODEL.moe else None,
)


class Load(Struct, frozen=True, kw_only=True):
    """`batch` sequences decode on each of `num_ranks` DP ranks. `model`: demo, or larger experts of random weights."""

    num_ranks: int
    batch: int
    model: str
    num_swaps: int
    exchanged: int  # pairs of experts in each layer, for every swap
    spare: int = 2  # empty slots of a rank in each layer


def run(load: Load) -> dict[str, Any]:
    """Milliseconds of steps, p50 and p99, during changes and outside. Raises EngineError when a rank dies."""
    with rank_processes(load.num_ranks, TIMEOUT_S, _rank, load) as ranks:
        result: dict[str, Any] = ranks.receive(0)
        return result


class _Recorder:
    """Stands before a rank's epochs: when each step ended, and whether a change was on."""

    def __init__(self, placements: Placements) -> None:
        self.ended_at: list[tuple[float, bool]] = []
        self._epochs = placements.epochs

    def launching(self, step: int, decision: Decision | None) -> Callable[[], None] | None:
        return self._epochs.launching(step, decision)

    def ended(self, step: int) -> None:
        is_changing = self._epochs.stats.is_changing
        self._epochs.ended(step)
        self.ended_at.append((time.perf_counter(), is_changing))

    def intervals(self) -> tuple[list[float], list[float]]:
        """Milliseconds of steps outside of changes, and during them; the first steps are left out."""
        quiet: list[float] = []
        changing: list[float] = []
        for (before, _), (after, is_changing) in zip(self.ended_at[10:], self.ended_at[11:], strict=False):
            (changing if is_changing else quiet).append(1e3 * (after - before))
        return quiet, changing


class _Role:
    def planned(self) -> None: ...

    def stepped(self, outcome: StepOutcome) -> None: ...


def _rank(rank: int, port: int, pipe: Connection, load: Load) -> None:
    torch.set_num_threads(1)
    asyncio.run(_serve(Rank(rank), load, TCPStore("127.0.0.1", port, is_master=False), pipe))


async def _serve(rank: Rank, load: Load, store: TCPStore, pipe: Connection) -> None:
    model = open_model("demo")
    config, source = (model.config, model.source) if load.model == "demo" else (LARGER, RandomSource(LARGER))
    if config.moe is None:
        raise ConfigError("swaps need a model with experts")
    slots = -(-config.moe.num_experts // load.num_ranks) + load.spare
    values = {"decode.data_parallel": load.num_ranks, "decode.rebalance": "off", "decode.expert_slots_per_rank": slots}
    spec = RankSpec(
        role="decode",
        engine_id=EngineId("swaps"),
        epoch=EngineEpoch(f"swaps-{store.port}"),
        rank=rank,
        data_parallel=load.num_ranks,
        tensor_parallel=1,
        config=load_config(values=values),
        store_host="",
        store_port=0,
    )
    groups = Groups.connect(store, rank=rank, tensor_parallel=1, data_parallel=load.num_ranks, timeout_s=TIMEOUT_S)
    num_blocks = load.batch * (config.max_position_embeddings // 16)
    engine = build_engine(
        config,
        source,
        dtype="bfloat16",
        block_size=16,
        groups=groups,
        num_blocks=min(num_blocks, 4096),
        expert_slots_per_rank=slots,
        dispatcher="collective",
    )

    async def publish(key: str, value: str) -> None:
        store.set(key, value)

    async def lookup(key: str) -> str:
        return (await asyncio.to_thread(store.get, key)).decode()

    meeting, clock = Meeting(publish=publish, lookup=lookup), SystemClock()
    sync = StepSync(epoch=spec.epoch, rank=rank, data_parallel=load.num_ranks, tensor_parallel=1, shared=True)

    def fail(error: EngineError) -> None:
        raise error

    placements = Placements(spec, engine, sync, clock, meeting, fail)
    await sync.start(meeting, "127.0.0.1", 60.0)
    await placements.start()
    recorder, thread = _Recorder(placements), EngineThread(engine)
    scheduler = Scheduler(
        num_blocks=engine.num_blocks,
        block_size=16,
        max_num_seqs=load.batch,
        max_num_batched_tokens=2048,
        max_model_len=engine.max_model_len,
        eos_token_ids=frozenset(),
        prefix_cache=False,
        preempt="requeue",
    )
    loop = EngineLoop(scheduler=scheduler, thread=thread, sync=sync, role=_Role(), clock=clock, epochs=recorder)
    feeding = asyncio.ensure_future(_feed(scheduler, loop, load.batch, config.vocab_size, int(rank)))
    running = asyncio.ensure_future(loop.run())
    if rank == 0:
        swapping = asyncio.ensure_future(_swap(placements, load))
        await asyncio.wait({swapping, running, feeding}, return_when=asyncio.FIRST_COMPLETED)
        if not swapping.done():
            raise EngineError("the engine ended before the measurement")
        pipe.send(_result(load, placements, recorder, swapping.result()))
    await running


async def _feed(scheduler: Scheduler, loop: EngineLoop, batch: int, vocab_size: int, seed: int) -> None:
    """As many sequences as the batch has places, always."""
    rng, number = random.Random(seed), 0
    while True:
        while scheduler.load().num_running + scheduler.load().num_waiting < batch:
            number += 1
            request = Request(
                id=RequestId(f"r{number}"),
                token_ids=[rng.randrange(3, vocab_size) for _ in range(CONTEXT)],
                num_prompt_tokens=CONTEXT,
                sampling=SamplingParams(temperature=1.0, max_tokens=900, ignore_eos=True, seed=number),
            )
            scheduler.add(request, prefill_only=False, now_s=0.0)
            loop.wake()
        await asyncio.sleep(0.05)


async def _swap(placements: Placements, load: Load) -> list[float]:
    """Seconds that each swap took, from the order to the last stage's commit."""
    hub = placements.hub
    assert hub is not None
    took = []
    await asyncio.sleep(2 * PAUSE_S)
    for seed in range(load.num_swaps):
        started_s = time.perf_counter()
        await hub.change(exchanged(hub.placement, load.exchanged, seed))
        took.append(time.perf_counter() - started_s)
        await asyncio.sleep(max(PAUSE_S, took[-1]))
    return took


def exchanged(current: Placement, num_pairs: int, seed: int) -> list[Stage]:
    """The stages that exchange `num_pairs` random pairs of experts between ranks, in each layer."""
    rng, layers, size = random.Random(seed), [], current.slots_per_rank
    for layer in range(len(current.layers)):
        held = [[e for e in current.rank_slots(layer, Rank(r)) if e is not None] for r in range(current.num_ranks)]
        for _ in range(num_pairs):
            a, b = rng.sample(range(current.num_ranks), 2)
            i, j = rng.randrange(len(held[a])), rng.randrange(len(held[b]))
            if held[a][i] not in held[b] and held[b][j] not in held[a]:
                held[a][i], held[b][j] = held[b][j], held[a][i]
        layers.append(LayerPlacement(tuple(s for h in held for s in (*h, *[None] * (size - len(h))))))
    wanted = msgspec.structs.replace(current, epoch=current.epoch + 1, layers=tuple(layers))
    return [Stage(stage, [{} for _ in stage.layers]) for stage in stages(current, wanted, max_loads_per_rank=8)]


def _result(load: Load, placements: Placements, recorder: _Recorder, took: list[float]) -> dict[str, Any]:
    quiet, changing = recorder.intervals()
    stats = placements.stats
    p50 = [statistics.median(each) for each in (quiet, changing)]
    p99 = [statistics.quantiles(each, n=100)[98] for each in (quiet, changing)]
    return {
        "ranks": load.num_ranks,
        "batch": load.batch,
        "model": load.model,
        "swaps": len(took),
        "epochs": stats.num_swaps,
        "abandoned": stats.num_abandoned,
        "moved_mb": round(stats.bytes_moved / 1e6, 1),
        "swap_s": round(statistics.median(took), 3),
        "steps_outside": len(quiet),
        "steps_during": len(changing),
        "outside_p50_ms": round(p50[0], 3),
        "during_p50_ms": round(p50[1], 3),
        "outside_p99_ms": round(p99[0], 3),
        "during_p99_ms": round(p99[1], 3),
        "p50_ratio": round(p50[1] / p50[0], 3),
        "p99_ratio": round(p99[1] / p99[0], 3),
    }
