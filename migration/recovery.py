"""Unplanned failures: who is lost, and how the job goes on without them, in the processes that live.

The controller's part; rebuilding.py is a process's. Every slot drops what it is at, spares take the slots of those
lost, and as a rule all slots of their hosts, and the whole job is built anew as the next generation, as at the start of
a run (starting.py), from the newest checkpoint that is whole. Where that can't be done, the job ends and may be started
again (`requeue`). Control thread only.
"""
from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

from migration.checkpoint_files import Start, find_restart
from migration.plan import plan_recovery
from migration.protocol import Event
from migration.record import RecoveryRecord
from migration.roster import MovePlan, Roster
from migration.starting import Starting
from migration.stopping import Stop
from migration.watch import LONGEST_TICK_S, LOOK_AROUND_S
from migration.world import Record

_GATHER_S = 0.6  # more than a heartbeat: processes that die together are replaced together
_RESTART_S = 1800.0  # at least: a large checkpoint is read in this time


@dataclass(slots=True, kw_only=True)
class Failure:
    """A process that can't go on has said why. Often because another one is gone: its silence tells which."""

    rank: int
    message: str
    code: int
    since_s: float  # monotonic
    looked_s: float = 0.0


class Recovery(Starting):
    """Losses, and how the job goes on after each."""

    _stop: Stop | None
    _step_down: Callable[[str], None]  # ends this process

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._failure: Failure | None = None
        self._suspects: dict[int, str] = {}  # world ranks that hold slots and are lost, and how that was noticed
        self._dead: set[int] = set()  # world ranks that nothing is to be sent to
        self._replace_at_s = 0.0
        self._ticked_s = 0.0
        self._replacement = MovePlan(assignments=())
        self._recovery: RecoveryRecord | None = None  # the last one, until its first iteration is done
        self._recovery_s = 0.0  # when it began
        self._num_done = 0  # iterations before it, of which none was done again so far

    def _send(self, rank: int, kind: str, **fields: Any) -> None:
        if rank not in self._dead:
            super()._send(rank, kind, **fields)

    # ---- where the job goes on

    def _choose_start(self) -> Start:
        start = super()._choose_start()
        if self._recovery is not None:
            start = find_restart(start, self.options.checkpoints)  # nobody writes one now
            self._num_done = max([self._num_done, *self._positions.values()])
            self._tell_restart(start)
            self._watch.set_deadline(max(_RESTART_S, self.options.prepare_deadline_s),
                                     "connecting the new generation and loading the checkpoint")
        return start

    def _tell_restart(self, start: Start) -> None:
        assert self._recovery is not None
        self._recovery.from_iteration = start.iteration
        self._recovery.redone = max(0, self._num_done - start.iteration)
        self._recovery.checkpoint = start.folder or None
        for note in start.notes:
            self.timeline.add_event("checkpoint", note)
        self._tell_recovery(f"goes on at iteration {start.iteration} from {start.folder or 'the start of the run'}; "
                            f"{self._recovery.redone} iterations are done again")
        self._write_down()

    def _note_iteration(self, rank: int) -> None:
        """A slot has finished an iteration, or the run."""
        self._to_finish_one.discard(rank)
        if self._recovery is None or self._to_finish_one or not self._is_starting:
            return
        self._recovery.recovery_s = time.monotonic() - self._recovery_s
        self._tell_recovery(f"done: noticed {self._recovery.detect_s:.1f} s after the last word of a lost process, "
                            f"first iteration done {self._recovery.recovery_s:.1f} s later"
                            + ("; sums keep their bits" if self._recovery.keeps_bits else ""))
        self._write_down()
        self._recovery, self._num_done = None, 0

    def _take_sums(self, others: list[int] | None) -> None:
        if self._recovery is None or others is None:
            return
        self._recovery.keeps_bits = not others
        if others:
            named = f"slot{'s' if len(others) > 1 else ''} {', '.join(map(str, others))}"
            slots = "all slots" if len(others) == self.config.job_size else named
            self._tell_recovery(f"sums of {slots} have other bits than before: losses may differ in their last bits "
                                "from here on; a spare host with room for a whole host may keep them, or --nccl-pin")
        self._write_down()

    # ---- who is lost

    def _on_fatal(self, record: Record) -> None:
        """A process can't go on. A moment later the silence of another one may tell why. A slot's counts more than a
        spare's."""
        holders = self._tally.roster.holders
        is_news = self._failure is None or (record["from"] in holders and self._failure.rank not in holders)
        if self._is_current(record) and is_news:
            self._failure = Failure(rank=record["from"], message=record["message"], code=record["code"],
                                    since_s=time.monotonic())

    def _suspect(self, rank: int, why: str, *, has_died: bool = False) -> None:
        """A process is lost. Those that hold slots are replaced together with others that are lost just now."""
        roster = self._tally.roster
        self._dead.update({rank} if has_died else ())
        if rank in roster.lost or rank in self._suspects or self._ended:
            return
        if rank == self.world.rank:
            self._suspect_own(f"world rank {rank} on {roster.hosts[rank]}, the controller's: {why}")
            return
        if rank not in roster.holders:
            self._lose_spare(rank, why)
            return
        if not self._suspects:
            self._replace_at_s = time.monotonic() + _GATHER_S
        self._suspects[rank] = why

    def _suspect_own(self, text: str) -> None:
        """Its training thread hangs. Nobody can be told to go on without the controller, but its deputy."""
        if self._gate.deputy is None:
            self._end_job(text, requeue=self._can_go_on(True))
        else:
            self._step_down(f"{text}; the process ends, and the deputy goes on")

    def _lose_spare(self, rank: int, why: str) -> None:
        text = f"world rank {rank} on {self._tally.roster.hosts[rank]} is lost: {why}"
        self._tell_lost(rank, text)
        self._act(self._tally.lose(rank, text))
        if not self._ended:
            self._start_if_ready()

    def _tell_lost(self, rank: int, text: str) -> None:
        self.timeline.add_event("lost", text)
        self._say(text)
        self._send(rank, "END", code=1, finalize=False)  # if it only hangs, it must not stay behind

    def _look_around(self, now_s: float) -> None:
        """At every tick: is a failure explained by a loss, and has everybody been found that is lost?"""
        passed_s, self._ticked_s = min(now_s - self._ticked_s, LONGEST_TICK_S), now_s
        failure = self._failure
        if failure is not None:
            failure.looked_s += passed_s
            if failure.looked_s > LOOK_AROUND_S and not self._suspects:
                for rank, _ in self._watch.silent_for(now_s, now_s - failure.since_s):
                    self._suspect(rank, f"it died or can't be reached; first seen by {failure.message}")
                if not self._suspects and self._has_begun and failure.rank not in self._tally.roster.holders:
                    self._failure = None  # a spare's, which the job can do without
                    self._suspect(failure.rank, f"it can't go on: {failure.message}")
                elif not self._suspects:
                    self._end_job(failure.message, failure.code, requeue=self._can_go_on(False))
                    return
                self._replace_at_s = now_s
        if self._suspects and now_s >= self._replace_at_s:
            self._lose_holders(now_s)

    def _lose_holders(self, now_s: float) -> None:
        suspects, self._suspects = self._suspects, {}
        roster = self._tally.recoverable
        for rank in suspects:
            roster = roster.without(rank)
        plan, cannot = self._plan_replacement(roster)
        texts = [f"world rank {rank} on {roster.hosts[rank]} is lost: {why}" for rank, why in suspects.items()]
        for rank, text in zip(suspects, texts):
            self._tell_lost(rank, text)
        self._begin_record(list(suspects), "; ".join(texts), plan, now_s)
        self._act(self._tally.lose_slots(suspects, "; ".join(texts) + cannot, plan))

    def _recover_all(self, why: str, lost: int) -> None:
        """Build every slot anew since `lost` is, which held none that is to be replaced."""
        plan, cannot = self._plan_replacement(self._tally.recoverable)
        self._begin_record([lost], why, plan, time.monotonic())
        self._act(self._tally.lose_slots([], why + cannot, plan))

    def _plan_replacement(self, roster: Roster) -> tuple[MovePlan | None, str]:
        """The spares that take the slots, or None and why the job ends instead."""
        if self.options.recover == "off":
            return None, ""
        if not self._has_begun:
            return None, "; the job had not begun to train"
        plan = plan_recovery(roster, whole_hosts=self.options.recover == "host")
        return plan, "" if plan is not None else f"; {len(roster.spares())} spares are too few to go on"

    # ---- carrying out

    def _drop_move(self) -> None:
        assert self._move is not None and self._current is not None
        self._say(f"move {self._current.text} is over: {self._tally.reason}")
        self._move.drop()
        self._record.finish(self._move, self._tally)
        self._release(self._hold_to_release())
        self._current = self._move = None

    def _begin_record(self, lost: list[int], why: str, plan: MovePlan | None, now_s: float) -> None:
        if plan is None:
            return
        self._replacement, self._recovery_s = plan, now_s
        hosts = self._tally.roster.hosts
        self._recovery = RecoveryRecord(
            lost=lost, hosts=[hosts[rank] for rank in lost], slots=list(plan.slots), to=list(plan.joiners), why=why,
            generation=self._tally.generation + 1,
            detect_s=max((now_s - self._watch.heard_s(rank) for rank in lost), default=0.0))
        self._record.recoveries.append(asdict(self._recovery))

    def _write_down(self) -> None:
        """The record's figures, as far as they are known."""
        assert self._recovery is not None
        self._record.recoveries[-1] = asdict(self._recovery)

    def _tell_recovery(self, text: str) -> None:
        told = f"recovery {len(self._record.recoveries) - 1}, generation {self._tally.generation}: {text}"
        self.timeline.add_event("recovery", told)
        self._say(told)

    def _send_recover(self) -> None:
        roster = self._tally.roster
        self._drop_store()  # who builds a generation with a lost process waits on it
        self._failure, self._is_starting, self.successor = None, False, None
        self._ready.clear()
        self._started.clear()
        self._awaited = set(roster.holders)
        self._stop = None if self._stop is None else Stop(requeue=self._stop.requeue)
        self.world.urgent = False
        self._watch.set_deadline(self.options.prepare_deadline_s, "leaving the old generation and building the slots")
        taken = [f"slot {a.slot} goes to world rank {a.joiner} on {roster.hosts[a.joiner]}"
                 for a in self._replacement.assignments]
        left = [f"world rank {rank} on {roster.hosts[rank]} stands by"
                for rank in self._replacement.leavers if rank not in roster.lost]
        self._tell_recovery(", ".join([*taken, *left] or ["every slot stays where it was before the move"]))
        for rank in sorted(set(range(self.world.size)) - roster.lost):
            self._send(rank, "RECOVER", recovery=len(self._record.recoveries), slot=roster.slot_of(rank),
                       generation=self._tally.generation, holds=sorted(self._schedule.holds))

    def _finish_recovery(self) -> None:
        self._drop_store()
        self._watch.clear_deadline()

    def _expire_recovery(self, reason: str) -> None:
        """Before all are ready, who isn't is at fault, and replaced; afterwards nobody can tell."""
        missing = self._awaited - self._ready
        if self._is_starting:
            missing = self._awaited - self._started
            self._take_event(Event.DEADLINE_EXPIRED, f"{reason}; missing: world ranks {sorted(missing)}")
        for rank in missing if not self._is_starting else ():
            self._suspect(rank, f"{reason}, and it isn't ready")
