"""The Live Migrator's harness: train a Megatron-Core GPT over MPI processes and move hosts while it trains.

    mpirun -n 8 python harness.py --profile tiny_TP2_PP1 --hosts b0,b1,b2,b3 --vacate b1@12
    python harness.py --np 8 --profile tiny_TP2_PP1 --hosts b0,b1,b2,b3 --vacate b1@12

This file: the roles of a process and the training loop. Arguments are in migration/arguments.py, the commands beside
a run (request, status, kill, ...) in migration/commands.py, everything else where migration/__init__.py says.
"""
from __future__ import annotations

import os
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

from migration.errors import UserError  # nothing else here: a process that a fork server's copy stands for is light
from migration.forkserver import ADDRESS_VARIABLE, forked_here, hand_over

if TYPE_CHECKING:
    from migration.config import Config
    from migration.job import Job
    from migration.process import Process
    from migration.world import World

RANK_VARIABLES = ("PMI_RANK", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "SLURM_PROCID")
_RANK_0_FIRST_S, _OTHERS_FIRST_S = 5.0, 3.0  # when they leave for a user's error


def train(job: Job, process: Process) -> bool:
    """THE LOOP. Returns False when the slot has been handed over, True when training is done."""
    clock, member = process.timeline.clock, process.member
    while job.iteration < process.num_iterations:
        arrived_s = start_s = clock()
        saves = False
        if job.micro_losses is None:  # else this process has just taken the slot over, inside this iteration
            if not member.at_boundary(job):
                return False
            if member.ends_before(job.iteration):
                break
            if saves := process.is_checkpoint_due(job):
                process.save_checkpoint(job)
            start_s = clock()
            job.compute_gradients()
        disturbed = saves or member.part is not None
        if not member.before_step(job):
            return False
        iteration, samples, consumed = job.iteration, job.cursor.samples_digest(), job.cursor.consumed_samples
        result = job.take_step()
        member.check()
        end_s = clock()
        disturbed = disturbed or member.part is not None
        own_s = process.own_s(end_s - start_s)
        process.timeline.add_iteration(
            iteration=iteration, slot=job.slot, generation=member.generation, start_s=start_s, time_s=end_s - start_s,
            boundary_s=start_s - arrived_s, loss=result.loss, grad_norm=result.grad_norm, skipped=result.skipped,
            consumed_samples=consumed, samples=samples, num_groups=job.groups.num_communicators,
            device_bytes=process.device_bytes(), disturbed=disturbed, own_s=own_s)
        process.report_progress(job, result, end_s - start_s, None if disturbed else own_s)
        if iteration == process.start_iteration:
            process.finish_start(job)
    return True


def live(process: Process, config: Config) -> None:
    """A process's life, from one recovery to the next. The control thread ends it."""
    while True:
        try:
            if process.member.is_recovering:
                process.begin_anew()
            serve(process, config)
        except BaseException as error:  # the controller ends them all, or has every slot built anew
            import traceback
            process.fail(error, traceback.format_exc())


def serve(process: Process, config: Config) -> None:
    """With a slot it trains, without one it stands by. Raises Recovering, or whatever an aborted operation gives."""
    from migration.job import close_job
    from migration.standby import wait_for_slot
    job = process.start_slot() if process.member.slot is not None else None
    while True:
        if job is None:
            job = wait_for_slot(process.member, config, process.samples)
        process.hold_slot(job)
        if train(job, process):
            process.finish(job)
        process.member.wait_retired()
        job = None
        close_job(process.groups)


def run_process(argv: list[str]) -> int:
    """One MPI process of a run. Ends by os._exit from the control thread, or returns 2 for a user's error."""
    from migration.arguments import parse_run
    from migration.timeline import Clock
    from migration.world import World
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # until this process knows its host
    clock, world = Clock(), World()
    marks = {"start": clock()}
    try:
        if argv[:1] == ["check"]:
            from migration.check import check_process
            return check_process(argv[1:])
        config, options = parse_run(argv)
        from migration.bringup import bring_up
        started = bring_up(world, config, options)
    except UserError as error:
        return refuse(error, world)
    except TimeoutError as error:  # perhaps rank 0 isn't there: each says it
        sys.stderr.write(f"harness: rank {own_rank()}: {error}\n")
        return end(1)
    marks["mpi"] = clock()
    try:
        from migration.footprint import write_footprint
        write_footprint(started.options.run, world.rank, world.hellos[world.rank]["host"])
        from migration.preload import preload
        preload()
        from migration import device
        device.check_usable()
        from migration.process import Process
        marks["import"] = clock()
        process = Process(config, started, world, clock, print_report)
    except UserError as error:  # of this process's machine, which may not be world rank 0's
        if world.rank > 0:
            sys.stderr.write(f"harness: world rank {world.rank} on {started.roster.hosts[world.rank]}: {error}\n")
        return refuse(error, world)
    except BaseException as error:  # nobody can be told yet: MPI ends them all
        sys.stderr.write(f"harness: world rank {world.rank} can't start: {type(error).__name__}: {error}\n")
        sys.stderr.flush()
        world.abort()
        raise
    process.add_marks(marks)
    live(process, config)
    raise AssertionError("a process ends from its control thread")


def print_report(run: str) -> None:
    """At the end of a run: the table of the moves and where the files are."""
    from analysis.report import report_text
    sys.stdout.write(report_text(Path(run)) + "\n")
    sys.stdout.flush()


def own_rank() -> int:
    """This process's rank as the launcher says it, 0 without one: to print an error once that every rank finds."""
    return next((int(os.environ[name]) for name in RANK_VARIABLES if name in os.environ), 0)


def refuse(error: UserError, world: World | None = None) -> int:
    """End with a user's error, which every rank finds and rank 0 tells. `world`: MPI's, if it may be up.

    mpirun kills the others once one process ends with an error code, which --np's doesn't. So before MPI is up rank 0
    leaves first; afterwards the others leave in order, with code 0, and rank 0 last.
    """
    from migration.launch import tell_refused
    from migration.mpich import leave_hydra
    from migration.zygote import RUN_VARIABLE
    is_up, killed = world is not None and world.rank >= 0, RUN_VARIABLE not in os.environ
    if own_rank() == 0:
        sys.stderr.write(f"harness: {error}\n")
        tell_refused()
    if is_up:
        leave_hydra()
    if killed and is_up is (own_rank() == 0) and any(name in os.environ for name in RANK_VARIABLES):
        time.sleep(_OTHERS_FIRST_S if is_up else _RANK_0_FIRST_S)
    return end(0 if is_up and own_rank() > 0 else 2)


def end(code: int) -> int:
    """End without MPI_Finalize, which other threads' MPI would wait in."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def main(argv: list[str]) -> int:
    """Dispatch: a command, an experiment, the launcher (--np), or one process under mpirun."""
    if any(argument.partition("=")[0] == "--experiment" for argument in argv):
        from analysis.experiments import main as run_experiment
        return run_experiment(argv)
    launchers = [name for name in RANK_VARIABLES if name in os.environ]
    starts_itself = any(argument == "--np" or argument.startswith("--np=") for argument in argv)
    # the shell of a batch job has a rank of Slurm's too, and --np may be typed there
    under_launcher = bool(launchers) and not (starts_itself and launchers == ["SLURM_PROCID"])
    if under_launcher and own_rank() > 0 and not {"-h", "--help", "--list-profiles"}.isdisjoint(argv):
        return 0  # rank 0 shows it
    is_run = not argv or argv[0].startswith("-")
    if under_launcher and (is_run or argv[0] == "check") and "--list-profiles" not in argv:
        if ADDRESS_VARIABLE in os.environ and not forked_here():
            hand_over(os.environ[ADDRESS_VARIABLE], argv)
        return run_process(argv)
    from migration import commands
    if not is_run and argv[0] in commands.COMMANDS:
        return commands.run(argv)
    if not is_run:
        raise UserError(f"{argv[0]}: there is no such command; commands are {', '.join(commands.COMMANDS)}; a run "
                        "takes options only (see python harness.py --help)")
    if "--list-profiles" in argv:
        return commands.list_profiles(argv)
    return commands.launch_run(argv)


if __name__ == "__main__":
    try:
        sys.exit(main(sys.argv[1:]))
    except UserError as error:
        sys.exit(refuse(error))
    except KeyboardInterrupt:
        if own_rank() == 0:
            sys.stderr.write(("\n" if sys.stderr.isatty() else "") + "harness: interrupted\n")  # after the ^C there
        sys.exit(130)
