"""The manifest of docs/operate gives what the sandbox asks for, and flags that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron.fill.config import FillSettings
from megatron.fill.given.settings import SiteSettings
from megatron.fill.sandbox import remedy

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "operate"


def container() -> dict:
    manifest = yaml.safe_load((FOLDER / "jobset.yaml").read_text(encoding="utf-8"))
    (node,) = manifest["spec"]["replicatedJobs"]
    (found,) = node["template"]["spec"]["template"]["spec"]["containers"]
    return found


def test_its_security_context_is_what_the_doctor_asks_for():
    words = f"{remedy._CONTAINER} {remedy._MOUNTS} {remedy._PROC} {remedy._KERNEL}".split()
    asked = {word for word in words if "=" in word and "unconfined" in word}
    assert asked == {"seccomp=unconfined", "apparmor=unconfined", "systempaths=unconfined"}
    assert [words[at + 1] for at, word in enumerate(words) if word == "--cap-add"] == ["SYS_ADMIN"]
    assert container()["securityContext"] == {
        "capabilities": {"add": ["SYS_ADMIN"]},
        "seccompProfile": {"type": "Unconfined"},
        "appArmorProfile": {"type": "Unconfined"},
        "procMount": "Unmasked",
    }


def test_its_flags_and_settings_are_there():
    given = dict(argument[2:].split("=", 1) for argument in container()["args"] if argument.startswith("--fill-"))
    assert {name[5:].replace("-", "_") for name in given} <= set(FillSettings.flags()) | {"settings"}
    pytest.importorskip("prometheus_client", reason="needs the extra metrics")
    SiteSettings.model_validate(yaml.safe_load(given["fill-settings"]))


def test_the_images_extras_are_there():
    setup = (FOLDER.parents[1] / "setup.py").read_text(encoding="utf-8")
    recipe = (FOLDER / "Containerfile").read_text(encoding="utf-8")
    extras = recipe[recipe.index(".[") + 2 : recipe.index("]")].split(",")
    assert extras
    assert [extra for extra in extras if f'"{extra}": [' not in setup] == []
