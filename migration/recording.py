"""What a slot's first iteration asked of its peers and got from them, for the shadow iterations of its joiners.

A recording is the sequence of calls on the slot's process groups of several members: which group, which operation,
shapes and dtypes, and what came back. A joiner that repeats the iteration gets the same answers without a peer, and
from the same seeds it then computes the same loss, bit for bit. A call that differs from the recorded one is an error:
in training it would have met nothing, or something else, on the other side.

Host memory is bounded by `limit_bytes`: a tensor that is large against what is left of it is kept as its first
elements, or not at all, and is answered with these over and over, or with zeros. Owns that choice and the format of
RUN/recordings. Knows nothing of process groups (communicators/recorded.py) or of moves.
"""
from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from migration.errors import MoveFailed, WarmUpMismatch

_WHOLE_SHARE, _PART_SHARE = 64, 1024  # of what is left of the limit: a whole tensor's at most, and a part's


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call as both sides must make it."""

    group: str
    slots: tuple[int, ...]  # the group's members
    operation: str
    given: tuple[str, ...]  # shapes and dtypes of all tensors in order, then what else decides: peer, kind of sum

    def __str__(self) -> str:
        return f"{self.operation}({', '.join(self.given)}) on group {self.group} of slots {list(self.slots)}"


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """What one tensor held afterwards: the first bytes of `num_bytes`, perhaps all of them."""

    num_bytes: int
    kept: bytes

    @property
    def is_whole(self) -> bool:
        return len(self.kept) == self.num_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Recording:
    """A slot's first iteration; `loss` and `grad_norm` as hex of the float ('nan': none on this stage)."""

    slot: int
    calls: tuple[Call, ...]
    answers: tuple[tuple[Answer, ...], ...]  # of each call
    loss: str
    grad_norm: str
    from_seeds: bool  # the iteration began from the config's seeds, not from a checkpoint

    @property
    def is_whole(self) -> bool:
        """Whether a shadow iteration gets every answer as it was."""
        return all(a.is_whole for answers in self.answers for a in answers)

    @property
    def kept_bytes(self) -> int:
        return sum(len(a.kept) for answers in self.answers for a in answers)

    def describe(self) -> str:
        tensors = [a for answers in self.answers for a in answers]
        num_whole = sum(a.is_whole for a in tensors)
        num_zeros = sum(not a.kept and not a.is_whole for a in tensors)
        return (f"{len(self.calls)} calls, {len(tensors)} answers of {sum(a.num_bytes for a in tensors)} bytes: "
                f"{num_whole} kept whole, {len(tensors) - num_whole - num_zeros} in part, {num_zeros} as zeros; "
                f"{self.kept_bytes} bytes")


class Recorder:
    """Takes one iteration down. Training thread only."""

    def __init__(self, slot: int, limit_bytes: int, *, from_seeds: bool = True) -> None:
        self._slot, self._left, self._from_seeds = slot, limit_bytes, from_seeds
        self._calls: list[Call] = []
        self._answers: list[tuple[Answer, ...] | None] = []

    def begin(self, call: Call) -> int:
        """A call is made; returns its number, for `keep`."""
        self._calls.append(call)
        self._answers.append(None)
        return len(self._calls) - 1

    def keep(self, number: int, results: Iterable[torch.Tensor]) -> None:
        """The call is done: `results` hold what it left behind, and may change again when this returns."""
        self._answers[number] = tuple(self._copy(tensor) for tensor in results)

    def _copy(self, tensor: torch.Tensor) -> Answer:
        size, num_bytes = tensor.element_size(), tensor.numel() * tensor.element_size()
        wanted = num_bytes if num_bytes * _WHOLE_SHARE <= self._left else min(num_bytes, self._left // _PART_SHARE)
        flat = tensor.detach().reshape(-1)[:wanted // size]
        kept = flat.contiguous().view(torch.uint8).cpu().numpy().tobytes()
        self._left -= len(kept)
        return Answer(num_bytes=num_bytes, kept=kept)

    def finish(self, loss: float, grad_norm: float) -> Recording:
        unfinished = [str(c) for c, a in zip(self._calls, self._answers, strict=True) if a is None]
        assert not unfinished, f"slot {self._slot}: nobody waited for {unfinished}"
        return Recording(slot=self._slot, calls=tuple(self._calls),
                         answers=tuple(a for a in self._answers if a is not None), loss=loss.hex(),
                         grad_norm=grad_norm.hex(), from_seeds=self._from_seeds)


class Replay:
    """Answers one iteration as it was recorded. Training thread only."""

    def __init__(self, recording: Recording) -> None:
        self._recording, self._next = recording, 0

    def check(self, call: Call) -> tuple[Answer, ...]:
        """The next call is `call`; returns its answers. Raises WarmUpMismatch if another one was recorded."""
        number, calls = self._next, self._recording.calls
        expected = calls[number] if number < len(calls) else None
        if call != expected:
            told = expected or "none: the iteration was over"
            raise WarmUpMismatch(f"slot {self._recording.slot}: call {number} of the joiner's first iteration is "
                                 f"{call}; the recorded one is {told}")
        self._next += 1
        return self._recording.answers[number]

    def finish(self) -> None:
        """The iteration is over. Raises WarmUpMismatch if calls are left."""
        if self._next < len(self._recording.calls):
            calls = self._recording.calls
            raise WarmUpMismatch(f"slot {self._recording.slot}: the joiner's first iteration ended after {self._next} "
                                 f"of {len(calls)} recorded calls; the next would have been {calls[self._next]}")


def fill(tensor: torch.Tensor, answer: Answer) -> None:
    """Leave in `tensor` what the recorded call left."""
    flat = tensor.detach().view(-1)  # a pipeline's receive buffer requires gradients
    if not answer.kept:
        flat.zero_()
        return
    part = torch.frombuffer(bytearray(answer.kept), dtype=torch.uint8).view(tensor.dtype).to(tensor.device)
    num_whole = flat.numel() // part.numel()
    flat[:num_whole * part.numel()].view(num_whole, part.numel()).copy_(part)
    flat[num_whole * part.numel():].copy_(part[:flat.numel() - num_whole * part.numel()])


# ---- files

def recording_path(run: str | os.PathLike[str], slot: int) -> Path:
    return Path(run) / "recordings" / f"slot{slot:04d}.rec"


def save_recording(recording: Recording, path: Path) -> None:
    """Write it so that a reader finds all of it or nothing: one line of JSON, then the bytes."""
    payload = b"".join(a.kept for answers in recording.answers for a in answers)
    header = {"slot": recording.slot, "loss": recording.loss, "grad_norm": recording.grad_norm,
              "from_seeds": recording.from_seeds, "sha256": hashlib.sha256(payload).hexdigest(),
              "calls": [[c.group, c.slots, c.operation, c.given, [[a.num_bytes, len(a.kept)] for a in answers]]
                        for c, answers in zip(recording.calls, recording.answers, strict=True)]}
    path.parent.mkdir(exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_bytes(json.dumps(header).encode() + b"\n" + payload)
    os.replace(partial, path)


def load_recording(path: Path) -> Recording:
    """Raises MoveFailed for a file that doesn't hold what was written."""
    text, _, payload = path.read_bytes().partition(b"\n")
    header = json.loads(text)
    if hashlib.sha256(payload).hexdigest() != header["sha256"]:
        raise MoveFailed(f"{path}: the recording is damaged: its {len(payload)} bytes have another digest")
    calls, answers, at = [], [], 0
    for group, slots, operation, given, sizes in header["calls"]:
        calls.append(Call(group=group, slots=tuple(slots), operation=operation, given=tuple(given)))
        ends = [at := at + kept for _, kept in sizes]
        answers.append(tuple(Answer(num_bytes=num_bytes, kept=payload[end - kept:end])
                             for (num_bytes, kept), end in zip(sizes, ends, strict=True)))
    return Recording(slot=header["slot"], calls=tuple(calls), answers=tuple(answers), loss=header["loss"],
                     grad_norm=header["grad_norm"], from_seeds=header["from_seeds"])
