"""How many KV blocks a rank gets, and what is refused."""

from pathlib import Path

import pytest
import torch

from pd_cluster.engine.memory import cgroup_free_bytes, choose_max_model_len, free_bytes, num_blocks_within
from pd_cluster.errors import ConfigError
from pd_cluster.kv.layout import KvLayout

LAYOUT = KvLayout(kind="mla", num_layers=2, head_ids=(0,), token_values=32, dtype="bfloat16", block_size=64)
MIB = 1 << 20


def test_blocks_share_a_fraction_of_what_is_free() -> None:
    assert LAYOUT.block_bytes == 64 * 2 * 32 * 2
    blocks = num_blocks_within(LAYOUT, 80 * MIB, fraction=0.5, max_bytes=1 << 40, ranks_on_host=4)
    assert blocks == 10 * MIB // LAYOUT.block_bytes


def test_blocks_are_bounded_by_max_bytes() -> None:
    assert num_blocks_within(LAYOUT, 1 << 40, fraction=0.5, max_bytes=8192 * 3 + 1, ranks_on_host=1) == 3


@pytest.mark.parametrize("free", [0, -5, 10_000])
def test_no_room_for_one_block_is_an_error_with_numbers(free: int) -> None:
    with pytest.raises(ConfigError, match=r"no KV block of 8192 bytes .* 4 ranks share it"):
        num_blocks_within(LAYOUT, free, fraction=0.5, max_bytes=1 << 30, ranks_on_host=4)


def test_free_memory_of_this_machine_is_measured() -> None:
    before = free_bytes(torch.device("cpu"))
    assert 0 < before < 1 << 50


def test_a_container_limit_counts_and_its_page_cache_is_free(tmp_path: Path) -> None:
    assert cgroup_free_bytes(tmp_path) is None
    (tmp_path / "memory.max").write_text("1000000\n")
    (tmp_path / "memory.current").write_text("700000\n")
    (tmp_path / "memory.stat").write_text("anon 400000\ninactive_file 200000\nactive_file 100000\n")
    assert cgroup_free_bytes(tmp_path) == 600_000
    (tmp_path / "memory.max").write_text("max\n")
    assert cgroup_free_bytes(tmp_path) is None


def test_the_older_cgroup_files_are_read_too(tmp_path: Path) -> None:
    old = tmp_path / "memory"
    old.mkdir()
    (old / "memory.limit_in_bytes").write_text("5000")
    (old / "memory.usage_in_bytes").write_text("3000")
    (old / "memory.stat").write_text("inactive_file 500\n")
    assert cgroup_free_bytes(tmp_path) == 2500
    (old / "memory.limit_in_bytes").write_text(str((1 << 63) - 4096))
    assert cgroup_free_bytes(tmp_path) is None


def test_the_context_defaults_to_what_model_and_memory_allow() -> None:
    assert choose_max_model_len(None, 4096, num_blocks=100, block_size=16) == 1600
    assert choose_max_model_len(None, 1024, num_blocks=100, block_size=16) == 1024
    assert choose_max_model_len(1600, 4096, num_blocks=100, block_size=16) == 1600


def test_a_context_that_cannot_fit_is_refused_with_both_numbers() -> None:
    with pytest.raises(ConfigError, match="2000 does not fit: a rank has room for 1600"):
        choose_max_model_len(2000, 4096, num_blocks=100, block_size=16)
    with pytest.raises(ConfigError, match="5000 exceeds the model's context of 4096"):
        choose_max_model_len(5000, 4096, num_blocks=1000, block_size=16)
    with pytest.raises(ConfigError, match="at least 1, got 0"):
        choose_max_model_len(0, 4096, num_blocks=1000, block_size=16)
