"""One rank's engine: sequences in, tokens out, by a transformer over a paged arena.

It keeps each sequence's tokens and pages as numpy arrays, turns a plan into a batch, runs it, and samples from logits
that are equal on all tensor-parallel ranks, so that every rank draws the same token and appends it. A rank without
work still enters the expert layers when another DP rank has some.
"""

import time
from collections import deque
from collections.abc import Sequence as Seq

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from pd_cluster.engine.arena import KvArena
from pd_cluster.engine.kv_identity import fingerprint_of, layout_of
from pd_cluster.engine.memory import check_max_model_len, choose_max_model_len, free_bytes, num_blocks_within
from pd_cluster.engine.plan import NewSequence, Sampled, StepPlan, StepResult, Work
from pd_cluster.errors import ConfigError, EngineError
from pd_cluster.ids import BlockId, Rank, RequestId
from pd_cluster.kv.layout import KvFingerprint, KvLayout
from pd_cluster.model.batch import Int64, Span
from pd_cluster.model.config import Dtype, ModelConfig
from pd_cluster.model.halves import MicroBatches, halve, in_turns, takes_halves
from pd_cluster.model.loader import Progress, load_transformer
from pd_cluster.model.sampler import Sampler, SampleRow
from pd_cluster.model.step_map import ReplicaChoice, choose_by_step
from pd_cluster.model.transformer import Transformer
from pd_cluster.model.weights import WeightSource
from pd_cluster.parallel.codec import CodecName
from pd_cluster.parallel.dispatch import Dispatcher
from pd_cluster.parallel.dispatchers import DispatcherName, Traffic, make_dispatcher
from pd_cluster.parallel.groups import Groups
from pd_cluster.parallel.one_sided import NixlDispatcher
from pd_cluster.parallel.placement import Placement, spread
from pd_cluster.parallel.slot_table import SlotTable
from pd_cluster.request import SamplingParams


class _Sequence:
    """Token ids, and the arena's unit index of every 16 tokens; both arrays grow by doubling."""

    def __init__(self, new: NewSequence, units_per_block: int) -> None:
        self.num_prompt_tokens = new.num_prompt_tokens
        self.num_computed = new.num_computed
        self.num_tokens = len(new.token_ids)
        self.sampling: SamplingParams = new.sampling
        self._tokens: Int64 = np.array(new.token_ids, dtype=np.int64)
        self._units_per_block = units_per_block
        self.units: Int64 = np.zeros(0, dtype=np.int64)
        self.grow(new.block_ids)

    @property
    def token_ids(self) -> Int64:
        return self._tokens[: self.num_tokens]

    def sample_row(self) -> SampleRow:
        history = self.token_ids if self.sampling.needs_history else None
        return SampleRow(self.sampling, self.num_tokens, self.num_tokens - self.num_prompt_tokens, history)

    def append(self, token_id: int) -> None:
        if self.num_tokens == len(self._tokens):
            self._tokens = np.concatenate([self._tokens, np.zeros(max(64, self.num_tokens), dtype=np.int64)])
        self._tokens[self.num_tokens] = token_id
        self.num_tokens += 1

    def grow(self, block_ids: Seq[BlockId]) -> None:
        first = np.array(block_ids, dtype=np.int64)[:, None] * self._units_per_block
        self.units = np.concatenate([self.units, (first + np.arange(self._units_per_block)).reshape(-1)])


class TorchEngine:
    """Implements `plan.Engine`. All calls come from one thread; an EngineError leaves it unusable."""

    def __init__(
        self,
        model: Transformer,
        arena: KvArena,
        sampler: Sampler,
        groups: Groups,
        *,
        fingerprint: KvFingerprint,
        max_model_len: int,
        placement: Placement | None = None,
        micro_batches: MicroBatches = "off",
    ) -> None:
        self.model = model
        self.arena = arena
        self.layout = arena.layout
        self.num_blocks = arena.num_blocks
        self.vocab_size = model.config.vocab_size
        self.max_model_len = max_model_len
        self.fingerprint = fingerprint
        self.placement = placement
        self.sampler = sampler
        self._groups = groups
        self._device = arena.device
        # only ranks that exchange tokens need each other's steps
        self._joins_idle = groups.dp_size > 1 and bool(model.moe_layers)
        dispatcher = self.dispatcher
        exchanges = dispatcher is not None and not dispatcher.replicated
        self._halves = micro_batches == "auto" and exchanges and arena.device.type == "cpu"
        self._sequences: dict[RequestId, _Sequence] = {}
        self._results: deque[StepResult] = deque()

    @property
    def dispatcher(self) -> Dispatcher | None:
        """Of all its expert layers; None for a model without experts."""
        return next((moe.dispatcher for moe in self.model.moe_layers), None)

    @property
    def num_sequences(self) -> int:
        return len(self._sequences)

    def launch(self, plan: StepPlan, step_tokens: list[int]) -> None:
        """Run `plan`. Raises EngineError when it does not fit the sequences, or when the step fails."""
        started_s = time.perf_counter()
        for request_id in plan.drop:
            self._sequences.pop(self._known(request_id))
        for new in plan.add:
            if new.request_id in self._sequences:
                raise EngineError(f"step {plan.step} adds sequence {new.request_id} twice")
            self._sequences[new.request_id] = _Sequence(new, self.layout.units_per_block)
        for request_id, block_ids in plan.grow.items():
            self._sequences[self._known(request_id)].grow(block_ids)
        spans = [self._span(work) for work in plan.work]
        sampled: list[Sampled] = []
        if spans or (self._joins_idle and any(step_tokens)):
            try:
                if isinstance(self.dispatcher, NixlDispatcher):
                    self.dispatcher.open_step(plan.step)
                logits_SV = self._run(spans, step_tokens)
                if self._is_void():
                    self._results.append(StepResult(step=plan.step, sampled=[], void=True))
                    return
                for work, span in zip(plan.work, spans, strict=True):
                    self._sequences[work.request_id].num_computed = span.end
                if self._device.type == "cuda":  # KV that a result speaks of may be read by a NIC: it must be there
                    torch.cuda.current_stream(self._device).synchronize()
                sampled = self._sample(logits_SV, [work.request_id for work in plan.work if work.sample])
            except RuntimeError as error:
                raise EngineError(f"step {plan.step} failed: {error}") from error
        self._results.append(
            StepResult(step=plan.step, sampled=sampled, compute_s=time.perf_counter() - started_s if spans else 0.0)
        )

    def _is_void(self) -> bool:
        """Whether results of experts were missing in this step, on any rank of this DP rank."""
        dispatcher, tp = self.dispatcher, self._groups.tp
        if not isinstance(dispatcher, NixlDispatcher):
            return False
        is_void = dispatcher.take_void()
        return is_void if tp is None else tp.minimum(int(not is_void), self._device) == 0

    def collect(self) -> StepResult:
        return self._results.popleft()

    def expert_load(self) -> list[list[int]]:
        """[MoE layer][expert] tokens routed since start; each token is counted by one rank of the engine."""
        return [moe.load_E.tolist() for moe in self.model.moe_layers]

    def load_counts(self) -> npt.NDArray[np.int64]:
        """[MoE layers, experts] the same as an array; between steps."""
        counts: npt.NDArray[np.int64] = torch.stack([moe.load_E for moe in self.model.moe_layers]).cpu().numpy()
        return counts

    @property
    def num_table_columns(self) -> int:
        """The most copies of an expert that a placement may have."""
        return self.model.moe_layers[0].choice.slots_EC.shape[1]

    def use(self, placement: Placement, tables: list[SlotTable]) -> None:
        """Steps launched from now on choose slots by `tables`, those of `placement` for each MoE layer. On the thread
        that launches.
        """
        for moe, table in zip(self.model.moe_layers, tables, strict=True):
            moe.choice.set(table)
        self.placement = placement

    def expert_slots(self) -> list[int]:
        """How many experts each rank of the engine holds in a MoE layer; empty for a model without experts."""
        placement = self.placement
        if placement is None:
            return []
        return [
            sum(expert is not None for expert in placement.rank_slots(0, Rank(rank)))
            for rank in range(placement.num_ranks)
        ]

    @torch.inference_mode()
    def _run(self, spans: list[Span], step_tokens: list[int]) -> Tensor:
        """float32 [S, V] logits of the spans that sample, in their order."""
        parts = halve(spans) if self._halves and takes_halves(step_tokens) else [spans]
        batches = [self.model.batch(part, self._device) for part in parts]
        for batch in batches:
            self.arena.clear_units(batch.open_units)
        if len(batches) == 1:
            hidden = [self.model(batches[0], self.arena.layers)]
        else:
            hidden = in_turns([self.model.stages(batch, self.arena.layers) for batch in batches])
        sampled = [h.index_select(0, batch.sample_rows) for h, batch in zip(hidden, batches, strict=True)]
        hidden_SH = sampled[0] if len(sampled) == 1 else torch.cat(sampled)
        if not len(hidden_SH):
            return torch.zeros((0, self.vocab_size), device=self._device)
        return self.model.logits(hidden_SH)

    def _known(self, request_id: RequestId) -> RequestId:
        if request_id not in self._sequences:
            raise EngineError(f"the plan names unknown sequence {request_id}")
        return request_id

    def _span(self, work: Work) -> Span:
        seq = self._sequences[self._known(work.request_id)]
        start, end = seq.num_computed, seq.num_computed + work.num_tokens
        if work.num_tokens < 1 or end > seq.num_tokens or work.sample != (end == seq.num_tokens):
            raise EngineError(f"{work} for {seq.num_tokens} tokens of which {start} have KV")
        if end > len(seq.units) * 16:
            raise EngineError(f"{work.request_id}: {end} tokens do not fit in its blocks")
        return Span(start, end, seq.token_ids[start:end], seq.units, work.sample)

    def _sample(self, logits_SV: Tensor, request_ids: list[RequestId]) -> list[Sampled]:
        """Draw the next token of each sequence and append it."""
        sampled = []
        sequences = [self._sequences[request_id] for request_id in request_ids]
        drawn = self.sampler.sample(logits_SV, [seq.sample_row() for seq in sequences])
        for request_id, seq, (token_id, logprobs) in zip(request_ids, sequences, drawn, strict=True):
            if token_id is not None:
                seq.append(token_id)
            sampled.append(Sampled(request_id, token_id, logprobs))
        return sampled


def build_engine(
    config: ModelConfig,
    source: WeightSource,
    *,
    dtype: Dtype,
    block_size: int,
    groups: Groups | None = None,
    num_blocks: int | None = None,
    max_model_len: int | None = None,
    max_num_batched_tokens: int = 2048,
    memory_fraction: float = 0.5,
    kv_max_bytes: int = 2 << 30,
    ranks_on_host: int = 1,
    redundant_experts: int = 0,
    expert_slots_per_rank: int | None = None,
    without_experts: bool = False,
    placement: Placement | None = None,
    dispatcher: DispatcherName = "auto",
    dispatch_dtype: CodecName = "auto",
    micro_batches: MicroBatches = "off",
    replica_choice: ReplicaChoice = "hash",
    eos_token_ids: tuple[int, ...] | None = None,
    device: torch.device | None = None,
    progress: Progress | None = None,
) -> TorchEngine:
    """Load this rank's part of the model and set aside its KV memory. All ranks of an engine call this together.

    `groups` says which rank this is (alone without). `num_blocks` None: measured after a step of
    `max_num_batched_tokens`, and equal on all ranks of a DP rank, or of the engine where these meet. `dispatcher`: see
    `parallel.dispatchers`; `local` plays all ranks of `placement` in this process. `dispatch_dtype`: how tokens travel
    between ranks. `replica_choice`: whether a token's hash or the counts of its step say which copy of an expert it
    goes to. `expert_slots_per_rank`: room for experts in every layer, default what the first placement fills.
    `without_experts`: a rank that joins later and is given its experts then. `eos_token_ids` default to the config's.
    Raises ConfigError for what does not divide or fit, ModelError from the source.
    """
    check_max_model_len(max_model_len, config.max_position_embeddings)
    groups = groups or Groups()
    device = device or torch.device("cpu")
    chosen: Dispatcher | None = None
    if config.moe is None:
        placement = None
        if redundant_experts:
            raise ConfigError(f"redundant_experts is {redundant_experts}, but {config.architecture} has no experts")
    else:
        if placement is None:
            num_experts, num_layers = config.moe.num_experts, config.num_moe_layers
            placement = spread(num_experts, groups.num_ranks, num_layers, redundant_experts, expert_slots_per_rank)
        traffic = Traffic(
            max_tokens=max_num_batched_tokens,
            num_chosen=config.moe.num_experts_per_tok,
            hidden_size=config.hidden_size,
            dtype=getattr(torch, dtype),
            codec=dispatch_dtype,
            device=device,
        )
        chosen = make_dispatcher(dispatcher, groups, placement, traffic)
    model = load_transformer(
        source,
        config,
        dtype=getattr(torch, dtype),
        groups=groups,
        placement=placement,
        dispatcher=chosen,
        device=device,
        progress=progress,
        without_experts=without_experts,
    )
    if replica_choice == "step" and chosen is not None and placement is not None:
        choose_by_step(model.moe_layers, chosen, placement)
    layout = layout_of(config, model.heads.held, dtype, block_size)
    if num_blocks is None:
        longest = min(max_num_batched_tokens, max_model_len or config.max_position_embeddings)
        _warm_up(model, layout, longest, device)
        free = free_bytes(device)
        num_blocks = num_blocks_within(
            layout, free, fraction=memory_fraction, max_bytes=kv_max_bytes, ranks_on_host=ranks_on_host
        )
        agreeing = groups.engine or groups.tp
        if agreeing is not None:
            num_blocks = agreeing.minimum(num_blocks, device)
    if num_blocks < 1:
        raise ConfigError(f"num_blocks must be at least 1, got {num_blocks}")
    return TorchEngine(
        model,
        KvArena(layout, num_blocks, device),
        Sampler(
            config.vocab_size,
            frozenset(config.eos_token_ids if eos_token_ids is None else eos_token_ids),
            model.highest,
        ),
        groups,
        fingerprint=fingerprint_of(config, layout, source),
        max_model_len=choose_max_model_len(max_model_len, config.max_position_embeddings, num_blocks, block_size),
        placement=placement,
        micro_batches=micro_batches,
    )


@torch.inference_mode()
def _warm_up(model: Transformer, layout: KvLayout, num_tokens: int, device: torch.device) -> None:
    """One prefill as large as a step may be: what it allocates is then not counted as free."""
    arena = KvArena(layout, layout.num_blocks_for(num_tokens), device)
    token_ids = np.arange(num_tokens, dtype=np.int64) % model.config.vocab_size
    units = np.arange(arena.num_blocks * layout.units_per_block, dtype=np.int64)
    batch = model.batch([Span(0, num_tokens, token_ids, units, True)], device)
    model.logits(model(batch, arena.layers).index_select(0, batch.sample_rows))
    for moe in model.moe_layers:
        moe.load_E.zero_()
