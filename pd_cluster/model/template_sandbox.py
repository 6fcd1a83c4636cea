"""The Jinja sandbox of chat templates: no way into Python, and a budget that no template outlives.

Jinja's own immutable sandbox keeps templates away from attributes and from changing values. It does not stop a
template from running or growing for ever, so here every loop iteration and macro call is counted, and operations that
can make a large value out of a small one are bounded.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from typing import Any

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

MAX_STEPS = 2_000_000  # loop iterations and macro calls of one rendering: quadratic in a thousand messages
CALL_STEPS = 10
MAX_SIZE = 64 << 20  # characters of a text, items of a list
MAX_WIDTH = 100_000  # of padding
MAX_EXPONENT = 64

_PADDING_METHODS = {"center", "expandtabs", "ljust", "rjust", "zfill"}
_REMOVED_FILTERS = ("batch", "center", "filesizeformat", "pprint", "random", "slice", "urlize", "wordwrap", "xmlattr")
_WIDE_FORMAT = re.compile(r"\d{6}|\*")


class _Budget:
    """Loop iterations and macro calls that one rendering has left."""

    def __init__(self) -> None:
        self.steps = MAX_STEPS


_BUDGET: ContextVar[_Budget] = ContextVar("chat_template_budget")


def _spend(num_steps: int) -> None:
    budget = _BUDGET.get()
    budget.steps -= num_steps
    if budget.steps < 0:
        raise SecurityError(f"more than {MAX_STEPS} loop iterations")


class TemplateSandbox(ImmutableSandboxedEnvironment):
    """Compiles templates and renders them under a budget. Safe to use from several threads."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def __init__(self, now: Callable[[], datetime]) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, loopcontrols])
        for name in _REMOVED_FILTERS:
            del self.filters[name]
        for name, check in (("format", _check_format), ("indent", _check_width), ("replace", _check_replace)):
            self.filters[name] = _checked(self.filters[name], check)
        self.filters["tojson"] = _tojson
        del self.globals["lipsum"]
        self.globals |= {
            "dict": _make_dict,
            "namespace": _PlainNamespace,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now(now),
        }

    def render(self, template: Template, values: Mapping[str, Any]) -> str:
        """The whole text. Raises SecurityError when the template exceeds its budget."""
        token = _BUDGET.set(_Budget())
        try:
            parts, size = [], 0
            for part in template.generate(values):
                size += len(part)
                _check_size(size)
                parts.append(part)
            return "".join(parts)
        finally:
            _BUDGET.reset(token)

    @property
    def tick(self) -> None:
        """Reading this counts one step: compiled templates do so at the head of every loop body."""
        _spend(1)

    @property
    def tick_call(self) -> None:
        """The same for a macro, whose call costs as much as many iterations."""
        _spend(CALL_STEPS)

    def joined(self, *parts: object) -> str:
        """The `~` operator."""
        texts = [str(part) for part in parts]
        _check_size(sum(map(len, texts)))
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        sizes = [len(side) for side in (left, right) if isinstance(side, (str, list, tuple))]
        if operator == "+":
            _check_size(sum(sizes))
        elif operator == "*" and sizes:
            _check_size(sizes[0] * next((side for side in (left, right) if isinstance(side, int)), 1))
        elif operator == "**" and abs(right) > MAX_EXPONENT:
            raise SecurityError(f"a power beyond {MAX_EXPONENT}")
        elif operator == "%" and isinstance(left, str):
            _check_format(left)
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            name = getattr(__obj, "__name__", "")
            if name in _PADDING_METHODS:
                _check_width(owner, *args, **kwargs)
            elif name == "replace":
                _check_replace(owner, *args)
            elif name == "join" and args:
                return owner.join(_bounded(args[0], len(owner)))
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapped = super().wrap_str_format(value)
        if wrapped is not None:
            _check_format(value.__self__)
        return wrapped

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree: nodes.Template = _Instrument().visit(super()._parse(source, name, filename))
        tree.set_environment(self)
        return tree


class _Instrument(NodeTransformer):
    """Count every loop iteration and macro call, and join through a bound. The names cannot be shadowed by a
    template."""

    def _count(self, node: Any) -> Any:
        self.generic_visit(node)
        tick = nodes.EnvironmentAttribute("tick" if isinstance(node, nodes.For) else "tick_call")
        node.body.insert(0, nodes.ExprStmt(tick).set_lineno(node.lineno))
        return node

    visit_For = visit_Macro = visit_CallBlock = _count

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        joined = nodes.EnvironmentAttribute("joined")
        return nodes.Call(joined, node.nodes, [], None, None).set_lineno(node.lineno)


class _Generation(Extension):
    """`{% generation %}` marks what an assistant wrote, for training; in a prompt its content counts as it is."""

    tags = {"generation"}  # noqa: RUF012

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body).set_lineno(line)


class _PlainNamespace(Namespace):
    """A template's mutable variables; names that could reach Python's internals are refused."""

    def __init__(self, *args: Any, **values: Any) -> None:
        for name in {**dict(*args), **values}:
            _refuse_private(name)
        super().__init__(*args, **values)

    def __setitem__(self, name: str, value: Any) -> None:
        _refuse_private(name)
        super().__setitem__(name, value)


def _refuse_private(name: object) -> None:
    if isinstance(name, str) and name.startswith("_"):
        raise SecurityError(f"a namespace attribute with a leading underscore, {name!r}")


def _checked(filter_: Callable[..., Any], check: Callable[..., None]) -> Callable[..., Any]:
    """`filter_` with `check` on its value and arguments first; a filter that wants Jinja's context keeps its mark."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        check(*(args[1:] if hasattr(filter_, "jinja_pass_arg") else args), **kwargs)
        return filter_(*args, **kwargs)

    wrapped.__dict__.update(filter_.__dict__)
    return wrapped


def _check_size(size: int) -> None:
    if size > MAX_SIZE:
        raise SecurityError(f"a value of more than {MAX_SIZE} characters or items")


def _check_width(value: object, *args: object, **kwargs: object) -> None:
    if any(isinstance(width, int) and width > MAX_WIDTH for width in (*args, *kwargs.values())):
        raise SecurityError(f"padding wider than {MAX_WIDTH}")


def _check_replace(value: object, old: object = "", new: object = "", *args: object) -> None:
    text = str(value)
    _check_size((text.count(str(old)) if old else len(text) + 1) * len(str(new)))


def _check_format(value: object, *args: object, **kwargs: object) -> None:
    if _WIDE_FORMAT.search(str(value)):
        raise SecurityError(f"a format field wider than {MAX_WIDTH}")


def _bounded(parts: Iterable[Any], separator: int) -> list[Any]:
    found, size = [], 0
    for part in parts:
        size += separator + len(part)
        _check_size(size)
        found.append(part)
    return found


def _raise_exception(message: object) -> None:
    raise TemplateError(str(message))


def _strftime_now(now: Callable[[], datetime]) -> Callable[[str], str]:
    def strftime_now(form: str) -> str:
        return now().strftime(form)

    return strftime_now  # a closure: a partial would show its parts to templates


def _make_dict(*pairs: Any, **values: Any) -> dict[Any, Any]:
    """The type itself would bring its class methods."""
    return dict(*pairs, **values)


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as models saw it in training: no HTML escapes, unlike Jinja's own filter."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
