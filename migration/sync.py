"""`harness.py sync --to DIR`: this code, as committed, into a folder on each node, and the proof that it is there.

Inside a Slurm allocation the archive goes out by `sbcast` and is unpacked on each node by `srun`; without one it is
unpacked here, which is enough for one machine or a shared file system, and hosts named by --hosts are asked over ssh.
What runs on a node is unpack.py. Mixed versions are refused at a run's start too (versions.py).
"""
from __future__ import annotations

import hashlib
import json
import os
import shlex
import shutil
import socket
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from migration import unpack
from migration.arguments import Parser
from migration.errors import UserError
from migration.versions import CODE_ROOT

_NODE_S = 120.0  # for one node
_COPY_S = 600.0  # for sbcast to all of them
_GIT_S = 60.0
_MAX_NAMED = 10  # files of a dirty tree


@dataclass(frozen=True, slots=True, kw_only=True)
class Goods:
    """What goes to a node. `digest` is what the code must have there (versions.py), `identity` the archive's own."""

    archive: Path
    folder: str
    identity: str
    digest: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What came of one node. `problem` is empty where the right code is there."""

    node: str
    done: str
    problem: str


def sync(argv: list[str]) -> int:
    """The command. Exit code 0 only if every node has the code."""
    parser = Parser(prog="harness.py sync", description="Bring this code, as committed, to a folder on each node, and "
                    "check it there: on every node of the Slurm allocation, or on this machine and over ssh.")
    parser.add_argument("--to", required=True, metavar="DIR", help="absolute path of the folder, the same everywhere; "
                        "what an earlier sync put there is replaced")
    parser.add_argument("--hosts", default="", metavar="H,H,...", help="only these nodes of the allocation; without "
                        "one: hosts that see the folder, checked over ssh (default: all nodes; this machine)")
    parser.add_argument("--dirty", action="store_true", help="the working tree as it is, changes and new files too")
    args = parser.parse_args(argv)
    if not os.path.isabs(args.to):
        raise UserError(f"--to {args.to}: must be an absolute path, since it is one on every node")
    args.to = os.path.normpath(args.to)  # the archive lies beside it, so its name has to be the last part
    hosts = [host for host in args.hosts.split(",") if host]
    in_slurm = "SLURM_JOB_ID" in os.environ
    if hosts and not in_slurm and shutil.which("ssh") is None:
        raise UserError(f"--hosts {args.hosts}: outside a Slurm allocation they are asked over ssh, which isn't "
                        "installed here; install it, or leave --hosts out and sync on each host")
    with tempfile.TemporaryDirectory(prefix="lm-sync-") as scratch:
        archive = Path(scratch) / "code.tar"
        commit = pack(CODE_ROOT, archive, dirty=args.dirty)
        goods = Goods(archive=archive, folder=args.to, identity=hashlib.sha256(archive.read_bytes()).hexdigest(),
                      digest=_digest_of(archive, Path(scratch) / "code"))
        answers = (_spread_in_slurm if in_slurm else _spread_without)(goods, hosts)
    width = max(len(answer.node) for answer in answers)
    for answer in answers:
        print(f"{answer.node:{width}s}  {answer.problem or f'{answer.done}, verified'}")
    wrong = [answer for answer in answers if answer.problem]
    print(f"{commit} (code {goods.digest[:12]}): {len(answers) - len(wrong)} of {len(answers)} nodes have it in "
          f"{args.to}")
    return 1 if wrong else 0


# ---- what is sent

def pack(root: Path, archive: Path, *, dirty: bool) -> str:
    """Write the tree of HEAD, or with `dirty` the working tree, to `archive`; returns what it is, in words.

    Raises UserError for a folder without git, or a changed tree without `dirty`.
    """
    if shutil.which("git") is None or not (root / ".git").exists():
        raise UserError(f"sync: {root} is no git checkout, so there is no commit to bring to the nodes")
    changed = [line[3:] for line in _git(root, "status", "--porcelain", "--untracked-files=all").splitlines()]
    if changed and not dirty:
        more = f" and {len(changed) - _MAX_NAMED} more" if len(changed) > _MAX_NAMED else ""
        raise UserError(f"sync: not committed: {', '.join(changed[:_MAX_NAMED])}{more}; commit, or say --dirty to send "
                        "the working tree as it is")
    commit = f"commit {_git(root, 'rev-parse', '--short', 'HEAD').strip()}"
    if not changed:
        _git(root, "archive", "--format=tar", f"--output={archive}", "HEAD")
        return commit
    names = _git(root, "ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")
    with tarfile.open(archive, "w") as tar:
        for name in sorted({name for name in names if name and (root / name).exists()}):
            tar.add(root / name, arcname=name)
    return f"{commit} with {len(changed)} changed files"


def _git(root: Path, *arguments: str) -> str:
    done = subprocess.run(["git", "-C", str(root), *arguments], stdin=subprocess.DEVNULL, capture_output=True,
                          text=True, timeout=_GIT_S)
    if done.returncode:
        raise UserError(f"sync: git {arguments[0]} in {root}: {done.stderr.strip()}")
    return done.stdout


def _digest_of(archive: Path, folder: Path) -> str:
    """The digest that every node must find: of the archive itself, for the tree may hold ignored files."""
    unpack.extract(archive, folder)
    return unpack.digest_in(folder)


# ---- to the nodes

def _spread_in_slurm(goods: Goods, hosts: Sequence[str]) -> list[Answer]:
    listed = _run("scontrol", "show", "hostnames", os.environ.get("SLURM_JOB_NODELIST", "")).split()
    if unknown := [host for host in hosts if host not in listed]:
        raise UserError(f"--hosts {','.join(unknown)}: not in this allocation, whose nodes are {', '.join(listed)}")
    there = f"{goods.folder}.{os.environ['SLURM_JOB_ID']}.tar"
    _run("srun", "--overlap", f"--nodes={len(listed)}", f"--ntasks={len(listed)}", "--ntasks-per-node=1", "mkdir", "-p",
         str(Path(goods.folder).parent), timeout_s=_NODE_S)
    _run("sbcast", "--force", str(goods.archive), there, timeout_s=_COPY_S)
    nodes = list(hosts) or listed
    # one after another: where the nodes share the folder, all but the first find it done
    answers = [_ask(node, _on_node(node), there, goods) for node in nodes]
    for node in listed:
        _run(*_on_node(node)(["rm", "-f", there]), timeout_s=_NODE_S)
    return answers


def _on_node(node: str) -> Callable[[Sequence[str]], list[str]]:
    return lambda command: ["srun", "--overlap", "--nodes=1", "--ntasks=1", f"--nodelist={node}", "--quiet", *command]


def _over_ssh(host: str) -> Callable[[Sequence[str]], list[str]]:
    return lambda command: ["ssh", "-o", "BatchMode=yes", "-o", "ConnectTimeout=10", host, shlex.join(command)]


def _spread_without(goods: Goods, hosts: Sequence[str]) -> list[Answer]:
    here = _ask(socket.gethostname(), lambda command: list(command), str(goods.archive), goods)
    # the archive is on this machine only: a host that doesn't see the folder says that nothing is there
    return [here, *(_ask(host, _over_ssh(host), os.path.join(goods.folder, "no-archive.tar"), goods) for host in hosts)]


def _ask(node: str, way: Callable[[Sequence[str]], list[str]], archive: str, goods: Goods) -> Answer:
    """Have a node unpack the archive, which lies at `archive` there, and look at what is in the folder then."""
    text = Path(unpack.__file__).read_text()
    command = way([sys.executable, "-c", text, archive, goods.folder, goods.identity, goods.digest])
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_NODE_S)
        found = json.loads(done.stdout.strip().rpartition("\n")[2])
    except subprocess.TimeoutExpired:
        return Answer(node=node, done="", problem=f"no answer in {_NODE_S:.0f} s")
    except ValueError:
        said = (done.stderr.strip() or f"{command[0]} ended with {done.returncode}").splitlines()[-1]
        return Answer(node=node, done="", problem=f"can't be asked: {said}")
    problem = found["problem"]
    if not problem and found["digest"] != goods.digest:
        problem = f"other code is there: {found['digest'][:12]}, not {goods.digest[:12]}"
    return Answer(node=node, done=found["done"], problem=problem)


def _run(*command: str, timeout_s: float = _GIT_S) -> str:
    """Raises UserError if it fails: without it no node gets anything."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=timeout_s)
    except FileNotFoundError:
        raise UserError(f"sync: {command[0]} isn't installed here, though this is a Slurm job") from None
    except subprocess.TimeoutExpired:
        raise UserError(f"sync: {shlex.join(command)} took longer than {timeout_s:.0f} s") from None
    if done.returncode:
        raise UserError(f"sync: {shlex.join(command)} ended with {done.returncode}: {done.stderr.strip()}")
    return done.stdout
