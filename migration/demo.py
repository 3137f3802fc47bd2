"""`harness.py demo`: the whole story in one command, on a plain CPU machine.

An undisturbed run, the same run with a host moved while it trains, the table of the move, pictures, and the comparison
of the two bit for bit. Everything is done by the commands that a user would type; each is printed before it runs.
"""
from __future__ import annotations

import os
import shlex
import time
from collections.abc import Mapping
from pathlib import Path

from migration.arguments import Parser
from migration.errors import UserError
from migration.launch import run_child, serve_imports


def demo(argv: list[str]) -> int:
    """Returns 0 only if both runs completed, the moves were committed and everything is equal."""
    parser = Parser(prog="harness.py demo", description="Train twice, once moving hosts, and compare bit for bit. "
                    "Under 4 minutes on 2 cores, imports included.")
    parser.add_argument("--run", default="", help="folder for the two runs (default: runs/<time>-demo)")
    parser.add_argument("--iterations", type=int, default=60, help="default: %(default)s")
    args = parser.parse_args(argv)
    if args.iterations < 30:
        raise UserError(f"--iterations {args.iterations}: the demo's moves need at least 30")
    folder = Path(os.path.abspath(args.run or f"runs/{time.strftime('%Y%m%d-%H%M%S')}-demo"))
    still, moved = folder / "undisturbed", folder / "moved"
    first, second = args.iterations // 5, args.iterations // 2
    common = ["harness.py", "--np", "8", "--profile", "tiny_TP2_PP1", "--hosts", "b0,b1,b2,b3",
              "--set", f"iterations={args.iterations}"]
    moves = ["--vacate", f"b1@{first}", "--vacate", f"b0->b1@{second}"]
    with serve_imports() as shared:
        _step("1. Train on hosts b0, b1, b2, two processes each; b3 is the spare host", [*common, "--run", str(still)],
              shared)
        _step(f"2. The same, but b1 moves to b3 at iteration {first}, then b0 (with world rank 0) to b1 at {second}",
              [*common, *moves, "--run", str(moved)], shared)
    _step("3. The move, as a table and as pictures", ["-m", "analysis.report", str(moved)])
    _step("4. Was anything lost?", ["-m", "analysis.compare", str(still), str(moved)])
    return 0


def _step(title: str, arguments: list[str], shared: Mapping[str, str] | None = None) -> None:
    print(f"\n=== {title}\n$ python {shlex.join(arguments)}", flush=True)
    code = run_child(arguments, environment={**os.environ, **(shared or {})}).returncode
    if code:
        raise UserError(f"the demo stopped: {arguments[0]} ended with exit code {code}, see above")
