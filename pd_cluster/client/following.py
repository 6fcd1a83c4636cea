"""One generation as its client follows it, over as many connections and routers as it takes.

Pure: it says what to ask next and takes in what came. Tokens and text arrive together, so after any message the tokens
held are exactly what a next router needs to continue: no token is lost, repeated, or turned into text twice.
"""

import grpc

from pd_cluster.client.failures import cause_of
from pd_cluster.client.patience import Patience
from pd_cluster.client.results import FINISH, Chunk, Completion, Timings, Usage, logprobs_of, plain
from pd_cluster.errors import DeadlineExceeded, PdClusterError, Unavailable
from pd_cluster.pb.v1 import inference_pb2 as pb
from pd_cluster.request import FinishReason, TokenLogprobs

WHOLE_INTERVAL_MS = 250
"""Between two messages of a stream that nobody watches."""


class Following:
    """`request()` for every attempt, `take` for every message, `failed` when an attempt broke."""

    def __init__(self, request: pb.GenerateRequest, patience: Patience) -> None:
        self.token_ids: list[int] = list(request.output_token_ids)
        self.logprobs: list[TokenLogprobs] = []
        self.text = ""
        self.finish_reason: FinishReason | None = None
        self.request_id = ""
        self.num_resumes = 0
        self._request = request
        self._patience = patience
        self._model = ""
        self._begun = False
        self._sequence = 0
        self._usage: pb.Usage | None = None
        self._timings: pb.Timings | None = None

    @property
    def done(self) -> bool:
        return self.finish_reason is not None

    def request(self) -> pb.GenerateRequest:
        """What to ask now: the same again, after the tokens so far."""
        self._sequence = 0
        request = pb.GenerateRequest()
        request.CopyFrom(self._request)
        del request.output_token_ids[:]
        request.output_token_ids.extend(self.token_ids)
        return request

    def timeout_s(self) -> float:
        """What is left of the time of the whole. Raises DeadlineExceeded when nothing is."""
        remaining_s = self._patience.remaining_s()
        if remaining_s <= 0:
            raise DeadlineExceeded(f"the answer was not complete in time: {len(self.token_ids)} tokens came")
        return remaining_s

    def take(self, message: pb.GenerateStreamResponse) -> Chunk | None:
        """What is new in `message`, if anything. Raises Unavailable when it is not the next one."""
        if message.sequence != self._sequence:
            raise Unavailable(f"message {self._sequence} is missing: {message.sequence} came")
        self._sequence += 1
        match message.WhichOneof("event"):
            case "begin":
                self._begun = True
                self.request_id = self.request_id or message.begin.request_id
                self._model = message.begin.model
                return None
            case "delta":
                return self._take_delta(message.delta)
            case "end":
                return self._take_end(message.end)
        return None  # of a newer router

    def failed(self, failure: grpc.RpcError | PdClusterError | None) -> float:
        """An attempt broke, or ended without its end (None): seconds until the next. Raises the error when there is
        none to be made.
        """
        cause = cause_of(failure)
        if not (cause.broken if self._begun else cause.lost):
            raise cause.error
        delay_s = self._patience.next_delay_s(begun=self._begun)
        if delay_s is None:
            raise cause.error
        self.num_resumes += self._begun
        return delay_s

    def completion(self) -> Completion:
        """The whole answer; only when done."""
        assert self.finish_reason is not None, "the stream is not at its end"
        return Completion(
            request_id=self.request_id,
            model=self._model,
            text=self.text,
            token_ids=self.token_ids,
            logprobs=self.logprobs,
            finish_reason=self.finish_reason,
            usage=plain(Usage, self._usage),
            timings=plain(Timings, self._timings),
            seed=self._request.sampling.seed,
            num_resumes=self.num_resumes,
        )

    def _take_delta(self, delta: pb.GenerateStreamResponse.Delta) -> Chunk:
        if delta.first_index != len(self.token_ids):
            raise Unavailable(f"token {len(self.token_ids)} is missing: {delta.first_index} came")
        self._patience.progress()
        token_ids = list(delta.token_ids)
        logprobs = [logprobs_of(token) for token in delta.logprobs]
        self.token_ids += token_ids
        self.logprobs += logprobs
        self.text += delta.text
        return Chunk(text=delta.text, token_ids=token_ids, logprobs=logprobs)

    def _take_end(self, end: pb.GenerateStreamResponse.End) -> Chunk:
        self.finish_reason = FINISH.get(end.finish_reason, FinishReason.STOP)
        self.text += end.text
        self._usage, self._timings = end.usage, end.timings
        return Chunk(text=end.text, finish_reason=self.finish_reason)
