"""What a site sets: partition, GPUs of a node, modules, container and so on, from one small TOML (example: site.toml).

Owns the keys and their meaning. Pure but for reading the file. Must not know what is trained.
"""
from __future__ import annotations

import dataclasses
import difflib
import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

from migration.errors import UserError

CONTAINER_TOOLS = ("apptainer", "pyxis")
_OPTION_VALUE = re.compile(r"[^\s\"'\\#$`;&|<>()]+")  # what an #SBATCH line takes as it is
_TIME = re.compile(r"(?:(\d+)-)?(\d+)(?::(\d+))?(?::(\d+))?")
_VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """Empty and 0 mean: say nothing of it, and Slurm's own default holds."""

    partition: str = ""
    account: str = ""
    qos: str = ""
    time: str = ""  # as sbatch takes it, such as 24:00:00
    warning_s: int = 600  # so long before the end the job is told to checkpoint and requeue
    max_requeues: int = 20  # of one job, so that what fails at once after each start comes to an end
    tasks_per_node: int = 0  # 0: one a GPU, or where nothing is said of those, as the profile's hosts have them
    gpus_per_node: int = 0
    cpus_per_task: int = 0
    sbatch: tuple[str, ...] = ()  # further options of the job, such as --constraint=h200
    srun: tuple[str, ...] = ()  # further options of its step
    modules: tuple[str, ...] = ()  # loaded before anything is started
    setup: tuple[str, ...] = ()  # commands after that, such as source .venv/bin/activate; each must succeed
    container: str = ""  # apptainer or pyxis
    container_image: str = ""
    container_mounts: tuple[str, ...] = ()  # FOLDER or FOLDER:INSIDE; the one submitted from is always there
    runs: str = "runs"  # run folders lie here, where every node sees them
    checkpoints: str = ""  # and a folder of checkpoints for each job here; empty: none, and so no requeue
    environment: tuple[tuple[str, str], ...] = ()  # the table [environment]


def load_site(path: Path) -> Site:
    """Raises UserError, in one line, for a file that can't be read, an unknown key, or a value of the wrong kind."""
    try:
        values = tomllib.loads(path.read_text())
    except OSError as error:
        raise UserError(f"--site {path}: can't be read: {error.strerror}") from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UserError(f"--site {path}: is no TOML: {error}") from None
    try:
        return build_site(values)
    except UserError as error:
        raise UserError(f"--site {path}: {error}") from None


def build_site(values: dict[str, Any]) -> Site:
    """A Site from the values of a TOML. Raises UserError for what doesn't fit; the message names the key."""
    known = get_type_hints(Site)
    for key in values:
        if key not in known:
            nearest = difflib.get_close_matches(key, known, n=1)
            raise UserError(f"{key}: there is no such key; " + (f"did you mean {nearest[0]}? " if nearest else "")
                            + f"keys are: {', '.join(known)}")
    site = Site(**{key: _convert(key, value) for key, value in values.items()})
    _check(site)
    return site


def _convert(key: str, value: Any) -> Any:
    default = next(field.default for field in dataclasses.fields(Site) if field.name == key)
    if key == "environment":
        if not isinstance(value, dict) or not all(isinstance(v, str) for v in value.values()):
            raise UserError(f"{key}: must be a table of strings, such as NCCL_SOCKET_IFNAME = \"ib0\"")
        return tuple(value.items())
    if isinstance(default, tuple):
        if not isinstance(value, list) or not all(isinstance(v, str) for v in value):
            raise UserError(f"{key}: must be a list of strings, not {value!r}")
        return tuple(value)
    if type(value) is not type(default):
        raise UserError(f"{key}: must be a {'number' if isinstance(default, int) else 'string'}, not {value!r}")
    return value


def _seconds(time: str) -> int:
    """Seconds of a limit as sbatch takes it: M, M:S, H:M:S, D-H, D-H:M or D-H:M:S. 0 for none and for UNLIMITED."""
    if not time or time.upper() in ("UNLIMITED", "INFINITE"):
        return 0
    match = _TIME.fullmatch(time)
    if not match:
        raise UserError(f"time: {time!r} is no time limit; write it as 24:00:00 or 1-12:00:00")
    days, *rest = match.groups()
    numbers = [int(number) for number in rest if number is not None]
    if days is not None:
        hours, minutes, seconds = (*numbers, 0, 0)[:3]
    elif len(numbers) == 3:
        hours, minutes, seconds = numbers
    else:
        hours, (minutes, seconds) = 0, (*numbers, 0)[:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + seconds


def _check(site: Site) -> None:
    for key in ("partition", "account", "qos", "time"):
        value = getattr(site, key)
        if value and not _OPTION_VALUE.fullmatch(value):
            raise UserError(f"{key}: {value!r} has characters that an #SBATCH line can't carry")
    limit_s = _seconds(site.time)
    if limit_s and limit_s <= site.warning_s:
        raise UserError(f"time: {site.time} is over before the job could do anything: it is told to end warning_s = "
                        f"{site.warning_s} s ahead")
    for option in site.sbatch:
        if not option.startswith("-") or not _OPTION_VALUE.fullmatch(option):
            raise UserError(f"sbatch: {option!r} must be one option, such as \"--constraint=h200\"")
    for key in ("warning_s", "max_requeues", "tasks_per_node", "gpus_per_node", "cpus_per_task"):
        if getattr(site, key) < 0:
            raise UserError(f"{key}: must not be negative, is {getattr(site, key)}")
    if 0 < site.gpus_per_node < site.tasks_per_node:
        raise UserError(f"tasks_per_node: {site.tasks_per_node} processes would share the GPUs of a node, of which "
                        f"there are gpus_per_node = {site.gpus_per_node}; take at most so many, or leave it out")
    for name, _ in site.environment:
        if not _VARIABLE.fullmatch(name):
            raise UserError(f"environment: {name!r} can't be the name of a variable")
    if site.container and site.container not in CONTAINER_TOOLS:
        raise UserError(f"container: {site.container!r}; must be one of {', '.join(CONTAINER_TOOLS)}")
    for value in (site.container_image, *site.container_mounts):
        if value and not _OPTION_VALUE.fullmatch(value):
            raise UserError(f"container_image, container_mounts: {value!r} has characters that can't be passed on")
    if bool(site.container) != bool(site.container_image):
        raise UserError("container and container_image: give both or none")
    for key in ("runs", "checkpoints"):
        value = getattr(site, key)
        if "$" in value or value.startswith("~"):
            raise UserError(f"{key}: {value!r} would be a folder of this very name, since the script expands neither $ "
                            "nor ~; write the path out")
    if not site.runs:
        raise UserError("runs: must name a folder that every node sees")
