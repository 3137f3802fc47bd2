"""Work on the device through the bare bindings: waits with a deadline, connecting, probing.

Everything runs on the calling thread's current stream. Knows nothing of stages, stores or moves.
"""
from __future__ import annotations

import contextlib
import hashlib
import threading
import time
from collections.abc import Callable, Iterator, Sequence

import torch

from migration.errors import DeadlineExpired, MoveFailed
from nccl_bindings.communicator import Communicator as Bare
from nccl_bindings.errors import Aborted
from nccl_bindings.operations import State, group
from nccl_bindings.types import DataType, RedOp

_SPIN_S = 0.002      # waits shorter than this are polled without a pause
_POLL_S = 0.0002
_P2P_BYTES = 1 << 20


@contextlib.contextmanager
def deadline(what: str, timeout_s: float, abort: Callable[[], None]) -> Iterator[None]:
    """For calls that block in NCCL: after `timeout_s`, `abort` ends the call inside; raises DeadlineExpired then."""
    expired = threading.Event()

    def expire() -> None:
        expired.set()
        abort()

    timer = threading.Timer(timeout_s, expire)
    timer.daemon = True
    timer.start()
    try:
        yield
    except Exception as error:
        if expired.is_set():
            raise DeadlineExpired(f"{what} took longer than {timeout_s:.1f} s") from error
        raise
    finally:
        timer.cancel()
    if expired.is_set():
        raise DeadlineExpired(f"{what} took longer than {timeout_s:.1f} s")


def wait_for_stream(bare: Bare, device: torch.device, ends_s: float, what: str, abort: Callable[[], None]) -> None:
    """Wait until everything issued on the current stream is done. Not collective, but it needs the peers' work.

    Past `ends_s` (time.monotonic) it calls `abort`, which ends NCCL's kernels, and raises DeadlineExpired. Raises
    Aborted if somebody else has aborted: the data are garbage then, although the stream looks done.
    """
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(device))
    started_s = time.monotonic()
    while not event.query():
        now_s = time.monotonic()
        if now_s > ends_s:
            abort()
            raise DeadlineExpired(f"{bare.name}: {what} wasn't done {now_s - started_s:.1f} s after it was waited for")
        if now_s - started_s > _SPIN_S:
            time.sleep(_POLL_S)
    if bare.state is State.ABORTED:
        raise Aborted(f"{bare.name}: aborted during {what}")


def connect(bare: Bare, device: torch.device, sizes_bytes: Sequence[int], peers: Sequence[int],
            wait: Callable[[], None]) -> None:
    """Do once what makes NCCL connect all that training uses, and `wait` for it. Collective over the members.

    NCCL connects by algorithm, and chooses the algorithm by operation and size; pairs when they first talk. Raises
    MoveFailed if a sum comes out wrong: NCCL may take calls and do nothing (see operations.leave_groups).
    """
    stream = torch.cuda.current_stream(device).cuda_stream
    size, rank = bare.group_size, bare.group_rank
    per_rank = [max(1, num_bytes // 4 // size) for num_bytes in sizes_bytes]
    buffer = torch.zeros(max(per_rank) * size, dtype=torch.float32, device=device)
    whole = buffer.data_ptr()
    for count in per_rank:
        own = whole + 4 * rank * count
        bare.all_reduce(whole, whole, size * count, DataType.FLOAT32, RedOp.SUM, stream)
        bare.reduce_scatter(whole, own, count, DataType.FLOAT32, RedOp.SUM, stream)
        bare.all_gather(own, whole, count, DataType.FLOAT32, stream)
    if peers:
        outgoing = torch.zeros(_P2P_BYTES, dtype=torch.uint8, device=device)
        incoming = torch.empty((len(peers), _P2P_BYTES), dtype=torch.uint8, device=device)
        with group(bare.raw):
            for row, peer in zip(incoming, peers, strict=True):
                bare.send(outgoing.data_ptr(), _P2P_BYTES, DataType.UINT8, peer, stream)
                bare.recv(row.data_ptr(), _P2P_BYTES, DataType.UINT8, peer, stream)
    ones = torch.ones(1, dtype=torch.float32, device=device)
    bare.all_reduce(ones.data_ptr(), ones.data_ptr(), 1, DataType.FLOAT32, RedOp.SUM, stream)
    wait()  # the buffers live as long as they are written to
    if ones.item() != size:
        raise MoveFailed(f"{bare.name}: an all-reduce of ones over {size} members gave {ones.item():g}")


def probe(bare: Bare, device: torch.device, slot: int, sizes: Sequence[int], wait: Callable[[], None]) -> str:
    """Digest of sums of `sizes` elements whose value depends on the order of addition. Collective over the members.

    All-reduce and reduce-scatter: each may add in another order, and in another one by size and by position.
    """
    generator = torch.Generator().manual_seed(9973 * slot + 1)
    exponents = torch.randint(-20, 21, (64,), generator=generator)
    terms = (torch.randn(64, generator=generator) * torch.exp2(exponents.float())).to(device)
    stream = torch.cuda.current_stream(device).cuda_stream
    results = []
    for size in sizes:
        per_member = 64 * -(-size // (64 * bare.group_size))
        values = terms.repeat(per_member * bare.group_size // 64)
        part = torch.empty(per_member, dtype=torch.float32, device=device)
        whole = torch.empty_like(values)
        bare.reduce_scatter(values.data_ptr(), part.data_ptr(), per_member, DataType.FLOAT32, RedOp.SUM, stream)
        bare.all_gather(part.data_ptr(), whole.data_ptr(), per_member, DataType.FLOAT32, stream)
        bare.all_reduce(values.data_ptr(), values.data_ptr(), values.numel(), DataType.FLOAT32, RedOp.SUM, stream)
        results += [values, whole]
    wait()  # with a deadline; the copies below have none
    digest = hashlib.sha256()
    for result in results:
        digest.update(result.cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
