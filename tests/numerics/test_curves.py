"""`bench curves` in its short form: real steps of the bundled model, a real router, and the files it leaves."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from pd_cluster.bench import curves
from pd_cluster.bench.curves import NAMES, QUICK, Curve, prefill_work, run, table, write
from pd_cluster.cli.main import app
from pd_cluster.errors import ConfigError
from pd_cluster.model.source import open_model

pytestmark = pytest.mark.processes


@pytest.fixture(scope="module")
def measured() -> dict[str, Curve]:
    found = {each.name: each for each in run(open_model("demo"), sizes=QUICK)}
    print("\n" + table(list(found.values())))
    return found


def test_every_curve_is_measured_at_every_point(measured: dict[str, Curve]) -> None:
    assert list(measured) == list(NAMES)
    for name, sizes in zip(
        NAMES, (QUICK.batches, QUICK.contexts, QUICK.lengths, QUICK.streams, QUICK.workers), strict=True
    ):
        assert tuple(measured[name].x) == sizes
        assert min(measured[name].cost) > 0


def test_costs_grow_with_their_work_and_no_faster(measured: dict[str, Curve]) -> None:
    """Loosely, for machines that are busy: a cost with the square of its work would grow tenfold here."""
    for name in ("step_vs_batch", "prefill_vs_length", "router_vs_streams"):
        assert measured[name].cost[-1] > measured[name].cost[0], name
    for each in measured.values():
        assert each.growth.unit_price_growth < 2, (each.name, each.cost)


def test_the_files_hold_what_was_measured(measured: dict[str, Curve], tmp_path: Path) -> None:
    files = write(list(measured.values()), tmp_path / "out")
    assert {path.name for path in files} == {"curves.json", *(f"{name}.png" for name in NAMES)}
    data = json.loads((tmp_path / "out" / "curves.json").read_text())
    assert [each["name"] for each in data] == list(NAMES)
    assert data[0]["cost"] == measured[NAMES[0]].cost
    assert set(data[0]["growth"]) >= {"exponent", "verdict", "unit_price_growth"}
    for name in NAMES:
        assert (tmp_path / "out" / f"{name}.png").read_bytes().startswith(b"\x89PNG")
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot write to"):
        write(list(measured.values()), tmp_path / "file" / "out")


def test_prefill_s_work_is_its_arithmetic() -> None:
    config = open_model("demo").config
    single, double, quadruple = (prefill_work(config, count) for count in (512, 1024, 2048))
    assert 2 < double / single < quadruple / double < 4  # between the tokens and their pairs


def test_the_command_ends_with_1_when_a_curve_is_worse_than_linear(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def costs(points: list[object], rounds: int) -> list[float]:
        return [float(x**power) for x in QUICK.batches]

    monkeypatch.setattr(curves, "_measured", costs)
    arguments = ["bench", "curves", "--quick", "--only", "step_vs_batch", "--out", str(tmp_path)]
    power = 1
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, "linear" in done.stdout) == (0, True), done.output
    power = 2
    done = CliRunner().invoke(app, arguments)
    assert (done.exit_code, "worse than linear" in done.stdout) == (1, True), done.output
    done = CliRunner().invoke(app, [*arguments[:4], "step_vs_moon", *arguments[5:]])
    assert done.exit_code == 2
    assert "there is no curve step_vs_moon" in done.stderr
