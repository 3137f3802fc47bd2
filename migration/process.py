"""One process of a run once MPI is up: wires world, groups, log, member and perhaps the controller together.

harness.py owns the training loop; this file owns what every process has, whatever its role. What it does for a slot is
slot_work.py's.
"""
from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch

from migration import device, digest, job
from migration.acceptance import NONE
from migration.bringup import Started
from migration.check_measure import measure_figures
from migration.communicators.makers import Maker, build_maker
from migration.communicators.nccl_policy import parse_pins
from migration.config import Config
from migration.controller import Controller
from migration.errors import UserError
from migration.groups import Groups
from migration.member import Member
from migration.own_time import build_own_time
from migration.pacing import choose_share
from migration.placement import take_gpu
from migration.role import Role
from migration.roster import Roster
from migration.slot_recording import SlotRecording
from migration.slot_work import SlotWork
from migration.timeline import Clock, Timeline
from migration.whereabouts import addresses
from migration.world import World

_ANSWER_S = 30.0  # for the controller to look who else is lost, and to decide


class Process(SlotWork):
    """What every process of a run has: its log, its groups, its part in moves, and perhaps the controller's role."""

    def __init__(self, config: Config, started: Started, world: World, clock: Clock,
                 on_end: Callable[[str], None]) -> None:
        self.config, self.world, self._started, self._on_end = config, world, started, on_end
        self.options, self.samples = started.options, started.samples
        self.num_iterations = self.options.last_iteration(config.iterations)
        self._first_iteration = started.start.iteration
        own = world.hellos[world.rank]
        self.timeline = Timeline(
            Path(self.options.run) / "log" / f"w{world.rank:04d}.h5", world_rank=world.rank, host=own["host"],
            config=asdict(config), options=asdict(self.options), versions={**own["versions"], "mpi": world.library},
            hosts=list(started.roster.hosts), clock=clock)
        self._tell_data()
        self._tell_start()
        self._take_device()
        maker = build_maker(device.current_device(), self.options.switch, allow_lazy=self.options.allow_lazy,
                            connect_in_background=self.options.connect == "background")
        self._tell_communicators(maker)
        share = choose_share(self.options.prepare_share, device.current_device().type)
        self.groups = Groups(device.current_device(), maker, close_share=share)
        self._own_time = build_own_time(config, self.options)
        self.groups.waits = None if self._own_time is None else self._own_time.waits
        self.member = Member(world=world, groups=self.groups, timeline=self.timeline, options=self.options,
                             address=self._address())
        self.member.slot = started.roster.slot_of(world.rank)
        self.member.hold_at(self.options.schedule().holds)
        self._measure()
        self._warm_digest()
        self._role = Role(self.member, self._make_controller)
        self._recording = SlotRecording(self.groups, self.timeline, self.options)
        if world.rank == 0:
            self._role.begin(started.roster)
        signal.signal(signal.SIGUSR2, lambda *_: self.member.vacate_own_host())
        world.go(self._role.on_record, self._role.on_tick)
        if self.member.slot is None:
            self.member.tell("READY", recovery=0)

    def _tell_data(self) -> None:
        """What is read goes into the log, and to the user where something is left out."""
        source = self.samples.source
        skipped = f"; {source.num_skipped_files} files left out, which aren't UTF-8" if source.num_skipped_files else ""
        self.timeline.add_event("data", f"{source.name}: {source.num_tokens} tokens{skipped}")
        if skipped and self.world.rank == 0:
            sys.stdout.write(f"data {source.name}: {source.num_tokens} tokens{skipped}\n")
            sys.stdout.flush()

    def _tell_start(self) -> None:
        """Which checkpoint the run goes on from, and which it passes over."""
        for note in self._started.start.notes:
            self.timeline.add_event("checkpoint", note)
            if self.world.rank == 0:
                sys.stdout.write(f"checkpoint {note}\n")
                sys.stdout.flush()

    def _take_device(self) -> None:
        """Choose a GPU, and tell NCCL which host this is, before either is started in this process."""
        self._shares_gpu = False
        if device.is_cpu():
            return
        os.environ.update(parse_pins(self.options.pins))
        placed = take_gpu(self.world.hellos, self.world.rank)
        self.timeline.add_event("device", f"GPU {placed.device}, NCCL host id {placed.host_id or 'its own'}"
                                + (" (shares the GPU with another process of its host)" if placed.shares_gpu else ""))
        machines = [h["machine"] for h in self.world.hellos]
        self._shares_gpu = machines.count(machines[self.world.rank]) > torch.cuda.device_count()

    def _measure(self) -> None:
        """What a joiner is compared with, should this process leave its slot; later that would disturb training."""
        if self.options.accept != NONE:
            self.member.figures = measure_figures(device.current_device(), is_shared=self._shares_gpu)

    def _warm_digest(self) -> None:
        """The digest's kernel is compiled, or found on the disk, here and in no pause. Nor beside communicators: to
        load a kernel may wait for what is on the GPU, and NCCL's kernels wait for other processes.
        """
        if not device.is_cpu():
            with self.timeline.span("warm_digest", "STARTUP"):
                told = digest.warm_up(device.current_device())
            self.timeline.add_event("digest", told)

    def _tell_communicators(self, maker: Maker) -> None:
        """How communicators are made goes into the log, and to the user where there is something to know."""
        told = maker.describe()
        self.timeline.add_event("communicators", told)
        if self.world.rank > 0:
            return
        if self.options.allow_lazy:
            told += "; a move that aborts in its pause may have to rebuild the old ones (--allow-lazy)"
        if not device.is_cpu() or self.options.allow_lazy:
            sys.stdout.write(f"communicators: {told}\n")
        if device.is_cpu() and self.options.pins:
            sys.stdout.write("--nccl-pin has no effect without a GPU: Gloo adds in one order always\n")
        sys.stdout.flush()

    def add_marks(self, marks: dict[str, float]) -> None:
        """Start-up spans from the times at which each part was done."""
        names = list(marks)
        for before, after in zip(names, names[1:]):
            self.timeline.add_span(after, "STARTUP", marks[before], marks[after])

    def device_bytes(self) -> int:
        return device.memory_bytes()

    # ---- the control thread

    def _make_controller(self, roster: Roster, term: int) -> Controller:
        made = Controller(world=self.world, config=self.config, options=self.options, roster=roster, term=term,
                          timeline=self.timeline, address=self._address(), on_end=self._on_end,
                          start=self._started.start, step_down=self._role.step_down, faults=self.member.faults)
        if self._started.slurm_job:
            made.start_watch(self._started.slurm_job)
        return made

    def _address(self) -> str:
        """Where other processes of the run reach this one."""
        return addresses(self.world.hellos)[self.world.rank]

    def begin_anew(self) -> None:
        """The training thread, out of all that it was at: what it held goes. Its slot may be another now, or none."""
        self.world.urgent = False  # of a move that is over
        with self.timeline.span("leave", "RECOVERING") as span:
            self.member.begin_anew()
            self._recording.drop()
            job.close_aborted_job(self.groups)
            span.generation, span.slot = self.member.generation, -1 if self.member.slot is None else self.member.slot

    def fail(self, error: BaseException, text: str) -> None:
        """This process can't go on with what it is at. Returns if the whole job is built anew, perhaps since another
        process is lost; else the controller ends them all.
        """
        member = self.member
        if member.is_ending:
            threading.Event().wait()  # the run is over: what goes wrong now is a consequence
        if member.is_recovering:
            return  # likewise
        role = f"slot {member.slot}" if member.slot is not None else "a spare"
        message = (f"{role} (world rank {self.world.rank} on {self.world.hellos[self.world.rank]['host']}, generation "
                   f"{member.generation}): {type(error).__name__}: {error}").splitlines()[0]
        self.timeline.add_event("error", message)
        if isinstance(error, UserError):
            member.tell("FATAL", message=str(error), code=2, recovery=member.num_recoveries)
        else:
            path = Path(self.options.run) / "log" / f"w{self.world.rank:04d}.traceback.txt"
            path.write_text(text)
            member.tell("FATAL", message=f"{message} (traceback: {path})", code=1, recovery=member.num_recoveries)
        # the controller's END ends this process from the control thread; without a controller it ends all the same
        if member.await_recovery(_ANSWER_S):
            return
        member.end_process(f"{message} (no controller answered)", 1)
