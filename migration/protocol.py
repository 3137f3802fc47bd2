"""The protocol of moves and recoveries: Phase, Event, Action and one transition table.

Pure: no I/O, no clock, no torch, no MPI.

The controller feeds events into `Machine` and carries out the actions it gets back; nothing else decides what happens
next. An event that the table doesn't know in the present phase raises IllegalEvent and changes nothing. `draw()` makes
the diagram in microbenchmark.md from this same table.
"""
from __future__ import annotations

from enum import Enum

from migration.errors import IllegalEvent


class Phase(Enum):
    """Where the job stands. One move at a time; only SWITCHING and COMMITTED lie inside the downtime."""

    TRAINING = "TRAINING"  # no move under way
    PREPARING = "PREPARING"  # joiners warm up, members build the next generation beside training
    READY = "READY"  # all are prepared; a position for the switchover is being agreed
    SWITCHING = "SWITCHING"  # members stop at the position; the state goes over and is compared
    COMMITTED = "COMMITTED"  # the verdict is out: generation + 1; acknowledgements are coming in
    ABORTED = "ABORTED"  # the verdict is out: the old generation goes on; acknowledgements are coming in
    RECOVERING = "RECOVERING"  # a slot's process was lost: every slot is built anew, and goes on from a checkpoint


class Event(Enum):
    """What can happen, already tallied: ALL_x means that every member has reported x."""

    REQUESTED = "a move is requested"
    ALL_PREPARED = "all members are prepared"
    POSITION_REFUSED = "a member is past the proposed position"
    ALL_ACCEPTED = "all members have accepted the position"
    ALL_HANDED_OVER = "all members are at the position with every transfer complete: old communicators may make room"
    ALL_VERIFIED = "all members are at the position, and the digests are equal"
    DIGEST_DIFFERS = "the digests of a leaver and its joiner differ"
    MEMBER_FAILED = "a member reports that it can't go on with the move"
    JOINER_LOST = "a joiner is lost"
    SLOT_LOST = "a process that holds a slot is lost, and the job can't go on without it"
    SLOT_REPLACED = "a process that holds a slot is lost, and a spare can take its slot"
    SPARE_LOST = "a spare outside the move is lost"
    DEADLINE_EXPIRED = "the deadline of the phase has passed"
    CANCELLED = "the user cancels"
    JOB_ENDED = "training ends before the position"
    ALL_ACKNOWLEDGED = "all members have acknowledged the verdict"
    ALL_RECOVERED = "every slot is built anew and about to train"


class Action(Enum):
    """What the controller does; each is a method of it."""

    SEND_PREPARE = "tell the members to prepare"
    PROPOSE_POSITION = "propose a position two iterations past the furthest member"
    SEND_SWITCH = "tell the members to switch at the position"
    SEND_PARK = "tell the members to park or close the old communicators, and to activate the new ones"
    SEND_COMMIT = "tell the members that the move is committed"
    SEND_ABORT = "tell the members that the move is aborted"
    RETIRE_GENERATION = "tell the members to close the old generation"
    FINISH_MOVE = "log the move and take the next request"
    QUEUE_REQUEST = "keep the request until this move is done"
    REFUSE_CANCEL = "tell the user that there is nothing to cancel any more"
    NOTE_LOSS = "log the lost process; it is never a joiner again"
    RECOUNT = "don't wait for the lost member"
    FAIL_JOB = "end every process with one message"
    DROP_MOVE = "log the move under way as aborted: whatever it had come to, nobody goes on with it"
    SEND_RECOVER = "tell every process to drop what it is at and to build its slot anew, if it has one"
    FINISH_RECOVERY = "log the recovery and take the next request"


_BEFORE_COMMIT = (Phase.PREPARING, Phase.READY, Phase.SWITCHING)
_WITHOUT_MOVE = (Phase.TRAINING, Phase.RECOVERING)
_ABORTING = (Event.MEMBER_FAILED, Event.DEADLINE_EXPIRED, Event.CANCELLED)

TABLE: dict[tuple[Phase, Event], tuple[Phase, tuple[Action, ...]]] = {
    (Phase.TRAINING, Event.REQUESTED): (Phase.PREPARING, (Action.SEND_PREPARE,)),
    (Phase.PREPARING, Event.ALL_PREPARED): (Phase.READY, (Action.PROPOSE_POSITION,)),
    (Phase.READY, Event.POSITION_REFUSED): (Phase.READY, (Action.PROPOSE_POSITION,)),
    (Phase.READY, Event.ALL_ACCEPTED): (Phase.SWITCHING, (Action.SEND_SWITCH,)),
    # only where old communicators make room for new ones: all are told to park, or none, so that none waits in vain
    (Phase.SWITCHING, Event.ALL_HANDED_OVER): (Phase.SWITCHING, (Action.SEND_PARK,)),
    (Phase.SWITCHING, Event.ALL_VERIFIED): (Phase.COMMITTED, (Action.SEND_COMMIT,)),
    (Phase.COMMITTED, Event.ALL_ACKNOWLEDGED): (Phase.TRAINING, (Action.RETIRE_GENERATION, Action.FINISH_MOVE)),
    # whatever goes wrong before the commit ends in the old generation, equal to the last bit
    **{(phase, event): (Phase.ABORTED, (Action.SEND_ABORT,)) for phase in _BEFORE_COMMIT for event in _ABORTING},
    **{(phase, Event.JOINER_LOST): (Phase.ABORTED, (Action.NOTE_LOSS, Action.SEND_ABORT)) for phase in _BEFORE_COMMIT},
    (Phase.PREPARING, Event.DIGEST_DIFFERS): (Phase.ABORTED, (Action.SEND_ABORT,)),
    (Phase.SWITCHING, Event.DIGEST_DIFFERS): (Phase.ABORTED, (Action.SEND_ABORT,)),
    (Phase.PREPARING, Event.JOB_ENDED): (Phase.ABORTED, (Action.SEND_ABORT,)),
    (Phase.READY, Event.JOB_ENDED): (Phase.ABORTED, (Action.SEND_ABORT,)),
    (Phase.ABORTED, Event.ALL_ACKNOWLEDGED): (Phase.TRAINING, (Action.FINISH_MOVE,)),
    # late news of a move that is already aborted
    (Phase.ABORTED, Event.MEMBER_FAILED): (Phase.ABORTED, ()),
    (Phase.ABORTED, Event.JOB_ENDED): (Phase.ABORTED, ()),
    (Phase.ABORTED, Event.JOINER_LOST): (Phase.ABORTED, (Action.NOTE_LOSS, Action.RECOUNT)),
    # who doesn't acknowledge a verdict in time is lost, and that is an event of its own
    (Phase.COMMITTED, Event.MEMBER_FAILED): (Phase.COMMITTED, (Action.FAIL_JOB,)),
    # the end of training: nothing to do with a move
    (Phase.TRAINING, Event.JOB_ENDED): (Phase.TRAINING, ()),
    (Phase.COMMITTED, Event.JOB_ENDED): (Phase.COMMITTED, ()),
    # the new generation needs every slot; who is missing may be lost too, and then is replaced as well
    (Phase.RECOVERING, Event.ALL_RECOVERED): (Phase.TRAINING, (Action.FINISH_RECOVERY,)),
    (Phase.RECOVERING, Event.DEADLINE_EXPIRED): (Phase.RECOVERING, (Action.FAIL_JOB,)),
    # after the commit the joiner is a slot's process like any other
    **{(phase, Event.SLOT_LOST): (phase, (Action.FAIL_JOB,)) for phase in Phase},
    **{(phase, Event.SLOT_REPLACED): (Phase.RECOVERING, (Action.SEND_RECOVER,)) for phase in _WITHOUT_MOVE},
    **{(phase, Event.SLOT_REPLACED): (Phase.RECOVERING, (Action.DROP_MOVE, Action.SEND_RECOVER))
       for phase in Phase if phase not in _WITHOUT_MOVE},
    **{(phase, Event.SPARE_LOST): (phase, (Action.NOTE_LOSS,)) for phase in Phase},
    (Phase.COMMITTED, Event.SPARE_LOST): (Phase.COMMITTED, (Action.NOTE_LOSS, Action.RECOUNT)),  # perhaps a leaver
    **{(phase, Event.REQUESTED): (phase, (Action.QUEUE_REQUEST,)) for phase in Phase if phase is not Phase.TRAINING},
    **{(phase, Event.CANCELLED): (phase, (Action.REFUSE_CANCEL,)) for phase in Phase if phase not in _BEFORE_COMMIT},
}


class Machine:
    """The phase, and the only way to change it."""

    def __init__(self, table: dict[tuple[Phase, Event], tuple[Phase, tuple[Action, ...]]] = TABLE) -> None:
        self._table = table
        self.phase = Phase.TRAINING

    def handle(self, event: Event) -> tuple[Action, ...]:
        """Take `event`; returns what to do, in order. Raises IllegalEvent, and changes nothing, if it isn't known."""
        row = self._table.get((self.phase, event))
        if row is None:
            legal = ", ".join(e.name for p, e in self._table if p is self.phase)
            raise IllegalEvent(f"event {event.name} ({event.value}) in phase {self.phase.name}; legal there: {legal}")
        self.phase, actions = row
        return actions


def draw() -> str:
    """The table as a Mermaid state diagram: transitions that change the phase."""
    edges: dict[tuple[Phase, Phase], list[str]] = {}
    for (phase, event), (after, _) in TABLE.items():
        if after is not phase:
            edges.setdefault((phase, after), []).append(event.name)
    lines = ["stateDiagram-v2", "    [*] --> TRAINING"]
    lines += [f"    {a.name} --> {b.name}: {', '.join(names)}" for (a, b), names in edges.items()]
    return "\n".join(lines)
