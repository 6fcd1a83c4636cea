"""Sets of CPUs: how they are written, which rank gets which, and that threads made later stay on them."""

import os
import subprocess
import sys

import pytest

from pd_cluster.config import load_config
from pd_cluster.cpus import bind, parse_cpus
from pd_cluster.errors import ConfigError
from pd_cluster.ids import EngineEpoch
from pd_cluster.launch.roles import engine_shape, rank_specs


@pytest.mark.parametrize(
    ("text", "cpus"), [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0, 2,8-9", {0, 2, 8, 9}), ("7-7", {7})]
)
def test_a_set_is_numbers_and_ranges(text: str, cpus: set[int]) -> None:
    assert parse_cpus(text) == cpus


@pytest.mark.parametrize("text", ["", "a", "3-1", "-1", "0-", "0,,1", "0-3-5"])
def test_what_is_no_set_is_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="a set of CPUs looks like"):
        parse_cpus(text)


def dealt(cpus: str, *, instance: int = 0) -> list[set[int]]:
    config = load_config(overrides=[f"decode.cpus={cpus}", "decode.data_parallel=2"])
    shape = engine_shape("decode", instance, config)
    return [set(spec.cpus or ()) for spec in rank_specs(shape, EngineEpoch("e"), config, ("127.0.0.1", 1), 1)]


def test_ranks_share_one_set_or_take_turns_over_all_instances() -> None:
    assert dealt("0-1") == [{0, 1}, {0, 1}]
    assert dealt("3") == [{3}, {3}]
    assert dealt('["0-1", 4]') == [{0, 1}, {4}]
    assert dealt('["0", "1", "2"]', instance=1) == [{2}, {0}]


def test_a_pool_without_a_set_runs_anywhere() -> None:
    config = load_config(overrides=["decode.cpus=1"])
    shape = engine_shape("prefill", 0, config)
    assert rank_specs(shape, EngineEpoch("e"), config, ("127.0.0.1", 1), 1)[0].cpus is None


def test_a_wrong_set_is_refused_when_the_configuration_is_read() -> None:
    with pytest.raises(ConfigError, match=r"decode\.cpus: a set of CPUs looks like '0-3' or '0,2,8-11', got '3-1'"):
        load_config(overrides=["decode.cpus=3-1"])
    with pytest.raises(ConfigError, match=r"prefill\.cpus: a list .* must not be empty"):
        load_config(overrides=["prefill.cpus=[]"])


@pytest.mark.parametrize("cpus", [{8191}, {99999}, {1 << 70}])
def test_cpus_that_this_host_lacks_are_named(cpus: set[int]) -> None:
    with pytest.raises(ConfigError, match=f"CPUs {max(cpus)} are not on this host"):
        bind(frozenset(cpus))


def test_a_set_of_which_this_host_has_only_some_is_refused_and_changes_nothing() -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(ConfigError, match=r"CPUs 8000-8001,8100 are not on this host"):
        bind(frozenset({min(before), 8000, 8001, 8100}))
    assert os.sched_getaffinity(0) == before


@pytest.mark.parametrize("text", ["0-9999999999", "8192", "99999999999999999999"])
def test_a_number_that_no_cpu_has_is_refused_before_a_set_is_made_of_it(text: str) -> None:
    with pytest.raises(ConfigError, match=r"CPUs have numbers below 8192"):
        parse_cpus(text)


def test_threads_made_later_stay_on_the_set() -> None:
    cpu = min(os.sched_getaffinity(0))
    code = f"""
import os, threading
from pd_cluster.cpus import bind
bind(frozenset({{{cpu}}}))
thread = threading.Thread(target=lambda: print(os.sched_getaffinity(0)))
thread.start()
thread.join()
"""
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == f"{{{cpu}}}"
