"""The HTTP surface: the OpenAI API, probes and metrics.

`/livez` says that this process runs; `/readyz`, and `/health` for clients that wait for a server, say that a request
could be served from prefill to decode. Use `/livez` for liveness probes: a router whose workers are away must not be
restarted.
"""

import msgspec
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from pd_cluster.errors import PdClusterError, Unavailable, UnknownModel
from pd_cluster.metrics import CONTENT_TYPE
from router.chat import ChatCompletions
from router.completions import Completions
from router.exchange import Endpoint, Exchange
from router.openai_errors import MethodNotAllowedError, NotFoundError, error_json
from router.serving import Serving


class App(Starlette):
    """What is asked most goes straight to its endpoint, so that no layer stands between a token and its socket; all
    else, and every mistake in a path or a method, goes the usual way.
    """

    def __init__(self, direct: list[Route], rest: list[Route]) -> None:
        super().__init__(routes=[*direct, *rest], exception_handlers={HTTPException: _http_error})
        self._direct = {("POST", route.path): route.app for route in direct}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        endpoint = self._direct.get((scope["method"], scope["path"])) if scope["type"] == "http" else None
        await (endpoint or super().__call__)(scope, receive, send)


def build_app(serving: Serving) -> Starlette:
    """The ASGI app of one router."""
    probes = Probes(serving)
    models = Models(serving)

    def route(path: str, method: str, handle: object, *, protected: bool = False) -> Route:
        endpoint = Endpoint(serving, path, handle, protected=protected)  # type: ignore[arg-type]
        return Route(path, endpoint, methods=[method])

    generating = [
        route("/v1/completions", "POST", Completions(serving).handle, protected=True),
        route("/v1/chat/completions", "POST", ChatCompletions(serving).handle, protected=True),
    ]
    return App(
        generating,
        [
            route("/v1/models", "GET", models.list, protected=True),
            route("/v1/models/{model:path}", "GET", models.get, protected=True),
            route("/livez", "GET", probes.live),
            route("/readyz", "GET", probes.ready),
            route("/startupz", "GET", probes.ready),
            route("/health", "GET", probes.ready),
            route("/metrics", "GET", probes.metrics),
        ],
    )


class Models:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def list(self, exchange: Exchange) -> None:
        await exchange.answer(msgspec.json.encode({"object": "list", "data": [self._card()]}))

    async def get(self, exchange: Exchange) -> None:
        name = exchange.scope["path_params"]["model"]
        if name != self._serving.model_name:
            raise UnknownModel(f"the model {name!r} does not exist; this server has {self._serving.model_name!r}")
        await exchange.answer(msgspec.json.encode(self._card()))

    def _card(self) -> dict[str, object]:
        return {
            "id": self._serving.model_name,
            "object": "model",
            "created": self._serving.created,
            "owned_by": "pd-cluster",
            "max_model_len": self._serving.max_model_len,
        }


class Probes:
    def __init__(self, serving: Serving) -> None:
        self._serving = serving

    async def live(self, exchange: Exchange) -> None:
        await exchange.answer(b'{"status":"alive"}')

    async def ready(self, exchange: Exchange) -> None:
        """Ready when some prefill worker can hand over to some decode worker."""
        if not self._serving.pipeline.ready:
            workers = {worker.id: worker.health for worker in self._serving.pipeline.directory.workers}
            states = ", ".join(f"{worker_id} is {health}" for worker_id, health in workers.items()) or "none is known"
            raise Unavailable(f"no pair of prefill and decode workers is ready: {states}")
        await exchange.answer(b'{"status":"ready"}')

    async def metrics(self, exchange: Exchange) -> None:
        await exchange.answer(self._serving.metrics.render(), content_type=CONTENT_TYPE)


async def _http_error(request: Request, error: Exception) -> Response:
    """Starlette's own answers, in the shape that clients know."""
    assert isinstance(error, HTTPException)
    ours: PdClusterError
    if error.status_code == 404:
        ours = NotFoundError(f"there is nothing at {request.url.path}")
    elif error.status_code == 405:
        ours = MethodNotAllowedError(f"{request.method} is not possible at {request.url.path}")
    else:
        ours = PdClusterError(error.detail)
    headers = dict(error.headers or {})
    return Response(error_json(ours), error.status_code, headers, media_type="application/json")
