"""One process of a run once MPI is up: wires world, groups, log, member and perhaps the controller together.

harness.py owns the training loop; this file owns what every process has, whatever its role.
"""
from __future__ import annotations

import dataclasses
import os
import signal
import sys
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import torch
import torch.distributed as dist

from migration import checkpoint, device, job, state
from migration.acceptance import NONE
from migration.bringup import Started
from migration.check_measure import measure_figures, measure_slots
from migration.communicators.makers import Maker, build_maker
from migration.communicators.nccl_policy import parse_pins
from migration.config import Config
from migration.controller import Controller
from migration.costs import log_costs, take_costs
from migration.errors import UserError
from migration.groups import Groups
from migration.job import IterationResult, Job
from migration.member import Member
from migration.pacing import choose_share
from migration.placement import take_gpu
from migration.own_time import build_own_time
from migration.roster import Roster
from migration.slot_recording import SlotRecording
from migration.stores import connect_store
from migration.timeline import Clock, Timeline
from migration.topology import pipeline_role
from migration.world import Record, World

_START_TIMEOUT_S = 300.0  # for the first generation: processes come up at different times
_ANSWER_S = 30.0  # for the controller to look who else is lost, and to decide


class Process:
    """What every process of a run has: its log, its groups, its part in moves, and perhaps the controller's role."""

    def __init__(self, config: Config, started: Started, world: World, clock: Clock,
                 on_end: Callable[[str], None]) -> None:
        self.config, self.world, self._started, self._on_end = config, world, started, on_end
        self.options, self.samples = started.options, started.samples
        self.num_iterations = self.options.last_iteration(config.iterations)
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
        self._controller: Controller | None = None
        self._recording = SlotRecording(self.groups, self.timeline, self.options)
        if world.rank == 0:
            self._controller = self._make_controller(started.roster, 0)
        signal.signal(signal.SIGUSR2, lambda *_: self.member.vacate_own_host())
        world.go(self._on_record, self._on_tick)
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

    # ---- a slot's process

    def start_slot(self) -> Job:
        """Build the slot's job and all communicators of the first generation, or of one that begins anew.

        Collective over the job.
        """
        slot, generation = self.member.slot, self.member.generation
        assert slot is not None
        phase = "RECOVERING" if self.member.num_recoveries else "STARTUP"
        with self.timeline.span("build", phase, slot=slot, generation=generation):
            job.open_groups(self.config, slot, self.groups)
            made = Job(self.config, slot, self.groups, self.samples)
        if self.options.checkpoints:
            checkpoint.check(made)
        self.member.tell("READY", recovery=self.member.num_recoveries)
        record = self.member.wait_for(lambda: self.member.started)
        folder = record["folder"]
        tags = {"slot": slot, "generation": generation, "iteration": record["iteration"]}
        with self.timeline.span("connect", phase, **tags):
            store = connect_store(tuple(record["store"]), _START_TIMEOUT_S)
            self.groups.prepare(generation, store, range(self.config.job_size), _START_TIMEOUT_S, beside_old=False)
            self.groups.activate()
            self.groups.adopt()
            if self.member.figures is not None:
                self.member.figures = dataclasses.replace(
                    self.member.figures, bytes_per_s=measure_slots(dist.group.WORLD, device.current_device()))
        log_costs(self.timeline, take_costs(self.groups), move=-1, slot=slot)
        with self.timeline.span("broadcast", phase, **tags):
            made.broadcast_parameters()
        if folder:
            with self.timeline.span("load", phase, **tags):
                checkpoint.load(made, folder)
        self._recording.begin(slot, from_seeds=not folder)
        if not folder:
            made.tie_embeddings()  # recorded: a joiner's first iteration needs the other stage's weights too
        self.member.tell("STARTED", iteration=made.iteration, recovery=self.member.num_recoveries)
        return made

    def hold_slot(self, made: Job) -> None:
        """This process is about to train in the slot."""
        if self._own_time is not None:
            made.before_forward = self._own_time.delay
            self._own_time.waits.take()  # what was waited before
            self._get_slow(made)

    def _get_slow(self, made: Job) -> None:
        assert self._own_time is not None
        if told := self._own_time.begin(made.slot, made.iteration):
            self.timeline.add_event("slow", told)

    def own_s(self, time_s: float) -> float | None:
        """Of an iteration of `time_s`, what this process did not spend waiting for others; None: nobody asks."""
        return None if self._own_time is None else self._own_time.take(time_s)

    def report_progress(self, made: Job, result: IterationResult, time_s: float, own_s: float | None) -> None:
        """Tell the controller where training is; the first slot of the last stage adds the loss. `own_s`: None if the
        iteration was disturbed."""
        self._recording.end(result)
        self.member.warm_roles.add(pipeline_role(self.config, made.slot))
        first_of_last_stage = self.config.job_size - self.config.tp * self.config.dp
        extra = {"loss": result.loss, "time_s": time_s} if made.slot == first_of_last_stage else {}
        if self._own_time is not None:
            self._get_slow(made)
            extra |= {"slot": made.slot, "own_s": own_s}
        part = self.member.part
        if part is not None and part.prepared[1]:
            extra["prepared"] = part.prepared
        self.member.tell("PROGRESS", iteration=made.iteration, recovery=self.member.num_recoveries, **extra)

    @property
    def _start_iteration(self) -> int:
        """Where the slots began, the last time that all of them did; also on a process that was a spare then."""
        return int(self.member.started["iteration"]) if self.member.started else self._started.start.iteration

    def is_checkpoint_due(self, made: Job) -> bool:
        """Whether a checkpoint is saved before the iteration that `made` is at. The same on every slot's process."""
        every = self.options.checkpoint_every
        return bool(every) and made.iteration % every == 0 and made.iteration > self._start_iteration

    def save_checkpoint(self, made: Job) -> None:
        """Collective over the job, at a boundary: whoever holds the slots in its generation saves them."""
        start_s = self.timeline.clock()
        with self.timeline.span("save", "TRAINING", slot=made.slot, iteration=made.iteration) as span:
            folder, span.bytes = checkpoint.save(made, self.options, self.world.hellos[0]["versions"],
                                                 self.member.check)
        if made.slot == 0:
            self.member.tell("CHECKPOINT", folder=str(folder), iteration=made.iteration, bytes=span.bytes,
                             time_s=self.timeline.clock() - start_s)

    def finish(self, made: Job) -> None:
        """Training is done: save, write the final digests, say so, and wait for the control thread to end the process.

        Without digests where training was stopped: its state is in the checkpoint.
        """
        self.member.finished(made.iteration)
        if self.options.checkpoints and made.iteration > self._start_iteration:
            self.save_checkpoint(made)
        made.finish()
        if made.iteration == self.config.iterations:
            digests = state.digests(state.capture(made))
            self.member.check()
            for kind, digest in digests.items():
                self.timeline.add_digest(made.slot, kind, digest)
        self.member.tell("FINISHED")
        self.member.wait_for(lambda: False)

    def device_bytes(self) -> int:
        return device.memory_bytes()

    # ---- the control thread

    def _make_controller(self, roster: Roster, term: int) -> Controller:
        made = Controller(world=self.world, config=self.config, options=self.options, roster=roster, term=term,
                          timeline=self.timeline, address=self._address(), on_end=self._on_end,
                          start=self._started.start)
        if self._started.slurm_job:
            made.start_watch(self._started.slurm_job)
        return made

    def _address(self) -> str:
        """Where other processes of the run reach this one."""
        one_machine = self._started.address == "127.0.0.1"
        return "127.0.0.1" if one_machine else self.world.hellos[self.world.rank]["address"]

    def _on_record(self, record: Record) -> None:
        if record["kind"] == "INHERIT":
            self._controller = self._make_controller(Roster.from_json(record["roster"]), record["term"])
            self._controller.inherit(record)
        elif "term" in record:
            self.member.on_record(record)
        elif self._controller is not None:
            self._controller.on_record(record)
        else:  # sent before the sender heard of the new controller
            self.world.send(self.member.controller, record)

    def _on_tick(self, now_s: float) -> None:
        if self._controller is not None:
            self._controller.on_tick(now_s)
            if self._controller.successor is not None and not self._controller.is_to_end:
                self.member.controller = self._controller.successor
                self._controller.resign()
                self._controller = None
        self.member.on_tick(now_s)

    def begin_anew(self) -> None:
        """The training thread, out of all that it was at: what it held goes. Its slot may be another now, or none."""
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
