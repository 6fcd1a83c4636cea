"""Prometheus metrics of a router: one registry for each, names with the prefix `pd_cluster_`, SI units."""

from bisect import bisect_left
from collections.abc import Iterable

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

PREFIX = "pd_cluster_"
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

LATENCY_BUCKETS = (0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TOKEN_BUCKETS = (0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
TRANSFER_BUCKETS = (0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0)


class RouterMetrics:
    """What a router counts as it happens; what workers report is collected when it is read."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = self._counter("requests", "Requests that ended, by finish reason or error code", "outcome")
        self.retries = self._counter("request_retries", "New attempts, by what ended the former", "reason")
        self.prompt_tokens = self._counter("prompt_tokens", "Prompt tokens of ended requests")
        self.cached_tokens = self._counter("prompt_tokens_cached", "Of them, found in a prefix cache")
        self.transfer_bytes = self._counter("kv_transfer_bytes", "KV bytes pushed")
        self.transfer_failures = self._counter("kv_transfer_failures", "Transfers that failed, by code", "reason")
        self.http_requests = self._counter("http_requests", "HTTP answers", "route", "status")
        self.grpc_requests = self._counter("grpc_requests", "gRPC calls of clients", "method", "code")
        self.ttft = self._histogram("time_to_first_token_seconds", "Submission to first token", LATENCY_BUCKETS)
        self.e2e = self._histogram("e2e_request_latency_seconds", "Submission to last token", LATENCY_BUCKETS)
        self.queue_time = self._histogram("request_queue_time_seconds", "Submission to prefill", LATENCY_BUCKETS)
        self.prefill_time = self._histogram("request_prefill_time_seconds", "Prefill to its token", LATENCY_BUCKETS)
        self.transfer_time = self._histogram("kv_transfer_seconds", "First post to last completion", TRANSFER_BUCKETS)
        self.tokens = TokenMetrics()
        self.collect_from(self.tokens)
        self.requests_in_phase = Gauge(
            f"{PREFIX}requests_in_phase", "Requests in flight", ["phase"], registry=self.registry
        )

    def _counter(self, name: str, documentation: str, *labels: str) -> Counter:
        return Counter(PREFIX + name, documentation, labels, registry=self.registry)

    def _histogram(self, name: str, documentation: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(PREFIX + name, documentation, buckets=buckets, registry=self.registry)

    def collect_from(self, collect: "Snapshot") -> None:
        """Ask `collect` for more metrics at every scrape."""
        self.registry.register(collect)

    def render(self) -> bytes:
        """The text format that Prometheus scrapes."""
        return generate_latest(self.registry)


class Snapshot(Collector):
    """Metrics computed when they are read."""

    def collect(self) -> Iterable[Metric]:
        raise NotImplementedError


class TokenMetrics(Snapshot):
    """What is counted for every token: plain numbers, since locks and labels would cost more than the token itself."""

    def __init__(self) -> None:
        self._num_tokens = 0
        self._sum_s = 0.0
        self._counts = [0] * (len(TOKEN_BUCKETS) + 1)

    def first(self, num_tokens: int) -> None:
        """The first tokens of a request."""
        self._num_tokens += num_tokens

    def further(self, num_tokens: int, seconds: float) -> None:
        """Tokens that came `seconds` after the ones before."""
        self._num_tokens += num_tokens
        self._sum_s += seconds
        self._counts[bisect_left(TOKEN_BUCKETS, seconds / num_tokens)] += num_tokens

    def collect(self) -> Iterable[Metric]:
        yield CounterMetricFamily(PREFIX + "generation_tokens", "Tokens sent to clients", value=self._num_tokens)
        cumulative, buckets = 0, []
        for limit, count in zip([*map(str, TOKEN_BUCKETS), "+Inf"], self._counts, strict=True):
            cumulative += count
            buckets.append((limit, float(cumulative)))
        name = PREFIX + "inter_token_latency_seconds"
        yield HistogramMetricFamily(name, "Between tokens of a request", buckets=buckets, sum_value=self._sum_s)
