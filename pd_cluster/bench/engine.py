"""The engine's steps next to the time that their matrix products alone take, in one run.

Decode steps at several batches and prefill steps at several lengths, bfloat16. The limit multiplies the same rows by
the same weights, the faster of two ways: our packed kernels and oneDNN's packed linear. Rounds alternate between the
engine and its limits and medians are compared; one thread is timed by its own CPU clock, which a busy neighbour does
not stretch.
"""

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from pd_cluster.engine.plan import NewSequence, StepPlan, Work
from pd_cluster.engine.torch_engine import TorchEngine, build_engine
from pd_cluster.errors import ConfigError
from pd_cluster.ids import BlockId, RequestId
from pd_cluster.kernels.packed import Packed
from pd_cluster.model.fused import FusedGqa, FusedMla, FusedTransformer
from pd_cluster.model.fused_mlp import FusedMlp
from pd_cluster.model.source import LoadedModel
from pd_cluster.request import SamplingParams

DECODE_BATCHES = (1, 8, 32)
PREFILL_TOKENS = (128, 512, 1500)
BLOCK_SIZE = 16
GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


def seconds() -> float:
    return time.thread_time() if torch.get_num_threads() == 1 else time.perf_counter()


class Steps:
    """Runs an engine by hand: sequences that decode, prompts that prefill."""

    def __init__(self, engine: TorchEngine) -> None:
        self.engine = engine
        self._vocab = min(1000, engine.vocab_size)
        self._step = 0
        self._free = list(range(engine.num_blocks))
        self.after_step: Callable[[], object] = lambda: None
        """Called outside the time that is measured."""

    def decode(self, batch: int, context: int, num_steps: int) -> list[float]:
        """Seconds of each step of `batch` sequences with `context` tokens of KV."""
        num_blocks = -(-(context + num_steps + 2) // BLOCK_SIZE)
        ids = [RequestId(f"decode{i}") for i in range(batch)]
        blocks = [self._take(num_blocks) for _ in ids]
        prompts = [[(7 * t + 31 * i) % self._vocab for t in range(context + 1)] for i in range(batch)]
        add = [self._new(i, ids, context, b) for i, ids, b in zip(ids, prompts, blocks, strict=True)]
        took = [self._run(StepPlan(step=0, add=add, work=[Work(i, 1, True) for i in ids]))]
        took += [self._run(StepPlan(step=0, work=[Work(i, 1, True) for i in ids])) for _ in range(num_steps)]
        self._drop(ids, blocks)
        return took[1:]

    def prefill(self, num_tokens: int) -> float:
        request_id, blocks = RequestId("prefill"), self._take(-(-num_tokens // BLOCK_SIZE))
        new = self._new(request_id, [(7 * t) % self._vocab for t in range(num_tokens)], 0, blocks)
        took = self._run(StepPlan(step=0, add=[new], work=[Work(request_id, num_tokens, True)]))
        self._drop([request_id], [blocks])
        return took

    def _new(self, request_id: RequestId, ids: list[int], num_computed: int, blocks: list[BlockId]) -> NewSequence:
        return NewSequence(
            request_id=request_id,
            token_ids=ids,
            num_prompt_tokens=len(ids),
            num_computed=num_computed,
            block_ids=blocks,
            sampling=GREEDY,
        )

    def _take(self, num_blocks: int) -> list[BlockId]:
        taken, self._free = self._free[:num_blocks], self._free[num_blocks:]
        return [BlockId(block) for block in taken]

    def _drop(self, ids: list[RequestId], blocks: list[list[BlockId]]) -> None:
        self._run(StepPlan(step=0, drop=ids))
        for each in blocks:
            self._free += each

    def _run(self, plan: StepPlan) -> float:
        started = seconds()
        self.engine.launch(plan, [plan.num_tokens])
        self.engine.collect()
        took = seconds() - started
        self.after_step()
        return took


class Products:
    """The matrix products of a dense model's step, and nothing else."""

    def __init__(self, model: FusedTransformer) -> None:
        self._layers: list[Packed] = []
        for layer in model.layers:
            assert isinstance(layer.mlp, FusedMlp), "the products of a step are those of a dense model"
            attention: FusedGqa | FusedMla = layer.attention
            if isinstance(attention, FusedGqa):
                self._layers += [attention.qkv, attention.out]
            else:
                self._layers += [attention.compress, attention.q_b, attention.out]
            self._layers += [layer.mlp.gate_up, layer.mlp.down]
        self._head = model.head
        self._onednn = [self._reorder(packed) for packed in [*self._layers, *([self._head] if self._head else [])]]

    def _reorder(self, packed: Packed) -> Tensor:
        weight = torch.randn(packed.num_outputs, packed.num_inputs).bfloat16()
        reordered: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, None)
        return reordered

    def _inputs(self, num_tokens: int, num_sampled: int) -> list[tuple[Packed, Tensor]]:
        sizes = {packed.num_inputs for packed in self._layers}
        rows = {size: torch.randn(num_tokens, size).bfloat16() for size in sizes}
        inputs = [(packed, rows[packed.num_inputs]) for packed in self._layers]
        if self._head is not None:
            inputs.append((self._head, torch.randn(num_sampled, self._head.num_inputs).bfloat16()))
        return inputs

    def timed(self, num_tokens: int, num_sampled: int) -> Callable[[], tuple[float, float]]:
        """Seconds of (our kernels, oneDNN) for one step's products."""
        inputs = self._inputs(num_tokens, num_sampled)

        @torch.inference_mode()
        def run() -> tuple[float, float]:
            started = seconds()
            for packed, x in inputs:
                packed(x)
            between = seconds()
            for (_, x), weight in zip(inputs, self._onednn, strict=True):
                torch.ops.mkldnn._linear_pointwise(x, weight, None, "none", [], "")
            return between - started, seconds() - between

        return run


def run(
    model: LoadedModel,
    *,
    context: int = 256,
    rounds: int = 5,
    batches: tuple[int, ...] = DECODE_BATCHES,
    lengths: tuple[int, ...] = PREFILL_TOKENS,
) -> dict[str, Any]:
    """Milliseconds of a step, of its matrix products, and their ratio; tokens per second beside them."""
    if model.config.moe is not None:
        raise ConfigError(f"{model.name} has experts, whose products depend on its tokens: see bench roofline")
    torch.manual_seed(0)
    num_blocks = max(max(batches) * (-(-(context + 64) // BLOCK_SIZE)), -(-max(lengths) // BLOCK_SIZE))
    engine = build_engine(model.config, model.source, dtype="bfloat16", block_size=BLOCK_SIZE, num_blocks=num_blocks)
    if not isinstance(engine.model, FusedTransformer):
        raise ConfigError("this model does not run on the C kernels here: is there a C compiler?")
    steps, products = Steps(engine), Products(engine.model)
    cases: list[tuple[str, int, Callable[[], float], Callable[[], tuple[float, float]]]] = []
    for batch in batches:
        cases.append((f"decode_{batch}", batch, _decode(steps, batch, context), products.timed(batch, batch)))
    for length in lengths:
        cases.append((f"prefill_{length}", length, _prefill(steps, length), products.timed(length, 1)))
    result: dict[str, Any] = {"model": model.name, "threads": torch.get_num_threads(), "context": context}
    for name, num_tokens, ours, limit in cases:
        ours(), limit()
        measured = [(ours(), *limit()) for _ in range(rounds)]
        step_s, packed_s, onednn_s = (statistics.median(column) for column in zip(*measured, strict=True))
        least_s = min(packed_s, onednn_s)
        result[f"{name}_step_ms"] = 1e3 * step_s
        result[f"{name}_matmul_ms"] = 1e3 * least_s
        result[f"{name}_matmul_onednn_ms"] = 1e3 * onednn_s
        result[f"{name}_ratio"] = step_s / least_s
        result[f"{name}_tok_s"] = num_tokens / step_s
    return result


def _decode(steps: Steps, batch: int, context: int) -> Callable[[], float]:
    return lambda: statistics.median(steps.decode(batch, context, 5))


def _prefill(steps: Steps, length: int) -> Callable[[], float]:
    return lambda: steps.prefill(length)
