"""A decode step of a mixture-of-experts model with latent attention, next to reading what it touches once.

The floor is the bytes of all weights that the step reads (attention, shared and chosen experts, the head) and of its
sequences' latents, over the bandwidth at which the fastest of several plain loops reads memory in the same process,
between the steps. The model is random: DeepSeek-V2-Lite at half its width (the latents are those of V3), about a
billion parameters, two thirds of which a step of 16 tokens reads. Sixteen rows are more than one core multiplies in the
time that it reads a weight: the dense part is bound by arithmetic, and the floor is not reached.
"""

import statistics
from typing import Any

import torch
from torch import Tensor

from pd_cluster.bench.engine import BLOCK_SIZE, Steps, seconds
from pd_cluster.engine.torch_engine import TorchEngine, build_engine
from pd_cluster.errors import ConfigError
from pd_cluster.kernels import native
from pd_cluster.kernels.packed import Packed, WeightMemory
from pd_cluster.model.config import MlaConfig, ModelConfig, MoeConfig, RopeConfig
from pd_cluster.model.fused import FusedMla, FusedTransformer
from pd_cluster.model.fused_mlp import FusedMlp
from pd_cluster.model.fused_moe import FusedExperts
from pd_cluster.model.moe import Moe
from pd_cluster.model.random_weights import RandomSource
from pd_cluster.model.tensors import num_parameters

READ_BYTES = 256 << 20
READ_PATTERNS = ((1, 0), (1, 4096), (4, 1024), (8, 0), (8, 1024))
"""How memory is read to see how fast it can be: streams side by side, and bytes fetched ahead of each."""

MODEL = ModelConfig(
    architecture="DeepseekV3ForCausalLM",
    vocab_size=32_000,
    hidden_size=1024,
    num_layers=13,
    intermediate_size=2816,
    attention=MlaConfig(
        num_heads=8,
        q_lora_rank=None,
        kv_lora_rank=512,
        qk_nope_head_dim=128,
        qk_rope_head_dim=64,
        v_head_dim=128,
    ),
    rope=RopeConfig(theta=1e4, dim=64, interleaved=True),
    moe=MoeConfig(
        gate="deepseek_v3",
        num_experts=64,
        num_experts_per_tok=6,
        intermediate_size=384,
        num_shared_experts=2,
        num_groups=8,
        topk_groups=4,
        norm_topk_prob=True,
        routed_scaling_factor=2.5,
    ),
    moe_layers=tuple(range(1, 13)),
    rms_norm_eps=1e-6,
    tie_word_embeddings=False,
    max_position_embeddings=8192,
    dtype="bfloat16",
    bos_token_id=0,
    eos_token_ids=(1,),
)


class Touched:
    """Bytes of the experts that steps read, from the loads that the layers count."""

    def __init__(self, engine: TorchEngine) -> None:
        self._engine = engine
        self._slot_bytes = 0
        for layer in engine.model.layers:
            if isinstance(layer.mlp, Moe):
                (experts,) = layer.mlp.experts.values()
                assert isinstance(experts, FusedExperts)
                self._slot_bytes = experts.slot_bytes
        self._before = self._load()

    def since_last(self) -> int:
        """Of one step."""
        load = self._load()
        num_experts = int((load > self._before).sum())
        self._before = load
        return num_experts * self._slot_bytes

    def _load(self) -> Tensor:
        return torch.tensor(self._engine.expert_load())


def always_read(model: FusedTransformer) -> int:
    """Bytes of the weights that every decode step reads, whatever its tokens."""
    matrices: list[Packed | None] = [model.head]
    gates = 0
    for layer in model.layers:
        attention, mlp = layer.attention, layer.mlp
        assert isinstance(attention, FusedMla)
        matrices += [attention.compress, attention.q_b, attention.absorb, attention.expand_values, attention.out]
        if isinstance(mlp, Moe):
            gates += mlp.gate.weight_EH.numel() * 4
            mlp = mlp.shared
        if isinstance(mlp, FusedMlp):
            matrices += [mlp.gate_up, mlp.down]
    return gates + sum(2 * packed.values.numel() for packed in matrices if packed is not None)


class Bandwidth:
    """Passes over memory of huge pages in several patterns; `best` is the fastest by its median, bytes per second."""

    def __init__(self) -> None:
        library = native.library()
        assert library is not None, "the C kernels could not be built"
        self._sum = library.sum_of_bytes
        self._memory = WeightMemory().take(READ_BYTES // 2).fill_(1.0)
        self._speeds: dict[tuple[int, int], list[float]] = {pattern: [] for pattern in READ_PATTERNS}

    def measure(self) -> None:
        for (num_streams, ahead), speeds in self._speeds.items():
            started = seconds()
            self._sum(self._memory.data_ptr(), READ_BYTES, num_streams, ahead)
            speeds.append(READ_BYTES / (seconds() - started))

    def best(self) -> float:
        return max(map(statistics.median, self._speeds.values()))


def run(*, batch: int = 16, context: int = 512, rounds: int = 7, config: ModelConfig = MODEL) -> dict[str, Any]:
    """Bandwidth, bytes, floor, measured step time and their ratio; medians over `rounds`."""
    engine = _engine(config, batch, context)
    model = engine.model
    if not isinstance(model, FusedTransformer):
        raise ConfigError("the C kernels could not be built: is there a C compiler?")
    steps, bandwidth, touched = Steps(engine), Bandwidth(), Touched(engine)
    expert_bytes: list[int] = []
    steps.after_step = lambda: expert_bytes.append(touched.since_last())
    weight_bytes, kv_bytes = always_read(model), batch * (context + 1) * engine.layout.token_bytes
    steps.decode(batch, context, 2)
    took = []
    for _ in range(rounds):
        bandwidth.measure()
        took.append(statistics.median(steps.decode(batch, context, 3)))
    expert_bytes = [num_bytes for num_bytes in expert_bytes if num_bytes]  # a step that only drops sequences reads none
    speed, step_s = bandwidth.best(), statistics.median(took)
    num_bytes = weight_bytes + kv_bytes + statistics.median(expert_bytes)
    return {
        "threads": torch.get_num_threads(),
        "batch": batch,
        "context": context,
        "parameters": num_parameters(config),
        "bandwidth_gb_s": speed / 1e9,
        "expert_mb": statistics.median(expert_bytes) / 1e6,
        "other_weights_mb": weight_bytes / 1e6,
        "kv_mb": kv_bytes / 1e6,
        "floor_ms": 1e3 * num_bytes / speed,
        "step_ms": 1e3 * step_s,
        "ratio": step_s * speed / num_bytes,
        "tok_s": batch / step_s,
    }


def _engine(config: ModelConfig, batch: int, context: int) -> TorchEngine:
    num_blocks = batch * (-(-(context + 16) // BLOCK_SIZE) + 1)
    return build_engine(config, RandomSource(config), dtype="bfloat16", block_size=BLOCK_SIZE, num_blocks=num_blocks)
