"""The cost model: what its roofline says about shapes, and how measurements move it."""

import pytest

from pd_cluster.costs.calibration import Corrections, WorkerCosts
from pd_cluster.costs.roofline import Hardware, ModelWork, decode_step_s, prefill_s, transfer_s
from pd_cluster.model.config import GqaConfig, MlaConfig, ModelConfig, MoeConfig, RopeConfig
from router.work import model_work

HARDWARE = Hardware(flops_s=1e12, memory_bytes_s=1e11, link_bytes_s=1e10, link_latency_s=1e-3, step_overhead_s=0.0)
WORK = ModelWork(
    dense_params=1e9,
    expert_params=1e8,
    num_experts=64,
    num_experts_per_tok=4,
    bytes_per_param=2.0,
    attention_flops=1e5,
    kv_token_bytes=1e4,
)


def test_prefill_of_a_long_prompt_is_bound_by_arithmetic():
    assert prefill_s(HARDWARE, WORK, 1000) == pytest.approx((2 * 1.4e9 * 1000 + 1e5 * 1000 * 500) / 1e12)


def test_cached_tokens_cost_attention_only():
    extra = prefill_s(HARDWARE, WORK, 1000, 1000) - prefill_s(HARDWARE, WORK, 1000)
    assert extra == pytest.approx(1e5 * 1000 * 1000 / 1e12)
    assert prefill_s(HARDWARE, WORK, 0, 1000) == 0


def test_a_decode_step_is_bound_by_the_weights_and_kv_it_reads():
    one = decode_step_s(HARDWARE, WORK, 1, 1000)
    assert one == pytest.approx((2 * (1e9 + 4e8) + 1e4 * 1000) / 1e11)
    assert decode_step_s(HARDWARE, WORK, 0, 0) == 0


def test_a_larger_batch_touches_more_experts_but_never_more_than_there_are():
    few, many, all_ = (WORK.weight_bytes(n) for n in (1, 16, 100_000))
    assert few < many < all_
    assert few == pytest.approx(2 * (1e9 + 4 * 1e8))
    assert all_ == pytest.approx(2 * (1e9 + 64 * 1e8))


def test_a_transfer_takes_latency_and_bandwidth():
    assert transfer_s(HARDWARE, 1e10) == pytest.approx(1.001)


def test_the_first_measurement_sets_the_scale_and_later_ones_move_it_slowly():
    costs = WorkerCosts(HARDWARE, WORK)
    guess = costs.prefill_s(1000)
    costs.observe_prefill(1000, 0, 3 * guess)
    assert costs.prefill_s(1000) == pytest.approx(3 * guess)
    for _ in range(20):
        costs.observe_prefill(1000, 0, 3 * guess)
    costs.observe_prefill(1000, 0, 300 * guess)  # an outlier
    assert costs.prefill_s(1000) < 9 * guess
    for _ in range(50):
        costs.observe_prefill(1000, 0, guess)
    assert costs.prefill_s(1000) == pytest.approx(guess, rel=0.01)


def test_nonsense_is_not_learnt():
    costs = WorkerCosts(HARDWARE, WORK)
    guess = costs.step_s(4, 100)
    for seconds in (0.0, -1.0, float("nan"), float("inf")):
        costs.observe_step(4, 100, seconds)
    costs.observe_step(0, 0, 1.0)
    assert costs.step_s(4, 100) == guess


def test_a_new_worker_is_judged_by_its_peers_until_it_is_known():
    pool = Corrections()
    old, new = WorkerCosts(HARDWARE, WORK, pool), WorkerCosts(HARDWARE, WORK, pool)
    assert not new.knows_prefill
    guess = new.prefill_s(1000)
    old.observe_prefill(1000, 0, 5 * guess)
    assert new.knows_prefill
    assert new.prefill_s(1000) == pytest.approx(5 * guess)
    new.observe_prefill(1000, 0, 2 * guess)
    assert new.prefill_s(1000) == pytest.approx(2 * guess)
    assert old.prefill_s(1000) == pytest.approx(5 * guess)


def test_a_backlog_of_many_prompts_is_not_one_long_prompt():
    costs = WorkerCosts(HARDWARE, WORK)
    assert costs.backlog_s(100_000) == pytest.approx(100_000 / 512 * costs.prefill_s(512))
    assert costs.backlog_s(100_000) < costs.prefill_s(100_000)


def config(**changes) -> ModelConfig:
    values = {
        "architecture": "test",
        "vocab_size": 1000,
        "hidden_size": 64,
        "num_layers": 2,
        "intermediate_size": 256,
        "attention": GqaConfig(num_heads=4, num_kv_heads=2, head_dim=16),
        "rope": RopeConfig(theta=1e4, dim=16),
        "moe": None,
        "moe_layers": (),
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
        "max_position_embeddings": 128,
        "dtype": "bfloat16",
        "bos_token_id": None,
        "eos_token_ids": (0,),
    }
    return ModelConfig(**{**values, **changes})


def test_a_dense_models_parameters_are_counted():
    work = model_work(config())
    attention = 64 * 64 + 2 * 64 * 32 + 64 * 64
    assert work.dense_params == 2 * (attention + 3 * 64 * 256) + 64_000
    assert work.active_params == work.dense_params
    assert work.attention_flops == 2 * 4 * 4 * 16
    assert work.bytes_per_param == 2.0


def test_experts_are_counted_once_for_each_layer_that_has_them():
    moe = MoeConfig(gate="mixtral", num_experts=8, num_experts_per_tok=2, intermediate_size=32, num_shared_experts=1)
    work = model_work(config(moe=moe, moe_layers=(1,)))
    dense = model_work(config())
    assert work.expert_params == 3 * 64 * 32
    assert work.dense_params == dense.dense_params - 3 * 64 * 256 + 3 * 64 * 32 + 64 * 8
    assert work.active_params == work.dense_params + 2 * work.expert_params


def test_mla_attention_is_counted_by_its_projections():
    mla = MlaConfig(
        num_heads=4, q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=8
    )
    work = model_work(config(attention=mla, fp8_block=(128, 128)))
    attention = 64 * 48 + 64 * 20 + 16 * 4 * 16 + 4 * 8 * 64
    assert work.dense_params == 2 * (attention + 3 * 64 * 256) + 64_000
    assert work.bytes_per_param == 1.0
