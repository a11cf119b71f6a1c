"""The package as others get it: an sdist, a wheel made of it, and that installed where no checkout is.

The environment is fresh but for the dependencies, which it borrows: from the folder of the one that runs the tests, by
its path alone, so that an editable install there is not seen.
"""

from __future__ import annotations

import email
import json
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import venv
import zipfile
from email.message import Message
from importlib.metadata import version
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
NOT_SHIPPED = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "runs")
BUILD = "from setuptools import build_meta; import sys; print(getattr(build_meta, sys.argv[1])(sys.argv[2]))"


def build(what: str, source: Path, into: Path) -> Path:
    done = subprocess.run(
        [sys.executable, "-c", BUILD, what, str(into)], cwd=source, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return into / done.stdout.split()[-1]


@pytest.fixture(scope="module")
def sdist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The unpacked sdist."""
    folder = tmp_path_factory.mktemp("sdist")
    shutil.copytree(ROOT, folder / "checkout", ignore=NOT_SHIPPED)
    with tarfile.open(build("build_sdist", folder / "checkout", folder)) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"pipefill-{version('pipefill')}"


@pytest.fixture(scope="module")
def wheel(sdist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build("build_wheel", sdist, tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def files(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


@pytest.fixture(scope="module")
def metadata(files: dict[str, bytes]) -> Message:
    (name,) = (name for name in files if name.endswith(".dist-info/METADATA"))
    return email.message_from_bytes(files[name])


@pytest.fixture(scope="module")
def environment(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The ``bin`` of an environment with the wheel in it."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    paths = sysconfig.get_paths(vars={"base": str(folder), "platbase": str(folder)})
    Path(paths["purelib"], "borrowed.pth").write_text(sysconfig.get_paths()["purelib"] + "\n", encoding="utf-8")
    pip = [sys.executable, "-m", "pip", "--python", str(folder), "install", "--quiet", "--no-deps", "--no-index"]
    # Else pip takes the checkout's editable install, which the borrowed folder has, for the one to replace.
    done = subprocess.run([*pip, "--ignore-installed", str(wheel)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "bin"


def run(environment: Path, *command: str) -> str:
    """Run a program of the environment in an empty folder; what it prints."""
    clean = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PIPEFILL_"))}
    folder = environment.parent / "elsewhere"
    folder.mkdir(exist_ok=True)
    done = subprocess.run(
        [str(environment / command[0]), *command[1:]],
        cwd=folder,
        env=clean,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_the_sdist_has_what_the_checkout_has(sdist):
    """So that its tests and its scripts run."""
    tracked = {
        str(path.relative_to(ROOT))
        for folder in ("docs", "examples", "megatron", "pipefill_patches", "scripts", "tests")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    tracked |= {path.name for path in ROOT.glob("*") if path.is_file() and not path.name.startswith(".")}
    shipped = {str(path.relative_to(sdist)) for path in sdist.rglob("*") if path.is_file()}
    assert tracked - shipped == set()
    # What is there besides is setuptools' own.
    assert {path for path in shipped - tracked if ".egg-info" not in path} == {"PKG-INFO", "setup.cfg"}


def test_the_wheel_has_all_files_of_the_packages_and_nothing_else(files):
    modules = {
        str(path.relative_to(ROOT))
        for folder in ("megatron", "pipefill_patches")
        for path in (ROOT / folder).rglob("*")
        if path.is_file() and path.suffix not in (".pyc", ".pyo")
    }
    found = {name for name in files if ".dist-info/" not in name}
    assert found == modules
    assert "megatron/__init__.py" not in found  # it would hide pip's megatron.core


def test_the_licence_comes_along(files, metadata):
    folder = next(name for name in files if name.endswith("/METADATA")).removesuffix("METADATA")
    assert b"Apache License" in files[f"{folder}licenses/LICENSE"]
    assert b"NVIDIA CORPORATION" in files[f"{folder}licenses/NOTICE"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert metadata.get_all("License-File") == ["LICENSE", "NOTICE"]
    assert "NOTICE" in (ROOT / "pretrain_gpt.py").read_text(encoding="utf-8").split('"""')[1]


def pythons(metadata: Message) -> tuple[int, int]:
    """The minor versions of Python 3 that it is for: the oldest, and the first that is too new."""
    limits = dict(re.findall(r"(>=|<)3\.(\d+)", metadata["Requires-Python"]))
    return int(limits[">="]), int(limits["<"])


def test_the_metadata_say_what_it_is(metadata):
    assert metadata["Name"] == "pipefill"
    assert metadata.get_payload().lstrip().startswith("# PipeFill")
    assert metadata["Description-Content-Type"] == "text/markdown"
    assert metadata["Keywords"]
    oldest, beyond = pythons(metadata)
    assert [name for name in metadata.get_all("Classifier") if " :: Python :: 3." in name] == [
        f"Programming Language :: Python :: 3.{minor}" for minor in range(oldest, beyond)
    ]


def test_the_set_up_script_takes_the_pythons_that_the_metadata_allow(metadata):
    oldest, beyond = pythons(metadata)
    script = (ROOT / "scripts" / "setup.sh").read_text(encoding="utf-8")
    assert f"(3, {oldest}) <= sys.version_info < (3, {beyond})" in script
    assert set(re.findall(r"python3\.(\d\d)", script)) == {str(minor) for minor in range(oldest, beyond)}


def test_megatron_core_is_asked_for_from_the_oldest_tested_version_on(metadata):
    from pipefill_patches.versions import TESTED

    oldest, _ = TESTED.split(",")
    assert f"megatron-core[training]{oldest}" in metadata.get_all("Requires-Dist")


def test_the_page_on_installing_names_every_extra(metadata):
    page = (ROOT / "docs" / "install.md").read_text(encoding="utf-8")
    assert set(re.findall(r"`\[(\w+)\]`", page)) == set(metadata.get_all("Provides-Extra"))


def test_the_namespace_has_both_and_the_entry_point_works(environment):
    code = "from importlib.util import find_spec; print(*(find_spec(f'megatron.{name}').origin for name in NAMES))"
    found = run(environment, "python", "-c", code.replace("NAMES", "('fill', 'core', 'training')")).split()
    assert [Path(path).is_relative_to(environment.parent) for path in found] == [True, False, False]
    assert run(environment, "pipefill", "--version").splitlines()[:2] == [
        f"pipefill {version('pipefill')}",
        f"megatron-core {version('megatron-core')}",
    ]
    doctor = json.loads(run(environment, "pipefill", "doctor", "--json"))
    assert {layer["name"] for layer in doctor["sandbox"]} >= {"processes", "files"}


def test_a_store_is_made_by_the_wheel(environment):
    folder = environment.parent / "elsewhere"
    folder.mkdir(exist_ok=True)
    (folder / "jobs.yaml").write_text("jobs: [{name: one, command: 'true'}]", encoding="utf-8")
    run(environment, "pipefill", "submit", "jobs.yaml", "--store", "jobs.db")
    listed = json.loads(run(environment, "pipefill", "list", "--store", "jobs.db", "--json"))
    assert [job["name"] for job in listed] == ["one"]


def test_all_that_it_needs_is_there(environment):
    """What pip says of the environment, as far as it is about PipeFill."""
    pip = [sys.executable, "-m", "pip", "--python", str(environment.parent), "check"]
    done = subprocess.run(pip, capture_output=True, text=True, check=False)
    assert [line for line in done.stdout.splitlines() if line.startswith("pipefill ")] == []


def test_the_shell_completes_commands(environment, monkeypatch):
    monkeypatch.setenv("_PIPEFILL_COMPLETE", "complete_bash")
    monkeypatch.setenv("COMP_WORDS", "pipefill d")
    monkeypatch.setenv("COMP_CWORD", "1")
    assert run(environment, "pipefill").split() == ["drain", "doctor"]
    monkeypatch.delenv("_PIPEFILL_COMPLETE")
    assert "_PIPEFILL_COMPLETE" in run(environment, "pipefill", "--show-completion", "bash")
