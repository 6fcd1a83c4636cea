"""A converted GGUF file gives transformers the logits that this engine computes from the file itself."""

from pathlib import Path

import pytest
import torch
from gguf import GGMLQuantizationType as Q
from gguf_files import write
from golden import prefill
from transformers import AutoModelForCausalLM

from pd_cluster.engine.torch_engine import build_engine
from pd_cluster.model.hf_export import export
from pd_cluster.model.source import open_model

QUANTISED = {"_proj.weight": Q.Q4_1, "_exps.weight": Q.Q4_1, "embed_tokens.weight": Q.Q8_0, "lm_head.weight": Q.Q8_0}


@pytest.mark.parametrize("name", ["llama", "llama_tied_llama3rope", "mixtral"])
def test_transformers_computes_the_logits_of_the_original_file(tmp_path: Path, name: str) -> None:
    model = open_model(str(write(tmp_path / "model.gguf", name, QUANTISED, freqs="llama3" in name)))
    export(model, tmp_path / "hf", dtype="float32")
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path / "hf")
    assert theirs.dtype == torch.float32
    ids = torch.randint(0, model.config.vocab_size, (1, 100), generator=torch.Generator().manual_seed(1))
    engine = build_engine(model.config, model.source, dtype="float32", block_size=16, num_blocks=8)
    with torch.inference_mode():
        expected = theirs(ids).logits[0]
        ours = engine.model.logits(prefill(engine, [ids[0].tolist()]))
    assert expected.std() > 0.5
    assert (ours - expected).abs().max() < 2e-4
