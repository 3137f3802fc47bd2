"""What the controller's parts stand on: what it knows of the job and of the move under way, how it speaks, and the end.

Its parts, each a class on top of the other, are actions.py, starting.py, recovery.py and so on up to controller.py.
Decides nothing but that a run is over. Control thread only, so it needs no lock.
"""
from __future__ import annotations

import sys
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

from migration.checkpoint_files import list_complete
from migration.config import Config
from migration.deputy import ANSWER_S, Gate
from migration.errors import UserError
from migration.move import MoveTally
from migration.options import REQUEUE_CODE, Options
from migration.record import MoveRecord, RunRecord
from migration.requests import RequestServer
from migration.roster import Roster
from migration.schedule import Pending
from migration.timeline import Timeline
from migration.watch import FIRST_WORD_S, STANDING_S, Watch
from migration.world import World

_BEAT_S = 5.0  # or more often, where processes wait for less before they end themselves


class ControllerBase:
    """What all of the controller's parts share."""

    def __init__(self, *, world: World, config: Config, options: Options, roster: Roster, timeline: Timeline,
                 address: str, term: int, on_end: Callable[[str], None]) -> None:
        self.world, self.config, self.options, self.timeline, self.term = world, config, options, timeline, term
        self.successor: int | None = None
        self._on_end, self._address = on_end, address
        self._gate = Gate()
        self._tally = MoveTally(roster, require_bitwise=options.require_bitwise)
        self._record = RunRecord(config=config, num_iterations=options.last_iteration(config.iterations),
                                 run=options.run, timeline=timeline, progress_s=options.progress_s)
        self._schedule = options.schedule()
        self._watch = Watch(world.size, beat_s=min(_BEAT_S, options.orphan_timeout_s / 4),
                            heartbeat_timeout_s=options.heartbeat_timeout_s,
                            first_word_s=0.0 if term else FIRST_WORD_S)  # later ones find everybody at work
        self._server = RequestServer(options.run, address, term, world.rank,
                                     hand_over_s=options.heartbeat_timeout_s + STANDING_S + ANSWER_S)
        self._store: Any = None  # of the generation being built; dropping it ends every member's wait on it
        self._store_coming: Future[Any] | None = None
        self._when_store_comes: Callable[[], None] = lambda: None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="store")
        self._current: Pending | None = None
        self._move: MoveRecord | None = None
        self._positions: dict[int, int] = {}
        self._warm_roles: dict[int, frozenset[str]] = {}  # by world rank: pipeline roles that its process has run
        self._may_be_closed = False  # old communicators of the move under way: members were told to make room
        self._finished: set[int] = set()
        self._unconnected: set[str] = set()  # prepared groups of the move under way that may be connected ahead
        self._cramped: set[str] = set()  # those of them for which a member lacks the memory
        self._prepared: dict[int, tuple[int, int]] = {}  # by world rank: groups prepared, of how many
        self._connect_s = 0.0  # what connecting a group took before, at the slowest member
        self._times_s: deque[float] = deque(maxlen=5)  # of the last iterations
        self._ended = False
        self._verdict: dict[str, Any] | None = None  # on the run, once it is over: arguments of _carry_out_end

    # ---- speaking

    def _send(self, rank: int, kind: str, **fields: Any) -> None:
        """Once the deputy has what it follows from."""
        record = {"kind": kind, "term": self.term, **fields}
        self._gate.put(lambda: self.world.send(rank, record))

    def _broadcast(self, kind: str, **fields: Any) -> None:
        for rank in range(self.world.size):
            if rank not in self._tally.roster.lost:
                self._send(rank, kind, **fields)

    def _to_members(self, kind: str, **fields: Any) -> None:
        for rank in sorted(self._tally.members):
            self._send(rank, kind, move=self._tally.number, **fields)

    def _say(self, text: str) -> None:
        self._record.say(text)

    def _refuse(self, pending: Pending, reason: str) -> None:
        self._say(f"move {pending.text} refused: {reason}")
        self._record.refuse(pending.text, pending.id, reason, self._tally.generation, self.term)

    # ---- the end

    def _can_go_on(self, lost: bool) -> bool:
        """Whether the run, started again, could go on from a checkpoint; `lost`: because a slot's process was lost.

        Processes that all live and still can't go on would come to the same end again: then only if this run has come
        further than the one before, which bounds the number of times.
        """
        folder = self.options.checkpoints
        return bool(folder and list_complete(Path(folder))) and (lost or bool(self._record.checkpoints))

    def _end_job(self, error: str, code: int = 1, requeue: bool = False) -> None:
        """One message, a verdict, and the end of every process. `requeue`: a launcher may start the run again."""
        if self._ended:
            return
        sys.stderr.write(f"harness: {error}\n")
        sys.stderr.flush()
        requeue = requeue and code == 1  # a user's error (2) stays one
        self._end("failed", error, code=REQUEUE_CODE if requeue else code, requeue=requeue)

    def _end(self, status: str, error: str | None, *, code: int = 0, requeue: bool = False) -> None:
        """`code`: the run's exit code; `requeue`: it is to be started again, and will go on from its checkpoint."""
        self._ended = True
        self._verdict = {"status": status, "error": error, "code": code, "requeue": requeue}
        self._gate.close()
        self._gate.put(self._carry_out_end)

    def _carry_out_end(self) -> None:
        assert self._verdict is not None
        error, code = self._verdict["error"], self._verdict["code"]
        self._server.close()
        self._record.end(**self._verdict, tally=self._tally, term=self.term)
        if error is None and self.options.report:
            self.timeline.close()  # HDF5 doesn't let a process read the file that it writes
            try:
                self._on_end(self.options.run)
            except UserError as problem:  # a log that can't be read doesn't make a completed run a failed one
                self._say(f"no report: {problem}")
        # plain mpirun calls it a failure if a process ends without MPI_Finalize, which needs every process
        finalize = error is None and not self._tally.roster.lost
        self._broadcast("END", code=code, finalize=finalize)
