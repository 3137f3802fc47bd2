"""What a deputy does once it holds the controller for lost: it is the controller, under the next term.

First it tells everybody, and hears from everybody where it stands: from then on no word of the last controller counts
any more. Then it decides once: a move that members have heard the commit of, or whose commit the deputy has, goes on as
committed; any other is aborted, after all members park their old communicators if one of them has been told to; and if
the lost process held a slot, or a recovery was under way, all slots are built anew (recovery.py). Control thread only.
"""
from __future__ import annotations

import time
from dataclasses import dataclass, field

from migration.deputy import Loss
from migration.protocol import Action, Event, Phase
from migration.succession import Succession
from migration.watch import STANDING_S
from migration.world import Record


@dataclass(slots=True, kw_only=True)
class Taking:
    """While it isn't decided how the job goes on. `awaited`: world ranks that must say where they stand."""

    loss: Loss
    awaited: set[int]
    until_s: float
    standings: dict[int, Record] = field(default_factory=dict)
    held_back: list[Record] = field(default_factory=list)  # what else they say


class Takeover(Succession):
    """From the loss of the last controller to the first decision of this one."""

    _taking: Taking | None = None

    def take_over(self, loss: Loss) -> None:
        """Become the controller in the place of one that is lost."""
        self._load(loss.state)
        roster = self._tally.roster
        self._watch.heard_before(loss.rank, loss.heard_s)
        self._dead.update({loss.rank} if loss.has_died else ())
        living = set(range(self.world.size)) - roster.lost - {loss.rank}
        self._taking = Taking(loss=loss, awaited=living, until_s=time.monotonic() + STANDING_S)
        text = (f"world rank {loss.rank} on {roster.hosts[loss.rank]}, the controller, is lost: {loss.why}; world rank "
                f"{self.world.rank} on {roster.hosts[self.world.rank]} takes its place, term {self.term}")
        self.timeline.add_event("controller", text)
        self._say(text)
        self._tell_controller()

    def _takes(self, record: Record) -> bool:
        """Whether a record has its place in the takeover; what doesn't waits for its end."""
        taking = self._taking
        if taking is None:
            return False
        if record["from"] == taking.loss.rank:
            return True  # one that only hung: it is told to end
        if record["kind"] == "STANDING":
            taking.standings[record["from"]] = record
        else:
            taking.awaited.difference_update(record.get("gone", ()))
            taking.held_back.append(record)
        return True

    def _look_at_takeover(self, now_s: float) -> None:
        """At every tick meanwhile."""
        taking = self._taking
        assert taking is not None
        if taking.awaited - taking.standings.keys() and now_s < taking.until_s:
            return
        self._taking = None
        for record in taking.standings.values():
            self._on_standing(record)
        if self._verdict is not None:
            self._ended = True
            self._carry_out_end()
            return
        self._resolve(taking)
        for rank in taking.awaited - taking.standings.keys():
            self._suspect(rank, "it doesn't say where it stands")
        for record in taking.held_back:
            self.on_record(record)

    def on_record(self, record: Record) -> None:
        raise NotImplementedError

    def _resolve(self, taking: Taking) -> None:
        loss, tally = taking.loss, self._tally
        was_committed = tally.phase is Phase.SWITCHING and any(
            standing["committed"] == tally.number for standing in taking.standings.values())
        if (ahead := self._find_ahead(taking, int(was_committed))) is not None:
            self._end_job(ahead, requeue=self._can_go_on(True))
            return
        must_recover = tally.phase is Phase.RECOVERING or (tally.phase is Phase.ABORTED and self._may_be_closed)
        is_replaced = loss.rank in tally.roster.holders
        if not is_replaced and not must_recover:
            if any(standing["may_park"] and standing["part"] == tally.number for standing in taking.standings.values()):
                self._to_members("PARK")  # it is collective: who parks waits for all
            self._repeat_verdict(was_committed)
        self._suspect(loss.rank, f"{loss.why} (it was the controller)", has_died=loss.has_died)
        if must_recover and not is_replaced and not self._ended:
            why = f"world rank {loss.rank}, the controller, was lost in phase {tally.phase.value}"
            self._recover_all(why, loss.rank)
        elif not is_replaced and tally.phase is Phase.SWITCHING:
            why = f"the controller, world rank {loss.rank}, was lost before its verdict"
            self._take_event(Event.MEMBER_FAILED, why)

    def _find_ahead(self, taking: Taking, num_commits: int) -> str | None:
        """Of a process that has heard what the deputy doesn't know: it had been replaced, and hadn't heard of that."""
        for rank, standing in taking.standings.items():
            generation = self._tally.generation + num_commits
            if standing["generation"] > generation or standing["part"] > self._tally.number:
                return (f"the controller, world rank {taking.loss.rank}, is lost, and what its deputy, world rank "
                        f"{self.world.rank}, knows is too old: world rank {rank} is in generation "
                        f"{standing['generation']} and move {standing['part']}, the deputy's are {generation} and "
                        f"{self._tally.number}")
        return None

    def _repeat_verdict(self, was_committed: bool) -> None:
        """What may not have come to everybody. A process that has heard it takes no note."""
        phase = self._tally.phase
        if was_committed:
            self._take_event(Event.ALL_VERIFIED)
        elif phase is Phase.COMMITTED:
            self._act((Action.SEND_COMMIT,))
        elif phase is Phase.ABORTED:
            self._act((Action.SEND_ABORT,))
        elif phase is Phase.TRAINING:
            self._broadcast("RETIRE", move=self._tally.number)
        if self._stop is not None and self._stop.agreed and self._stop.iteration is not None:
            self._tell_stop(self._stop.iteration, agreed=True)
