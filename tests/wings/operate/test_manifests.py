"""The manifest of docs/operate gives what the sandbox asks for, and flags that there are."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from megatron.fill.config import FillSettings
from megatron.fill.given.settings import SiteSettings
from megatron.fill.sandbox import remedy

FOLDER = Path(__file__).resolve().parents[3] / "docs" / "operate"


def manifest() -> dict:
    return yaml.safe_load((FOLDER / "jobset.yaml").read_text(encoding="utf-8"))


def container() -> dict:
    (node,) = manifest()["spec"]["replicatedJobs"]
    (found,) = node["template"]["spec"]["template"]["spec"]["containers"]
    return found


def test_its_security_context_is_what_the_doctor_asks_for():
    words = remedy._CONTAINER.split()
    asked = [words[at + 1] for at, word in enumerate(words) if word in ("--cap-add", "--security-opt")]
    assert asked == ["NET_ADMIN", "SYS_ADMIN", "apparmor=unconfined"]
    assert container()["securityContext"] == {
        "capabilities": {"add": ["SYS_ADMIN", "NET_ADMIN"]},
        "seccompProfile": {"type": "RuntimeDefault"},
        "appArmorProfile": {"type": "Unconfined"},
    }


def unknown(given: object, kept: object, at: str = "") -> list[str]:
    """The paths of what was given and is not kept."""
    if isinstance(given, dict) and isinstance(kept, dict):
        return [path for name, its in given.items() for path in unknown(its, kept.get(name), f"{at}.{name}")]
    if isinstance(given, list) and isinstance(kept, list) and len(given) == len(kept):
        return [path for i, pair in enumerate(zip(given, kept, strict=True)) for path in unknown(*pair, f"{at}.{i}")]
    return [] if given == kept else [at]


def test_it_is_what_the_schema_of_jobset_says():
    api = pytest.importorskip("kubeflow_trainer_api.models", reason="needs the extra dev")

    def left_out(content: dict) -> list[str]:  # wrong types and values are refused, unknown fields are dropped
        return unknown(content, api.JobsetV1alpha2JobSet.from_dict(content).to_dict())

    given = manifest()
    assert left_out(given) == []
    given["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]["hostUser"] = False
    assert left_out(given) == [".spec.replicatedJobs.0.template.spec.template.spec.hostUser"]


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
