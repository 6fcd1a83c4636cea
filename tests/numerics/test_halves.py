"""A step in two halves computes what the whole step does, on whichever ranks, and only where all of them know to."""

import threading
from collections.abc import Callable

import numpy as np
import pytest
import torch
from golden import TOLERANCE, Cluster, prompts, reference

from pd_cluster.model import halves
from pd_cluster.model.batch import Span
from pd_cluster.model.fused import FusedTransformer
from pd_cluster.model.halves import HALVE_FROM, Stages, finish, halve, in_turns, takes_halves

Clusters = Callable[..., Cluster]
STEPS = 5


def span(start: int, end: int, sample: bool = True) -> Span:
    return Span(start, end, np.arange(start, end), np.arange(8), sample)


@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        ([], ([], [])),
        ([(0, 1)], ([(0, 1)], [])),
        ([(4, 5), (9, 10), (2, 3)], ([(4, 5), (9, 10)], [(2, 3)])),
        ([(0, 7)], ([(0, 4)], [(4, 7)])),
        ([(5, 6), (0, 10), (3, 4)], ([(5, 6), (0, 5)], [(5, 10), (3, 4)])),
    ],
)
def test_halves_have_as_many_tokens_as_can_be_in_their_order(
    spans: list[tuple[int, int]], expected: tuple[list[tuple[int, int]], ...]
) -> None:
    parts = halve([span(*bounds) for bounds in spans])
    assert tuple([(s.start, s.end) for s in part] for part in parts) == expected
    for part in parts:
        for each in part:
            assert each.token_ids.tolist() == list(range(each.start, each.end))
    assert sum(s.sample for part in parts for s in part) == len(spans), "the last token of a span is in one half"


def test_the_choice_depends_on_what_all_ranks_know() -> None:
    assert takes_halves([0, HALVE_FROM])
    assert not takes_halves([HALVE_FROM - 1, HALVE_FROM - 1])


def test_stages_take_turns_and_each_gives_its_own_result() -> None:
    said: list[str] = []

    def stages(name: str, pauses: int) -> Stages:
        for number in range(pauses):
            said.append(f"{name}{number}")
            yield
        said.append(f"{name}end")
        return torch.tensor([float(pauses)])

    assert [float(x) for x in in_turns([stages("a", 2), stages("b", 3), stages("c", 0)])] == [2.0, 3.0, 0.0]
    assert said == ["a0", "b0", "cend", "a1", "b1", "aend", "b2", "bend"]
    assert float(finish(stages("d", 4))) == 4.0


@pytest.fixture
def halved(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Halve steps of 6 tokens and more; returns how many steps were, over all ranks."""
    counts: list[int] = []
    lock = threading.Lock()

    def counting(several: list[Stages]) -> list[torch.Tensor]:
        with lock:
            counts.append(len(several))
        return in_turns(several)

    monkeypatch.setattr(halves, "HALVE_FROM", 6)
    monkeypatch.setattr("pd_cluster.engine.torch_engine.in_turns", counting)
    return counts


@pytest.mark.parametrize("dispatcher", ["nixl", "collective"])
@pytest.mark.parametrize(("dp", "tp"), [(2, 1), (2, 2)])
@pytest.mark.parametrize("name", ["deepseek_v3_yarn", "qwen3_moe"])
def test_halved_steps_agree_with_the_reference(
    cluster: Clusters, halved: list[int], name: str, dp: int, tp: int, dispatcher: str
) -> None:
    """Prompts are cut in the middle of a chunk, one rank has few tokens or none, and small steps stay whole."""
    ranks = cluster(name, dp=dp, tp=tp, dispatcher=dispatcher, micro_batches="auto")
    longest_first = prompts(name)[::-1]
    outputs = ranks.generate([longest_first[:3], longest_first[3:]], STEPS)
    assert halved
    assert set(halved) == {2}
    assert len(halved) < ranks.step * dp * tp, "small steps were not halved"
    expected = reference(name)
    for group, indices in zip(outputs, ([3, 2, 1], [0]), strict=True):
        for seq, i in zip(group, indices, strict=True):
            assert seq.output == expected[f"prompt{i}.greedy_ids"][:STEPS].tolist()
            difference = torch.stack(seq.logits) - expected[f"prompt{i}.greedy_logits"][:STEPS]
            assert difference.abs().max() < TOLERANCE


def test_halved_steps_of_the_packed_layers_have_the_bits_of_whole_ones(cluster: Clusters, halved: list[int]) -> None:
    """bfloat16: in the C kernels a row's bits depend neither on the rows beside it nor on how its prompt was cut."""
    name = "qwen3_moe"
    results = []
    for micro_batches in ("off", "auto"):
        ranks = cluster(name, dp=2, dtype="bfloat16", dispatcher="nixl", micro_batches=micro_batches)
        assert isinstance(ranks.engines[0].model, FusedTransformer)
        groups = ranks.generate([prompts(name)[:2], prompts(name)[2:]], STEPS)
        results.append([(seq.output, torch.stack(seq.logits)) for group in groups for seq in group])
        assert bool(halved) == (micro_batches == "auto")
    for (ours, our_logits), (theirs, their_logits) in zip(*results, strict=True):
        assert ours == theirs
        assert torch.equal(our_logits, their_logits)


def test_one_dp_rank_never_halves(cluster: Clusters, halved: list[int]) -> None:
    name = "qwen3_moe"
    cluster(name, tp=2, micro_batches="auto").generate([prompts(name)], 2)
    assert not halved
