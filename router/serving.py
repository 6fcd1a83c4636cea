"""What every route of the HTTP API needs: the pipeline, the model's tokenizer and template, names and limits."""

import time
from collections.abc import Mapping, Sequence
from typing import Any

from pd_cluster.errors import InvalidRequest
from pd_cluster.metrics import RouterMetrics
from pd_cluster.model.chat_template import ChatTemplate
from pd_cluster.model.source import LoadedModel
from pd_cluster.model.tokenizer import Tokenizer
from router.pipeline import Pipeline


class Serving:
    def __init__(
        self,
        pipeline: Pipeline,
        model: LoadedModel,
        model_name: str,
        metrics: RouterMetrics,
        *,
        api_key: str | None = None,
    ) -> None:
        self.pipeline = pipeline
        self.model_name = model_name
        self.metrics = metrics
        self.api_key = api_key
        self.created = int(time.time())
        self.vocab_size = model.config.vocab_size
        self.tokenizer: Tokenizer | None = model.tokenizer
        self._model = model
        self._template: ChatTemplate | None = model.chat_template
        self._max_position = model.config.max_position_embeddings

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Every id that ends a sequence."""
        return self._model.eos_token_ids

    @property
    def has_chat_template(self) -> bool:
        return self._template is not None

    @property
    def max_model_len(self) -> int:
        """Of the workers; of the model while none is known."""
        return self.pipeline.max_model_len or self._max_position

    def encode(self, text: str, *, add_special_tokens: bool = True) -> list[int]:
        """Raises InvalidRequest when the model came without a tokenizer."""
        if self.tokenizer is None:
            raise InvalidRequest("this model has no tokenizer: send the prompt as token ids", param="prompt")
        return self.tokenizer.encode(text, add_special_tokens)

    def encode_chat(self, messages: Sequence[Mapping[str, Any]]) -> list[int]:
        """Token ids of a conversation up to where the assistant speaks. Raises InvalidRequest."""
        return self.encode(self.render_chat(messages), add_special_tokens=False)

    def render_chat(self, messages: Sequence[Mapping[str, Any]]) -> str:
        """Its text; special tokens are spelt out. Raises InvalidRequest."""
        if self._template is None:
            raise InvalidRequest(
                f"the model {self.model_name} has no chat template: send a plain prompt", param="messages"
            )
        return self._template.render(messages)
