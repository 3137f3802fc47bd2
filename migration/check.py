"""`harness.py check`: what each process of a preflight measures, without training.

    mpirun -n 8 python harness.py check --profile tiny_TP2_PP1 --hosts b0,b1,b2,b3
    python harness.py check --np 8 --profile tiny_TP2_PP1 --hosts b0,b1,b2,b3

Owns the measurements and a process's life in a preflight. The main thread measures, step by step, as world rank 0 says
(check_conductor.py); what the figures mean is in check_report.py. Imports nothing heavy before everybody is there.
"""
from __future__ import annotations

import json
import os
import queue
import socket
import sys
import tempfile
import threading
import time
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from migration.check_conductor import Conductor, write_result
from migration.config import Config, apply_settings
from migration.data import Samples, open_source
from migration.errors import UserError
from migration.placement import take_gpu
from migration.plan import spread_hosts
from migration.profiles import DEFAULT_PROFILE, get_profile
from migration.versions import collect_versions
from migration.whereabouts import addresses, own_host
from migration.world import Record, World

if TYPE_CHECKING:
    from migration.communicators.makers import Maker

_SLOWDOWN = 5  # of --slow-rank, for tests
_ORPHAN_S = 30.0  # without a word from world rank 0
_LAST_SENDS_S = 1.0
_FINALIZE_S = 5.0
_OTHERS_END_S = 2.0


def parse_check(argv: list[str]) -> tuple[Config, Namespace]:
    """Raises UserError for what the user got wrong."""
    from migration.arguments import Parser
    parser = Parser(prog="harness.py check", description="Say, without training, whether these processes can run a "
                    "profile: devices, memory, versions, speed and groups of every process, and what is wrong. Exit "
                    "code 0: nothing is wrong, 1: something is, 2: it was asked wrongly.")
    parser.add_argument("--profile", default=DEFAULT_PROFILE)
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", dest="settings")
    parser.add_argument("--data", default="", help="as for a run: it is read and compared")
    parser.add_argument("--np", type=int, metavar="N", help="start N processes on this machine; else start this under "
                        "mpirun or srun")
    parser.add_argument("--hosts", default="", metavar="H,H,...", help="as for a run (default: the real hosts)")
    parser.add_argument("--run", default="", help="folder that gets the figures as result.json (default: none)")
    parser.add_argument("--size-mib", type=float, default=0.0, metavar="MIB", help="of an all-reduce (default: 4 on "
                        "CPUs, 64 on GPUs, 8 where processes share one)")
    parser.add_argument("--timeout", type=float, default=120.0, metavar="S", help="for each step; who isn't done by "
                        "then is named (default: %(default)g)")
    parser.add_argument("--slow-rank", type=int, default=-1, metavar="R", help="for tests: world rank R multiplies "
                        f"matrices {_SLOWDOWN} times slower")
    args = parser.parse_args(argv)
    settings = args.settings + ([f"data={os.path.abspath(args.data)}"] if args.data else [])
    if args.timeout <= 0:
        raise UserError(f"--timeout {args.timeout:g}: must be above 0 s")
    if args.size_mib < 0:
        raise UserError(f"--size-mib {args.size_mib:g}: must be above 0, or 0 for the device's usual one")
    args.run = os.path.abspath(args.run) if args.run else ""
    args.hosts = args.hosts.split(",") if args.hosts else []
    return apply_settings(get_profile(args.profile), settings), args


def launch_check(argv: list[str]) -> int:
    """`harness.py check --np N` outside mpirun. Returns the exit code."""
    from migration.launch import launch
    _, args = parse_check(argv)
    if args.np is None or args.np < 1:
        raise UserError("check: start it with --np N on this machine, or under mpirun or srun, with the processes of "
                        "the run to come, spares included")
    if args.hosts:
        spread_hosts(args.hosts, args.np)
    rank_argv = [a for i, a in enumerate(argv) if not a.startswith("--np") and (i == 0 or argv[i - 1] != "--np")]
    with tempfile.TemporaryDirectory(prefix="lm-check-") as folder:
        run = Path(args.run or folder)
        code = launch(args.np, ["check", *rank_argv, *([] if args.run else ["--run", folder])], run_dir=run)
        result = run / "result.json"
        return json.loads(result.read_text())["exit_code"] if result.exists() and code in (0, 1) else code


def check_process(argv: list[str]) -> int:
    """One MPI process of a preflight. Returns its exit code, or is ended by the control thread. Raises UserError, on
    every rank."""
    config, args = parse_check(argv)
    world = World()

    def hello(rank: int, size: int) -> dict[str, Any]:
        digest, problem = "", ""
        try:
            digest = Samples(open_source(config.data, config.vocab_size), config.seq_length, config.seed).source.digest
        except UserError as error:
            problem = str(error)
        return {"host": own_host(rank, size, args.hosts), "machine": socket.gethostname(),
                "versions": collect_versions(), "data": digest, "data_problem": problem}

    world.start(hello)
    problems = {h["data_problem"] for h in world.hellos}
    if len(problems) == 1 and "" not in problems:  # the same everywhere: no host is to blame
        if args.run and world.rank == 0:
            write_result(args.run, 2)
        raise UserError(problems.pop())
    return Checker(world, config, args).measure_as_told()


class Checker:
    """A process of the preflight."""

    def __init__(self, world: World, config: Config, args: Namespace) -> None:
        self._world, self._args = world, args
        self._steps: queue.SimpleQueue[Record] = queue.SimpleQueue()
        self._heard_s = time.monotonic()
        self._exit = (float("inf"), 1)  # when, and with which code
        self._maker: Maker | None = None
        self._server: Any = None  # the store that world rank 0 serves
        self._store: Any = None
        self._conductor: Conductor | None = None
        world.urgent = True  # until the round trips are measured
        if world.rank == 0:
            self._conductor = Conductor(world, config, size_bytes=int(args.size_mib * (1 << 20)),
                                        timeout_s=args.timeout, run=args.run)
        world.go(self._on_record, self._on_tick)

    # ---- the control thread

    def _on_record(self, record: Record) -> None:
        if record["kind"] in ("PONG", "DONE", "FAILED"):
            assert self._conductor is not None
            self._conductor.on_record(record)
            return
        self._heard_s = time.monotonic()
        if record["kind"] == "PING":
            self._world.send(0, {"kind": "PONG", "rank": self._world.rank})
        elif record["kind"] == "STEP":
            self._world.urgent = False
            self._steps.put(record)
        elif record["kind"] == "END":
            if record["finalize"]:
                self._end_in_order(record["code"])
            self._exit = (self._heard_s + _LAST_SENDS_S, record["code"])

    def _end_in_order(self, code: int) -> NoReturn:
        """MPI ends here, the process in the main thread: MPICH takes its leave of mpiexec when a program ends as usual,
        and without that mpiexec kills the others."""
        if self._world.rank == 0:
            watch = threading.Timer(_FINALIZE_S, _exit, (code,))  # before the one in finalize, which says 0
            watch.daemon = True
            watch.start()
        self._world.finalize(2 * _FINALIZE_S)
        self._steps.put({"do": "end", "code": code})
        threading.Event().wait()
        raise AssertionError("the main thread ends the process")

    def _on_tick(self, now_s: float) -> None:
        if self._conductor is not None:
            self._conductor.on_tick(now_s)
        elif now_s > self._heard_s + _ORPHAN_S:
            sys.stderr.write(f"harness: world rank {self._world.rank} hasn't heard world rank 0 for {_ORPHAN_S:g} s\n")
            _exit(1)
        if now_s > self._exit[0]:
            _exit(self._exit[1])

    # ---- the main thread

    def measure_as_told(self) -> int:
        """Returns the exit code if all ended well; else the control thread ends the process."""
        do: dict[str, Callable[[Record], dict[str, Any]]] = {
            "device": self._device, "matmul": self._matmul, "all_reduce": self._all_reduce}
        while (step := self._steps.get())["do"] != "end":
            try:
                answer = {"kind": "DONE", "found": do[step["do"]](step)}
            except Exception as error:  # it is what the preflight is for: named with its host in the report
                answer = {"kind": "FAILED", "message": f"{type(error).__name__}: {error}".splitlines()[0]}
            store = [self._address(), self._server.port] if self._server is not None else []
            self._world.send(0, {**answer, "rank": self._world.rank, "store": store})
        # mpiexec kills the others when one ends with an error: only world rank 0 does, and last
        if self._world.rank or not step["code"]:
            return 0
        time.sleep(_OTHERS_END_S)
        return step["code"]

    def _address(self) -> str:
        return addresses(self._world.hellos)[0]

    def _device(self, _step: Record) -> dict[str, Any]:
        """Everything that a run imports, then the device as a run takes it."""
        from migration.preload import preload
        preload()
        import torch

        from migration import check_measure, device
        from migration.communicators.makers import build_maker
        from migration.stores import start_store
        device.check_usable()
        if self._world.rank == 0:
            self._server = start_store(self._address())
        if device.is_cpu():
            self._maker = build_maker(device.current_device(), "connected", connect_in_background=False)
            return {"device": f"CPU, {len(os.sched_getaffinity(0))} cores",
                    "free_bytes": check_measure.free_host_bytes()}
        placed = take_gpu(self._world.hellos, self._world.rank)
        self._maker = build_maker(device.current_device(), "connected", connect_in_background=False)
        return {"device": f"GPU {placed.device}, {torch.cuda.get_device_name()}", "gpu": placed.device,
                "free_bytes": torch.cuda.mem_get_info()[0], "versions": check_measure.gpu_versions()}

    def _matmul(self, _step: Record) -> dict[str, Any]:
        from migration import check_measure, device
        slowdown = _SLOWDOWN if self._world.rank == self._args.slow_rank else 1
        return {"flops": check_measure.measure_matmul(device.current_device(), slowdown)}

    def _all_reduce(self, step: Record) -> dict[str, Any]:
        from migration import check_measure, device
        from migration.stores import connect_store
        if self._store is None:
            self._store = connect_store(tuple(step["store"]), self._args.timeout)
        assert self._maker is not None
        members = tuple(step["members"])
        communicator = self._maker.make(step["name"], members, members.index(self._world.rank), num_groups=1)
        communicator.prepare(self._store, self._args.timeout, self._args.timeout)
        communicator.activate()
        times_s = check_measure.measure_all_reduce(communicator.inner, device.current_device(), step["size_bytes"])
        communicator.close()
        return {"times_s": times_s}


def _exit(code: int) -> NoReturn:
    """From the control thread: the main thread may wait for a member that never comes."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
