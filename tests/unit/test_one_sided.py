"""One-sided exchange between ranks in threads: equal to permuting, whoever is late, masked or sized otherwise."""

import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from torch import Tensor

from pd_cluster.errors import ConfigError, EngineError
from pd_cluster.ids import Rank
from pd_cluster.parallel.codec import RAW, Codec, Fp8
from pd_cluster.parallel.dispatch import combine
from pd_cluster.parallel.local import LocalDispatcher
from pd_cluster.parallel.one_sided import FORGOTTEN_S, SUSPECT_S, NixlDispatcher
from pd_cluster.parallel.wire import ARRIVED, AWAITED, COMBINE, DISPATCH, HEADER, HEADER_BYTES, PlainWire, tag_of

PER_RANK, K, H, MAX_TOKENS = 3, 3, 40, 32


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


class Ranks:
    """Connected dispatchers of one process; `each` runs a function for every rank at once."""

    def __init__(
        self,
        num: int,
        *,
        plain: bool = False,
        dtype: torch.dtype = torch.float32,
        codec: Codec = RAW,
        hidden_size: int = H,
        step_deadline_s: float = 20.0,
    ) -> None:
        self.num = num
        self.all = [
            NixlDispatcher(
                Rank(rank),
                num,
                PER_RANK,
                max_tokens=MAX_TOKENS,
                num_chosen=K,
                hidden_size=hidden_size,
                dtype=dtype,
                codec=codec,
                step_deadline_s=step_deadline_s,
            )
            for rank in range(num)
        ]
        if plain:
            for dispatcher in self.all:
                dispatcher.wire = PlainWire(dispatcher.buffers)
        for one in self.all:
            for other in self.all:
                if one is not other:
                    one.connect(other.ranks[0], other.endpoint())
        self._pool = ThreadPoolExecutor(num)
        self.begin(0)

    def __enter__(self) -> "Ranks":
        return self

    def __exit__(self, *_: object) -> None:
        self._pool.shutdown()
        for dispatcher in self.all:
            dispatcher.close()

    def begin(self, generation: int, live: list[int] | None = None) -> None:
        ranks = [Rank(rank) for rank in (range(self.num) if live is None else live)]
        self.each(lambda rank: self.all[rank].begin(generation, ranks), live)

    def each(self, act: Callable[[int], object], live: list[int] | None = None) -> list[object]:
        return list(self._pool.map(act, range(self.num) if live is None else live))


class Step:
    """Tokens for every rank, and experts that multiply by their number: [T, H] in, weighted sums out."""

    def __init__(
        self, counts: list[int], dtype: torch.dtype = torch.float32, hidden_size: int = H, seed: int = 0
    ) -> None:
        generator = torch.Generator().manual_seed(seed)
        self.num_ranks = len(counts)
        total, num_slots = sum(counts), len(counts) * PER_RANK
        self.hidden = torch.randn(total, hidden_size, generator=generator).to(dtype)
        self.slots = torch.rand(total, num_slots, generator=generator).topk(K).indices
        self.weights = torch.rand(total, K, generator=generator)
        self.bounds = torch.tensor([0, *counts]).cumsum(0).tolist()

    def own(self, rank: int) -> tuple[Tensor, Tensor, Tensor]:
        run = slice(self.bounds[rank], self.bounds[rank + 1])
        return self.hidden[run], self.slots[run], self.weights[run]

    def run(self, dispatcher: NixlDispatcher) -> Tensor:
        rank = dispatcher.ranks[0]
        combining = dispatcher.dispatch(0, *self.own(rank))
        (arrived,) = combining.arrived()
        return combine(combining, [experts(rank, arrived.hidden_RH, arrived)])

    def expected(self, codec: Codec = RAW) -> list[Tensor]:
        """What every rank should get: the same exchange as a permutation."""
        results = []
        for rank in range(self.num_ranks):
            local = LocalDispatcher(self.num_ranks, PER_RANK, codec)
            hidden, slots, weights = self.own(rank)
            combining = local.dispatch(0, hidden, slots, weights)
            results.append(combine(combining, [experts(a.rank, a.hidden_RH, a) for a in combining.arrived()]))
        return results


def experts(rank: int, hidden_RH: Tensor, arrived: object) -> Tensor:
    out = torch.zeros(len(hidden_RH), hidden_RH.shape[1])
    slots, rows, weights = arrived.pair_slot_P, arrived.pair_row_P, arrived.pair_weight_P  # type: ignore[attr-defined]
    assert sum(arrived.slot_counts) == len(slots)  # type: ignore[attr-defined]
    assert torch.equal(slots, slots.sort().values)
    scale = (rank * PER_RANK + slots + 1).float() * weights
    out.index_add_(0, rows, hidden_RH.float()[rows] * scale.unsqueeze(1))
    return out.to(hidden_RH.dtype)


@pytest.mark.parametrize("plain", [False, True])
@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_ranks_get_the_bits_of_a_permutation(plain: bool, fp8: bool, dtype: torch.dtype) -> None:
    codec: Codec = Fp8() if fp8 else RAW
    hidden_size = 300 if fp8 else H
    with Ranks(4, plain=plain, dtype=dtype, codec=codec, hidden_size=hidden_size) as ranks:
        for seed, counts in enumerate([[5, 0, 17, 1], [0, 0, 0, 3], [0, 0, 0, 0], [32, 32, 32, 32], [4, 3, 2, 1]]):
            step = Step(counts, dtype, hidden_size, seed)
            results = ranks.each(lambda rank, step=step: step.run(ranks.all[rank]))  # type: ignore[misc]
            for result, expected in zip(results, step.expected(codec), strict=True):
                assert torch.equal(result, expected)
                assert result.dtype == dtype
        assert not any(dispatcher.take_void() for dispatcher in ranks.all)


def test_both_wires_write_the_same_messages() -> None:
    """Torch and C read each other: half of the ranks run each."""
    with Ranks(2, dtype=torch.bfloat16, codec=Fp8(), hidden_size=200) as ranks:
        ranks.all[1].wire = PlainWire(ranks.all[1].buffers)
        step = Step([9, 14], torch.bfloat16, 200)
        results = ranks.each(lambda rank: step.run(ranks.all[rank]))
        for result, expected in zip(results, step.expected(Fp8()), strict=True):
            assert torch.equal(result, expected)


def test_two_exchanges_may_be_under_way_together() -> None:
    with Ranks(2) as ranks:
        first, second = Step([6, 7], seed=1), Step([3, 9], seed=2)

        def run(rank: int) -> list[Tensor]:
            dispatcher = ranks.all[rank]
            for _ in range(3):
                one = dispatcher.dispatch(0, *first.own(rank))
                two = dispatcher.dispatch(0, *second.own(rank))
                results = []
                for combining in (one, two):
                    (arrived,) = combining.arrived()
                    results.append(combine(combining, [experts(rank, arrived.hidden_RH, arrived)]))
            return results

        for rank, results in enumerate(ranks.each(run)):
            assert isinstance(results, list)
            assert torch.equal(results[0], first.expected()[rank])
            assert torch.equal(results[1], second.expected()[rank])


def test_a_slow_rank_is_waited_for_and_named() -> None:
    with Ranks(2) as ranks:
        step = Step([4, 4])
        suspected: list[list[Rank]] = []

        def run(rank: int) -> Tensor:
            if rank == 1:
                deadline_s = time.monotonic() + 10 * SUSPECT_S
                while not ranks.all[0].suspects() and time.monotonic() < deadline_s:
                    time.sleep(0.01)
                suspected.append(ranks.all[0].suspects())
            return step.run(ranks.all[rank])

        results = ranks.each(run)
        assert suspected == [[Rank(1)]]
        assert ranks.all[0].suspects() == []
        assert all(torch.equal(result, expected) for result, expected in zip(results, step.expected(), strict=True))
        assert not any(dispatcher.take_void() for dispatcher in ranks.all)


def test_a_rank_that_costs_one_step_after_the_other_its_deadline_is_named_over_their_ends() -> None:
    with Ranks(2, step_deadline_s=0.1) as ranks:
        step = Step([4, 4])
        dispatcher = ranks.all[0]
        started_s = time.monotonic()
        while time.monotonic() - started_s < 1.5 * SUSPECT_S:
            step.run(dispatcher)
            assert dispatcher.take_void()
        assert dispatcher.suspects() == [Rank(1)]
        ranks.begin(1)
        assert dispatcher.suspects() == []
        results = ranks.each(lambda rank: step.run(ranks.all[rank]))
        assert all(torch.equal(result, expected) for result, expected in zip(results, step.expected(), strict=True))


def test_a_rank_that_exchanged_more_in_one_step_meets_the_others_in_the_next(caplog: pytest.LogCaptureFixture) -> None:
    with Ranks(2, step_deadline_s=0.3) as ranks:
        step = Step([4, 4])

        def run(rank: int, number: int, times: int) -> tuple[list[object], bool]:
            dispatcher = ranks.all[rank]
            dispatcher.open_step(number)
            results: list[object] = [step.run(dispatcher) for _ in range(times)]
            return results, dispatcher.take_void()

        one, other = ranks.each(lambda rank: run(rank, 7, 2 + rank))
        assert one[1] is False
        assert other[1] is True, "nobody met its third exchange"
        assert "rank=1 generation=0 step=7 void=True missed={0: 'nothing came in time'}" in caplog.text
        caplog.clear()
        for number in (8, 9, 12):
            for (results, void), expected in zip(
                ranks.each(lambda rank, number=number: run(rank, number, 3)),  # type: ignore[misc]
                step.expected(),
                strict=True,
            ):
                assert all(torch.equal(result, expected) for result in results)
                assert not void
        assert not caplog.text


def test_a_write_that_never_ends_costs_one_step_and_its_connection(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with Ranks(2, step_deadline_s=2 * SUSPECT_S) as ranks:
        step = Step([4, 4])
        for _ in range(2):
            ranks.each(lambda rank: step.run(ranks.all[rank]))
        posts, key = ranks.all[0].posts, (1, DISPATCH, 0)
        (stuck,) = posts._handles[key].values()
        check = posts._agent.check_xfer_state
        monkeypatch.setattr(
            posts._agent, "check_xfer_state", lambda handle: "PROC" if handle is stuck else check(handle)
        )
        posts._pending[key] = stuck
        named: list[list[Rank]] = []
        looking = threading.Timer(1.5 * SUSPECT_S, lambda: named.append(ranks.all[0].suspects()))
        looking.start()
        ranks.each(lambda rank: step.run(ranks.all[rank]))
        looking.join()
        assert named == [[Rank(1)]]
        assert "did not end" in caplog.text
        assert posts.broken == {1}
        assert all(dispatcher.take_void() for dispatcher in ranks.all)
        assert not posts.broken
        results = ranks.each(lambda rank: step.run(ranks.all[rank]))
        assert all(torch.equal(result, expected) for result, expected in zip(results, step.expected(), strict=True))
        assert not any(dispatcher.take_void() for dispatcher in ranks.all)


def test_a_connection_found_broken_between_steps_accuses_nobody_once_the_engine_idles() -> None:
    with Ranks(2, step_deadline_s=0.2) as ranks:
        step = Step([4, 4])
        ranks.each(lambda rank: step.run(ranks.all[rank]))
        dispatcher = ranks.all[0]
        dispatcher.posts.give_up(1, "the network was cut")
        assert dispatcher.suspects() == [Rank(1)]
        dispatcher._waited_at_s -= FORGOTTEN_S
        assert dispatcher.suspects() == []
        ranks.each(lambda rank: step.run(ranks.all[rank]))
        assert dispatcher.take_void()
        assert dispatcher.suspects() == []


STOPS = ["before dispatch", "between dispatch and combine", "after its own combine began"]


@pytest.mark.parametrize("stop", STOPS)
def test_a_rank_that_stops_is_masked_and_the_step_ends_void(stop: str) -> None:
    """Rank 2 gets so far in the second of three layers; the survivors end the step, begin anew and are exact."""
    with Ranks(3) as ranks:
        step = Step([5, 6, 7])
        stopped = threading.Event()

        def run(rank: int) -> None:
            dispatcher = ranks.all[rank]
            for layer in range(3):
                if rank == 2 and layer == 1:
                    if stop != STOPS[0]:
                        combining = dispatcher.dispatch(0, *step.own(rank))
                    if stop == STOPS[2]:
                        (arrived,) = combining.arrived()
                        dispatcher.reserve(1, COMBINE)
                        reply = dispatcher.wire.reply(
                            1, tag_of(0, 1), combining._state, combining._counts, arrived.hidden_RH
                        )
                        dispatcher.write(1, COMBINE, reply)
                    stopped.set()
                    return
                step.run(dispatcher)

        def mask() -> None:
            stopped.wait(10)
            while any(not ranks.all[rank].buffers.ignored[2] for rank in (0, 1)):
                for rank in (0, 1):
                    ranks.all[rank].mask(Rank(2))

        masking = threading.Thread(target=mask)
        masking.start()
        ranks.each(run)
        masking.join()
        assert ranks.all[0].take_void()
        assert ranks.all[1].take_void()
        assert not ranks.all[0].take_void()
        ranks.begin(1, [0, 1])
        after = Step([5, 6, 0])
        after.slots %= 2 * PER_RANK
        for rank, result in zip((0, 1), ranks.each(lambda rank: after.run(ranks.all[rank]), [0, 1]), strict=True):
            assert torch.equal(result, after.expected()[rank])
        assert not ranks.all[0].take_void()


def test_a_silent_rank_is_missing_behind_the_deadline_and_finds_that_others_went_on() -> None:
    with Ranks(2, step_deadline_s=0.2) as ranks:
        step = Step([4, 4])
        for _ in range(4):
            step.run(ranks.all[0])
        assert ranks.all[0].take_void()
        started_s = time.monotonic()
        for _ in range(4):
            step.run(ranks.all[1])
        assert time.monotonic() - started_s < 0.3, "all but the last two layers show at once that the peer is ahead"
        assert ranks.all[1].take_void()
        # both have run the same number of layers: they meet again by themselves
        results = ranks.each(lambda rank: step.run(ranks.all[rank]))
        assert all(torch.equal(result, expected) for result, expected in zip(results, step.expected(), strict=True))
        assert not any(dispatcher.take_void() for dispatcher in ranks.all)


def test_a_peer_without_rows_of_a_rank_does_not_void_its_step() -> None:
    with Ranks(2, step_deadline_s=0.1) as ranks:
        step = Step([4, 0])
        step.slots %= PER_RANK  # all on rank 0
        assert torch.equal(step.run(ranks.all[0]), step.expected()[0])
        assert not ranks.all[0].take_void()


def test_a_message_of_an_older_generation_or_life_is_never_taken() -> None:
    with Ranks(2, step_deadline_s=0.2) as ranks:
        step = Step([4, 4])
        ranks.each(lambda rank: step.run(ranks.all[rank]))
        theirs = ranks.all[0].buffers.received(0, DISPATCH, 1)
        old = theirs.copy()
        ranks.begin(1)
        theirs[:] = old  # it lands once more, late
        state, counts = np.array([ARRIVED, AWAITED], np.uint8), np.zeros((2, 2), np.int64)
        wires = [ranks.all[0].wire, PlainWire(ranks.all[0].buffers)]
        for wire in wires:
            assert wire.look(DISPATCH, 0, tag_of(1, 0), state, counts, 1e-3, False) == 1
        forged = theirs[:HEADER_BYTES].view(HEADER)
        forged["tag"] = tag_of(1, 0)  # the seal no longer fits
        for wire in wires:
            assert wire.look(DISPATCH, 0, tag_of(1, 0), state, counts, 1e-3, False) == 1
        results = ranks.each(lambda rank: step.run(ranks.all[rank]))
        assert all(torch.equal(result, expected) for result, expected in zip(results, step.expected(), strict=True))
        ranks.all[0].buffers.lives[1] += 1  # another life of rank 1 is expected now
        assert ranks.each(lambda rank: (step.run(ranks.all[rank]), ranks.all[rank].take_void())[1])[0]


@pytest.mark.parametrize("at", [0, 8, 16, 30, 100, 400])
def test_a_message_counts_only_when_all_of_it_is_there(at: int) -> None:
    with Ranks(2) as ranks:
        step = Step([4, 9])
        dispatcher = ranks.all[1]
        dispatcher.dispatch(0, *step.own(1))
        room = ranks.all[0].buffers.received(0, DISPATCH, 1)
        deadline_s = time.monotonic() + 10
        while room[:8].view(np.uint64)[0] != tag_of(0, 0) and time.monotonic() < deadline_s:
            dispatcher.posts.progress()
            ranks.all[0].posts.progress()
        wires = [ranks.all[0].wire, PlainWire(ranks.all[0].buffers)]
        room[at] ^= 1
        for wire in wires:
            state, counts = np.array([ARRIVED, AWAITED], np.uint8), np.zeros((2, 2), np.int64)
            assert wire.look(DISPATCH, 0, tag_of(0, 0), state, counts, 1e-3, False) == 1
        room[at] ^= 1
        for wire in wires:
            state, counts = np.array([ARRIVED, AWAITED], np.uint8), np.zeros((2, 2), np.int64)
            assert wire.look(DISPATCH, 0, tag_of(0, 0), state, counts, 1e-3, False) == 0
            assert counts[1, 0] == len(set((step.own(1)[1] // PER_RANK == 0).nonzero()[:, 0].tolist()))


def test_capacity_and_unknown_slots_are_refused_by_name() -> None:
    with Ranks(2) as ranks:
        step = Step([MAX_TOKENS + 1, 0])
        with pytest.raises(EngineError, match="sized for 32"):
            step.run(ranks.all[0])
        for plain in (False, True):
            for slot in (-1, 2 * PER_RANK):
                bad = Step([3, 0])
                bad.slots[1, 2] = slot
                if plain:
                    ranks.all[0].wire = PlainWire(ranks.all[0].buffers)
                with pytest.raises(EngineError, match=f"slot {slot}"):
                    bad.run(ranks.all[0])


def test_ranks_sized_otherwise_or_never_met_are_refused_by_name() -> None:
    with Ranks(2) as ranks:
        other = NixlDispatcher(
            Rank(1), 2, PER_RANK, max_tokens=8, num_chosen=K, hidden_size=H, dtype=torch.float32, codec=Fp8()
        )
        with pytest.raises(ConfigError, match="max_tokens 8 there and 32 here, fp8 True there"):
            ranks.all[0].connect(Rank(1), other.endpoint())
        with pytest.raises(ConfigError, match="endpoint"):
            ranks.all[0].connect(Rank(1), b"what?")
        stranger = NixlDispatcher(Rank(0), 2, PER_RANK, max_tokens=8, num_chosen=K, hidden_size=H, dtype=torch.float32)
        with pytest.raises(EngineError, match=r"never connected: \[1\]"):
            stranger.begin(0, [Rank(0), Rank(1)])
        stranger.close()
        other.close()


def test_a_rank_alone_warms_up_before_it_has_met_anyone() -> None:
    dispatcher = NixlDispatcher(
        Rank(0), 2, PER_RANK, max_tokens=MAX_TOKENS, num_chosen=K, hidden_size=H, dtype=torch.float32
    )
    step = Step([9, 0])
    assert step.run(dispatcher).shape == (9, H)
    assert dispatcher.take_void()
    dispatcher.close()


def test_a_new_life_of_a_rank_is_met_and_the_old_one_stays_masked() -> None:
    with Ranks(2) as ranks:
        step = Step([4, 4])
        ranks.each(lambda rank: step.run(ranks.all[rank]))
        ranks.all[0].mask(Rank(1))
        old = ranks.all[1]
        ranks.all[0].connect(Rank(1), old.endpoint())
        assert ranks.all[0].buffers.ignored[1], "the same life again"
        ranks.all[1] = new = NixlDispatcher(
            Rank(1), 2, PER_RANK, max_tokens=MAX_TOKENS, num_chosen=K, hidden_size=H, dtype=torch.float32
        )
        ranks.all[0].connect(Rank(1), new.endpoint())
        new.connect(Rank(0), ranks.all[0].endpoint())
        ranks.begin(1)
        results = ranks.each(lambda rank: step.run(ranks.all[rank]))
        assert all(torch.equal(result, expected) for result, expected in zip(results, step.expected(), strict=True))
        old.close()


def test_a_generation_to_come_ends_what_is_under_way_and_nothing_behind_it() -> None:
    """Only rank 0 was told of a step; rank 1 lives and never enters it."""
    with Ranks(2) as ranks:
        step = Step([5, 6])
        halting = threading.Timer(0.05, lambda: ranks.all[0].halt(1))
        halting.start()
        started_s = time.monotonic()
        step.run(ranks.all[0])
        assert time.monotonic() - started_s < 5.0
        halting.join()
        assert ranks.all[0].take_void()
        ranks.all[1].halt(1)
        ranks.begin(1)
        results = ranks.each(lambda rank: step.run(ranks.all[rank]))
        assert all(torch.equal(result, expected) for result, expected in zip(results, step.expected(), strict=True))
        assert not any(dispatcher.take_void() for dispatcher in ranks.all)


def test_a_generation_that_is_over_before_it_begins_waits_for_nobody() -> None:
    with Ranks(2) as ranks:
        step = Step([5, 6])
        ranks.all[0].halt(2)
        ranks.begin(1)
        step.run(ranks.all[0])  # rank 1 does not come
        assert ranks.all[0].take_void()
        ranks.begin(2)
        results = ranks.each(lambda rank: step.run(ranks.all[rank]))
        assert all(torch.equal(result, expected) for result, expected in zip(results, step.expected(), strict=True))
