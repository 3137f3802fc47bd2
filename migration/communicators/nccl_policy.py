"""How NCCL communicators are switched, and what that may cost: the choice as data and pure functions.

| switch | stage 1, beside training | at the boundary | device memory while both live |
| --- | --- | --- | --- |
| `connected` | init; then connected, one group a boundary | nothing | a second connected communicator |
| `parked` | init, suspended | old suspended, new resumed and connected | a few MiB a group |
| `lazy` | init | old destroyed, new connected | an unconnected communicator |

Imports neither torch nor NCCL.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from migration.errors import UserError

SWITCHES = ("lazy", "parked", "connected")  # weakest first: a group does what its weakest member can
P2P = ("none", "ring", "all")
_PINS = ("NCCL_ALGO", "NCCL_PROTO", "NCCL_MIN_NCHANNELS", "NCCL_MAX_NCHANNELS", "NCCL_MIN_CTAS", "NCCL_MAX_CTAS")


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclPolicy:
    """What a run wants of its communicators. Sizes in bytes a GPU; times are deadlines of one wait each."""

    switch: str = "auto"
    reserve_bytes: int = 2 << 30        # stays free whatever `auto` chooses
    connected_bytes: int = 320 << 20    # of one connected communicator; 279 MiB measured over NVLink, 8 over sockets
    p2p: str = "ring"                   # which pairs are connected ahead: Megatron's pipeline talks to neighbours
    connect_sizes_bytes: tuple[int, ...] = (1 << 10, 1 << 20, 32 << 20)  # NCCL picks its algorithm by size
    probe_sizes: tuple[int, ...] = (64, 1 << 18)  # elements of the reductions that are compared, likewise
    max_ctas: int | None = None         # pins the channels of the communicators made here
    connect_timeout_s: float = 60.0
    park_timeout_s: float = 30.0
    close_timeout_s: float = 30.0

    def validate(self) -> None:
        """Raises UserError for a value that means nothing."""
        if self.switch not in (*SWITCHES, "auto"):
            raise UserError(f"NCCL policy: switch={self.switch} is unknown; take auto, {', '.join(SWITCHES)}")
        if self.p2p not in P2P:
            raise UserError(f"NCCL policy: p2p={self.p2p} is unknown; take {', '.join(P2P)}")
        if not self.connect_sizes_bytes or min(self.connect_sizes_bytes) <= 0:
            raise UserError(f"NCCL policy: connect_sizes_bytes={self.connect_sizes_bytes} needs positive sizes")


def choose_switch(policy: NcclPolicy, *, can_park: bool, free_bytes: int, num_groups: int) -> str:
    """This process's choice for a move that touches `num_groups` of its groups.

    `free_bytes` is the device's (cudaMemGetInfo), not the allocator's. Raises UserError when `parked` was asked for and
    the library can't.
    """
    if policy.switch == "parked" and not can_park:
        raise UserError("NCCL policy: switch=parked needs NCCL 2.30.3 or newer; take lazy, or a newer libnccl.so.2")
    if policy.switch != "auto":
        return policy.switch
    if free_bytes >= num_groups * policy.connected_bytes + policy.reserve_bytes:
        return "connected"
    return "parked" if can_park else "lazy"


def weakest(switches: Iterable[str]) -> str:
    """What a group does whose members chose `switches`."""
    return min(switches, key=SWITCHES.index)


def pinned(policy: NcclPolicy, environment: Mapping[str, str]) -> dict[str, str]:
    """What fixes the order of NCCL's sums in this run, by name: empty means that NCCL chooses by topology and size."""
    found = {name: environment[name] for name in _PINS if environment.get(name)}
    if policy.max_ctas is not None:
        found["max_ctas"] = str(policy.max_ctas)
    return found


def connected_peers(p2p: str, group_rank: int, group_size: int) -> tuple[int, ...]:
    """Group ranks to connect to ahead. Symmetric: who is in mine has me in theirs."""
    if p2p == "none":
        return ()
    others = {r for r in range(group_size) if r != group_rank}
    if p2p == "all":
        return tuple(sorted(others))
    return tuple(sorted(others & {(group_rank + 1) % group_size, (group_rank - 1) % group_size}))
