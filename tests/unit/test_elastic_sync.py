"""Leads, followers and real connections around toy engines that wait for each other, as experts make them do."""

import asyncio
import random
import threading

import pytest
from harness import until

from pd_cluster.clock import SystemClock
from pd_cluster.engine.elastic_sync import ElasticSync
from pd_cluster.engine.generations import AllMet, Formed
from pd_cluster.engine.loop import EngineLoop, EngineThread, follow
from pd_cluster.engine.outcome import StepOutcome
from pd_cluster.engine.plan import StepPlan, StepResult
from pd_cluster.engine.scheduler import Scheduler
from pd_cluster.engine.step_sync import Meeting
from pd_cluster.engine.toy import ToyEngine, toy_tokens
from pd_cluster.errors import EngineError, Unavailable
from pd_cluster.ids import EngineEpoch, Rank, RequestId
from pd_cluster.launch.meeting import Board, LocalRendezvous
from pd_cluster.parallel.roster import Roster
from pd_cluster.request import Request, SamplingParams

NUM_BLOCKS = 64
MAX_TOKENS = 40


class Exchange:
    """What a dispatcher is to step sync: a step ends when all ranks of its generation are in it, or when it is told not
    to wait; then it is void, on all ranks of its DP rank.
    """

    def __init__(self) -> None:
        self._there: dict[tuple[int, int], set[Rank]] = {}
        self._agreed: dict[tuple[int, int, EngineEpoch], list[bool]] = {}
        self._changed = threading.Condition()
        self._halted: set[tuple[EngineEpoch, Rank]] = set()

    def meet(self, key: tuple[int, int], rank: Rank, life: EngineEpoch, ranks: frozenset[Rank], size: int) -> bool:
        """Whether everybody came, to each of the `size` ranks of this life."""
        with self._changed:
            there = self._there.setdefault(key, set())
            there.add(rank)
            self._changed.notify_all()
            halt = life, rank
            assert self._changed.wait_for(lambda: there >= ranks or halt in self._halted, 20), "nobody ends this step"
            agreed = self._agreed.setdefault((*key, life), [])
            agreed.append(there >= ranks)
            self._changed.notify_all()
            assert self._changed.wait_for(lambda: len(agreed) == size, 20), "a rank of this life is not in the step"
            return all(agreed)

    def halt(self, life: EngineEpoch, ranks: list[Rank]) -> None:
        with self._changed:
            self._halted.update((life, rank) for rank in ranks)
            self._changed.notify_all()

    def go_on(self, life: EngineEpoch, rank: Rank) -> None:
        with self._changed:
            self._halted.discard((life, rank))


class Coupled(ToyEngine):
    def __init__(self, exchange: Exchange, rank: Rank, life: EngineEpoch, size: int) -> None:
        super().__init__(num_blocks=NUM_BLOCKS, block_size=16, role="both")
        self._exchange, self.rank, self._life, self._size = exchange, rank, life, size
        self.generation = -1
        self.proceed = threading.Event()
        self.proceed.set()
        self.is_held = threading.Event()  # in a step, until told to proceed
        self.is_dead = False
        self.ranks: frozenset[Rank] = frozenset()
        self.steps: list[int] = []

    def launch(self, plan: StepPlan, step_tokens: list[int]) -> None:
        assert not self.steps or plan.step > self.steps[-1]
        self.steps.append(plan.step)
        proceed = self.proceed
        if not proceed.is_set():
            self.is_held.set()
        assert proceed.wait(20)
        if self.is_dead:
            raise EngineError("this rank is dead")
        if self._exchange.meet((self.generation, plan.step), self.rank, self._life, self.ranks, self._size):
            super().launch(plan, step_tokens)
            return
        super().launch(StepPlan(step=plan.step, drop=plan.drop, add=plan.add, grow=plan.grow), [0])
        super().collect()
        self._results.append(StepResult(step=plan.step, sampled=[], void=True))


class Member:
    """A DP rank: its lead with a loop, and its followers."""

    def __init__(self, group: "Group", dp_rank: int) -> None:
        self.group = group
        self.dp_rank = dp_rank
        group.num_lives += 1
        self.life = EngineEpoch(f"life{group.num_lives}")
        self.is_alive = True
        self.seen = 0
        self.tokens: dict[RequestId, list[int]] = {}
        self.ended: set[RequestId] = set()
        self.formed: list[int] = []
        self.failure: EngineError | None = None
        size = group.tensor_parallel
        self.syncs: list[ElasticSync] = []
        self.engines: list[Coupled] = []
        self.threads: list[EngineThread] = []
        for tp_rank in range(size):
            rank = Rank(dp_rank * size + tp_rank)
            engine = Coupled(group.exchange, rank, self.life, size)
            self.engines.append(engine)
            self.threads.append(EngineThread(engine))
            self.syncs.append(
                ElasticSync(
                    epoch=EngineEpoch("e"),
                    life=self.life,
                    rank=rank,
                    data_parallel=group.num_members,
                    tensor_parallel=size,
                    clock=SystemClock(),
                    on_begin=lambda formed, engine=engine: self._begin(engine, formed),  # type: ignore[misc]
                    settle=group.settle,
                )
            )
        self.scheduler = Scheduler(
            num_blocks=NUM_BLOCKS,
            block_size=16,
            max_num_seqs=8,
            max_num_batched_tokens=32,
            max_model_len=256,
            eos_token_ids=frozenset(),
            prefix_cache=False,
        )
        self.loop = EngineLoop(
            scheduler=self.scheduler, thread=self.threads[0], sync=self.syncs[0], role=self, clock=SystemClock()
        )
        self.tasks: list[asyncio.Future[None]] = []

    async def start(self) -> None:
        await asyncio.gather(*(sync.start(self.group.meeting, "127.0.0.1", 5.0) for sync in self.syncs))
        self.tasks = [asyncio.ensure_future(self._run())]
        for sync, thread in zip(self.syncs[1:], self.threads[1:], strict=True):
            self.tasks.append(asyncio.ensure_future(follow(thread, sync, lambda _payload: None)))

    async def _run(self) -> None:
        try:
            await self.loop.run()
        except EngineError as error:
            self.failure = error

    async def _begin(self, engine: Coupled, formed: Formed) -> None:
        await asyncio.sleep(self.group.rng.random() * 0.003)
        size = self.group.tensor_parallel
        engine.generation = formed.generation
        engine.ranks = frozenset(
            Rank(dp_rank * size + tp_rank)
            for dp_rank, life in enumerate(formed.lives)
            if life is not None
            for tp_rank in range(size)
        )
        self.formed.append(formed.generation)
        if self.group.rosters[self.seen - 1].generation == formed.generation:
            self.group.exchange.go_on(self.life, engine.rank)

    def issued(self, roster: Roster) -> None:
        self.seen += 1
        self.group.exchange.halt(self.life, [engine.rank for engine in self.engines])
        self.syncs[0].issued(roster)

    async def die(self) -> None:
        self.is_alive = False
        for task in self.tasks:
            task.cancel()
        self.group.exchange.halt(self.life, [engine.rank for engine in self.engines])
        await asyncio.gather(*self.tasks, return_exceptions=True)
        for sync, thread in zip(self.syncs, self.threads, strict=True):
            await sync.close()
            thread.close()

    # ---- a role that only remembers

    def planned(self) -> None:
        pass

    def stepped(self, outcome: StepOutcome) -> None:
        for delta in outcome.tokens:
            self.tokens.setdefault(delta.request_id, []).extend(delta.token_ids)
            if delta.finish is not None:
                self.ended.add(delta.request_id)

    def add(self, name: str, prompt: list[int]) -> None:
        request = Request(
            id=RequestId(name),
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        )
        self.scheduler.add(request, prefill_only=False, now_s=0.0)
        self.loop.wake()


class Group:
    def __init__(self, num_members: int, tensor_parallel: int, seed: int) -> None:
        self.num_members = num_members
        self.tensor_parallel = tensor_parallel
        self.rng = random.Random(seed)
        self.exchange = Exchange()
        self.meeting: Meeting = LocalRendezvous(Board()).meeting()
        self.num_lives = 0
        self.rosters: list[Roster] = []
        self.members: dict[int, Member] = {}
        self.refusal: str | None = None

    def settle(self, met: AllMet) -> bytes:
        if self.refusal is not None:
            raise Unavailable(self.refusal)
        return b""

    async def __aenter__(self) -> "Group":
        for dp_rank in range(self.num_members):
            self.members[dp_rank] = Member(self, dp_rank)
        await asyncio.gather(*(member.start() for member in self.members.values()))
        await self.issue()
        return self

    async def __aexit__(self, *_: object) -> None:
        await asyncio.gather(*(member.die() for member in self.living))

    @property
    def living(self) -> list[Member]:
        return [member for member in self.members.values() if member.is_alive]

    async def issue(self) -> None:
        """A roster of who lives, which reaches each at another time."""
        lives = tuple(m.life if (m := self.members[d]).is_alive else None for d in range(self.num_members))
        self.rosters.append(Roster(generation=len(self.rosters), tensor_parallel=self.tensor_parallel, lives=lives))
        for member in self.rng.sample(self.living, len(self.living)):
            await asyncio.sleep(self.rng.random() * 0.002)
            while member.seen < len(self.rosters):
                member.issued(self.rosters[member.seen])

    async def replace(self, dp_rank: int) -> Member:
        member = self.members[dp_rank] = Member(self, dp_rank)
        await member.start()
        return member

    async def until_formed(self) -> None:
        latest = self.rosters[-1].generation
        await until(lambda: all(not m.syncs[0].generations.is_over and m.formed[-1] == latest for m in self.living))


def prompt_of(index: int) -> list[int]:
    return [index + 1, 2 * index + 1, *range(3, 20)]


def check(members: list[Member]) -> None:
    for member in members:
        assert member.failure is None
        for request_id, tokens in member.tokens.items():
            index = int(request_id.rpartition("r")[2])
            assert tokens == toy_tokens(prompt_of(index), MAX_TOKENS)[: len(tokens)]
        member.scheduler.check()


@pytest.mark.parametrize("tensor_parallel", [1, 2])
@pytest.mark.parametrize("seed", range(3))
async def test_survivors_go_on_with_their_own_tokens_whoever_dies_and_the_replaced_join(
    tensor_parallel: int, seed: int
) -> None:
    async with Group(3, tensor_parallel, seed) as group:
        index = 0
        for _ in range(6):
            for member in group.living:
                for _ in range(2):
                    member.add(f"{member.life}-r{index}", prompt_of(index))
                    index += 1
            await asyncio.sleep(group.rng.random() * 0.01)
            victim = group.rng.choice(group.living)  # as often as not the hub
            await victim.die()
            await asyncio.sleep(group.rng.random() * 0.003)
            issuing = asyncio.ensure_future(group.issue())
            if group.rng.random() < 0.5:  # join while the group forms without the dead one
                await asyncio.sleep(group.rng.random() * 0.004)
            else:
                await issuing
                await group.until_formed()
            await group.replace(victim.dp_rank)
            await issuing
            await group.issue()
        await group.until_formed()
        await until(lambda: all(len(m.ended) == len(m.tokens) and not m.scheduler.has_work(0.0) for m in group.living))
        for member in group.living:
            member.add(f"last-r{index}", prompt_of(index))
        await until(lambda: all(RequestId(f"last-r{index}") in m.ended for m in group.living))
        check(group.living)
        for member in group.living:
            assert all(engine.steps == member.engines[0].steps for engine in member.engines), "followers run the same"
            assert sum(len(tokens) for tokens in member.tokens.values()) == MAX_TOKENS * len(member.tokens)
        assert len({member.engines[0].steps[-1] for member in group.living}) == 1


@pytest.mark.parametrize("victim", [0, 2])
async def test_a_step_that_waits_for_the_dead_is_void_and_its_work_done_again(victim: int) -> None:
    async with Group(3, 1, 0) as group:
        await group.until_formed()
        for index in range(3):
            group.members[index].add(f"r{index}", prompt_of(index))
        await until(lambda: all(member.tokens for member in group.living))
        dying = group.members[victim]
        dying.engines[0].proceed = threading.Event()  # it took the step upon itself and never comes
        survivors = [member for member in group.living if member is not dying]
        await until(dying.engines[0].is_held.is_set)
        at = dying.engines[0].steps[-1]
        await until(lambda: [member.engines[0].steps[-1] for member in survivors] == [at, at])
        dying.engines[0].is_dead = True
        dying.engines[0].proceed.set()
        await dying.die()
        await group.issue()
        await until(lambda: all(member.ended for member in survivors))
        check(survivors)
        assert [member.loop.num_void_steps for member in survivors] == [1, 1]
        assert all(at + 1 in member.engines[0].steps for member in survivors)


@pytest.mark.parametrize("victim", [0, 2])
async def test_whoever_keeps_work_waiting_between_steps_is_named(victim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.engine.elastic_sync.AWAITED_S", 0.1)
    async with Group(3, 1, 0) as group:
        await group.until_formed()
        syncs = [group.members[dp_rank].syncs[0] for dp_rank in range(3)]
        for index in range(3):
            group.members[index].add(f"r{index}", prompt_of(index))
        await until(lambda: all(member.tokens for member in group.living))
        assert not any(sync.awaited() for sync in syncs)
        monkeypatch.setattr(syncs[victim], "vote", lambda _step, _num_tokens: None)
        assert [sync.dp_rank for sync in syncs if sync.is_hub] == [0]
        others = [sync for sync in syncs if sync.dp_rank != victim]
        await until(lambda: all(sync.awaited() for sync in others))
        named = {sync.dp_rank: sync.awaited() for sync in others}
        assert named == ({1: [0], 2: [0]} if victim == 0 else {0: [2], 1: [0]})


async def test_idle_ranks_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pd_cluster.engine.elastic_sync.AWAITED_S", 0.0)
    async with Group(3, 1, 0) as group:
        await group.until_formed()
        group.members[1].add("r1", prompt_of(1))
        await until(lambda: len(group.members[1].ended) == 1)
        await until(lambda: not any(member.syncs[0].awaited() for member in group.living))


async def test_a_roster_that_only_tells_some_to_leave_voids_no_step() -> None:
    async with Group(2, 1, 0) as group:
        await group.until_formed()
        group.members[0].add("r1", prompt_of(1))
        leaving = Roster(
            generation=1,
            tensor_parallel=1,
            lives=group.rosters[0].lives,
            leaving=frozenset({1}),
        )
        for member in group.living:
            member.syncs[0].issued(leaving)
        await until(lambda: len(group.members[0].ended) == 1)
        assert group.members[0].loop.num_void_steps == 0
        assert group.members[0].formed == [0]


async def test_a_hub_that_cannot_place_the_experts_ends_by_name_and_says_so() -> None:
    async with Group(2, 1, 0) as group:
        await group.until_formed()
        await group.members[1].die()
        group.refusal = "experts do not fit: raise expert_slots_per_rank"
        await group.issue()
        await until(lambda: group.members[0].failure is not None)
        assert "expert_slots_per_rank" in str(group.members[0].failure)


async def test_a_lost_follower_ends_its_dp_rank_and_no_other() -> None:
    async with Group(2, 2, 0) as group:
        await group.until_formed()
        await group.members[1].syncs[1].close()
        await until(lambda: group.members[1].failure is not None)
        await group.members[1].die()
        await group.issue()
        group.members[0].add("r3", prompt_of(3))
        await until(lambda: len(group.members[0].ended) == 1)
        check([group.members[0]])
