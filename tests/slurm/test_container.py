"""The recipe of the container, as far as it can be checked without one: its sections, its script, its versions."""
from __future__ import annotations

import re
import subprocess
import tomllib

from jobs import ROOT

from slurm.site import CONTAINER_TOOLS, load_site

RECIPE = ROOT / "slurm" / "container.def"
SETUP = ROOT / "slurm" / "container_setup.sh"


def sections() -> dict[str, list[str]]:
    """Section -> its lines; the header under the empty name."""
    found: dict[str, list[str]] = {"": []}
    name = ""
    for line in RECIPE.read_text().splitlines():
        if line.startswith("%"):
            name = line[1:].strip()
            assert name not in found, f"section {name} is there twice"
            found[name] = []
        elif line.strip() and not line.startswith("#"):
            found[name].append(line.strip())
    return found


def test_the_recipe_has_what_apptainer_asks_for() -> None:
    found = sections()
    header = dict(line.split(": ", 1) for line in found[""])
    assert header["Bootstrap"] == "docker"
    assert re.fullmatch(r"nvcr\.io/nvidia/pytorch:\d\d\.\d\d-py3", header["From"])
    assert set(found) == {"", "files", "post", "environment", "labels"}
    source, target = found["files"][0].split()
    assert ROOT / source == SETUP and found["post"] == [f"bash {target}"]
    assert header["From"].replace("nvcr.io/", "nvcr.io#") in RECIPE.read_text()  # the line for Enroot names the same


def test_its_scripts_are_bash() -> None:
    for text in (SETUP.read_text(), *("\n".join(sections()[name]) for name in ("post", "environment"))):
        checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60)
        assert (checked.returncode, checked.stderr) == (0, "")


def test_its_versions_are_the_projects() -> None:
    """All that the project needs but torch and numpy, which are the image's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
    wanted = {line.split(";")[0].strip() for line in project if "< '3.12'" not in line}
    installed = set(re.findall(r"[a-z0-9-]+==[0-9.]+", SETUP.read_text()))
    assert {name for name in wanted if name.split("==")[0] not in ("torch", "numpy")} == installed


def test_the_example_names_a_tool_that_is_known() -> None:
    text = (ROOT / "slurm" / "site.toml").read_text()
    assert re.search(r'^#container = "(\w+)"', text, re.MULTILINE)[1] in CONTAINER_TOOLS
    assert load_site(ROOT / "slurm" / "site.toml").container == ""
