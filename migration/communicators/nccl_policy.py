"""How NCCL communicators are switched, and what that may cost: the choice as data and pure functions.

| switch | stage 1, beside training | at the boundary | device memory while both live |
| --- | --- | --- | --- |
| `connected` | init; then connected, a few a boundary | nothing | a second connected communicator |
| `parked` | init, suspended; then resumed, connected, suspended | old suspended, new resumed | a few MiB a group, and |
| | | | one connected communicator at a time |
| `lazy` | init | old destroyed, new connected | an unconnected communicator |

Where memory is short of that one too, a parked one is connected at the boundary. All that is for groups that training
uses. Others are prepared likewise but not connected, and old ones of them aren't parked: from the boundary until the
old ones are closed, old and new ones hold what an unconnected one does, 8 to 100 MiB.

Imports neither torch nor NCCL.
"""
from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from migration.errors import UserError

SWITCHES = ("lazy", "parked", "connected")  # weakest first: a group does what its weakest member can
P2P = ("none", "ring", "all")
CLOSE_BY = ("abort", "destroy")
# what fixes the order of NCCL's sums: variables that NCCL reads when it starts, and what --nccl-pin calls them
PINS = {"ALGO": "NCCL_ALGO", "PROTO": "NCCL_PROTO", "MIN_CHANNELS": "NCCL_MIN_NCHANNELS",
        "MAX_CHANNELS": "NCCL_MAX_NCHANNELS", "MIN_CTAS": "NCCL_MIN_CTAS", "MAX_CTAS": "NCCL_MAX_CTAS"}


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclPolicy:
    """What a run wants of its communicators. Sizes in bytes a GPU; times are deadlines of one wait each."""

    switch: str = "auto"
    reserve_bytes: int = 2 << 30        # stays free whatever `auto` chooses
    connected_bytes: int = 320 << 20    # of one connected communicator; 279 MiB measured over NVLink, 8 over sockets
    p2p: str = "ring"                   # which pairs are connected ahead: Megatron's pipeline talks to neighbours
    connect_sizes_bytes: tuple[int, ...] = (1 << 10, 1 << 20, 32 << 20)  # NCCL picks its algorithm by size
    probe_sizes: tuple[int, ...] = (64, 1 << 18)  # elements of the reductions that are compared, likewise
    connect_timeout_s: float = 60.0
    park_timeout_s: float = 30.0
    close_timeout_s: float = 30.0
    close_by: str = "abort"  # of what was parked and never connected: abort, or destroy, which its members join

    def validate(self) -> None:
        """Raises UserError for a value that means nothing."""
        if self.switch not in (*SWITCHES, "auto"):
            raise UserError(f"NCCL policy: switch={self.switch} is unknown; take auto, {', '.join(SWITCHES)}")
        if self.close_by not in CLOSE_BY:
            raise UserError(f"NCCL policy: close_by={self.close_by} is unknown; take {', '.join(CLOSE_BY)}")
        if self.p2p not in P2P:
            raise UserError(f"NCCL policy: p2p={self.p2p} is unknown; take {', '.join(P2P)}")
        if not self.connect_sizes_bytes or min(self.connect_sizes_bytes) <= 0:
            raise UserError(f"NCCL policy: connect_sizes_bytes={self.connect_sizes_bytes} needs positive sizes")


def choose_switch(policy: NcclPolicy, *, can_park: bool, free_bytes: int, num_groups: int) -> str:
    """This process's choice for a move for which it is to connect `num_groups` groups.

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


def parse_pins(text: str) -> dict[str, str]:
    """The environment that `--nccl-pin NAME=VALUE,NAME=VALUE` asks for. Raises UserError if it can't be read."""
    found: dict[str, str] = {}
    for part in filter(None, text.split(",")):
        name, _, value = part.partition("=")
        if name not in PINS or not value:
            raise UserError(f"--nccl-pin {text}: write it as NAME=VALUE,NAME=VALUE, such as ALGO=Ring,PROTO=Simple; "
                            f"names are {', '.join(PINS)}")
        if name not in ("ALGO", "PROTO") and not (value.isdecimal() and int(value) > 0):
            raise UserError(f"--nccl-pin {text}: {name} is a number above 0, not {value}")
        found[PINS[name]] = value
    return found


def pinned(environment: Mapping[str, str]) -> dict[str, str]:
    """What fixes the order of NCCL's sums in this process: empty means that NCCL chooses by topology and size."""
    return {name: environment[name] for name in PINS.values() if environment.get(name)}


def describe_pins(environment: Mapping[str, str]) -> str:
    """The same in words."""
    found = pinned(environment)
    if not found:
        return "nothing pinned: NCCL chooses algorithm, protocol and channels by topology and size"
    return "pinned: " + ", ".join(f"{name}={value}" for name, value in found.items())


def connected_peers(p2p: str, group_rank: int, group_size: int) -> tuple[int, ...]:
    """Group ranks to connect to ahead. Symmetric: who is in mine has me in theirs."""
    if p2p == "none":
        return ()
    others = {r for r in range(group_size) if r != group_rank}
    if p2p == "all":
        return tuple(sorted(others))
    return tuple(sorted(others & {(group_rank + 1) % group_size, (group_rank - 1) % group_size}))
