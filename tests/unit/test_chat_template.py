"""Chat templates: the same prompts as transformers makes, and nothing that a hostile template can do to a router."""

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from transformers.utils.chat_template_utils import render_jinja_template

from pd_cluster.errors import InvalidRequest, ModelError
from pd_cluster.model.chat_template import ChatTemplate, load_chat_template
from pd_cluster.model.source import open_model

CHATML = """{%- if tools %}
    {{- '<|im_start|>system\\n# Tools\\n' }}
    {%- for tool in tools %}
        {{- "\\n" }}
        {{- tool | tojson }}
    {%- endfor %}
    {{- '<|im_end|>\\n' }}
{%- endif %}
{%- set ns = namespace(last=messages|length - 1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == "user" and ns.last == messages|length - 1 %}
        {%- set ns.last = (messages|length - 1) - loop.index0 %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'skip' %}{% continue %}{% endif %}
    {{- '<|im_start|>' + message.role + '\\n' + message.content | trim + '<|im_end|>' + '\\n' }}
    {%- if message.tool_calls %}{{ message.tool_calls | tojson(indent=2) }}{% endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}
        {{- '<think>\\n\\n</think>\\n\\n' }}
    {%- endif %}
{%- endif %}"""
LLAMA2 = """{{ bos_token }}{% for message in messages %}
    {% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}
        {{ raise_exception('roles must alternate user/assistant') }}
    {% endif %}
    {% generation %}
[INST] {{ message['content'] }} [/INST]{% endgeneration %}
    {# a comment #}
{% endfor %}"""
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "Hi <b> & 'you' \"there\" é"}],
    [{"role": "user", "content": " a "}, {"role": "assistant", "content": "b\n"}, {"role": "user", "content": "c"}],
    [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": "", "tool_calls": [{"id": "1", "f": {"a": "ü"}}]},
    ],
]
TOOLS = [{"type": "function", "function": {"name": "weather", "parameters": {"text": "<é>"}}}]


@pytest.mark.parametrize("messages", CHATS)
@pytest.mark.parametrize("source", [CHATML, LLAMA2])
@pytest.mark.parametrize("generation", [True, False])
@pytest.mark.parametrize("tools", [None, TOOLS])
def test_prompts_are_those_of_transformers(messages: Any, source: str, generation: bool, tools: Any) -> None:
    special = {"bos_token": "<s>", "eos_token": "</s>"}
    template = ChatTemplate(source, special_tokens=special)
    switch_sets: list[dict[str, Any]] = [{}, {"enable_thinking": False}]
    for switches in switch_sets:
        ours = template.render(messages, tools=tools, add_generation_prompt=generation, **switches)
        rest: dict[str, Any] = {"add_generation_prompt": generation, **special, **switches}
        theirs: Any = render_jinja_template(conversations=[messages], tools=tools, chat_template=source, **rest)
        assert [ours] == theirs[0]
        assert ours


def rendered(source: str, messages: Any = CHATS[0], **variables: Any) -> str:
    return ChatTemplate(source).render(messages, **variables)


def test_null_fields_are_absent() -> None:
    message = {"role": "assistant", "content": None, "tool_calls": None}
    assert rendered("{{ messages[0] | tojson }}", [message]) == '{"role": "assistant"}'


def test_json_has_no_html_escapes() -> None:
    assert rendered("{{ messages[0].content | tojson }}") == json.dumps(CHATS[0][0]["content"], ensure_ascii=False)


def test_the_clock_is_a_parameter() -> None:
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", now=lambda: datetime(2024, 7, 26, tzinfo=UTC))
    assert template.render([]) == "26 Jul 2024"


def test_the_tool_template_serves_requests_with_tools() -> None:
    template = ChatTemplate("plain", named={"tool_use": "tools: {{ tools | length }}"})
    assert template.render(CHATS[0]) == "plain"
    assert template.render(CHATS[0], tools=TOOLS) == "tools: 1"


def test_a_template_s_own_refusal_reaches_the_client() -> None:
    messages = [{"role": "assistant", "content": "first"}]
    with pytest.raises(InvalidRequest, match="the chat template refused the messages: roles must alternate") as caught:
        rendered(LLAMA2, messages)
    assert caught.value.http_status == 400


ESCAPES = [
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ cycler.__init__.__globals__ }}",
    "{{ namespace.__init__.__globals__ }}",
    "{{ raise_exception.__globals__ }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{% set ns = namespace(__class__='x') %}",
    "{% set ns = namespace() %}{% set ns.__init__ = 1 %}",
    "{{ '{0.__class__}'.format(1) }}",
    "{{ messages | map(attribute='__class__') | list | first | attr('x') }}",
]


@pytest.mark.parametrize("source", ESCAPES)
def test_the_sandbox_holds(source: str) -> None:
    before = json.dumps(CHATS[0])
    try:
        text = rendered(source)
    except InvalidRequest as error:
        text = "" if "not allowed" in error.message or "undefined" in error.message else error.message
    assert text == ""  # an attribute out of bounds is undefined, and prints as nothing
    assert json.dumps(CHATS[0]) == before


BOMBS = [
    ("{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}", "loop iterations"),
    (
        "{% set tick = 1 %}{% for a in range(9**5) %}{% for b in range(9**5) %}{% endfor %}{% endfor %}",
        "loop iterations",
    ),
    ("{% for a in range(10**9) %}{% endfor %}", "Range too big"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "calls itself without end"),
    ("{% macro f(n) %}{% if n %}{{ f(n-1) ~ f(n-1) }}{% endif %}{% endmacro %}{{ f(60) }}", "loop iterations"),
    ("{% for a in range(9999) recursive %}{{ loop(range(9999)) }}{% endfor %}", "calls itself without end"),
    ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}{% endfor %}", "a value of more"),
    ("{% set n = namespace(x='ab') %}{% for i in range(60) %}{% set n.x = n.x + n.x %}{% endfor %}", "a value of more"),
    ("{{ messages[0].content * 10**11 }}", "a value of more"),
    ("{{ 10**11 * messages }}", "a value of more"),
    ("{{ 9**(9**9) }}", "a power beyond"),
    ("{% for i in range(99999) %}{{ x }}{% endfor %}", "a value of more"),
    ("{{ x.replace('a', x) }}", "a value of more"),
    ("{{ x | replace('a', x) }}", "a value of more"),
    ("{{ x.join([x] * 9000) }}", "a value of more"),
    ("{{ 'a'.center(10**11) }}", "padding wider"),
    ("{{ 'a'.ljust(width=10**11) }}", "padding wider|no keyword arguments"),
    ("{{ 'a' | indent(10**11) }}", "padding wider"),
    ("{{ '%99999999999d' % 1 }}", "format field wider"),
    ("{{ '%99999999999d' | format(1) }}", "format field wider"),
    ("{{ '{:99999999999}'.format(1) }}", "format field wider"),
    ("{{ lipsum(10**9) }}", "'lipsum' is undefined"),
]


@pytest.mark.parametrize(("source", "reason"), BOMBS)
def test_no_template_runs_or_grows_without_end(source: str, reason: str) -> None:
    start = time.perf_counter()
    with pytest.raises(InvalidRequest, match=reason):
        rendered(source, x="a" * 10_000)
    assert time.perf_counter() - start < 10


def test_a_long_conversation_is_within_budget() -> None:
    messages = CHATS[1] * 300
    quadratic = "{% for m in messages %}{% for n in messages %}{% endfor %}{{ m.role }}{% endfor %}"
    assert rendered(quadratic, messages).startswith("userassistant")


def test_only_plain_values_reach_a_template() -> None:
    with pytest.raises(InvalidRequest, match="take JSON values, not object"):
        rendered("{{ messages }}", [{"role": "user", "content": object()}])


def test_a_mistake_in_the_messages_is_the_clients() -> None:
    with pytest.raises(InvalidRequest, match="refused the messages: 'dict object' has no attribute 'content'"):
        rendered("{{ messages[0]['content'] + 'x' }}", [{"role": "user"}])
    with pytest.raises(InvalidRequest, match="TypeError"):
        rendered("{{ messages[0].content + 'x' }}", [{"role": "user", "content": [{"type": "text"}]}])


def test_broken_templates_are_the_models() -> None:
    with pytest.raises(ModelError, match="the chat template is not valid Jinja"):
        ChatTemplate("{% if %}")


def test_a_directory_s_template_file_goes_before_its_tokenizer_config(tmp_path: Path) -> None:
    assert load_chat_template(tmp_path, {}) is None
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"chat_template": "from config"}))
    template = load_chat_template(tmp_path, {})
    assert template is not None
    assert template.render([]) == "from config"
    named = [{"name": "default", "template": "one"}, {"name": "tool_use", "template": "two"}]
    config.write_text(json.dumps({"chat_template": named}))
    template = load_chat_template(tmp_path, {})
    assert template is not None
    assert template.render([], tools=TOOLS) == "two"
    (tmp_path / "chat_template.jinja").write_text("{{ bos_token }}from file")
    template = load_chat_template(tmp_path, {"bos_token": "<s>"})
    assert template is not None
    assert template.render([], tools=TOOLS) == "<s>from file"
    (tmp_path / "chat_template.jinja").unlink()
    config.write_text("{")
    with pytest.raises(ModelError, match=r"cannot read the chat template in .*tokenizer_config\.json"):
        load_chat_template(tmp_path, {})


def test_the_demo_model_continues_a_story_over_turns() -> None:
    template = open_model("demo").chat_template
    assert template is not None
    first: list[dict[str, Any]] = [
        {"role": "system", "content": "ignored"},
        {"role": "user", "content": " Once upon a time"},
    ]
    assert template.render(first) == "<s>Once upon a time"
    parts = [{"type": "text", "text": "The cat"}]
    later = [*first, {"role": "assistant", "content": ", there was a cat."}, {"role": "user", "content": parts}]
    assert template.render(later) == "<s>Once upon a time, there was a cat. The cat"
