"""What hatchling runs when it builds the wheel: adds the SBOM (PEP 770), in CycloneDX 1.6.

The wheel bundles nothing of others. Its SBOM lists what an install brings along: the dependencies that pyproject.toml
declares, those of the extras for users among them, each with the version that constraints.txt has proven to work. What
these depend on is not listed, and the SBOM says that it is incomplete there. It follows from the two files alone: no
time and no random number is in it, so that every build has the same bytes. Only the standard library is used, which is
all that a build has.
"""

from __future__ import annotations

import json
import re
import tempfile
import tomllib
import uuid
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

NAME = "ckpttool.cdx.json"
EXTRAS = ("torch", "remote", "ray")
"""Those for users; the others are for work on ckpttool."""
_REQUIREMENT = re.compile(r"([A-Za-z0-9._-]+)(?:\[[^]]*])?\s*(.*)")


class BuildHook(BuildHookInterface):  # type: ignore[type-arg]  # hatchling does not say of what it is generic
    """See the file's own text."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Before the wheel is put together."""
        del version
        metadata = self.metadata
        self._folder = tempfile.TemporaryDirectory()
        path = Path(self._folder.name) / NAME
        path.write_text(sbom_text(Path(self.root), metadata.version), encoding="utf-8")
        build_data["sbom_files"].append(str(path))

    def finalize(self, version: str, build_data: dict[str, Any], artifact_path: str) -> None:
        """After it."""
        del version, build_data, artifact_path
        self._folder.cleanup()


def sbom_text(root: Path, version: str) -> str:
    """The SBOM of this version, as JSON. Raises ValueError for a dependency that constraints.txt does not pin."""
    project = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    pins = pinned((root / "constraints.txt").read_text(encoding="utf-8"))
    wanted = [(text, "") for text in project["dependencies"]]
    wanted += [(text, extra) for extra in EXTRAS for text in project["optional-dependencies"][extra]]
    components = [component(text, extra, pins) for text, extra in wanted]
    this = f"pkg:pypi/{project['name']}@{version}"
    bom = {
        "$schema": "http://cyclonedx.org/schema/bom-1.6.schema.json",
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "lifecycles": [{"phase": "build"}],
            "component": {
                "type": "application",
                "bom-ref": this,
                "name": project["name"],
                "version": version,
                "description": project["description"],
                "licenses": [{"license": {"id": project["license"]}}],
                "purl": this,
            },
        },
        "components": components,
        "dependencies": [
            {"ref": this, "dependsOn": [c["bom-ref"] for c in components]},
            *({"ref": c["bom-ref"]} for c in components),
        ],
        "compositions": [{"aggregate": "incomplete", "dependencies": [c["bom-ref"] for c in components]}],
    }
    bom["serialNumber"] = f"urn:uuid:{uuid.uuid5(uuid.NAMESPACE_URL, json.dumps(bom))}"
    return json.dumps(bom, indent=2) + "\n"


def normal(name: str) -> str:
    """A project's name as indexes compare it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def pinned(text: str) -> dict[str, str]:
    """Project -> version."""
    lines = (line.partition("#")[0].partition(";")[0].strip() for line in text.splitlines())
    return {normal(name): version for name, found, version in (line.partition("==") for line in lines) if found}


def component(text: str, extra: str, pins: dict[str, str]) -> dict[str, Any]:
    """A dependency, by what pyproject.toml says of it. Raises ValueError for one without a pin."""
    found = _REQUIREMENT.fullmatch(text)
    name = normal(found[1]) if found else ""
    if name not in pins:
        raise ValueError(f"constraints.txt has no pin for {text}")
    purl = f"pkg:pypi/{name}@{pins[name]}"
    properties = [{"name": "ckpttool:requirement", "value": text}]
    if extra:
        properties.append({"name": "ckpttool:extra", "value": extra})
    return {
        "type": "library",
        "bom-ref": purl,
        "name": name,
        "version": pins[name],
        "scope": "optional" if extra else "required",
        "purl": purl,
        "properties": properties,
    }
