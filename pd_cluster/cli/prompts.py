"""Prompts as users give them (text, token ids, or a file of JSON lines of either) and the requests made of them."""

from pathlib import Path

import msgspec
from msgspec import Struct

from pd_cluster.config import ClusterConfig
from pd_cluster.errors import ConfigError, InvalidRequest, RequestError
from pd_cluster.ids import RequestId
from pd_cluster.model.source import LoadedModel
from pd_cluster.model.tokenizer import Tokenizer
from pd_cluster.request import Request, SamplingParams


class Prompt(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of the two is set."""

    prompt: str | None = None
    prompt_ids: list[int] | None = None

    def token_ids(self, tokenizer: Tokenizer | None) -> list[int]:
        if self.prompt_ids is not None:
            return self.prompt_ids
        assert self.prompt is not None
        if tokenizer is None:
            raise InvalidRequest(
                "this model has no tokenizer: give token ids (--prompt-ids, or prompt_ids in the file)"
            )
        return tokenizer.encode(self.prompt)


def read_prompts(texts: list[str], ids: list[str], file: Path | None) -> list[Prompt]:
    """All prompts in the order texts, ids, file. Raises ConfigError that says what is wrong where."""
    prompts = [Prompt(prompt=text) for text in texts]
    for listed in ids:
        try:
            prompts.append(Prompt(prompt_ids=[int(part) for part in listed.split(",")]))
        except ValueError:
            raise ConfigError(
                f"--prompt-ids wants integers with commas between, such as 1,2,3; got {listed!r}"
            ) from None
    if file is not None:
        prompts += _read_file(file)
    if not prompts:
        raise ConfigError("there is no prompt: give --prompt, --prompt-ids or --prompts-file")
    return prompts


def _read_file(file: Path) -> list[Prompt]:
    try:
        lines = file.read_bytes().splitlines()
    except OSError as error:
        raise ConfigError(f"cannot read {file}: {error.strerror}") from error
    prompts = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        where = f"{file} line {number}"
        try:
            prompt = msgspec.json.decode(line, type=Prompt)
        except msgspec.DecodeError as error:
            raise ConfigError(f'{where}: {error}; a line is {{"prompt": "..."}} or {{"prompt_ids": [1, 2]}}') from error
        if (prompt.prompt is None) == (prompt.prompt_ids is None):
            raise ConfigError(f"{where}: give either prompt or prompt_ids")
        prompts.append(prompt)
    return prompts


def make_requests(
    prompts: list[list[int]], sampling: SamplingParams, model: LoadedModel, config: ClusterConfig
) -> list[Request]:
    """Checked before a cluster starts for nothing. Raises RequestError that names the prompt."""
    limit = config.model.max_model_len or model.config.max_position_embeddings
    requests = []
    for index, token_ids in enumerate(prompts):
        request = Request(
            id=RequestId(f"prompt-{index}"), token_ids=token_ids, num_prompt_tokens=len(token_ids), sampling=sampling
        )
        try:
            request.validate(model.config.vocab_size, limit)
        except RequestError as error:
            raise type(error)(f"prompt {index}: {error.message}") from error
        requests.append(request)
    return requests
