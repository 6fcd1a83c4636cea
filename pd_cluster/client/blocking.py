"""The client for threads: every method waits for its answer."""

import contextlib
import time
from collections.abc import Callable, Iterator, Sequence
from types import TracebackType
from typing import Any, Self, Unpack

import grpc

from pd_cluster.client.asking import Messages, Options, Prompt, chat_message, chat_request, prompt_request
from pd_cluster.client.connection import DEFAULT_ADDRESS, Tls, Turn, connection
from pd_cluster.client.failures import cause_of
from pd_cluster.client.following import WHOLE_INTERVAL_MS, Following
from pd_cluster.client.patience import Patience
from pd_cluster.client.results import (
    Chunk,
    ClusterStatus,
    Completion,
    Model,
    Role,
    WorkerStatus,
    cluster_status,
    plain,
    worker_status,
)
from pd_cluster.clock import SystemClock
from pd_cluster.errors import PdClusterError
from pd_cluster.pb.v1 import cluster_pb2, cluster_pb2_grpc, inference_pb2, inference_pb2_grpc


class Router:
    """The stubs of one router."""

    def __init__(self, channel: grpc.Channel) -> None:
        self.channel = channel
        self.inference = inference_pb2_grpc.InferenceStub(channel)
        self.cluster = cluster_pb2_grpc.ClusterStub(channel)


class Client:
    """`with Client("host:8001") as client`. Several addresses are routers of the same cluster.

    May be used by several threads at once. Errors are those of `pd_cluster.errors`.
    """

    def __init__(
        self,
        addresses: str | Sequence[str] = DEFAULT_ADDRESS,
        *,
        api_key: str | None = None,
        tls: Tls | None = None,
        allow_insecure: bool = False,
        timeout_s: float = 600.0,
        resume_timeout_s: float = 60.0,
        keepalive_s: float = 10.0,
    ) -> None:
        """`timeout_s`: of a whole answer. `resume_timeout_s`: how long a stream that broke tries to go on. Raises
        ConfigError, also when the key would travel in the clear without `allow_insecure`.
        """
        self._connection = connection(
            addresses,
            api_key=api_key,
            tls=tls,
            allow_insecure=allow_insecure,
            timeout_s=timeout_s,
            resume_timeout_s=resume_timeout_s,
            keepalive_s=keepalive_s,
        )
        credentials = tls.credentials() if tls is not None else None
        options = self._connection.options
        self._routers = [
            Router(
                grpc.secure_channel(address, credentials, options)
                if credentials is not None
                else grpc.insecure_channel(address, options)
            )
            for address in self._connection.addresses
        ]
        self._turn = Turn(len(self._routers))

    def close(self) -> None:
        """Hang up; streams that still run end with an error."""
        for router in self._routers:
            router.channel.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- completions

    def generate(self, prompt: Prompt, **options: Unpack[Options]) -> Completion:
        """The whole completion of a text or of token ids."""
        return self._whole(prompt_request(prompt, options), options)

    def chat(self, messages: Messages, **options: Unpack[Options]) -> Completion:
        """What the assistant says next, as a whole."""
        return self._whole(chat_request(messages, options), options)

    def stream(self, prompt: Prompt, **options: Unpack[Options]) -> "Stream":
        """A completion as it comes: `for chunk in client.stream(...)`."""
        return self._follow(prompt_request(prompt, options), options)

    def stream_chat(self, messages: Messages, **options: Unpack[Options]) -> "Stream":
        """What the assistant says next, as it comes."""
        return self._follow(chat_request(messages, options), options)

    def _follow(self, request: inference_pb2.GenerateRequest, options: Options) -> "Stream":
        return Stream(self, Following(request, self._patience(options.get("timeout_s"))))

    def _whole(self, request: inference_pb2.GenerateRequest, options: Options) -> Completion:
        request.stream_interval_ms = WHOLE_INTERVAL_MS
        with self._follow(request, options) as stream:
            for _ in stream:
                pass
            return stream.completion

    # ---- tokens, models

    def tokenize(self, text: str | Messages, *, model: str = "", add_special_tokens: bool = True) -> list[int]:
        """The token ids of a text, or of a chat up to where the assistant speaks."""
        message = inference_pb2.TokenizeRequest(model=model, add_special_tokens=add_special_tokens)
        if isinstance(text, str):
            message.text = text
        else:
            message.chat.CopyFrom(chat_message(text))
        return list(self._ask(lambda router: router.inference.Tokenize, message).token_ids)

    def detokenize(self, token_ids: Sequence[int], *, model: str = "", skip_special_tokens: bool = True) -> str:
        message = inference_pb2.DetokenizeRequest(
            model=model, token_ids=token_ids, skip_special_tokens=skip_special_tokens
        )
        text: str = self._ask(lambda router: router.inference.Detokenize, message).text
        return text

    def models(self) -> list[Model]:
        answer = self._ask(lambda router: router.inference.ListModels, inference_pb2.ListModelsRequest())
        return [plain(Model, model) for model in answer.models]

    # ---- the cluster

    def status(self, *, max_requests: int = 0) -> ClusterStatus:
        """`max_requests`: how many of the requests in flight to list, the oldest first."""
        message = cluster_pb2.GetStatusRequest(max_requests=max_requests)
        return cluster_status(self._ask(lambda router: router.cluster.GetStatus, message).status)

    def watch(self, interval_s: float = 1.0, *, max_requests: int = 0) -> Iterator[ClusterStatus]:
        """The status again and again; goes on at another router, or the same one restarted, when one is lost."""
        message = cluster_pb2.WatchStatusRequest(interval_ms=round(1000 * interval_s), max_requests=max_requests)
        patience = self._patience(float("inf"))
        begun = False
        while True:
            index = self._turn.index
            call: Any = self._routers[index].cluster.WatchStatus(message, metadata=self._connection.metadata)
            failure: grpc.RpcError | None = None
            try:
                for response in call:
                    patience.progress()
                    begun = True
                    yield cluster_status(response.status)
            except grpc.RpcError as error:
                failure = error
            finally:
                call.cancel()
            cause = cause_of(failure)
            delay_s = patience.next_delay_s(begun=begun) if cause.lost else None
            if delay_s is None:
                raise cause.error
            self._turn.failed(index)
            time.sleep(delay_s)

    def drain(self, worker_id: str) -> WorkerStatus:
        """The worker takes nothing new and finishes what it has. Raises UnknownWorker, PermissionDenied."""
        message = cluster_pb2.DrainRequest(worker_id=worker_id)
        return worker_status(self._ask(lambda router: router.cluster.Drain, message).worker)

    def scale(self, role: Role | str, instances: int) -> int:
        """Let that many engines of a role run; how many were meant to before. Raises NotSupported, PermissionDenied."""
        message = cluster_pb2.ScaleRequest(role=cluster_pb2.Role.Value(f"ROLE_{Role(role).name}"), instances=instances)
        return int(self._ask(lambda router: router.cluster.Scale, message).instances_before)

    def scale_ranks(self, role: Role | str, ranks: int, engine_id: str | None = None) -> tuple[str, int]:
        """Let that many ranks of one engine compute; its id, and how many were meant to before. Returns when they do.

        `engine_id` may be left out when the role has one engine. Raises InvalidRequest that says what does not fit,
        Unavailable when the engine ends meanwhile, NotSupported, PermissionDenied, DeadlineExceeded.
        """
        role_value = cluster_pb2.Role.Value(f"ROLE_{Role(role).name}")
        message = cluster_pb2.ScaleRequest(role=role_value, ranks=ranks, engine_id=engine_id or "")
        answer = self._ask(lambda router: router.cluster.Scale, message)
        return str(answer.engine_id), int(answer.ranks_before)

    # ---- calls

    def _patience(self, timeout_s: float | None) -> Patience:
        return Patience(
            SystemClock(),
            timeout_s=self._connection.timeout_s if timeout_s is None else timeout_s,
            resume_timeout_s=self._connection.resume_timeout_s,
            num_routers=len(self._routers),
        )

    def _ask(self, method: Callable[[Router], Any], message: Any) -> Any:
        """One answer, from the first router that gives any."""
        patience = self._patience(None)
        while True:
            index = self._turn.index
            try:
                return method(self._routers[index])(
                    message, timeout=max(0.0, patience.remaining_s()), metadata=self._connection.metadata
                )
            except grpc.RpcError as error:
                cause = cause_of(error)
            if not cause.lost or patience.next_delay_s(begun=False) is None:
                raise cause.error
            self._turn.failed(index)

    def open(self, following: Following) -> tuple[int, Any]:
        """The next attempt of a stream: which router, and the call."""
        index = self._turn.index
        call = self._routers[index].inference.GenerateStream(
            following.request(), timeout=following.timeout_s(), metadata=self._connection.metadata
        )
        return index, call

    def lost(self, index: int) -> None:
        """A stream broke at that router."""
        self._turn.failed(index)


class Stream:
    """An iterator of chunks; leaving its `with` block, or `close()`, cancels what is not finished.

    `text` and `token_ids` are everything so far; `completion` is there at the end.
    """

    def __init__(self, client: Client, following: Following) -> None:
        self._client = client
        self._following = following
        self._index = 0
        self._call: Any = None
        self._closed = False

    @property
    def text(self) -> str:
        return self._following.text

    @property
    def token_ids(self) -> list[int]:
        return self._following.token_ids

    @property
    def request_id(self) -> str:
        """Empty until the request was accepted."""
        return self._following.request_id

    @property
    def done(self) -> bool:
        """Whether the last chunk has come."""
        return self._following.done

    @property
    def completion(self) -> Completion:
        """The whole answer; only after the last chunk."""
        return self._following.completion()

    def close(self) -> None:
        self._closed = True
        if self._call is not None:
            self._call.cancel()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Chunk:
        while not (self._following.done or self._closed):
            try:
                if self._call is None:
                    self._index, self._call = self._client.open(self._following)
                chunk = self._following.take(next(self._call))
            except StopIteration:
                self._broke(None)
            except (grpc.RpcError, PdClusterError) as error:
                self._broke(error)
            else:
                if self._following.done:
                    self._finish()
                if chunk is not None:
                    return chunk
        raise StopIteration

    def _broke(self, failure: grpc.RpcError | PdClusterError | None) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.cancel()
        if self._closed:
            return
        delay_s = self._following.failed(failure)
        self._client.lost(self._index)
        time.sleep(delay_s)

    def _finish(self) -> None:
        """Let the call end as it does, so that the router does not take it for cancelled."""
        with contextlib.suppress(grpc.RpcError, StopIteration):
            next(self._call)
