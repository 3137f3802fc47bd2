"""How a running job is asked to save a checkpoint and end: `harness.py stop`, and Slurm's signal ahead of a time limit.

All slots must save the same iteration, so the end is agreed on as a move's position is: the controller proposes an
iteration two past the furthest slot, each slot's process accepts it unless it is past, and whoever comes there waits
for the verdict. No move is under way meanwhile: the one that is, is cancelled, and those that wait are refused.
"""
from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from migration.actions import Actions
from migration.errors import UserError
from migration.options import REQUEUE_CODE
from migration.protocol import Event, Phase
from migration.world import Record


@dataclass(slots=True, kw_only=True)
class Stop:
    """The stop that was asked for. `iteration`: the proposed first one that isn't done, then the agreed one."""

    requeue: bool
    iteration: int | None = None
    agreed: bool = False
    waiting: set[int] = field(default_factory=set)  # world ranks that have not answered


class Stopping(Actions):
    """The controller's part in it. Control thread only."""

    _stop: Stop | None = None

    def _request_stop(self, requeue: bool) -> dict[str, Any]:
        """Take the request; raises UserError where there is nothing to save into or the job ends anyway."""
        if not self.options.checkpoints:
            raise UserError("stop: this run saves no checkpoints, so it would end without one; start it with "
                            "--checkpoints DIR")
        if self._finished:
            raise UserError("stop: training is over, the job is ending")
        self._stop = self._stop or Stop(requeue=requeue)
        self._stop.requeue |= requeue
        self._gate.close()
        self.timeline.add_event("request", "stop and requeue" if requeue else "stop")
        self._clear_the_way()
        return {"phase": self._tally.phase.value, "checkpoints": self.options.checkpoints}

    def _clear_the_way(self) -> None:
        while (pending := self._schedule.drop_next()) is not None:
            self._refuse(pending, "the run is about to stop")
            self._release(pending.hold)
        if self._tally.phase in (Phase.PREPARING, Phase.READY, Phase.SWITCHING):
            self._take_event(Event.CANCELLED, "the run is about to stop")

    def _propose_stop(self) -> None:
        """In phase TRAINING, with every slot started."""
        assert self._stop is not None
        if self._stop.agreed or self._stop.waiting:
            return
        holders = self._tally.roster.holders
        iteration = max(self._positions.get(r, 0) for r in holders) + 2
        last = self.options.last_iteration(self.config.iterations)
        if iteration >= last:
            self._say(f"stop: the run ends before iteration {last} anyway")
            self._stop.iteration, self._stop.agreed = None, True
            self._tell_stop(last, agreed=False)  # whoever waits at an earlier proposal goes on
            return
        self._stop.iteration, self._stop.waiting = iteration, set(holders)
        self._tell_stop(iteration, agreed=False)

    def _on_end_answer(self, record: Record) -> None:
        stop, member = self._stop, record["from"]
        self._positions[member] = max(self._positions.get(member, 0), record["position"])
        if stop is None or stop.agreed or record["iteration"] != stop.iteration:
            return  # of an earlier proposal
        if not record["accepted"]:
            stop.waiting.clear()
            self._propose_stop()
            return
        stop.waiting.discard(member)
        if not stop.waiting:
            stop.agreed = True
            self._gate.close()
            self._tell_stop(record["iteration"], agreed=True)
            self._say(f"stop: training ends before iteration {stop.iteration}")

    def _tell_stop(self, iteration: int, *, agreed: bool) -> None:
        for rank in self._tally.roster.holders:
            self._send(rank, "END_BEFORE", iteration=iteration, agreed=agreed)

    def _end_run(self) -> None:
        """Every slot has finished: completed, or stopped with a checkpoint."""
        if self._stop is None or self._stop.iteration is None:
            self._end("completed", None)
        else:
            self._end("stopped", None, code=REQUEUE_CODE if self._stop.requeue else 0, requeue=self._stop.requeue)
