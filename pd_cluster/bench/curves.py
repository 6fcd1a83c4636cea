"""Cost against work, each curve measured, judged and drawn: nothing may grow faster than its work does.

    step_vs_batch        a decode step's time against its sequences
    step_vs_context      a decode step's time against the tokens of KV of each of its sequences
    prefill_vs_length    a prefill's time against its prompt; its work is the arithmetic, which attention bends upwards
    router_vs_streams    the router's CPU time against its streams, a token of each
    router_vs_workers    the same streams from more and more workers

Engine times are of one thread and by its own CPU clock, medians of rounds that go up and down the points in turn; the
router is a process of its own under workers without engines. Verdicts are those of `growth`.
"""

import asyncio
import statistics
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
import torch
from msgspec import Struct

from pd_cluster.bench.engine import BLOCK_SIZE, Steps
from pd_cluster.bench.growth import Growth, growth
from pd_cluster.bench.router_load import cpu_ms_per_step, routed
from pd_cluster.engine.torch_engine import build_engine
from pd_cluster.errors import ConfigError
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.source import LoadedModel
from router.work import model_work

NAMES = ("step_vs_batch", "step_vs_context", "prefill_vs_length", "router_vs_streams", "router_vs_workers")


class Sizes(Struct, frozen=True, kw_only=True):
    """Where the curves are measured."""

    batches: tuple[int, ...] = (1, 2, 4, 8, 12, 16, 17, 24, 32, 33, 48, 64)
    batch_context: int = 256
    contexts: tuple[int, ...] = (128, 256, 512, 1024, 2048, 4096, 8064)
    context_batch: int = 4
    lengths: tuple[int, ...] = (64, 128, 256, 512, 1024, 1536, 2048, 3072, 4096)
    streams: tuple[int, ...] = (32, 64, 128, 256, 384, 512)
    workers: tuple[int, ...] = (1, 2, 4, 8, 16, 32, 64)
    worker_streams: int = 64
    num_steps: int = 5
    rounds: int = 5
    router_step_s: float = 0.1
    router_window_s: float = 3.0


QUICK = Sizes(
    batches=(1, 4, 8, 16, 32),
    batch_context=32,
    contexts=(32, 128, 256, 512, 1024),
    lengths=(32, 128, 256, 512, 1024),
    streams=(8, 16, 32, 48, 64),
    workers=(1, 2, 4, 8),
    worker_streams=8,
    num_steps=3,
    rounds=3,
    router_step_s=0.02,
    router_window_s=0.5,
)


class Curve(Struct, frozen=True, kw_only=True):
    """`work` is what `cost` should be linear in; mostly `x` itself."""

    name: str
    x_label: str
    cost_label: str
    x: list[int]
    work: list[float]
    cost: list[float]
    growth: Growth


def curve(name: str, x_label: str, cost_label: str, x: Sequence[int], cost: list[float], work: list[float]) -> Curve:
    judged = growth(work, cost)
    return Curve(name=name, x_label=x_label, cost_label=cost_label, x=list(x), work=work, cost=cost, growth=judged)


def run(
    model: LoadedModel,
    *,
    names: Sequence[str] = NAMES,
    sizes: Sizes | None = None,
    say: Callable[[str], None] = lambda name: None,
) -> list[Curve]:
    """Measure the curves of these names, in bfloat16 on this thread; `say` hears each name before. Raises ConfigError
    for an unknown one."""
    for name in names:
        if name not in NAMES:
            raise ConfigError(f"there is no curve {name}; there are {', '.join(NAMES)}")
    sizes = sizes or Sizes()
    curves = _engine_curves(model, names, sizes, say) if any(not name.startswith("router") for name in names) else []
    if "router_vs_streams" in names:
        say("router_vs_streams")
        costs = asyncio.run(_router_vs_streams(sizes))
        curves.append(_by_x("router_vs_streams", "streams", "router CPU, ms a token of each", sizes.streams, costs))
    if "router_vs_workers" in names:
        say("router_vs_workers")
        costs = [asyncio.run(_router_of_workers(count, sizes)) for count in sizes.workers]
        label = f"router CPU, ms a token of {sizes.worker_streams} streams"
        curves.append(_by_x("router_vs_workers", "workers", label, sizes.workers, costs))
    return curves


def _by_x(name: str, x_label: str, cost_label: str, x: Sequence[int], cost: list[float]) -> Curve:
    return curve(name, x_label, cost_label, x, cost, [float(each) for each in x])


def prefill_work(config: ModelConfig, num_tokens: int) -> float:
    """Arithmetic of a prompt: its products, grown in step with it, and attention, which grows with its square."""
    work = model_work(config)
    head = config.vocab_size * config.hidden_size  # meets the last token alone
    products = 2 * ((work.active_params - head) * num_tokens + head)
    return products + work.attention_flops * num_tokens**2 / 2


def _engine_curves(model: LoadedModel, names: Sequence[str], sizes: Sizes, say: Callable[[str], None]) -> list[Curve]:
    torch.manual_seed(0)
    longest = model.config.max_position_embeddings
    contexts = [context for context in sizes.contexts if context + sizes.num_steps + 2 <= longest]
    lengths = [length for length in sizes.lengths if length <= longest]
    blocks = _blocks(sizes.batch_context, sizes) * max(sizes.batches)
    blocks = max(blocks, _blocks(max(contexts), sizes) * sizes.context_batch, _blocks(max(lengths), sizes))
    engine = build_engine(
        model.config,
        model.source,
        dtype="bfloat16",
        block_size=BLOCK_SIZE,
        num_blocks=blocks,
        device=torch.device("cpu"),
    )
    steps = Steps(engine)

    def decode(batch: int, context: int) -> float:
        return statistics.median(steps.decode(batch, context, sizes.num_steps))

    curves = []
    if "step_vs_batch" in names:
        say("step_vs_batch")
        costs = _measured([partial(decode, batch, sizes.batch_context) for batch in sizes.batches], sizes.rounds)
        label = f"decode step at {sizes.batch_context} tokens of KV, ms"
        curves.append(_by_x("step_vs_batch", "sequences", label, sizes.batches, costs))
    if "step_vs_context" in names:
        say("step_vs_context")
        costs = _measured([partial(decode, sizes.context_batch, context) for context in contexts], sizes.rounds)
        label = f"decode step of {sizes.context_batch} sequences, ms"
        curves.append(_by_x("step_vs_context", "tokens of KV of each", label, contexts, costs))
    if "prefill_vs_length" in names:
        say("prefill_vs_length")
        costs = _measured([partial(steps.prefill, length) for length in lengths], sizes.rounds)
        work = [prefill_work(model.config, length) for length in lengths]
        curves.append(curve("prefill_vs_length", "prompt tokens", "prefill, ms", lengths, costs, work))
    return curves


def _blocks(num_tokens: int, sizes: Sizes) -> int:
    """Of one sequence that decodes `num_steps` further tokens."""
    return -(-(num_tokens + sizes.num_steps + 2) // BLOCK_SIZE)


def _measured(points: list[Callable[[], float]], rounds: int) -> list[float]:
    """Milliseconds of each point: medians of rounds that go up and down in turn."""
    points[0]()
    times: list[list[float]] = [[] for _ in points]
    for number in range(rounds):
        order = range(len(points)) if number % 2 == 0 else reversed(range(len(points)))
        for index in order:
            times[index].append(points[index]() * 1e3)
    return [statistics.median(each) for each in times]


async def _router_vs_streams(sizes: Sizes) -> list[float]:
    costs = []
    async with routed(4, sizes.router_step_s) as (router, workers):
        num_streams = 0
        for count in sizes.streams:
            await router.add_streams(count - num_streams)
            num_streams = count
            costs.append(await cpu_ms_per_step(router, workers, sizes.router_window_s))
    return costs


async def _router_of_workers(num_workers: int, sizes: Sizes) -> float:
    async with routed(num_workers, sizes.router_step_s) as (router, workers):
        await router.add_streams(sizes.worker_streams)
        return await cpu_ms_per_step(router, workers, sizes.router_window_s)


def write(curves: list[Curve], directory: Path) -> list[Path]:
    """`curves.json` and a picture of each curve. Raises ConfigError when that cannot be."""
    from pd_cluster.bench.plots import draw

    try:
        directory.mkdir(parents=True, exist_ok=True)
        data = directory / "curves.json"
        data.write_bytes(msgspec.json.format(msgspec.json.encode(curves)))
        return [data, *(draw(each, directory / f"{each.name}.png") for each in curves)]
    except OSError as error:
        raise ConfigError(f"cannot write to {directory}: {error.strerror}") from error


def table(curves: list[Curve]) -> str:
    lines = [f"{'curve':18} {'points':>12} {'cost':>18} {'exponent':>8} {'unit price':>10} {'misfit':>7}  verdict"]
    for each in curves:
        found = each.growth
        lines.append(
            f"{each.name:18} {f'{each.x[0]}..{each.x[-1]}':>12} {f'{each.cost[0]:.3g}..{each.cost[-1]:.3g} ms':>18} "
            f"{found.exponent:8.2f} {found.unit_price_growth:10.2f} {found.misfit:7.1%}  {found.verdict}"
        )
    return "\n".join(lines) + "\n"
