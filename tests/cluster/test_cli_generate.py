"""`pd-cluster generate` over real processes: right tokens, in order, and nothing left behind however it ends."""

import json
import signal
from pathlib import Path

import pytest
from processes import running, until

from pd_cluster.model.source import DEMO

pytestmark = pytest.mark.processes

SPLIT = ["--prefill-tp", "2", "--decode-dp", "2", "--dtype", "float32", "--set", "kv.max_bytes=16777216"]


def test_split_pools_continue_prompts_as_the_reference_does(tmp_path: Path) -> None:
    cases = json.loads((DEMO / "reference.json").read_text())["cases"]
    file = tmp_path / "prompts.jsonl"
    file.write_text("".join(json.dumps({"prompt_ids": case["prompt_ids"]}) + "\n" for case in cases))
    num_tokens = 24
    with running("generate", "--prompts-file", str(file), "--max-tokens", "24", "--ignore-eos", "--logprobs", "2",
                 "--json", *SPLIT) as command:  # fmt: skip
        code, out, err = command.finish()
        assert code == 0, err
        assert command.family() == []
    lines = [json.loads(line) for line in out.splitlines()]
    assert [line["index"] for line in lines] == list(range(len(cases)))
    for line, case in zip(lines, cases, strict=True):
        assert line["token_ids"] == case["greedy_ids"][:num_tokens]
        assert line["finish_reason"] == "length"
        assert [p["token_id"] for p in line["logprobs"]] == line["token_ids"]
        assert [p["logprob"] for p in line["logprobs"]] == pytest.approx(case["greedy_logprobs"][:num_tokens], abs=1e-3)
        assert {len(p["top"]) for p in line["logprobs"]} == {2}
        assert line["timings"]["prefill_worker"] == "prefill-0/0"
        assert line["timings"]["decode_worker"] in ("decode-0/0", "decode-0/1")
        assert line["timings"]["transfer_bytes"] > 0


def test_a_single_prompt_is_plain_text_and_stdout_holds_nothing_else() -> None:
    with running("generate", "--prompt", "Once upon a time", "--max-tokens", "12", "--colocated", "--dtype", "float32",
                 "--set", "kv.max_bytes=16777216") as command:  # fmt: skip
        code, out, err = command.finish()
        assert code == 0, err
        assert out == ", there was a little girl named Lily. She\n"


def test_ctrl_c_while_ranks_start_ends_everything() -> None:
    with running("generate", "--prompt", "x", "--max-tokens", "2000", "--ignore-eos", *SPLIT) as command:
        until(lambda: len(command.ranks()) == 4)
        command.signal(signal.SIGINT)
        code, out, err = command.finish(30)
        assert code == 130
        assert "Traceback" not in err
        assert out == ""
        until(lambda: command.family() == [])


def test_a_configuration_that_a_rank_refuses_is_one_error_and_leaves_nothing() -> None:
    with running("generate", "--prompt", "x", "--colocated", "--decode-tp", "3") as command:
        code, out, err = command.finish()
        assert code == 2, err
        assert out == ""
        assert "Traceback" not in err
        assert err.splitlines()[-1].startswith("pd-cluster: ")
        assert command.family() == []
