"""A slot's whole state, of every kind that state_kinds.py lists: captured, set, poisoned, and its digests.

Knows nothing of communicators or of the protocol.
"""
from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from migration import internals
from migration.digest import digest_tensors
from migration.errors import StateMismatch
from migration.state_kinds import Tensors, kinds_of

if TYPE_CHECKING:
    from migration.job import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """References to a slot's tensors and a snapshot of its values, by kind. No copies of tensors."""

    tensors: dict[str, Tensors]
    values: dict[str, Any]

    @property
    def num_bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(num_bytes(named.values()) for named in self.tensors.values())

    def manifest(self) -> dict[str, Any]:
        """Names, dtypes and shapes: what both sides must agree on before a byte is sent."""
        return {kind: [[name, str(t.dtype), list(t.shape)] for name, t in named.items()]
                for kind, named in self.tensors.items()}


def capture(job: Job, omit: frozenset[str] = frozenset()) -> State:
    """The state of `job`'s slot. Call on the training thread, between two iterations or at the cut."""
    kinds = kinds_of(job, omit)
    return State(tensors={n: k.tensors(job) for n, k in kinds.items() if k.tensors},
                 values={n: k.get(job) for n, k in kinds.items() if k.get})


def apply_values(job: Job, values: dict[str, Any], omit: frozenset[str] = frozenset()) -> None:
    """Set every value on `job`. Raises StateMismatch when the kinds differ from the own ones."""
    kinds = {n: k for n, k in kinds_of(job, omit).items() if k.set}
    if set(kinds) != set(values):
        raise StateMismatch(f"slot {job.slot}: kinds of state differ: {sorted(set(kinds) ^ set(values))}")
    for name, kind in kinds.items():
        kind.set(job, values[name])


def poison(job: Job) -> None:
    """Fill a joiner's state with NaN and wrong values: what the transfer forgets can't pass for something right."""
    state = capture(job)
    with torch.no_grad():
        for named in state.tensors.values():
            for tensor in named.values():
                tensor.fill_(float("nan") if tensor.is_floating_point() else torch.iinfo(tensor.dtype).max)
        # padding stays zero, as in every process: where parameters aren't sent but gathered, it goes along
        for chunk in job.chunks:
            for buffer in internals.param_buffers(chunk):
                buffer.zero_()
            for parameter in chunk.parameters():
                parameter.fill_(float("nan"))
    for name, kind in kinds_of(job).items():
        if kind.set:
            kind.set(job, kind.poison(state.values[name]))


def digests(state: State) -> dict[str, str]:
    """Of each kind: of names, dtypes, shapes and bytes of its tensors, computed where they lie, or of its value.

    Takes `digest.scratch_bytes` of the device's memory meanwhile.
    """
    found = digest_tensors(state.tensors)
    for kind, value in state.values.items():
        found[kind] = hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()
    return found


def combined(by_kind: dict[str, str]) -> str:
    """One digest of all kinds."""
    return hashlib.sha256(json.dumps(by_kind, sort_keys=True).encode()).hexdigest()[:32]


def num_bytes(tensors: Iterable[torch.Tensor]) -> int:
    """Of all of them together."""
    return sum(tensor.nbytes for tensor in tensors)


def as_bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's memory as a flat uint8 view. Raises StateMismatch if it isn't contiguous."""
    if not tensor.is_contiguous():
        raise StateMismatch(f"a tensor of shape {tuple(tensor.shape)} is not contiguous: it can't be sent in place")
    return tensor.detach().reshape(-1).view(torch.uint8)
