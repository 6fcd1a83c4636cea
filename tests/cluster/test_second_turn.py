"""A chat's next turn moves only what decode lacks, computes only what prefill lacks, and shares with nobody else."""

import pytest
from harness import CHECKPOINTS, LocalCluster, Output, config_of, request

BLOCK = 16
PROMPT = [3 + (11 * i + i * i) % 500 for i in range(40)]
QUESTION = [401, 33, 7, 250, 90, 14]
MODELS = {"deepseek_v3_yarn": "MLA", "qwen3_moe": "GQA"}


def pools(model: str, **keys: object) -> LocalCluster:
    return LocalCluster(config_of(CHECKPOINTS / model, **keys))


async def turn(cluster: LocalCluster, token_ids: list[int], name: str, salt: str = "") -> Output:
    output = await cluster.generate(request(token_ids, name, salt, max_tokens=20))
    await cluster.until_free()
    return output


async def fresh(model: str, token_ids: list[int], **keys: object) -> Output:
    """The same on a cluster that has seen nothing."""
    async with pools(model, **keys) as cluster:
        return await turn(cluster, token_ids, "fresh")


def units(num_tokens: int) -> int:
    return -(-num_tokens // BLOCK)


@pytest.mark.parametrize("model", MODELS)
async def test_the_second_turn_pushes_only_what_decode_lacks(model: str) -> None:
    async with pools(model) as cluster:
        first = await turn(cluster, PROMPT, "first")
        chat = PROMPT + first.token_ids + QUESTION
        second = await turn(cluster, chat, "second")
        unit_bytes = cluster.unit_bytes()
        # decode computed the first turn's answer, so it holds all of that turn but the last token's KV
        at_decode = (len(PROMPT) + len(first.token_ids) - 1) // BLOCK * BLOCK
        at_prefill = len(PROMPT) // BLOCK * BLOCK
        assert first.timings.transfer_bytes == units(len(PROMPT)) * unit_bytes
        assert second.timings.transfer_bytes == (units(len(chat)) - at_decode // BLOCK) * unit_bytes
        assert (first.timings.num_cached_tokens, second.timings.num_cached_tokens) == (0, at_prefill)
        whole = units(len(chat)) * unit_bytes
        print(f"{model}: first {first.timings.transfer_bytes}, second {second.timings.transfer_bytes} of {whole} bytes")
    assert second.token_ids == (await fresh(model, chat)).token_ids


async def test_a_third_turn_of_whole_blocks_moves_one_block_alone() -> None:
    """Both sides have everything before it."""
    async with pools("deepseek_v3_yarn") as cluster:
        chat = PROMPT[:32]
        for number in range(3):
            output = await turn(cluster, chat, f"turn{number}")
            chat = [*chat, *output.token_ids[:11], *QUESTION[:5]]
            assert len(chat) % BLOCK == 0
            expected = 2 if number == 0 else 1
            assert output.timings.transfer_bytes == expected * cluster.unit_bytes()


async def test_the_same_prompt_again_moves_nothing_but_the_commit_when_it_fills_its_blocks() -> None:
    async with pools("deepseek_v3_yarn") as cluster:
        first = await turn(cluster, PROMPT[:32], "first")
        again = await turn(cluster, PROMPT[:32], "again")
        assert (first.timings.transfer_bytes, again.timings.transfer_bytes) == (2 * cluster.unit_bytes(), 0)
        assert again.token_ids == first.token_ids


@pytest.mark.parametrize(("prefill_block", "decode_block"), [(16, 48), (48, 16), (32, 16)])
async def test_each_side_reuses_whole_blocks_of_its_own_size(prefill_block: int, decode_block: int) -> None:
    keys = {"prefill__block_size": prefill_block, "decode__block_size": decode_block}
    async with pools("qwen3_moe", **keys) as cluster:
        first = await turn(cluster, PROMPT, "first")
        chat = PROMPT + first.token_ids + QUESTION
        second = await turn(cluster, chat, "second")
        at_decode = (len(PROMPT) + len(first.token_ids) - 1) // decode_block * decode_block
        assert second.timings.num_cached_tokens == len(PROMPT) // prefill_block * prefill_block
        assert second.timings.transfer_bytes == (units(len(chat)) - at_decode // BLOCK) * cluster.unit_bytes()
    assert second.token_ids == (await fresh("qwen3_moe", chat, **keys)).token_ids


async def test_a_chat_returns_to_the_workers_that_know_it() -> None:
    """Two of each: the second turn goes where the first was, on both sides."""
    keys = {"prefill__instances": 2, "decode__instances": 2}
    async with pools("deepseek_v3_yarn", **keys) as cluster:
        for number in range(4):
            prompt = [number + 3, *PROMPT]
            first = await turn(cluster, prompt, f"a{number}")
            second = await turn(cluster, prompt + first.token_ids + QUESTION, f"b{number}")
            assert second.timings.prefill_worker == first.timings.prefill_worker
            assert second.timings.decode_worker == first.timings.decode_worker
            assert second.timings.num_cached_tokens == 32


async def test_requests_with_another_salt_share_nothing_on_either_side() -> None:
    async with pools("deepseek_v3_yarn") as cluster:
        first = await turn(cluster, PROMPT, "first", salt="alice")
        for name, salt in (("bob", "bob"), ("nobody", "")):
            stranger = await turn(cluster, PROMPT, name, salt)
            assert stranger.timings.num_cached_tokens == 0
            assert stranger.timings.transfer_bytes == first.timings.transfer_bytes
            assert stranger.token_ids == first.token_ids
        again = await turn(cluster, PROMPT, "again", salt="alice")
        assert again.timings.num_cached_tokens == 32
        assert again.timings.transfer_bytes == cluster.unit_bytes()
