"""The sampler against exact distributions and against a slow reference that anyone can check."""

import math
from collections import Counter

import numpy as np
import pytest
import torch

from pd_cluster.model import sampler as sampler_module
from pd_cluster.model.sampler import Sampler, SampleRow, uniform
from pd_cluster.request import SamplingParams, TokenLogprobs

V = 12
EOS = 3


def params(**values: object) -> SamplingParams:
    return SamplingParams(**values)  # type: ignore[arg-type]


def row(
    sampling: SamplingParams, position: int = 0, prompt: tuple[int, ...] = (), output: tuple[int, ...] = ()
) -> SampleRow:
    history = np.array([*prompt, *output], dtype=np.int64) if sampling.needs_history else None
    return SampleRow(sampling, position, len(output), history)


def some_logits(num_rows: int = 1, seed: int = 0, vocab_size: int = V) -> torch.Tensor:
    return torch.randn(num_rows, vocab_size, generator=torch.Generator().manual_seed(seed)) * 2


def sample(logits: torch.Tensor, rows: list[SampleRow], vocab_size: int = V) -> list[int | None]:
    return [token_id for token_id, _ in Sampler(vocab_size, frozenset({EOS})).sample(logits, rows)]


def reference(
    logits: list[float], sampling: SamplingParams, prompt: tuple[int, ...], output: tuple[int, ...]
) -> list[float]:
    """The distribution that the parameters ask for, one rule after the other."""
    values = list(logits)
    for token_id in set(prompt + output):
        penalty = sampling.repetition_penalty
        values[token_id] = values[token_id] / penalty if values[token_id] > 0 else values[token_id] * penalty
    for token_id, count in Counter(output).items():
        values[token_id] -= sampling.presence_penalty + sampling.frequency_penalty * count
    for token_id, bias in sampling.logit_bias.items():
        values[token_id] += bias
    if len(output) < sampling.min_tokens:
        for token_id in {*sampling.stop_token_ids, *(() if sampling.ignore_eos else (EOS,))}:
            values[token_id] = -math.inf
    best = max(values)
    if sampling.temperature == 0:
        return [float(i == values.index(best)) for i in range(len(values))]
    weights = [math.exp((x - best) / sampling.temperature) for x in values]
    weights = [w if w >= sampling.min_p * max(weights) else 0.0 for w in weights]
    order = sorted(range(len(weights)), key=lambda i: (-weights[i], i))
    if sampling.top_k:
        order = order[: sampling.top_k]
    total = math.fsum(weights[i] for i in order)
    kept: list[int] = []
    while order and (not kept or math.fsum(weights[i] for i in kept) < sampling.top_p * total):
        kept.append(order.pop(0))
    total = math.fsum(weights[i] for i in kept)
    return [weights[i] / total if i in kept else 0.0 for i in range(len(weights))]


CASES = [
    {},
    {"temperature": 0.3},
    {"temperature": 3.0},
    {"temperature": 0.0},
    {"top_k": 1},
    {"top_k": 4},
    {"top_k": 100},
    {"top_p": 0.01},
    {"top_p": 0.6},
    {"top_p": 0.999999},
    {"min_p": 0.2},
    {"min_p": 1.0},
    {"top_k": 5, "top_p": 0.7},
    {"top_k": 5, "top_p": 0.7, "min_p": 0.05, "temperature": 1.7},
    {"presence_penalty": 1.5},
    {"frequency_penalty": -1.2},
    {"repetition_penalty": 1.8},
    {"repetition_penalty": 0.5, "presence_penalty": 0.5, "frequency_penalty": 0.7, "top_p": 0.9},
    {"logit_bias": {2: 3.0, 7: -100.0}},
    {"logit_bias": {2: 100.0}, "temperature": 0.0},
    {"repetition_penalty": 3.0, "temperature": 0.0},
    {"min_tokens": 5, "max_tokens": 9},
    {"min_tokens": 5, "max_tokens": 9, "stop_token_ids": (0, 1)},
    {"min_tokens": 5, "max_tokens": 9, "stop_token_ids": (0, 1), "ignore_eos": True},
    {"min_tokens": 4, "max_tokens": 9, "stop_token_ids": (0,)},
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_draws_follow_the_distribution_that_the_parameters_ask_for(case: dict[str, object]) -> None:
    logits = some_logits(seed=4)
    prompt, output = (1, 2, 2, 9), (5, 5, 0, 2)
    num_draws = 6000
    rows = [row(params(seed=17, **case), position, prompt, output) for position in range(num_draws)]
    counts = Counter(sample(logits.expand(num_draws, V), rows))
    expected = reference(logits[0].tolist(), params(**case), prompt, output)
    assert set(counts) <= {i for i, p in enumerate(expected) if p > 0}
    chi_square = sum((counts[i] - num_draws * p) ** 2 / (num_draws * p) for i, p in enumerate(expected) if p > 0)
    # 11 degrees of freedom at most: chance exceeds 45 once in a hundred thousand times
    assert chi_square < 45, (counts, expected)


@pytest.mark.parametrize("num_candidates", [1, 3, 1024])
def test_truncation_is_the_same_however_many_candidates_are_sorted_first(
    num_candidates: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab_size, num_rows = 40, 200
    logits = torch.randint(
        0, 5, (num_rows, vocab_size), generator=torch.Generator().manual_seed(1)
    ).float()  # many ties
    cases: list[dict[str, object]] = [{"top_k": k, "top_p": p} for k in (0, 1, 2, 5, 39) for p in (0.1, 0.5, 0.9, 1.0)]
    rows = [row(params(seed=i, **cases[i % len(cases)])) for i in range(num_rows)]
    monkeypatch.setattr(sampler_module, "_NUM_CANDIDATES", num_candidates)
    tokens = sample(logits, rows, vocab_size)
    for index, token_id in enumerate(tokens):
        expected = reference(logits[index].tolist(), rows[index].sampling, (), ())
        order = sorted((i for i in range(vocab_size) if expected[i]), key=lambda i: (-expected[i], i))
        target, total = uniform(index, 0), 0.0
        truncates = rows[index].sampling.top_k or rows[index].sampling.top_p < 1
        for i in order if truncates else sorted(order):
            total += expected[i]
            if total > target:
                assert token_id == i
                break


@pytest.mark.parametrize("top_p", [0.25, 0.5, 0.75, 1.0])
def test_top_p_keeps_the_smallest_set_that_reaches_it_exactly(top_p: float) -> None:
    logits = torch.zeros(1, 4)  # four tokens of exactly a quarter
    rows = [row(params(top_p=top_p, seed=i)) for i in range(400)]
    assert set(sample(logits.expand(400, 4), rows, 4)) == set(range(int(top_p * 4)))


def test_top_p_below_the_likeliest_token_keeps_that_token() -> None:
    logits = torch.tensor([[0.0, 5.0, 1.0]])
    assert sample(logits, [row(params(top_p=1e-9))], 3) == [1]


def test_token_depends_on_its_own_row_only() -> None:
    vocab_size = 2000
    cases = [params(seed=i, **case) for i, case in enumerate(CASES)] * 3
    logits = some_logits(len(cases), 5, vocab_size)
    rows = [row(p, 100 + i, (1, 2), (3, 4, 5)) for i, p in enumerate(cases)]
    alone = [sample(logits[i : i + 1], [r], vocab_size)[0] for i, r in enumerate(rows)]
    together = sample(logits, rows, vocab_size)
    backwards = sample(logits.flip(0), rows[::-1], vocab_size)[::-1]
    assert alone == together == backwards


def test_noise_is_uniform_and_differs_between_seeds_and_positions() -> None:
    numbers = np.array([uniform(seed, position) for seed in range(50) for position in range(200)])
    assert len(set(numbers.tolist())) == 10000
    assert numbers.min() >= 0
    assert numbers.max() < 1
    counts, _ = np.histogram(numbers, bins=20, range=(0, 1))
    assert ((counts - 500) ** 2 / 500).sum() < 60
    grid = numbers.reshape(50, 200)
    assert abs(np.corrcoef(grid[:, :-1].ravel(), grid[:, 1:].ravel())[0, 1]) < 0.05  # along positions
    assert abs(np.corrcoef(grid[:-1].ravel(), grid[1:].ravel())[0, 1]) < 0.05  # along seeds
    assert uniform(1, 0) != uniform(0, 1)
    assert 0 <= uniform(2**63 - 1, 2**31) < 1


def test_noise_never_changes_between_versions() -> None:
    # a request may move between workers of different builds
    assert uniform(0, 0) == float.fromhex("0x1.4e0dba5e9a32fp-1")
    assert uniform(123456789, 1000) == float.fromhex("0x1.580b909d4f698p-3")


def test_largest_noise_still_chooses_a_token_with_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, position: 1 - 2.0**-53)
    logits = torch.tensor([[0.0, 1.0, 2.0, -math.inf, -math.inf]])
    for case in ({}, {"top_p": 0.99}, {"top_k": 5}, {"temperature": 1e-3}):
        assert sample(logits, [row(params(**case))], 5)[0] in (0, 1, 2)
    monkeypatch.setattr(sampler_module, "uniform", lambda seed, position: 0.0)
    assert sample(torch.tensor([[-math.inf, 1.0]]), [row(params())], 2) == [1]


def test_greedy_takes_the_first_of_equal_tokens_and_ignores_the_seed() -> None:
    logits = torch.tensor([[0.0, 2.0, 2.0, 1.0]])
    assert sample(logits.expand(3, 4), [row(params(temperature=0, seed=s)) for s in range(3)], 4) == [1, 1, 1]


@pytest.mark.parametrize("temperature", [1e-300, 1e-40, 1e-5])
def test_tiny_temperature_is_greedy(temperature: float) -> None:
    assert sample(some_logits(seed=2), [row(params(temperature=temperature))]) == [int(some_logits(seed=2).argmax())]


def test_columns_beyond_the_vocabulary_are_never_chosen_nor_counted() -> None:
    logits = torch.cat([some_logits(2), torch.full((2, 5), 50.0)], dim=1)
    results = Sampler(V, frozenset()).sample(
        logits, [row(params(temperature=0, logprobs=20)), row(params(temperature=100.0))]
    )
    plain = Sampler(V, frozenset()).sample(
        logits[:, :V], [row(params(temperature=0, logprobs=20)), row(params(temperature=100.0))]
    )
    assert results == plain


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("case", [{"temperature": 0}, {}, {"top_p": 0.5}, {"logit_bias": {1: 1.0}}, {"logprobs": 2}])
def test_row_that_is_not_a_number_has_no_token_and_leaves_the_others_alone(bad: float, case: dict[str, object]) -> None:
    logits = some_logits(3)
    expected = sample(logits, [row(params(**case), i) for i in range(3)])
    logits[1, 6] = bad
    tokens = sample(logits, [row(params(**case), i) for i in range(3)])
    assert tokens == [expected[0], None, expected[2]]


def test_row_without_any_possible_token_has_none() -> None:
    assert sample(torch.full((1, V), -math.inf), [row(params())]) == [None]
    banned = params(stop_token_ids=tuple(range(V)), min_tokens=1)
    assert sample(some_logits(), [row(banned)]) == [None]


def test_masked_logits_are_never_drawn() -> None:
    logits = some_logits().expand(500, V).clone()
    logits[:, ::2] = -math.inf
    tokens = sample(logits, [row(params(temperature=5.0), i) for i in range(500)])
    assert {t % 2 for t in tokens if t is not None} == {1}
    assert None not in tokens


def test_logprobs_are_those_of_the_raw_logits() -> None:
    logits = some_logits(2, seed=3)
    sampling = params(temperature=3.0, logit_bias={0: -100.0}, logprobs=4, seed=5, presence_penalty=1.0)
    results = Sampler(V, frozenset()).sample(
        logits, [row(sampling, 0, (1,), (2,)), row(params(temperature=0, logprobs=0), 0)]
    )
    for index, num_top in ((0, 4), (1, 0)):
        token_id, logprobs = results[index]
        expected = logits[index].log_softmax(0)
        assert token_id is not None
        assert isinstance(logprobs, TokenLogprobs)
        assert logprobs.chosen == pytest.approx(float(expected[token_id]))
        assert logprobs.rank == 1 + int((expected > expected[token_id]).sum())
        assert logprobs.top_ids == expected.topk(num_top).indices.tolist()
        assert logprobs.top_logprobs == pytest.approx(expected.topk(num_top).values.tolist())


def test_only_rows_that_ask_get_logprobs() -> None:
    results = Sampler(V, frozenset()).sample(some_logits(3), [row(params(logprobs=n)) for n in (None, 1, None)])
    assert [logprobs is not None for _, logprobs in results] == [False, True, False]


def test_logits_are_left_as_they_were() -> None:
    logits = some_logits(3)
    before = logits.clone()
    cases = [params(logit_bias={1: 5.0}), params(temperature=0, repetition_penalty=2.0), params(top_p=0.5, min_p=0.1)]
    sample(logits, [row(p, 0, (1,), (2,)) for p in cases])
    assert torch.equal(logits, before)


def test_no_rows_no_tokens() -> None:
    assert Sampler(V, frozenset()).sample(torch.zeros(0, V), []) == []
