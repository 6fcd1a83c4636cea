"""The Dockerfile: stages, user and files, as far as they can be looked at without building it."""

import re
import tomllib

import yaml
from helm_tool import CHART, ROOT

DOCKERFILE = ROOT / "deploy" / "docker" / "Dockerfile"


def instructions() -> list[tuple[str, str]]:
    text = re.sub(r"\\\n", " ", DOCKERFILE.read_text())
    lines = [line.strip() for line in text.splitlines()]
    return [(line.split()[0], line.partition(" ")[2]) for line in lines if line and not line.startswith("#")]


def test_the_image_is_made_in_stages_from_a_pinned_base() -> None:
    bases = [rest for name, rest in instructions() if name == "FROM"]
    assert len(bases) == 2
    assert bases[0].endswith(" AS build")
    assert {re.match(r"python:3\.\d+\.\d+-slim-\w+", base)[0] for base in bases} == {bases[1]}  # type: ignore[index]


def test_the_image_runs_as_the_user_that_the_chart_names() -> None:
    (user,) = [rest for name, rest in instructions() if name == "USER"]
    security = yaml.safe_load((CHART / "values.yaml").read_text())["podSecurity"]
    assert user == f"{security['runAsUser']}:{security['runAsGroup']}"
    last = [name for name, _ in instructions()]
    assert "RUN" not in last[last.index("USER") :]


def test_everything_that_the_image_copies_exists_and_passes_the_ignore_file() -> None:
    ignored = (DOCKERFILE.parent / "Dockerfile.dockerignore").read_text().splitlines()
    kept = {line[1:] for line in ignored if line.startswith("!")}
    copied = {rest.split()[0] for name, rest in instructions() if name == "COPY" and "--from" not in rest}
    copied |= {rest.split()[1] for name, rest in instructions() if name == "COPY" and len(rest.split()) == 3}
    copied -= {"--from=build"} | {source for source in copied if source.startswith("/")}
    assert copied <= kept
    for name in kept:
        assert (ROOT / name).exists(), name


def test_every_package_of_the_wheel_is_in_the_image() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    packages = project["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
    copied = [rest for name, rest in instructions() if name == "COPY"]
    assert all(any(rest.startswith(f"{package} ") for rest in copied) for package in packages)


def test_ports_of_the_image_are_those_of_the_chart() -> None:
    values = yaml.safe_load((CHART / "values.yaml").read_text())
    ports = {values["router"]["httpPort"], values["router"]["grpc"]["port"]}
    ports |= {values["decode"]["ports"]["control"], values["decode"]["ports"]["probes"]}
    (exposed,) = [rest for name, rest in instructions() if name == "EXPOSE"]
    assert set(map(int, exposed.split())) == ports


def test_versions_agree() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert chart["appVersion"] == project
    manifest = (ROOT / "deploy" / "ray" / "rayservice.yaml").read_text()
    assert set(re.findall(r"image: \S+:(\S+)", manifest)) == {project}
