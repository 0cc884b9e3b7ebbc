"""The Dockerfiles: linted, pinned, confined; and the reader that carries them out without a container."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
import yaml

from deploy.exercise.dockerfile import Dockerfile, Instruction, expanded
from deploy.exercise.image import build
from tests.conftest import ROOT

TIERS = ("gateway", "tulip")
OPTIONAL = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


def path_of(tier: str) -> Path:
    return ROOT / "deploy" / tier / "Dockerfile"


@pytest.mark.parametrize("tier", TIERS)
def test_hadolint_finds_nothing(tier):
    command = shutil.which("hadolint", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if command is None:
        pytest.skip("hadolint is not installed")
    outcome = subprocess.run([command, path_of(tier)], capture_output=True, text=True)
    assert outcome.returncode == 0, outcome.stdout


@pytest.mark.parametrize("tier", TIERS)
def test_bases_and_packages_are_pinned(tier):
    dockerfile = Dockerfile.read(path_of(tier))
    for stage in dockerfile.stages:
        assert re.search(r":\d+\.\d+", stage.base), f"{stage.base} names no version"
    installs = [line for line in runs(dockerfile) if "pip install" in line]
    assert installs
    assert all("-c constraints.txt" in line for line in installs)


@pytest.mark.parametrize("tier", TIERS)
def test_signals_reach_the_server_itself(tier):
    final = Dockerfile.read(path_of(tier)).stages[-1]
    assert final.last("CMD").exec_form()[:2] == ["python", "-m"]
    assert final.last("STOPSIGNAL").text == "SIGTERM"
    with pytest.raises(LookupError):
        final.last("ENTRYPOINT")  # nothing stands between


@pytest.mark.parametrize("tier", TIERS)
def test_a_container_is_no_root_and_writes_nowhere_but_tmp_and_volumes(tier):
    final = Dockerfile.read(path_of(tier)).stages[-1]
    assert int(final.last("USER").text.partition(":")[0]) > 0
    homes = re.findall(r"(?:HOME|_DIR|_PATH|_BASE)=(/\S+)", final.last("ENV").text)
    assert homes
    assert all(home.startswith(("/tmp", "/cache")) for home in homes)


@pytest.mark.parametrize("tier", TIERS)
def test_the_health_check_waits_for_the_longest_first_start(tier):
    health = Dockerfile.read(path_of(tier)).stages[-1].last("HEALTHCHECK")
    assert "--start-period=10m" in health.flags
    assert Instruction("CMD", (), health.text.removeprefix("CMD")).exec_form()[0] == "python"


@pytest.mark.parametrize("tier", TIERS)
def test_the_context_holds_just_what_is_copied(tier):
    ignore_file = path_of(tier).with_name("Dockerfile.dockerignore")
    allowed = set(re.findall(r"^!(.+)$", ignore_file.read_text(), re.MULTILINE))
    copies = [i for i in instructions(Dockerfile.read(path_of(tier)), "COPY") if not i.flags]
    assert allowed == {source for copy in copies for source in copy.words[:-1]}


def test_extras_are_ones_that_exist_and_the_gateway_has_no_torch():
    gateway, tulip = (Dockerfile.read(path_of(tier)) for tier in TIERS)
    (names,) = re.findall(r"'\.\[([\w,]+)\]'", " ".join(runs(gateway)))
    assert not any("torch" in requirement for name in names.split(",") for requirement in OPTIONAL[name])
    (extras,) = [i.text.partition("=")[2] for i in instructions(tulip, "ARG") if i.text.startswith("EXTRAS")]
    assert set(extras.split(",")) == {"server", "gpu", "tracing"} <= OPTIONAL.keys()
    compose = yaml.safe_load((ROOT / "deploy" / "compose.yaml").read_text())
    on_the_cpu = compose["services"]["tulip-cpu"]["build"]["args"]["EXTRAS"]
    assert set(on_the_cpu.split(",")) == {"server", "tracing"}


# -- the reader


def test_continued_lines_comments_flags_and_arguments(tmp_path):
    file = tmp_path / "Dockerfile"
    file.write_text(
        "# comment\nARG BASE=a:1.0\nFROM ${BASE} AS build\nRUN one \\\n  # inside\n  && two\n"
        'FROM $BASE\nHEALTHCHECK --interval=5s --timeout=1s CMD ["x"]\nENV A=1 \\\n    B=2\n'
    )
    dockerfile = Dockerfile.read(file, {"BASE": "b:2.0"})
    assert [(stage.base, stage.name) for stage in dockerfile.stages] == [("b:2.0", "build"), ("b:2.0", "")]
    assert dockerfile.stages[0].last("RUN").words == ["one", "&&", "two"]
    health = dockerfile.stages[1].last("HEALTHCHECK")
    assert health.flags == ("--interval=5s", "--timeout=1s")
    assert health.text == 'CMD ["x"]'
    assert dockerfile.stages[1].last("ENV").words == ["A=1", "B=2"]


def test_the_shell_form_is_refused():
    with pytest.raises(ValueError, match="CMD"):
        Instruction("CMD", (), '"python -m x"').exec_form()


def test_variables_are_expanded_as_the_builder_does():
    assert expanded("${A}/$B:$C", {"A": "1", "B": "2"}) == "1/2:"


def test_a_file_is_carried_out_below_the_root(tmp_path):
    context, root = tmp_path / "context", tmp_path / "root"
    (context / "code").mkdir(parents=True)
    (context / "code" / "a.py").write_text("a")
    root.mkdir()
    file = context / "Dockerfile"
    file.write_text(
        "FROM x:1.0 AS build\nARG WORD=plain\nWORKDIR /src\nCOPY code code\n"
        "RUN mkdir -p /opt/app && cp code/a.py /opt/app/ && echo ${WORD} > /opt/app/word\n"
        "FROM x:1.0\nCOPY --from=build /opt/app /opt/app\nENV PATH=/opt/app:$PATH CACHE=/cache\n"
        "USER 10001:10001\nWORKDIR /tmp\n"
        'HEALTHCHECK CMD ["python", "-c", "pass"]\nCMD ["cat", "/opt/app/word"]\n'
    )
    image = build(file, context, root, {"WORD": "given"})
    assert (root / "opt" / "app" / "word").read_text() == "given\n"
    assert image.command == ("cat", f"{root}/opt/app/word")
    assert image.environment["PATH"].startswith(f"{root}/opt/app:/usr")
    assert image.environment["CACHE"] == f"{root}/cache"
    assert (image.user, image.working_folder) == (10001, root / "tmp")


def test_a_failing_line_stops_the_build(tmp_path):
    file = tmp_path / "Dockerfile"
    file.write_text("FROM x:1.0\nRUN exit 3\n")
    with pytest.raises(subprocess.CalledProcessError):
        build(file, tmp_path, tmp_path, {})


def runs(dockerfile: Dockerfile) -> list[str]:
    return [instruction.text for instruction in instructions(dockerfile, "RUN")]


def instructions(dockerfile: Dockerfile, keyword: str) -> list[Instruction]:
    return [i for stage in dockerfile.stages for i in stage.instructions if i.keyword == keyword]
