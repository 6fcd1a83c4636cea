"""The cost model of one worker: the roofline, corrected by what the worker measured.

Each kind of work has one factor, the moving average of log(measured / predicted). A slow worker, an optimistic hardware
table or a busy host therefore shows within a few observations, and one outlier moves little.
"""

import math

from pd_cluster.costs import roofline
from pd_cluster.costs.roofline import Hardware, ModelWork

WEIGHT = 0.2
"""Of the newest observation; the first few weigh more, so that a new worker is known after one request."""

ORDINARY_PROMPT = 512
"""Tokens."""

MAX_LOG_RATIO = math.log(1e6)


class Correction:
    """A factor learnt from pairs of predicted and measured seconds; a pool's while there are none of its own."""

    def __init__(self, pool: "Correction | None" = None) -> None:
        self._log_ratio = 0.0
        self._num_observed = 0
        self._pool = pool

    @property
    def factor(self) -> float:
        if not self._num_observed and self._pool is not None:
            return self._pool.factor
        return math.exp(self._log_ratio)

    @property
    def is_learnt(self) -> bool:
        return self._num_observed > 0 or (self._pool is not None and self._pool.is_learnt)

    def observe(self, predicted_s: float, measured_s: float) -> None:
        """Learn from one measurement; meaningless ones (zero, negative, not finite) are ignored."""
        if not (predicted_s > 0 and measured_s > 0 and math.isfinite(predicted_s) and math.isfinite(measured_s)):
            return
        log_ratio = max(-MAX_LOG_RATIO, min(MAX_LOG_RATIO, math.log(measured_s / predicted_s)))
        if self._pool is not None:
            self._pool.observe(predicted_s, measured_s)
        self._num_observed += 1
        self._log_ratio += max(WEIGHT, 1 / self._num_observed) * (log_ratio - self._log_ratio)


class Corrections:
    """One for each kind of work."""

    def __init__(self, pool: "Corrections | None" = None) -> None:
        self.prefill: Correction = Correction(pool.prefill if pool is not None else None)
        self.step: Correction = Correction(pool.step if pool is not None else None)
        self.transfer: Correction = Correction(pool.transfer if pool is not None else None)


class WorkerCosts:
    """Predictions for one worker, in seconds. Workers of one `pool` learn from each other until each knows itself."""

    def __init__(
        self, hardware: Hardware | None = None, work: ModelWork | None = None, pool: Corrections | None = None
    ) -> None:
        self.hardware = hardware or Hardware()
        self.work = work or ModelWork()
        self._corrections = Corrections(pool)

    def prefill_s(self, num_new_tokens: int, num_cached_tokens: int = 0) -> float:
        predicted = roofline.prefill_s(self.hardware, self.work, num_new_tokens, num_cached_tokens)
        return self._corrections.prefill.factor * predicted

    def backlog_s(self, num_tokens: int) -> float:
        """Seconds to compute prompt tokens of other requests: many of ordinary length, not one very long one."""
        return self.prefill_s(ORDINARY_PROMPT) * num_tokens / ORDINARY_PROMPT

    @property
    def knows_prefill(self) -> bool:
        """Whether predictions of prefill rest on any measurement."""
        return self._corrections.prefill.is_learnt

    def step_s(self, num_seqs: int, num_context_tokens: int) -> float:
        predicted = roofline.decode_step_s(self.hardware, self.work, num_seqs, num_context_tokens)
        return self._corrections.step.factor * predicted

    def transfer_s(self, num_tokens: int) -> float:
        predicted = roofline.transfer_s(self.hardware, num_tokens * self.work.kv_token_bytes)
        return self._corrections.transfer.factor * predicted

    def observe_prefill(self, num_new_tokens: int, num_cached_tokens: int, seconds: float) -> None:
        predicted = roofline.prefill_s(self.hardware, self.work, num_new_tokens, num_cached_tokens)
        self._corrections.prefill.observe(predicted, seconds)

    def observe_step(self, num_seqs: int, num_context_tokens: int, seconds: float) -> None:
        predicted = roofline.decode_step_s(self.hardware, self.work, num_seqs, num_context_tokens)
        self._corrections.step.observe(predicted, seconds)

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        if num_bytes > 0:
            self._corrections.transfer.observe(roofline.transfer_s(self.hardware, num_bytes), seconds)
