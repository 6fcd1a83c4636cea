"""A conversation becomes one prompt through the model's own Jinja template, in a sandbox.

Templates come with checkpoints, so they are other people's code: they see plain data only, reach no Python internals,
and run under a budget of loop iterations and of text, so that none can stop a router. What they see follows
transformers' `apply_chat_template`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from jinja2 import TemplateError, TemplateSyntaxError
from jinja2.exceptions import SecurityError

from pd_cluster.errors import InvalidRequest, ModelError
from pd_cluster.model.template_sandbox import TemplateSandbox

Messages = Sequence[Mapping[str, Any]]


class ChatTemplate:
    """The template of one model, compiled once. `named` holds alternatives such as tool_use beside the default."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str] | None = None,
        named: Mapping[str, str] | None = None,
        now: Callable[[], datetime] = datetime.now,
    ) -> None:
        """Raises ModelError when a template is not valid Jinja. `now` is the clock behind `strftime_now`."""
        sandbox = TemplateSandbox(now)
        self._special_tokens = dict(special_tokens or {})
        try:
            self._templates = {
                name: sandbox.from_string(text) for name, text in {"default": source, **(named or {})}.items()
            }
        except (TemplateSyntaxError, RecursionError) as error:
            raise ModelError(f"the chat template is not valid Jinja: {error}") from error
        self._sandbox = sandbox

    def render(
        self,
        messages: Messages,
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """The prompt for `messages`, special tokens included: encode it with `add_special_tokens=False`.

        `variables` are the template's own switches, such as enable_thinking. Raises InvalidRequest with the
        template's or the sandbox's reason.
        """
        template = self._templates["tool_use" if tools and "tool_use" in self._templates else "default"]
        values: dict[str, Any] = {
            **self._special_tokens,
            **_plain(variables),
            "messages": [_message(message) for message in messages],
            "tools": _plain(list(tools)) if tools else None,
            "documents": None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._sandbox.render(template, values)
        except SecurityError as error:
            raise InvalidRequest(f"the chat template is not allowed to do this: {error}", param="messages") from error
        except TemplateError as error:
            raise InvalidRequest(f"the chat template refused the messages: {error}", param="messages") from error
        except RecursionError as error:
            raise InvalidRequest("the chat template calls itself without end", param="messages") from error
        except (ArithmeticError, LookupError, MemoryError, TypeError, ValueError, AttributeError) as error:
            reason = f"{type(error).__name__}: {error}"
            raise InvalidRequest(f"the chat template failed on these messages: {reason}", param="messages") from error


def load_chat_template(directory: Path, special_tokens: Mapping[str, str]) -> ChatTemplate | None:
    """The template of a Hugging Face directory: chat_template.jinja, else tokenizer_config.json; None when it has
    neither."""
    files = {"default": directory / "chat_template.jinja"}
    files |= {path.stem: path for path in sorted(directory.glob("additional_chat_templates/*.jinja"))}
    try:
        found = {name: path.read_text(encoding="utf-8") for name, path in files.items() if path.is_file()}
    except (OSError, ValueError) as error:
        raise ModelError(f"cannot read the chat template in {directory}: {error}") from error
    if "default" not in found:
        found = _from_tokenizer_config(directory / "tokenizer_config.json") | found
    source = found.pop("default", None)
    return None if source is None else ChatTemplate(source, special_tokens=special_tokens, named=found)


def _from_tokenizer_config(path: Path) -> dict[str, str]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text(encoding="utf-8")).get("chat_template")
        if isinstance(value, list):
            return {str(entry["name"]): str(entry["template"]) for entry in value}
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise ModelError(f"cannot read the chat template in {path}: {error!r}") from error
    return {"default": value} if isinstance(value, str) else {}


def _message(message: Mapping[str, Any]) -> dict[str, Any]:
    """Keys without a value go: clients send content=null beside tool calls, and templates would print None."""
    return {key: value for key, value in _plain(message).items() if value is not None}


def _plain(value: Any) -> Any:
    """Only JSON's types reach a template; anything else would bring methods that the sandbox does not know."""
    if value is None or type(value) in (str, int, float, bool):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, str):
        return str.__str__(value)
    raise InvalidRequest(f"chat templates take JSON values, not {type(value).__name__}", param="messages")
