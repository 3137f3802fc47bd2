"""The state's way while training goes on: the leaver's side of the stream, and what both sides call a batch.

What the optimizer steps, main parameters and moments, changes only inside the step. So between two steps a thread of
the leaver sends it from where it lies, batch by batch; and after each step the gradients of what has gone already
follow, with which the joiner takes the same step (follow.py). Nothing is copied, so no device memory is added.

The training thread and the stream thread share the tensors through a gate: closed from just before a step until its
gradients have followed.
"""
from __future__ import annotations

import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from migration import internals
from migration.communicators.base import Communicator
from migration.errors import DeadlineExpired, MoveFailed
from migration.gradients import Parts
from migration.state import num_bytes
from migration.state_kinds import KINDS
from migration.transfer import CHUNK_BYTES, chunks, patience_s, send_tensors
from migration.wire import Wire

if TYPE_CHECKING:
    from migration.job import Job

STREAM_PATIENCE_S = 30.0  # of the stream thread with a chunk: on a GPU, training may wait for the kernel too
_MIN_BATCHES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """Whole optimizer parameters up to number `end` - 1, each with its moments: what is sent between two steps or not
    at all."""

    end: int
    tensors: tuple[torch.Tensor, ...]
    steps: tuple[torch.Tensor, ...]  # Adam's step counts, on the host: as words

    @property
    def num_bytes(self) -> int:
        return num_bytes(self.tensors)


def build_batches(job: Job, omit: frozenset[str]) -> list[Batch]:
    """What the stream consists of, in order: equal on leaver and joiner. `omit`: kinds that are left out, for tests."""
    batches, tensors, first, size = [], [], 0, 0
    states = list(internals.adam_states(job.optimizer))
    # a step waits for the batch on its way, so there are several however small the state is
    batch_bytes = min(CHUNK_BYTES, sum(12 * parameter.numel() for _, parameter, _ in states) // _MIN_BATCHES)
    for i, (_, parameter, moments) in enumerate(states):
        own = [parameter.data] if "main_parameters" not in omit else []
        own += [moments["exp_avg"], moments["exp_avg_sq"]] if "moments" not in omit else []
        tensors += own
        size += num_bytes(own)
        if size >= batch_bytes or i + 1 == len(states):
            steps = tuple(moments["step"] for _, _, moments in states[first:i + 1])
            batches.append(Batch(end=i + 1, tensors=tuple(tensors), steps=steps))
            tensors, first, size = [], i + 1, 0
    return batches


class Sender:
    """The leaver's side. `run` by the stream thread; `open` and `hold_back` by the training thread, at its stops."""

    def __init__(self, *, job: Job, pair: Communicator, wire: Wire, omit: frozenset[str], limit_bytes_s: float) -> None:
        self._job, self._pair, self._wire = job, pair, wire
        self._limit_bytes_s = limit_bytes_s
        self.batches = build_batches(job, omit)
        self.num_sent, self.num_bytes = 0, 0  # batches; bytes, replayed gradients too
        self.state_digest = ""  # once no step comes before the switchover any more
        self.gradients: Parts | None = None  # likewise
        self.at_cut = False  # training has come to the switchover
        self.stop = -1  # that training has come to, once what must go to the joiner first has gone
        self._gate = threading.Condition()
        self._is_open = self._is_sending = self._is_broken = False
        self._param_groups: list[Any] | None = None  # as of the step whose gradients have to follow
        self._written: torch.cuda.Event | None = None  # the last step, on the device

    # ---- the training thread

    @property
    def has_step_to_follow(self) -> bool:
        """Whether a step has been taken since parts of the state went over."""
        return self._param_groups is not None

    def open(self) -> None:
        """At a stop: the state stays as it is until `hold_back`. After a step, first sends the gradients of it."""
        if self._is_broken:
            return
        if self._param_groups is not None:
            self._replay(self._param_groups)
            self._param_groups = None
        with self._gate:
            if not self._is_open:
                if self._job.device.type == "cuda":
                    self._written = torch.cuda.Event()
                    self._written.record()
                self._is_open = True
            self._gate.notify_all()

    def arrive(self, stop: int) -> None:
        """The stream thread may do what is meant for `stop`."""
        with self._gate:
            self.stop = max(self.stop, stop)
            self._gate.notify_all()

    def hold_back(self) -> None:
        """Before a step: returns when no batch is on its way. Raises DeadlineExpired if that takes too long."""
        largest = max((batch.num_bytes for batch in self.batches), default=0)
        with self._gate:
            self._is_open = False  # from now on the rate limit doesn't count
            if not self._gate.wait_for(lambda: not self._is_sending or self._is_broken, patience_s(largest)):
                self._is_broken = True
                raise DeadlineExpired(f"the joiner didn't take a batch of {largest} bytes in {patience_s(largest):.0f} "
                                      "s, and training can't wait longer")
            if self.num_sent and not self._is_broken:
                self._param_groups = KINDS["param_groups"].get(self._job)

    def _replay(self, param_groups: list[Any]) -> None:
        """The step just taken, for the parameters that have gone before it."""
        if not self._job.stepped:
            return  # an overflow: nothing has changed but the scaler, which goes over at the cut
        end = self.batches[self.num_sent - 1].end
        gradients = [p.grad for _, p, _ in list(internals.adam_states(self._job.optimizer))[:end]]
        self._wire.send("REPLAY", patience_s(0), end=end, param_groups=param_groups)
        self.num_bytes += send_tensors(self._pair, gradients)

    # ---- the stream thread

    def run(self) -> None:
        """Send every batch, each between two steps. Raises MoveFailed when the joiner is gone or `stop_sending` was
        called."""
        for i, batch in enumerate(self.batches):
            self._take_turn()
            try:
                self._send(i, batch)
            finally:
                with self._gate:
                    self._is_sending = False
                    self._gate.notify_all()

    def _take_turn(self) -> None:
        with self._gate:
            self._gate.wait_for(lambda: self._is_open or self._is_broken)
            self.check()
            self._is_sending = True
            self.wait_for_step_before()

    def _send(self, index: int, batch: Batch) -> None:
        self._wire.send("BATCH", patience_s(0), index=index, steps=[step.item() for step in batch.steps])
        for chunk in chunks(batch.tensors):
            started_s = time.monotonic()
            self.num_bytes += send_tensors(self._pair, [chunk], STREAM_PATIENCE_S)
            if self._limit_bytes_s:
                self._rest(chunk.numel() / self._limit_bytes_s - (time.monotonic() - started_s))
        self.num_sent = index + 1

    def _rest(self, seconds: float) -> None:
        """Keep to the rate limit, unless training waits."""
        with self._gate:
            self._gate.wait_for(lambda: not self._is_open or self._is_broken, max(0.0, seconds))
            self.check()

    def check(self) -> None:
        """Raises MoveFailed once the stream was stopped."""
        if self._is_broken:
            raise MoveFailed("the stream of the state was stopped")

    def wait_for_stop(self, stop: int) -> None:
        """Until the training thread has come to `stop` or further. Raises MoveFailed if stopped."""
        with self._gate:
            self._gate.wait_for(lambda: self.stop >= stop or self._is_broken)
            self.check()

    def wait_for_step_before(self) -> None:
        """On the device: what this thread issues from now on sees the last step done."""
        if self._written is not None:
            torch.cuda.current_stream(self._job.device).wait_event(self._written)

    # ---- any thread

    def stop_sending(self) -> None:
        """The move is aborted: nobody waits for the joiner any more."""
        with self._gate:
            self._is_broken = True
            self._gate.notify_all()
