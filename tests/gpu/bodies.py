"""What every rank of the GPU tests of the NCCL communicator does. Started by ranks.py, which has loaded the overlay.

Each body asserts what must hold on any machine and returns the figures that depend on it. Those of communicators that
make room for others are in parking_bodies.py, those that close many of them in closing_bodies.py.
"""
from __future__ import annotations

import statistics
import threading
import time
from typing import Any

import torch
import torch.distributed as dist
from nccl_tools import MIB, TIMEOUT_S, Busy, check_sums, costs, make, ready
from ranks import Rank

from migration.communicators.nccl import NcclCommunicator, Stage
from migration.communicators.nccl_pair import NcclPair
from migration.communicators.nccl_policy import NcclPolicy
from migration.errors import DeadlineExpired
from nccl_bindings.communicator import Communicator as Bare
from nccl_bindings.errors import Aborted
from nccl_bindings.operations import new_unique_id
from third_party.pytorch.nccl_group import backend_of, build_nccl, communicator_of, install_p2p_grouping
from third_party.pytorch.process_group import MigratableGroup

LARGE = 300  # ranks


def adoption(own: Rank) -> dict[str, Any]:
    """Stock ProcessGroupNCCL works on the communicator that the bindings made, and closes it."""
    adopted_before, calls_before = own.overlay.num_adopted, own.overlay.num_calls
    communicator = ready(own, "adopted")
    assert own.overlay.num_adopted == adopted_before + 1 and own.overlay.num_calls == calls_before + 1
    assert communicator_of(communicator.inner) == communicator._bare.pointer
    check_sums(own, communicator.inner)
    _check_batched_p2p(own, communicator)
    assert own.overlay.num_calls == calls_before + 1, "no further communicator was made, also not for pairs"
    communicator.close()
    assert communicator.stage is Stage.CLOSED
    communicator.close()
    _check_large(own)
    return {"costs": costs(communicator)}


def _check_large(own: Rank) -> None:
    """Beyond 128 ranks torch has another way to make a communicator; it takes the one that is handed over all the same.

    One of this rank alone stands for it: nothing is called on it but the abort.
    """
    bare = Bare(own.library, 0, 1, "large")
    bare.init(new_unique_id(bare.raw))
    group = build_nccl(None, "large", 0, LARGE, own.device, communicator=bare.pointer, ranks=range(LARGE),
                       operation_timeout_s=TIMEOUT_S)
    assert communicator_of(group) == bare.pointer
    bare.hand_over()
    backend_of(group).abort()


def _check_batched_p2p(own: Rank, communicator: NcclCommunicator) -> None:
    install_p2p_grouping()
    handle = MigratableGroup("p2p", own.rank, tuple(range(own.world)))
    handle.inner = communicator.inner
    dist.distributed_c10d._world.pg_map[handle] = ("nccl", None)  # as new_group would
    dist.distributed_c10d._world.pg_group_ranks[handle] = {r: r for r in range(own.world)}
    dist.distributed_c10d._world.pg_names[handle] = "p2p"
    received = torch.zeros(1 << 20, device=own.device)
    right, left = (own.rank + 1) % own.world, (own.rank - 1) % own.world
    works = dist.batch_isend_irecv([
        dist.P2POp(dist.isend, torch.full_like(received, float(own.rank)), group=handle, group_peer=right),
        dist.P2POp(dist.irecv, received, group=handle, group_peer=left)])
    for work in works:
        work.wait()
    torch.cuda.synchronize(own.device)
    assert bool((received == float(left)).all())


def background(own: Rank) -> dict[str, Any]:
    """A further communicator is prepared while a live one is busy; both are right, and sums keep their bits."""
    live = ready(own, "live")
    busy = Busy(own, live.inner)
    busy.iterate(10)
    undisturbed_s = busy.iterate(60)
    following = make(own, "next")
    errors: list[Exception] = []

    def prepare() -> None:
        try:
            following.prepare(own.store, TIMEOUT_S)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=prepare)
    thread.start()
    during_s = busy.iterate(60)
    thread.join(TIMEOUT_S)
    assert not thread.is_alive() and not errors, errors
    following.activate()
    assert following.probe(own.device) == live.probe_digest
    check_sums(own, following.inner)
    check_sums(own, live.inner)
    following.close()
    check_sums(own, live.inner)
    live.close()
    return {"undisturbed_s": statistics.median(undisturbed_s), "during_s": statistics.median(during_s),
            "costs": costs(following)}


def abort_half_built(own: Rank) -> dict[str, Any]:
    """A member never comes: init ends when it is aborted, soon, and the live communicator doesn't notice."""
    live = ready(own, "live")
    if own.rank == 0:
        own.store.set("half id", new_unique_id(live._bare.raw))
    unique_id = own.store.get("half id")
    half = Bare(own.library, own.rank, own.world + 1, "half")
    errors: list[Exception] = []

    def init() -> None:
        torch.cuda.set_device(own.device)
        try:
            half.init(unique_id)
        except Exception as error:
            errors.append(error)

    thread = threading.Thread(target=init)
    thread.start()
    Busy(own, live.inner).iterate(100)
    assert thread.is_alive(), errors
    started_s = time.perf_counter()
    half.abort()
    thread.join(20.0)
    seconds = time.perf_counter() - started_s
    assert not thread.is_alive() and isinstance(errors[0], Aborted), errors
    own.barrier("aborted")
    check_sums(own, live.inner)

    missing = NcclCommunicator("missing", tuple(range(own.world + 1)), own.rank, device=own.device,
                               library=own.library, policy=NcclPolicy(switch="lazy"))
    try:
        missing.prepare(own.store, 1.0)
    except DeadlineExpired as error:
        assert f"switch/{own.world}" in str(error)
    missing.close()
    check_sums(own, live.inner)
    live.close()
    return {"abort_s": seconds}


def abort_prepared(own: Rank) -> dict[str, Any]:
    """A prepared one is aborted; one whose peers don't come to connect ends by its deadline. The live one goes on."""
    live = ready(own, "live")
    dropped = make(own, "dropped")
    dropped.prepare(own.store, TIMEOUT_S)
    dropped.abort()
    dropped.abort()
    dropped.close()
    check_sums(own, live.inner)
    alone = make(own, "alone", connect_timeout_s=3.0)
    alone.prepare(own.store, TIMEOUT_S)
    started_s = time.perf_counter()
    if own.rank == 0:
        try:
            alone.connect()
        except DeadlineExpired as error:
            assert "alone: connecting" in str(error), error
        else:
            raise AssertionError("connected without its peers")
    seconds = time.perf_counter() - started_s
    own.barrier("given up")
    alone.abort()
    alone.close()
    check_sums(own, live.inner)
    live.close()
    return {"alone_s": seconds}


def peer_goes_away(own: Rank) -> dict[str, Any]:
    """While all but the last member connect, that one aborts. Whatever it was that failed, this thread's next calls are
    carried out: NCCL may leave a group of its own open, and everything would be queued for ever."""
    live = ready(own, "live")
    half = make(own, "half", connect_timeout_s=20.0)
    half.prepare(own.store, TIMEOUT_S)
    own.barrier("prepared")
    told = ""
    if own.rank == own.world - 1:
        time.sleep(1.0)  # the others are at it
        half.abort()
        half.wait_aborted(TIMEOUT_S)
    else:
        try:
            half.connect()
        except RuntimeError as error:
            told = f"{type(error).__name__}: {error}"
        assert told, "connected without one of its members"
        half.abort()
    own.barrier("given up")
    check_sums(own, live.inner)
    following = ready(own, "following")
    check_sums(own, following.inner)
    half.close()
    following.close()
    live.close()
    return {"told": told[:200]}


def pair(own: Rank) -> dict[str, Any]:
    """A leaver's bytes arrive at the joiner; a transfer without its other end ends by its deadline."""
    name = f"pair {own.rank // 2}"
    two = NcclPair(name, (0, 1), own.rank % 2, device=own.device, library=own.library, policy=NcclPolicy())
    two.prepare(own.store, TIMEOUT_S, operation_timeout_s=3.0)
    two.activate()
    chunks = [torch.zeros(64 * MIB, dtype=torch.uint8, device=own.device) for _ in range(4)]
    is_leaver = own.rank % 2 == 0
    if is_leaver:
        for i, chunk in enumerate(chunks):
            chunk.fill_(i + 1)
    torch.cuda.synchronize(own.device)
    started_s = time.perf_counter()
    works = [two.inner.send([c], 1, 0) if is_leaver else two.inner.recv([c], 0, 0) for c in chunks]
    for work in works:
        work.wait()
    seconds = time.perf_counter() - started_s
    assert [int(c[-1]) for c in chunks] == [1, 2, 3, 4]
    own.barrier("sent")
    if not is_leaver:
        try:
            two.inner.recv([chunks[0]], 0, 0).wait()
        except DeadlineExpired as error:
            assert "recv" in str(error)
        else:
            raise AssertionError("received from nobody")
    two.close()
    return {"gb_per_s": 256 * MIB / seconds / 1e9, "costs": costs(two)}
