"""What each of two ranks does to measure a communicator by itself: the host's cost of a collective, and a state's way.

Run by analysis/ranks.py; bench_gpu.py makes figures of what is returned. The same code on NCCL and on Gloo.
"""
from __future__ import annotations

import statistics
import time
from dataclasses import asdict
from typing import Any

import torch
import torch.distributed as dist

from analysis.ranks import Rank
from analysis.wrapper_cost import measure
from migration.communicators.makers import build_maker
from third_party.pytorch.nccl_group import build_nccl
from third_party.pytorch.process_group import MigratableGroup, build_gloo

TIMEOUT_S = 60.0
BOTH = (0, 1)


def host_cost(own: Rank) -> dict[str, Any]:
    """A handle on a communicator that was prepared by our bindings, against a group that torch made by itself.

    Arguments: repeats, calls. Returns the rows of wrapper_cost.
    """
    maker = build_maker(own.device, "connected", connect_in_background=False)
    prepared = maker.make("measured", BOTH, own.rank, num_groups=1)
    prepared.prepare(own.store, TIMEOUT_S)
    prepared.activate()
    handle = MigratableGroup("measured", own.rank, BOTH)
    handle.inner = prepared.inner
    costs = measure(handle, own.arguments["repeats"], own.arguments["calls"], bare=_stock(own), device=own.device)
    return {"costs": [asdict(cost) for cost in costs]}


def _stock(own: Rank) -> dist.ProcessGroup:
    store = dist.PrefixStore("stock", own.store)
    if own.device.type == "cuda":
        return build_nccl(store, "stock", own.rank, 2, own.device, communicator=None, ranks=BOTH,
                          operation_timeout_s=TIMEOUT_S)
    return build_gloo(store, "stock", own.rank, 2, connect_timeout_s=TIMEOUT_S, operation_timeout_s=TIMEOUT_S)


def state_rate(own: Rank) -> dict[str, Any]:
    """A slot's state from rank 0 to rank 1 as a move sends it, against one bare send of as many bytes.

    Arguments: settings (of the config), repeats. Returns bytes, and seconds of each repetition at this rank.
    """
    from migration.preload import preload
    preload()
    from analysis.prepare_beside import build_groups, build_job, config_of
    from migration import state, transfer, wire
    config = config_of({"tp": 1, "dp": 1}, own.arguments["settings"])
    groups = build_groups(own, "connected")
    job = build_job(config, 0, groups)
    job.run_shadow_iteration()
    captured = state.capture(job)
    listener = wire.Listener(own.store, "state", "127.0.0.1") if own.rank == 1 else None
    pair = groups.make_pair("state", own.rank)
    groups.prepare_pair(pair, own.store, TIMEOUT_S, 2 * TIMEOUT_S)
    words = listener.accept(TIMEOUT_S) if listener else wire.connect(own.store, "state", TIMEOUT_S)
    bare = _bare_transfer(own)

    def as_a_move() -> None:
        if own.rank == 0:
            transfer.send_state(pair, words, captured)
        else:
            transfer.receive_state(pair, words.receive(TIMEOUT_S), captured)

    as_a_move()
    num_bytes = captured.num_bytes
    flat = torch.empty(num_bytes, dtype=torch.uint8, device=own.device)
    times_s: dict[str, list[float]] = {"state": [], "bare": []}
    bare(flat)
    for i in range(own.arguments["repeats"]):
        for which, call in (("state", as_a_move), ("bare", lambda: bare(flat))):
            own.barrier(f"{which} {i}", poll_s=0.0002)  # either transfer takes as long as the later of both
            started_s = time.perf_counter()
            call()
            times_s[which].append(time.perf_counter() - started_s)
    words.close()
    groups.release_pair(pair)
    return {"bytes": num_bytes, "num_tensors": sum(map(len, captured.tensors.values())),
            **{f"{which}_s": statistics.median(times) for which, times in times_s.items()}}


def _bare_transfer(own: Rank) -> Any:
    """A function that brings a tensor from rank 0 to rank 1 in one operation, and returns when it is there."""
    if own.device.type != "cuda":
        group = _stock(own)

        def over_gloo(flat: torch.Tensor) -> None:
            (group.send([flat], 1, 0) if own.rank == 0 else group.recv([flat], 0, 0)).wait()

        return over_gloo
    from nccl_bindings.communicator import Communicator as Bare
    from nccl_bindings.operations import new_unique_id
    from nccl_bindings.types import DataType
    bare = Bare(own.library, own.rank, 2, "bare")
    if own.rank == 0:
        own.store.set("bare id", new_unique_id(bare.raw))
    bare.init(own.store.get("bare id"))

    def over_nccl(flat: torch.Tensor) -> None:
        call, peer = (bare.send, 1) if own.rank == 0 else (bare.recv, 0)
        call(flat.data_ptr(), flat.numel(), DataType.UINT8, peer, torch.cuda.current_stream(own.device).cuda_stream)
        torch.cuda.synchronize(own.device)

    return over_nccl
