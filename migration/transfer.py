"""A slot's whole state from a leaver to its joiner: words over the wire, bytes over the pair's communicator.

In place, in chunks, no pickle: each tensor's bytes go from where they lie to where they belong, and may be touched
again when the call returns. Knows nothing of the protocol: another thread may abort the pair and close the wire.
"""
from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from typing import Any

import torch

from migration.communicators.base import Communicator
from migration.errors import DeadlineExpired, StateMismatch
from migration.state import State, as_bytes, num_bytes
from migration.wire import Message, Wire

LEAVER, JOINER = 0, 1  # group ranks of a pair
CHUNK_BYTES = 64 << 20
_SLOWEST_BYTES_S = 50e6  # a joiner that takes less than this in training's way isn't waited for
_PATIENCE_S = 5.0


def patience_s(num_bytes: int) -> float:
    """How long training waits for `num_bytes` to go over before the move is given up."""
    return _PATIENCE_S + num_bytes / _SLOWEST_BYTES_S


def chunks(tensors: Iterable[torch.Tensor]) -> Iterator[torch.Tensor]:
    """Flat byte views of at most CHUNK_BYTES each, one by one: the first ones travel while others are made."""
    for tensor in tensors:
        flat = as_bytes(tensor)
        for i in range(0, flat.numel(), CHUNK_BYTES):
            yield flat[i:i + CHUNK_BYTES]


def send_tensors(pair: Communicator, tensors: Iterable[torch.Tensor], timeout_s: float | None = None) -> int:
    """The leaver's side. Returns the bytes sent. `timeout_s`: patience, unless given. Collective over the pair.

    Raises DeadlineExpired if the joiner is too slow, RuntimeError if it is gone.
    """
    tensors = list(tensors)
    size = num_bytes(tensors)
    limit_s, started_s = patience_s(size) if timeout_s is None else timeout_s, time.monotonic()
    try:
        pair.send_all(chunks(tensors), JOINER, limit_s)
    except RuntimeError as error:
        if time.monotonic() - started_s < limit_s:
            raise
        raise DeadlineExpired(f"the joiner took longer than {limit_s:.1f} s to receive {size} bytes") from error
    return size


def receive_tensors(pair: Communicator, tensors: Iterable[torch.Tensor]) -> int:
    """The joiner's side, into tensors of the same sizes. Returns the bytes. Collective over the pair."""
    tensors = list(tensors)
    pair.recv_all(chunks(tensors), LEAVER)
    return num_bytes(tensors)


def all_tensors(state: State) -> list[torch.Tensor]:
    """Of all kinds, in order."""
    return [tensor for named in state.tensors.values() for tensor in named.values()]


def send_state(pair: Communicator, wire: Wire, own: State) -> int:
    """The leaver's side. Returns the bytes sent. Collective over the pair."""
    size = wire.send("STATE", patience_s(0), manifest=own.manifest(), values=own.values)
    return size + send_tensors(pair, all_tensors(own))


def receive_state(pair: Communicator, message: Message, own: State) -> int:
    """The joiner's side, once `message` has come: fills the tensors of its own state. Returns their bytes.

    Collective over the pair. Raises StateMismatch if names, dtypes or shapes differ, RuntimeError if the leaver is
    gone.
    """
    check(message["manifest"], own)
    return receive_tensors(pair, all_tensors(own))


def check(theirs: dict[str, Any], state: State) -> None:
    """Raises StateMismatch where the leaver's manifest isn't that of the joiner's state."""
    own = state.manifest()
    for kind in sorted(set(theirs) | set(own)):
        if theirs.get(kind) != own.get(kind):
            rows = [r for r in theirs.get(kind, []) + own.get(kind, [])
                    if r not in theirs.get(kind, []) or r not in own.get(kind, [])]
            raise StateMismatch(f"state kind {kind}: leaver and joiner differ in name, dtype or shape: {rows[:2]}")
