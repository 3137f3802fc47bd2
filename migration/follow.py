"""The joiner's side of the stream: takes batches of the state as they come, and takes the steps that its leaver takes.

What comes next is said over the wire, the bytes come over the pair's communicator. Runs on the joiner's main thread,
from the end of its warm-up to the switchover.
"""
from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING

import torch

from migration import gradients, internals
from migration.communicators.base import Communicator
from migration.state_kinds import KINDS
from migration.stream import build_batches
from migration.transfer import receive_tensors
from migration.wire import Message, Wire

if TYPE_CHECKING:
    from migration.job import Job


class Follower:
    """A joiner between its warm-up and the switchover. `connect` connects prepared groups, by name."""

    def __init__(self, *, job: Job, pair: Communicator, wire: Wire, omit: frozenset[str],
                 connect: Callable[[list[str], int], None]) -> None:
        self._job, self._pair, self._wire = job, pair, wire
        self._connect = connect
        self._batches = build_batches(job, omit)
        self.num_bytes = 0
        self.state_digest = ""  # of what the stream brought, once it is complete

    def follow(self) -> Message:
        """Do as the leaver says; returns its first message of the switchover, STATE or CUT.

        Raises MoveFailed when the leaver is gone, RuntimeError when the pair's communicator was aborted.
        """
        while (message := self._wire.receive())["do"] not in ("STATE", "CUT"):
            getattr(self, "_on_" + message["do"].lower())(message)
        return message

    def _on_connect(self, message: Message) -> None:
        self._connect(message["names"], message["iteration"])

    def _on_batch(self, message: Message) -> None:
        batch = self._batches[message["index"]]
        self._take(batch.tensors)
        for step, value in zip(batch.steps, message["steps"], strict=True):
            step.fill_(value)

    @torch.no_grad()
    def _on_replay(self, message: Message) -> None:
        """The leaver has taken a step: with its gradients, clipped as it has clipped them, take the same one."""
        KINDS["param_groups"].set(self._job, message["param_groups"])
        internals.attach_gradients(self._job.optimizer)
        parameters = [p for _, p, _ in internals.adam_states(self._job.optimizer)]
        for parameter in parameters[message["end"]:]:
            parameter.grad = None
        self._take(p.grad for p in parameters[:message["end"]])
        internals.step_inner(self._job.optimizer)
        for parameter in parameters:
            parameter.grad = None

    def _on_final(self, _message: Message) -> None:
        """No step will be taken any more before the switchover."""
        self.state_digest = gradients.digest_stream(self._batches)
        gradients.poison(self._job)

    def _on_gradients(self, message: Message) -> None:
        shards = internals.gradient_shards(self._job.chunks)
        self._take(shards[name] for name in message["names"])

    def _take(self, tensors: Iterable[torch.Tensor]) -> None:
        self.num_bytes += receive_tensors(self._pair, tensors)
