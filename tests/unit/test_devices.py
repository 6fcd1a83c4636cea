"""GPUs are dealt out over ranks, and who asks for one where there is none is told so by name."""

from collections import Counter

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from pd_cluster import devices
from pd_cluster.cli.checkup import gpu_plan
from pd_cluster.config import load_config
from pd_cluster.devices import (
    DeviceChoice,
    GpuHolder,
    deal_gpus,
    device_name,
    gpu_share,
    gpu_variables,
    narrow_to_one,
    ranks_per_gpu,
    visible_gpus,
)
from pd_cluster.engine.arena import KvArena
from pd_cluster.errors import ConfigError
from pd_cluster.ids import EngineEpoch
from pd_cluster.kv.layout import KvLayout
from pd_cluster.launch.rank import own_device
from pd_cluster.launch.ray_places import bundle
from pd_cluster.launch.roles import engine_shapes, rank_specs

LAYOUT = KvLayout(kind="mla", num_layers=2, head_ids=(0,), token_values=8, dtype="float32", block_size=16)


def ranks(engine: str, count: int, choice: DeviceChoice = "auto") -> list[GpuHolder]:
    return [GpuHolder(engine, choice)] * count


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, ["0", "1", "2"]),
        ({"CUDA_VISIBLE_DEVICES": "2,0"}, ["2", "0"]),
        ({"CUDA_VISIBLE_DEVICES": " GPU-5a , MIG-7b"}, ["GPU-5a", "MIG-7b"]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "1,-1,2"}, ["1"]),
    ],
)
def test_visible_gpus_are_those_that_cuda_would_show(environ: dict[str, str], expected: list[str]) -> None:
    assert visible_gpus(environ, lambda: 3) == expected


def test_a_host_without_a_driver_has_no_gpus(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(devices, "NVML", "libno-such-driver.so.1")
    assert devices.count_gpus() == 0
    assert visible_gpus({}) == []


def test_each_rank_of_a_host_with_enough_gpus_has_one_alone() -> None:
    asking = ranks("prefill-0", 2) + ranks("decode-0", 2, "cuda")
    assert deal_gpus(asking, [], ["4", "5", "6", "7"]) == ["4", "5", "6", "7"]


def test_a_rank_that_is_replaced_gets_the_gpu_that_was_freed() -> None:
    held = [GpuHolder("decode-0", "auto", "0"), GpuHolder("prefill-0", "auto", "2")]
    assert deal_gpus(ranks("decode-0", 1), held, ["0", "1", "2"]) == ["1"]


def test_engines_share_gpus_where_there_are_too_few() -> None:
    assert deal_gpus(ranks("prefill-0", 1) + ranks("decode-0", 1), [], ["0"]) == ["0", "0"]
    asking = ranks("prefill-0", 2) + ranks("decode-0", 2)
    assert deal_gpus(asking, [], ["0", "1"]) == ["0", "1", "0", "1"]


def test_ranks_of_one_engine_never_share_a_gpu() -> None:
    with pytest.raises(ConfigError, match=r"decode-0 has more ranks on this host than the 2 GPUs here.* for decode$"):
        deal_gpus(ranks("decode-0", 3), [], ["0", "1"])
    with pytest.raises(ConfigError, match="than the 1 GPU here"):
        deal_gpus(ranks("decode-0", 1), [GpuHolder("decode-0", "auto", "0")], ["0"])


def test_who_wants_the_cpu_gets_it_and_so_does_everybody_without_gpus() -> None:
    asking = ranks("prefill-0", 1, "cpu") + ranks("decode-0", 1)
    assert deal_gpus(asking, [], ["0"]) == [None, "0"]
    assert deal_gpus(ranks("decode-0", 9, "cuda"), [], []) == [None] * 9


@given(
    sizes=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    num_gpus=st.integers(1, 8),
    num_started=st.integers(0, 5),
)
def test_dealing_is_even_and_never_doubles_an_engine(sizes: list[int], num_gpus: int, num_started: int) -> None:
    gpus = [str(gpu) for gpu in range(num_gpus)]
    held: list[GpuHolder] = []
    for group in (sizes[:num_started], sizes[num_started:]):
        asking = [rank for size in group for rank in ranks(f"decode-{len(held)}-{sizes.index(size)}", size)]
        per_engine = Counter(rank.engine for rank in asking)
        if max(per_engine.values(), default=0) > num_gpus:
            with pytest.raises(ConfigError):
                deal_gpus(asking, held, gpus)
            return
        dealt = deal_gpus(asking, held, gpus)
        held += [rank._replace(gpu=gpu) for rank, gpu in zip(asking, dealt, strict=True)]
    assert max(Counter((rank.engine, rank.gpu) for rank in held).values(), default=1) == 1
    used = Counter(rank.gpu for rank in held)
    assert max(used.values(), default=0) <= len(held) // num_gpus + len(sizes)
    assert len(held) < num_gpus or set(used) == set(gpus)


def test_a_rank_sees_its_gpu_alone_and_one_on_the_cpu_sees_none() -> None:
    assert gpu_variables("GPU-5a", ["GPU-5a", "GPU-6b"]) == {"CUDA_VISIBLE_DEVICES": "GPU-5a"}
    assert gpu_variables(None, ["0"]) == {"CUDA_VISIBLE_DEVICES": ""}
    assert gpu_variables(None, []) == {}


@pytest.mark.parametrize(
    ("choice", "shown", "index", "expected"),
    [("auto", "4,5,6", 4, "5"), ("cuda", "4", 3, "4"), ("cpu", "4,5", 1, "4,5"), ("auto", "", 1, "")],
)
def test_a_rank_that_no_launcher_gave_a_gpu_takes_the_one_of_its_index(
    choice: DeviceChoice, shown: str, index: int, expected: str
) -> None:
    environ = {"CUDA_VISIBLE_DEVICES": shown}
    narrow_to_one(choice, index, environ)
    assert environ["CUDA_VISIBLE_DEVICES"] == expected


def test_a_rank_computes_on_the_gpu_that_it_sees() -> None:
    assert device_name("auto", 1, "decode") == "cuda:0"
    assert device_name("cuda", 1, "decode") == "cuda:0"
    assert device_name("cpu", 1, "decode") == "cpu"
    assert device_name("auto", 0, "decode") == "cpu"
    with pytest.raises(ConfigError, match=r'prefill\.device = "cuda", but torch sees no GPU here: .*"auto"'):
        device_name("cuda", 0, "prefill")


@pytest.mark.skipif(torch.cuda.is_available(), reason="this machine has a GPU")
def test_a_rank_refuses_to_start_when_it_must_have_a_gpu_and_sees_none() -> None:
    config = load_config(overrides=['decode.device="cuda"'])
    prefill, decode = (rank_specs(shape, EngineEpoch("e"), config, ("h", 1), 1)[0] for shape in engine_shapes(config))
    assert own_device(prefill) == torch.device("cpu")
    with pytest.raises(ConfigError, match=r'decode\.device = "cuda"'):
        own_device(decode)


@pytest.mark.parametrize(
    ("choice", "num_ranks", "largest", "num_gpus", "expected"),
    [
        ("auto", 4, 4, 0, 0.0),
        ("cpu", 4, 4, 8, 0.0),
        ("auto", 4, 4, 4, 1.0),
        ("cuda", 4, 2, 0, 1.0),  # a cluster may grow by a node that has one
        ("auto", 2, 1, 1, 0.5),
        ("auto", 4, 1, 3, 0.5),
        ("auto", 7, 1, 3, 1 / 3),
    ],
)
def test_a_scheduler_is_asked_for_whole_gpus_or_equal_parts(
    choice: DeviceChoice, num_ranks: int, largest: int, num_gpus: int, expected: float
) -> None:
    assert gpu_share(choice, num_ranks, largest, num_gpus) == pytest.approx(expected)


def test_parts_of_a_gpu_are_refused_to_engines_of_several_ranks() -> None:
    with pytest.raises(ConfigError, match="4 ranks need a GPU each, for some share an engine, and the cluster has 2"):
        gpu_share("auto", 4, 2, 2)


def test_ranks_that_share_a_gpu_share_its_memory() -> None:
    assert [ranks_per_gpu(*pair) for pair in ((1, 1), (4, 4), (5, 4), (8, 4), (3, 0))] == [1, 1, 2, 2, 1]


def test_a_placement_group_sets_a_gpu_aside_only_where_one_is_asked_for() -> None:
    spec = rank_specs(
        engine_shapes(load_config(overrides=["prefill.threads=4"]))[0], EngineEpoch("e"), load_config(), ("h", 1), 1
    )[0]
    assert bundle(spec, 0.5, 0.0) == {"CPU": 2.0}
    assert bundle(spec, 1.0, 1.0) == {"CPU": 4.0, "GPU": 1.0}


class OnGpu(KvArena):
    """An arena that says it lies on a GPU."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(LAYOUT, 2)
        self.device = device


@pytest.mark.parametrize(
    ("name", "memory", "device_id"), [("cpu", "DRAM", 0), ("cuda:0", "VRAM", 0), ("cuda:3", "VRAM", 3)]
)
def test_an_arena_is_registered_as_the_memory_that_it_is(name: str, memory: str, device_id: int) -> None:
    arena = OnGpu(torch.device(name))
    registered = arena.registered
    assert (registered.memory, registered.device_id) == (memory, device_id)
    assert (registered.base_address, registered.num_bytes) == (arena.bytes.data_ptr(), 2 * LAYOUT.block_bytes)


def test_an_arena_s_bytes_can_be_read_for_checksums() -> None:
    arena = KvArena(LAYOUT, 2)
    arena.bytes[:] = torch.arange(arena.num_bytes) % 251
    assert bytes(arena.read(300, 5)) == bytes([49, 50, 51, 52, 53])
    assert arena.read(0, 0).nbytes == 0


def test_the_doctor_says_which_rank_computes_where() -> None:
    config = load_config(overrides=["prefill.tensor_parallel=2"])
    status, detail, _ = gpu_plan(config, ["H200"] * 4, ["0", "1", "2", "3"])
    assert (status, detail) == ("ok", "4 x H200; prefill-0 on 0, prefill-0 on 1, decode-0 on 2")
    status, detail, advice = gpu_plan(load_config(), ["H200"], ["0"])
    assert (status, detail) == ("warn", "1 x H200; prefill-0 on 0, decode-0 on 0")
    assert "share GPUs" in advice
    assert gpu_plan(load_config(), [], [])[1] == "none: everything runs on the CPU"
    with pytest.raises(ConfigError, match=r'decode\.device = "cuda", but torch sees no GPU'):
        gpu_plan(load_config(overrides=["decode.device=cuda"]), [], [])
    with pytest.raises(ConfigError, match="prefill-0 has more ranks on this host than the 1 GPU"):
        gpu_plan(config, ["H200"], ["0"])
