"""Every reference checkpoint, prefilled on one engine and decoded on another, in every layout that matters."""

import json

import pytest
import torch
from harness import CHECKPOINTS, LocalCluster, config_of
from safetensors import safe_open

LAYOUTS = {
    "tp1 to dp1": {},
    "tp2 to dp2 ep2": {"prefill__tensor_parallel": 2, "decode__data_parallel": 2},
    "tp1 to tp2 x dp2 ep4": {"decode__tensor_parallel": 2, "decode__data_parallel": 2},
    "tp2 to dp1": {"prefill__tensor_parallel": 2},
    "tp4 to tp1": {"prefill__tensor_parallel": 4},
    "blocks of 32 to blocks of 16": {"prefill__block_size": 32, "prefill__tensor_parallel": 2},
    "colocated tp2 x dp2": {"colocated": True, "decode__tensor_parallel": 2, "decode__data_parallel": 2},
}
MODELS = sorted(path.name for path in CHECKPOINTS.iterdir() if path.is_dir())
TOLERANCE = 2e-4


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("model", MODELS)
async def test_tokens_and_logprobs_are_the_references(model: str, layout: str) -> None:
    prompts = json.loads((CHECKPOINTS / model / "reference.json").read_text())["prompts"]
    with safe_open(CHECKPOINTS / model / "reference.safetensors", "pt") as reference:
        expected = [
            torch.log_softmax(reference.get_tensor(f"prompt{i}.greedy_logits").double(), -1)
            for i in range(len(prompts))
        ]
    async with LocalCluster(config_of(CHECKPOINTS / model, **LAYOUTS[layout])) as cluster:
        outputs = await cluster.all_greedy([prompt["ids"] for prompt in prompts], logprobs=20)
        if "colocated" not in layout:
            assert all(output.timings.transfer_bytes > 0 for output in outputs)
            assert all("decode" in str(output.timings.decode_worker) for output in outputs)
    worst = 0.0
    for prompt, output, logprobs_SV in zip(prompts, outputs, expected, strict=True):
        assert output.token_ids == prompt["greedy_ids"]
        for step, logprobs in enumerate(output.logprobs):
            assert logprobs.rank == 1
            assert len(logprobs.top_ids) == 20
            for token_id, logprob in zip(logprobs.top_ids, logprobs.top_logprobs, strict=True):
                worst = max(worst, abs(logprob - logprobs_SV[step, token_id].item()))
    assert worst < TOLERANCE
    print(f"{len(prompts)} prompts x 32 tokens equal, largest error of 20 logprobs {worst:.1e}")
