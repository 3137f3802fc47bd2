"""Nodes that Slurm wants back: what the controller does as they are drained, fail or come near their end.

Between Actions and Controller: takes what slurm_watch.py has seen, asks for the moves as a user would, ends the
processes of a host once it is empty, and has the node given back. Which host is how far says departures.py. Control
thread only; never waits for Slurm.
"""
from __future__ import annotations

import time
from typing import Any

from migration.actions import Actions
from migration.departures import Departure, Departures, Stage
from migration.errors import UserError
from migration.roster import Roster, choose_successor
from migration.slurm_nodes import Judge, Sighting
from migration.slurm_watch import GaveBack, NoAnswer, SlurmWatch, check_commands

_FIRST_PAUSE_S, _MAX_PAUSE_S = 30.0, 600.0  # before a move that came to nothing, or a resize, is tried again
_QUIET_S = 2.5  # a process that was told to end and is silent for so long has ended: five heartbeats
_ENDING_TIMEOUT_S = 20.0
_END_IS_NEAR_S = 600.0


class Leaving(Actions):
    """Hosts that are to be left."""

    def __init__(self, **fields: Any) -> None:
        super().__init__(**fields)
        self._slurm: SlurmWatch | None = None
        self._sighting: Sighting | None = None
        self._judge, self._departures = Judge(), Departures()
        self._noted: set[str] = set()  # what was said already
        self._idle: set[int] = set()  # world ranks that are done with the last move
        self._asked = -1  # number of the last request of our own
        self._tried_on: Roster | None = None
        self._try_again_s = self._give_back_again_s = 0.0
        self._pause_s = self._resize_pause_s = 0.0
        self._gives_back = False
        self._ending_until_s: dict[str, float] = {}

    def request_move(self, text: str, origin: str) -> int:
        """Take a request as a user's; returns its number. Raises UserError if it can't be done as things stand."""
        raise NotImplementedError

    def start_watch(self, job_id: str) -> None:
        """Look at Slurm's job `job_id` from now on."""
        try:
            check_commands()
        except UserError as error:
            self._note(f"Slurm: {error}")
            return
        self._slurm = SlurmWatch(job_id, self.options.slurm_poll_s)

    def _stop_watch(self) -> None:
        if self._slurm is not None:
            self._slurm.close()

    def _tell(self, text: str) -> None:
        """Into the log and onto the screen."""
        self.timeline.add_event("slurm", text)
        self._say(text)

    def _note(self, text: str) -> None:
        """The same, but not a second time: what is found at every look."""
        if text not in self._noted:
            self._noted.add(text)
            self._tell(text)

    # ---- what the watch brings

    def _look_after_nodes(self, now_s: float, can_move: bool) -> None:
        """At every poll. `can_move`: no move is under way, and the job trains."""
        if self._slurm is None:
            return
        while (found := self._slurm.take()) is not None:
            if isinstance(found, Sighting):
                self._see(found)
            elif isinstance(found, NoAnswer):
                self.timeline.add_event("slurm", f"no answer: {found.error}")
            else:
                self._take_given_back(found, now_s)
        if can_move and self._sighting is not None and not self._has_asked():
            self._ask_for_moves(now_s)
            if self._is_settled():
                self._end_empty_hosts(now_s)
        self._give_back_ended(now_s)

    def _see(self, sighting: Sighting) -> None:
        self._sighting = sighting
        hosts = {name: trouble for name, trouble in self._judge.judge(sighting).items()
                 if name in self._tally.roster.hosts}
        new, returned = self._departures.see(hosts, sighting.job.nodes)
        for departure in new:
            num_slots = len(self._tally.roster.slots_on(departure.host))
            self._noted = {text for text in self._noted if f"node {departure.host} " not in text}
            self._tell(f"Slurm: node {departure.host} is {departure.why}: "
                       + (f"its {num_slots} slots are moved away" if num_slots else "its spares are not used"))
        for host in returned:
            self._tell(f"Slurm: node {host} is no longer to be left; processes without a slot are spares again")
        for departure in self._departures.forget_gone(sighting.job.nodes):
            self._tell(f"Slurm: node {departure.host} is given back, before iteration {self._furthest()}")
        self._tally.avoid(self._departures.avoided)
        end_s = sighting.job.end_s
        if end_s is not None and end_s - sighting.time_s < _END_IS_NEAR_S:
            self._note(f"Slurm: the job's time ends at {time.strftime('%H:%M:%S', time.localtime(end_s))}")

    def _furthest(self) -> int:
        return max(self._positions.values(), default=0)

    # ---- moves

    def _has_asked(self) -> bool:
        return any(pending.id == self._asked for pending in self._schedule.waiting)

    def _ask_for_moves(self, now_s: float) -> None:
        """One move for all hosts to be vacated, or, with too few spares for that, for the first that fits."""
        whys = {d.host: d.why for d in self._departures.to_vacate(self._tally.roster)}
        if not whys or (self._tried_on == self._tally.roster and now_s < self._try_again_s):
            return
        if self._tried_on != self._tally.roster:
            self._pause_s = _FIRST_PAUSE_S
        self._tried_on, self._try_again_s = self._tally.roster, float("inf")
        for hosts in ([list(whys)] if len(whys) == 1 else [list(whys), *([host] for host in whys)]):
            try:
                why = "; ".join(f"{host} {whys[host]}" for host in hosts)
                self._asked = self.request_move(",".join(hosts), f"Slurm: {why}")
            except UserError as error:
                if len(hosts) == 1:
                    self._note(f"Slurm: node {hosts[0]} can't be emptied yet: {error}")
                continue
            # should it come to nothing, with everybody where they were, it is tried again after a while
            self._try_again_s = now_s + self._pause_s
            self._pause_s = min(2 * self._pause_s, _MAX_PAUSE_S)
            return

    def _all_rests_s(self) -> float:
        """A node that is in trouble is emptied at once."""
        is_own = self._current is not None and self._current.id == self._asked
        return 0.0 if is_own else super()._all_rests_s()

    # ---- the processes of an empty host

    def _finish_move(self) -> None:
        super()._finish_move()
        self._idle.clear()

    def _is_settled(self) -> bool:
        """Whether every process is done with the last move, its old communicators included."""
        roster = self._tally.roster
        return set(range(self.world.size)) - roster.lost <= self._idle

    def _end_empty_hosts(self, now_s: float) -> None:
        assert self._sighting is not None
        roster, batch_host = self._tally.roster, self._sighting.job.batch_host
        for departure in self._departures.to_keep(roster, batch_host):
            departure.stage = Stage.KEPT
            why = ("it carries the job's batch shell, so it can't be given back before the job ends"
                   if departure.host == batch_host else "it stays in the job, and is used again when it answers")
            self._tell(f"Slurm: node {departure.host} holds no slot any more; {why}")
        ending = self._departures.to_end(roster, batch_host)
        if roster.hosts[self.world.rank] in {d.host for d in ending}:
            self.successor = choose_successor(roster)  # it will come back to this
            return
        if ending:
            self._gate.close()
        for departure in ending:
            ranks = [r for r in roster.world_ranks_of(departure.host) if r not in roster.lost]
            self._tell(f"Slurm: node {departure.host} holds no slot any more; its {len(ranks)} processes end")
            for rank in ranks:
                self._send(rank, "END", code=0, finalize=False)
            self._tally.release(departure.host)
            departure.stage = Stage.ENDING
            self._ending_until_s[departure.host] = now_s + _ENDING_TIMEOUT_S

    def _give_back_ended(self, now_s: float) -> None:
        """Ended hosts go back to Slurm together, because some clusters shrink a job only once."""
        quiet = {rank for rank, _ in self._watch.silent_for(now_s, _QUIET_S)}
        for departure in self._departures.ending():
            until_s = self._ending_until_s.setdefault(departure.host, now_s + _ENDING_TIMEOUT_S)
            if set(self._tally.roster.world_ranks_of(departure.host)) <= quiet or now_s > until_s:
                self._tell(f"Slurm: node {departure.host} is empty" if now_s <= until_s else
                           f"Slurm: processes on node {departure.host} don't end; Slurm ends them with the node")
                departure.stage = Stage.EMPTY
        empty = self._departures.to_give_back()
        if not empty or self._departures.ending() or self._gives_back or now_s < self._give_back_again_s:
            return
        assert self._slurm is not None
        self._gives_back = True
        self._slurm.give_back(tuple(d.host for d in empty), self._comment(empty))

    def _comment(self, departures: list[Departure]) -> str:
        what = "; ".join(f"{d.host} ({d.why})" for d in departures)
        return f"Live Migrator: vacated and gave back {what}, before iteration {self._furthest()}"

    def _take_given_back(self, found: GaveBack, now_s: float) -> None:
        """Whether the nodes are really gone from the job, the next look tells."""
        self._gives_back = False
        if found.comment_error:
            self.timeline.add_event("slurm", f"no comment on the job: {found.comment_error}")
        self._resize_pause_s = min(2 * self._resize_pause_s, _MAX_PAUSE_S) if found.error else _FIRST_PAUSE_S
        self._give_back_again_s = now_s + self._resize_pause_s
        if found.error:
            hint = ("; without an accounting database (AccountingStorageType) Slurm shrinks a job only once"
                    if "DB index" in found.error else "")
            self._note(f"Slurm: {','.join(found.nodes)} can't be given back, and stays in the job, without processes: "
                       f"{found.error}{hint}")
