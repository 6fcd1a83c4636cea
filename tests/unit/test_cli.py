"""The command line as a user meets it: quick help, mistakes told in one line with a way out, meaningful exit codes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_cluster.cli.main import app
from pd_cluster.cli.prompts import Prompt, read_prompts
from pd_cluster.errors import ConfigError, InvalidRequest
from pd_cluster.model.source import open_model


def run(*args: str) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, list(args))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout, result.stderr


def test_help_imports_no_heavy_library() -> None:
    script = (
        "import sys\n"
        "from pd_cluster.cli.main import app\n"
        "heavy = {'torch', 'ray', 'nixl', 'grpc', 'numpy', 'tokenizers', 'uvicorn', 'rich'} & set(sys.modules)\n"
        "assert not heavy, heavy\n"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


COMMANDS = ["demo", "serve", "generate", "chat", "status", "top", "drain", "scale", "doctor", "config", "bench"]


@pytest.mark.parametrize("command", [[], *([name] for name in COMMANDS)])
def test_every_command_explains_itself(command: list[str]) -> None:
    code, out, _ = run(*command, "--help")
    assert code == 0
    assert "Usage" in out


def test_config_prints_what_it_resolved_as_toml_and_json() -> None:
    code, out, _ = run("config", "--set", "decode.data_parallel=4", "--json")
    assert code == 0
    assert json.loads(out)["decode"]["data_parallel"] == 4
    code, out, _ = run("config", "--set", "decode.data_parallel=4")
    assert "[decode]\ninstances = 1\ntensor_parallel = 1\ndata_parallel = 4" in out


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["config", "--set", "kv.blocksize=16"], "unknown key kv.blocksize"),
        (["config", "--config", "/nonexistent.toml"], "cannot read the configuration /nonexistent.toml"),
        (["generate"], "there is no prompt: give --prompt, --prompt-ids or --prompts-file"),
        (["generate", "--prompt", "x", "--model", "/no/model"], "there is no model at /no/model"),
        (["generate", "--prompt-ids", "1,two"], "--prompt-ids wants integers"),
        (["generate", "--prompt-ids", "1,99999"], "prompt 0: prompt token ids must be between 0 and 511"),
        (
            ["generate", "--prompt", "x", "--temperature", "-1"],
            "prompt 0: temperature must be between 0 and 100, got -1",
        ),
        (["generate", "--prompt", "x", "--max-tokens", "0"], "max_tokens must be between 1 and"),
        (["generate", "--prompt", "x", "--logprobs", "99"], "logprobs must be between 0 and 20"),
        (["generate", "--prompt", "word " * 3000], "this model's context is 2048"),
        (["serve", "--set", "decode.data_parallel=0"], "decode.data_parallel must be at least 1"),
    ],
)
def test_a_mistake_is_one_line_that_says_what_to_do_and_exit_code_2(args: list[str], message: str) -> None:
    code, out, err = run(*args)
    assert code == 2
    assert out == ""
    assert err.startswith("pd-cluster: ")
    assert message in err
    assert len(err.strip().splitlines()) == 1


def test_an_unknown_option_or_choice_is_a_usage_error() -> None:
    assert run("serve", "--no-such-option")[0] == 2
    code, _, err = run("serve", "--launcher", "slurm")
    assert code == 2
    assert "process" in err


def test_prompts_are_read_in_order_from_all_places(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "c"}\n\n{"prompt_ids": [5, 6]}\n')
    assert read_prompts(["a"], ["1, 2"], file) == [
        Prompt(prompt="a"),
        Prompt(prompt_ids=[1, 2]),
        Prompt(prompt="c"),
        Prompt(prompt_ids=[5, 6]),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{'prompt': 1}", "line 2: .*malformed"),
        ('{"prompt": 1}', r"line 2: Expected `str \| null`, got `int` - at `\$.prompt`"),
        ('{"promt": "x"}', "line 2: .*unknown field `promt`"),
        ('{"prompt": "x", "prompt_ids": [1]}', "line 2: give either prompt or prompt_ids"),
        ("{}", "line 2: give either"),
    ],
)
def test_a_bad_line_of_a_prompts_file_is_named(tmp_path: Path, line: str, message: str) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(f'{{"prompt": "fine"}}\n{line}\n')
    with pytest.raises(ConfigError, match=message):
        read_prompts([], [], file)


def test_text_for_a_model_without_tokenizer_is_refused() -> None:
    assert Prompt(prompt_ids=[1]).token_ids(None) == [1]
    with pytest.raises(InvalidRequest, match="no tokenizer: give token ids"):
        Prompt(prompt="x").token_ids(None)
    demo = open_model("demo").tokenizer
    assert Prompt(prompt="Once upon a time").token_ids(demo) == [1, 403, 407, 261, 378]
