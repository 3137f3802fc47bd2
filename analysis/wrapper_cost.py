"""`python -m analysis.wrapper_cost`: what a process group handle costs per collective, against the bare stock group.

Both are the same Gloo communicator in the same process: the handle forwards to the very group that is called bare (on
GPUs, analysis/bench_gpu.py, bare is a group that torch made by itself).
Batches of calls alternate, handle and bare, in an order that changes, so that whatever else the machine does meets both
alike; the cost is the median over the batches of (handle minus bare). A group of one has nothing to wait for but Gloo's
own thread, so it shows the host's cost; a group of two processes shows what that is beside real communication.

Owns the measurement and its table. Knows nothing of moves.
"""
from __future__ import annotations

import argparse
import json
import multiprocessing
import statistics
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass

import torch
import torch.distributed as dist

from third_party.pytorch.process_group import MigratableGroup, build_gloo

NUM_ELEMENTS = 8  # small: the cost of a call doesn't depend on it, the noise does
_TIMEOUT_S = 60.0
_US = 1e6

Call = Callable[[dist.ProcessGroup], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Medians over the batches, of one call from its start to its end."""

    collective: str
    group_size: int
    bare_us: float
    handle_us: float
    added_us: float  # median of the differences of neighbouring batches
    spread_us: float  # of those differences, between the quartiles: how far the machine's noise reaches


def build_calls(group_size: int, device: torch.device) -> dict[str, Call]:
    """The collectives that Megatron uses most, as it calls them; on the CPU, each waits for its end."""
    part, whole = torch.ones(NUM_ELEMENTS, device=device), torch.ones(NUM_ELEMENTS * group_size, device=device)
    return {
        "all_reduce": lambda group: dist.all_reduce(part, dist.ReduceOp.MAX, group=group),
        "broadcast": lambda group: dist.broadcast(part, group_src=0, group=group),
        "all_gather_into_tensor": lambda group: dist.all_gather_into_tensor(whole, part, group=group),
        "reduce_scatter_tensor": lambda group: dist.reduce_scatter_tensor(part, whole, dist.ReduceOp.MAX, group=group),
        "barrier": lambda group: dist.barrier(group),
    }


def measure(handle: MigratableGroup, num_repeats: int, num_calls: int, *, bare: dist.ProcessGroup | None = None,
            device: torch.device = torch.device("cpu")) -> list[Cost]:
    """`bare`: what the handle is compared with, where that isn't what is inside it.

    Collective over the group: every member makes the same calls in the same order. On a GPU it is the host's time that
    is measured: the device works the calls off after each batch.
    """
    costs = []
    for name, call in build_calls(handle.size(), device).items():
        groups = {"bare": handle.inner if bare is None else bare, "handle": handle}
        for group in groups.values():
            _time_batch(call, group, num_calls, device)  # the first calls are slower
        times_us: dict[str, list[float]] = {"bare": [], "handle": []}
        for i in range(num_repeats):
            for which in sorted(groups, reverse=bool(i % 2)):
                times_us[which].append(_time_batch(call, groups[which], num_calls, device))
        added_us = [h - b for h, b in zip(times_us["handle"], times_us["bare"])]
        low_us, median_us, high_us = statistics.quantiles(added_us, n=4, method="inclusive")
        costs.append(Cost(collective=name, group_size=handle.size(), bare_us=statistics.median(times_us["bare"]),
                          handle_us=statistics.median(times_us["handle"]), added_us=median_us,
                          spread_us=high_us - low_us))
    return costs


def _time_batch(call: Call, group: dist.ProcessGroup, num_calls: int, device: torch.device) -> float:
    """Microseconds of one call, on average over the batch."""
    start_s = time.perf_counter()
    for _ in range(num_calls):
        call(group)
    time_s = time.perf_counter() - start_s
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time_s / num_calls * _US


def connect(store: dist.Store, group_rank: int, group_size: int) -> MigratableGroup:
    """A handle on a connected Gloo group. Collective over its members."""
    handle = MigratableGroup("measured", group_rank, tuple(range(group_size)))
    handle.inner = build_gloo(dist.PrefixStore(f"{group_size}/", store), "measured", group_rank, group_size,
                              connect_timeout_s=_TIMEOUT_S, operation_timeout_s=_TIMEOUT_S)
    return handle


def _set_up() -> None:
    warnings.filterwarnings("ignore", category=FutureWarning, module=r"torch\..*")  # newer torch has other names
    torch.set_num_threads(1)


def _run_peer(port: int, num_repeats: int, num_calls: int) -> None:
    """The other process of the group of two."""
    _set_up()
    store = dist.TCPStore("127.0.0.1", port, is_master=False)
    measure(connect(store, 1, 2), num_repeats, num_calls)


def measure_all(num_repeats: int, num_calls: int) -> list[Cost]:
    """A group of this process alone, then one of two processes."""
    _set_up()
    costs = measure(connect(dist.HashStore(), 0, 1), num_repeats, num_calls)
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    peer = multiprocessing.get_context("spawn").Process(target=_run_peer, args=(server.port, num_repeats, num_calls))
    peer.start()
    try:
        costs += measure(connect(server, 0, 2), num_repeats, num_calls)
        peer.join(_TIMEOUT_S)
    finally:
        peer.kill()  # has ended already, unless something went wrong above
    return costs


def build_table(costs: Sequence[Cost]) -> str:
    lines = [f"{'one collective [us], medians':<28} {'processes':>9} {'bare group':>11} {'handle':>9} {'added':>8} "
             f"{'spread':>8}"]
    lines += [f"{c.collective:<28} {c.group_size:>9} {c.bare_us:>11.2f} {c.handle_us:>9.2f} {c.added_us:>+8.2f} "
              f"{c.spread_us:>8.2f}" for c in costs]
    return "\n".join([*lines, "", "added: median of handle minus bare over neighbouring batches; spread: between the "
                      "quartiles of that"])


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m analysis.wrapper_cost", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=_at_least_two, default=200,
                        help="batches of each kind, at least 2 (default: %(default)s)")
    parser.add_argument("--calls", type=_at_least_two, default=50,
                        help="calls in a batch, at least 2 (default: %(default)s)")
    parser.add_argument("--json", action="store_true", help="machine-readable")
    args = parser.parse_args(argv)
    costs = measure_all(args.repeats, args.calls)
    print(json.dumps([asdict(cost) for cost in costs], indent=1) if args.json else build_table(costs))
    return 0


def _at_least_two(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 2")
    return int(text)


if __name__ == "__main__":
    raise SystemExit(main())
