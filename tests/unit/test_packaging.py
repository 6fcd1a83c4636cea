"""What a user installs: one wheel with four import packages, the demo model, and a command."""

import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGES = ["pd_cluster", "prefill_worker", "decode_worker", "router"]


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The built wheel, unpacked as pip would."""
    from hatchling.builders.wheel import WheelBuilder

    directory = tmp_path_factory.mktemp("wheel")
    (wheel,) = WheelBuilder(str(ROOT)).build(directory=str(directory), versions=["standard"])
    site = directory / "site"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    return site


def python(site: Path, script: str) -> str:
    script = f"import sys; sys.path.insert(0, {str(site)!r})\n{script}"
    return subprocess.run(
        [sys.executable, "-I", "-c", script], check=True, capture_output=True, text=True, cwd=site
    ).stdout.strip()


def test_each_of_the_four_names_belongs_to_this_distribution(installed: Path) -> None:
    script = (
        "import importlib.metadata as m, importlib\n"
        f"owners = m.packages_distributions(); names = {PACKAGES}\n"
        "assert all(owners[name] == ['pd-cluster'] or set(owners[name]) == {'pd-cluster'} for name in names), owners\n"
        "print(*[importlib.import_module(name).__file__ for name in names])"
    )
    for file in python(installed, script).split():
        assert file.startswith(str(installed)), file


def test_nothing_else_is_installed_at_the_top(installed: Path) -> None:
    names = {path.name for path in installed.iterdir() if not path.name.endswith(".dist-info")}
    assert names == set(PACKAGES)


def test_the_wheel_holds_the_demo_model_and_what_it_needs(installed: Path) -> None:
    script = (
        "from pd_cluster.model.source import open_model\n"
        "model = open_model('demo')\n"
        "print(model.path, model.config.architecture, model.tokenizer.encode('Once upon a time'))"
    )
    path, rest = python(installed, script).split(" ", 1)
    assert path.startswith(str(installed))
    assert rest == "DeepseekV3ForCausalLM [1, 403, 407, 261, 378]"
    assert (installed / "pd_cluster/demo_model/model.safetensors").stat().st_size > 5_000_000


def test_the_command_and_the_licence_are_there(installed: Path) -> None:
    (metadata,) = installed.glob("*.dist-info")
    assert "pd-cluster = pd_cluster.cli.main:app" in (metadata / "entry_points.txt").read_text()
    assert "Copyright 2026 pd-cluster contributors" in (metadata / "licenses/LICENSE").read_text()


def test_every_dependency_is_pinned() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    requirements = project["dependencies"] + project["optional-dependencies"]["dev"]
    assert all("==" in requirement for requirement in requirements), requirements
