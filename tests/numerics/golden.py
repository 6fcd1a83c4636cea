"""The reference checkpoints, and engines of several ranks as threads of this process that run them."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed import HashStore

from pd_cluster.engine.plan import NewSequence, StepPlan, StepResult, Work
from pd_cluster.engine.torch_engine import TorchEngine, build_engine
from pd_cluster.ids import BlockId, Rank, RequestId
from pd_cluster.model.batch import Span
from pd_cluster.model.config import ModelConfig
from pd_cluster.model.random_weights import RandomSource
from pd_cluster.model.source import LoadedModel, open_model
from pd_cluster.parallel.groups import Groups
from pd_cluster.parallel.one_sided import NixlDispatcher
from pd_cluster.request import SamplingParams

CHECKPOINTS = Path(__file__).parents[1] / "checkpoints"
NAMES = sorted(path.parent.name for path in CHECKPOINTS.glob("*/reference.safetensors"))
TOLERANCE = 2e-4
GREEDY = SamplingParams(temperature=0.0)
T = TypeVar("T")


@cache
def model(name: str) -> LoadedModel:
    return open_model(str(CHECKPOINTS / name))


MOE_NAMES = [name for name in NAMES if model(name).config.moe is not None]
MLA_NAMES = [name for name in NAMES if name.startswith("deepseek")]


@cache
def reference(name: str) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = load_file(CHECKPOINTS / name / "reference.safetensors")
    return tensors


def prompts(name: str) -> list[list[int]]:
    return [reference(name)[f"prompt{i}.ids"].tolist() for i in range(4)]


@dataclass
class _Running:
    token_ids: list[int]
    num_computed: int = 0
    blocks: list[BlockId] = field(default_factory=list)
    output: list[int] = field(default_factory=list)
    logits: list[Tensor] = field(default_factory=list)


class Recorder:
    """Stands before an engine's sampler and keeps the logits it was given."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.rows: list[Tensor] = []

    def sample(self, logits_SV: Tensor, rows: list[Any]) -> Any:
        self.rows = list(logits_SV.clone())
        return self.sampler.sample(logits_SV, rows)


class Cluster:
    """An engine of data_parallel x tensor_parallel ranks, one thread each; steps run on all of them together."""

    def __init__(
        self,
        of: str | ModelConfig,
        dp: int = 1,
        tp: int = 1,
        num_blocks: int | None = 40,
        make_source: type[RandomSource] = RandomSource,
        **options: Any,
    ) -> None:
        self.dp, self.tp = dp, tp
        options.setdefault("dtype", "float32")
        self.block_size: int = options.setdefault("block_size", 16)
        self.step = 0
        config = of if isinstance(of, ModelConfig) else model(of).config
        store = HashStore()
        self._pool = ThreadPoolExecutor(dp * tp)

        def build(rank: int) -> TorchEngine:
            torch.set_num_threads(1)
            groups = Groups.connect(store, rank=Rank(rank), tensor_parallel=tp, data_parallel=dp, timeout_s=60)
            source = make_source(of) if isinstance(of, ModelConfig) else open_model(str(CHECKPOINTS / of)).source
            return build_engine(config, source, groups=groups, num_blocks=num_blocks, **options)

        self.engines = list(self._pool.map(build, range(dp * tp)))
        dispatchers = [engine.dispatcher for engine in self.engines if isinstance(engine.dispatcher, NixlDispatcher)]
        for one in dispatchers:
            for other in dispatchers:
                if one is not other:
                    one.connect(other.ranks[0], other.endpoint())
        for one in dispatchers:
            one.begin(0, [other.ranks[0] for other in dispatchers])
        self._dispatchers = dispatchers
        for engine in self.engines:
            engine.sampler = Recorder(engine.sampler)  # type: ignore[assignment]

    def on_all(self, function: Callable[[TorchEngine], T]) -> list[T]:
        """`function` on every rank at once, in rank order."""
        return list(self._pool.map(function, self.engines))

    def run_step(self, plans: list[StepPlan]) -> list[StepResult]:
        """One step, a plan for each DP rank; the results of the leads, which their followers must share."""
        step_tokens = [plan.num_tokens for plan in plans]

        def run(engine: TorchEngine) -> StepResult:
            engine.launch(plans[self.engines.index(engine) // self.tp], step_tokens)
            return engine.collect()

        results = self.on_all(run)
        for rank, result in enumerate(results):
            assert result.sampled == results[rank // self.tp * self.tp].sampled
        return results[:: self.tp]

    def generate(self, prompts: list[list[list[int]]], num_tokens: int, budget: int = 64) -> list[list[_Running]]:
        """Greedy tokens for `prompts` [DP rank][request], at most `budget` tokens a step and DP rank, decodes first."""
        running = [{RequestId(f"r{i}"): _Running(list(ids)) for i, ids in enumerate(group)} for group in prompts]
        free = [iter(range(self.engines[0].num_blocks)) for _ in prompts]
        fresh = [set(group) for group in running]
        while any(len(seq.output) < num_tokens for group in running for seq in group.values()):
            self.step += 1  # the same for all ranks
            plans = []
            for group, blocks, new in zip(running, free, fresh, strict=True):
                plans.append(self._plan(group, blocks, new, num_tokens, budget))
            for rank, result in enumerate(self.run_step(plans)):
                rows = self.engines[rank * self.tp].sampler.rows  # type: ignore[attr-defined]
                for work in plans[rank].work:
                    running[rank][work.request_id].num_computed += work.num_tokens
                for sampled, row in zip(result.sampled, rows, strict=False):
                    seq = running[rank][sampled.request_id]
                    assert sampled.token_id is not None
                    seq.token_ids.append(sampled.token_id)
                    seq.output.append(sampled.token_id)
                    seq.logits.append(row)
        self.step += 1
        self.run_step([StepPlan(step=self.step, drop=list(group)) for group in running])
        assert [engine.num_sequences for engine in self.engines] == [0] * len(self.engines)
        return [list(group.values()) for group in running]

    def _plan(
        self, group: dict[RequestId, _Running], free: Any, new: set[RequestId], num_tokens: int, budget: int
    ) -> StepPlan:
        add, grow, work = [], {}, []
        for request_id, seq in sorted(group.items(), key=lambda item: len(item[1].token_ids) - item[1].num_computed):
            count = min(len(seq.token_ids) - seq.num_computed, budget)
            if len(seq.output) == num_tokens or not count:
                continue
            budget -= count
            end = seq.num_computed + count
            needed = -(-end // self.block_size) - len(seq.blocks)
            blocks = [BlockId(next(free)) for _ in range(needed)]
            seq.blocks += blocks
            if request_id in new:
                new.discard(request_id)
                add.append(
                    NewSequence(
                        request_id=request_id,
                        token_ids=list(seq.token_ids),
                        num_prompt_tokens=len(seq.token_ids),
                        num_computed=0,
                        block_ids=blocks,
                        sampling=GREEDY,
                    )
                )
            elif blocks:
                grow[request_id] = blocks
            work.append(Work(request_id, count, end == len(seq.token_ids)))
        return StepPlan(step=self.step, add=add, grow=grow, work=work)

    def prefill_logits(self, prompts: list[list[int]]) -> list[Tensor]:
        """Logits of every position of `prompts`, all in one batch of every DP rank; equal on all ranks."""

        def run(engine: TorchEngine) -> list[Tensor]:
            with torch.inference_mode():
                hidden_TH = prefill(engine, prompts)
                logits_TV = engine.model.logits(hidden_TH)
            return list(logits_TV.split([len(ids) for ids in sorted(prompts, key=len)]))

        results = self.on_all(run)
        for result in results[1:]:
            assert all(torch.equal(a, b) for a, b in zip(result, results[0], strict=True))
        return results[0]

    def close(self) -> None:
        self._pool.shutdown()
        for dispatcher in self._dispatchers:
            dispatcher.close()


def prefill(engine: TorchEngine, prompts: list[list[int]]) -> Tensor:
    """The last layer's output [T, H] for `prompts`, shortest first."""
    spans = []
    units_per_block = engine.layout.units_per_block
    order = torch.randperm(engine.num_blocks, generator=torch.Generator().manual_seed(0))
    for ids in sorted(prompts, key=len):
        num_blocks = engine.layout.num_blocks_for(len(ids))
        blocks, order = order[:num_blocks], order[num_blocks:]
        units = (blocks[:, None] * units_per_block + torch.arange(units_per_block)).reshape(-1)
        spans.append(Span(0, len(ids), torch.tensor(ids).numpy(), units.numpy(), True))
    batch = engine.model.batch(spans, torch.device("cpu"))
    engine.arena.clear_units(batch.open_units)
    return engine.model(batch, engine.arena.layers)
