"""The state's way from a leaver to its joiner, over a communicator of the two. In place, in chunks, no pickle.

First a header (names, dtypes, shapes, values as JSON), then each tensor's bytes from where they lie to where they
belong. A tensor may be touched again when the call returns. Knows nothing of the protocol: deadlines come from the
communicator's own time-out, and another thread may abort it.
"""
from __future__ import annotations

import json

import torch

from migration.communicators.base import Communicator
from migration.errors import StateMismatch
from migration.state import State, as_bytes

CHUNK_BYTES = 64 << 20
_LEAVER, _JOINER = 0, 1


def _chunks(state: State) -> list[torch.Tensor]:
    found = []
    for named in state.tensors.values():
        for tensor in named.values():
            flat = as_bytes(tensor)
            found += [flat[i:i + CHUNK_BYTES] for i in range(0, flat.numel(), CHUNK_BYTES)]
    return found


def send_state(pair: Communicator, state: State, device: torch.device) -> int:
    """Leaver's side. Returns the bytes sent. Collective over the pair. Raises RuntimeError if the joiner is gone."""
    header = json.dumps({"manifest": state.manifest(), "values": state.values}).encode()
    blob = torch.frombuffer(bytearray(header), dtype=torch.uint8).to(device)
    length = torch.tensor([blob.numel()], dtype=torch.int64, device=device)
    parts = [[length], [blob], _chunks(state)]
    for tensors in parts:
        pair.send_all(tensors, _JOINER)
    return sum(t.numel() * t.element_size() for tensors in parts for t in tensors)


def receive_header(pair: Communicator, device: torch.device) -> tuple[dict, int]:
    """Joiner's side: waits for the leaver to come to the boundary. Returns the header and the bytes received.

    Collective over the pair. Raises RuntimeError if the leaver is gone.
    """
    length = torch.zeros(1, dtype=torch.int64, device=device)
    pair.recv_all([length], _LEAVER)
    blob = torch.empty(int(length.item()), dtype=torch.uint8, device=device)
    pair.recv_all([blob], _LEAVER)
    return json.loads(blob.cpu().numpy().tobytes()), length.element_size() + blob.numel()


def receive_tensors(pair: Communicator, header: dict, state: State) -> int:
    """Joiner's side: fills the tensors of its own `state` in place. Returns the bytes received.

    Collective over the pair. Raises StateMismatch if names, dtypes or shapes differ, RuntimeError if the leaver is
    gone.
    """
    _check(header["manifest"], state.manifest())
    chunks = _chunks(state)
    pair.recv_all(chunks, _LEAVER)
    return sum(c.numel() for c in chunks)


def _check(theirs: dict, own: dict) -> None:
    for kind in sorted(set(theirs) | set(own)):
        if theirs.get(kind) != own.get(kind):
            rows = [r for r in theirs.get(kind, []) + own.get(kind, [])
                    if r not in theirs.get(kind, []) or r not in own.get(kind, [])]
            raise StateMismatch(f"state kind {kind}: leaver and joiner differ in name, dtype or shape: {rows[:2]}")
