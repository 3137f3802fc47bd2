"""What a process does for the slot that it holds, besides training: builds it, saves it, tells of it, finishes it.

THE LOOP in harness.py calls these on the training thread. Where membership changes is stops.py's.
"""
from __future__ import annotations

import dataclasses

import torch.distributed as dist

from migration import checkpoint, device, job, state
from migration.check_measure import measure_slots
from migration.config import Config
from migration.costs import log_costs, take_costs
from migration.data import Samples
from migration.groups import Groups
from migration.job import IterationResult, Job
from migration.member import Member
from migration.options import Options
from migration.own_time import OwnTime
from migration.slot_recording import SlotRecording
from migration.timeline import Timeline
from migration.topology import pipeline_role
from migration.world import World

_START_TIMEOUT_S = 300.0  # for the first generation: processes come up at different times


class SlotWork:
    """The half of a process that works for a slot. Its attributes are set by Process."""

    config: Config
    options: Options
    samples: Samples
    world: World
    timeline: Timeline
    groups: Groups
    member: Member
    num_iterations: int  # where training ends, or stops with a checkpoint
    _own_time: OwnTime | None
    _recording: SlotRecording
    _first_iteration: int  # where the run began

    def start_slot(self) -> Job:
        """Build the slot's job and all communicators of the first generation, or of one that begins anew.

        Collective over the job.
        """
        slot, generation = self.member.slot, self.member.generation
        assert slot is not None
        phase = self._start_phase
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
            with self.groups.meeting(tuple(record["store"]), _START_TIMEOUT_S) as store:
                self.groups.begin(generation, store, slot, _START_TIMEOUT_S)
            if self.member.figures is not None:
                self.member.figures = dataclasses.replace(
                    self.member.figures, bytes_per_s=measure_slots(dist.group.WORLD, device.current_device()))
        log_costs(self.timeline, take_costs(self.groups, self.groups.live), move=-1, slot=slot)
        with self.timeline.span("broadcast", phase, **tags):
            made.broadcast_parameters()
        if folder:
            with self.timeline.span("load", phase, **tags):
                checkpoint.load(made, folder)
        self._recording.begin(slot, from_seeds=not folder)
        if not folder:
            made.tie_embeddings()  # recorded: a joiner's first iteration needs the other stage's weights too
        self.groups.forget_use()
        self.member.tell("STARTED", iteration=made.iteration, recovery=self.member.num_recoveries,
                         sums=self.groups.sums_digest())
        return made

    @property
    def _start_phase(self) -> str:
        """Of the spans in which all slots begin together."""
        return "RECOVERING" if self.member.num_recoveries else "STARTUP"

    def finish_start(self, made: Job) -> None:
        """After the first iteration since all slots began: connect the groups that it has used.

        Collective over the job.
        """
        with self.timeline.span("connect_used", self._start_phase, slot=made.slot, generation=self.member.generation):
            self.groups.learn_used(self.member.check)
        if self._own_time is not None:
            self._own_time.waits.take()  # they are of no iteration
        log_costs(self.timeline, take_costs(self.groups, self.groups.live), move=-1, slot=made.slot)
        self.member.tell("SUMS", recovery=self.member.num_recoveries, sums=self.groups.sums_digest())

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
    def start_iteration(self) -> int:
        """Where the slots began, the last time that all of them did; also on a process that was a spare then."""
        return int(self.member.started["iteration"]) if self.member.started else self._first_iteration

    def is_checkpoint_due(self, made: Job) -> bool:
        """Whether a checkpoint is saved before the iteration that `made` is at. The same on every slot's process."""
        every = self.options.checkpoint_every
        return bool(every) and made.iteration % every == 0 and made.iteration > self.start_iteration

    def save_checkpoint(self, made: Job) -> None:
        """Collective over the job, at a boundary: whoever holds the slots in its generation saves them."""
        start_s = self.timeline.clock()
        with self.timeline.span("save", "TRAINING", slot=made.slot, iteration=made.iteration) as span:
            folder, span.bytes = checkpoint.save(made, self.options, self.world.hellos[0]["versions"],
                                                 self.member.check, self.member.num_recoveries)
        if made.slot == 0:
            self.member.tell("CHECKPOINT", folder=str(folder), iteration=made.iteration, bytes=span.bytes,
                             time_s=self.timeline.clock() - start_s)

    def finish(self, made: Job) -> None:
        """Training is done: save, write the final digests, say so, and wait for the control thread to end the process.

        Without digests where training was stopped: its state is in the checkpoint.
        """
        self.member.finished(made.iteration)
        if self.options.checkpoints and made.iteration > self.start_iteration:
            self.save_checkpoint(made)
        made.finish()
        if made.iteration == self.config.iterations:
            digests = state.digests(state.capture(made))
            self.member.check()
            for kind, digest in digests.items():
                self.timeline.add_digest(made.slot, kind, digest)
        self.member.tell("FINISHED", recovery=self.member.num_recoveries)
        self.member.wait_for(lambda: False)
