"""The two-member communicator of a leaver and its joiner: send and recv straight on it, GPU to GPU, in place.

No torch group, no copies, no third thread; every wait has a deadline and tells an aborted transfer from a finished
one. Knows nothing of what is sent.
"""
from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
import torch.distributed as dist

from migration.communicators.nccl import NcclCommunicator
from migration.communicators.nccl_device import wait_for_stream
from nccl_bindings.communicator import Communicator as Bare
from nccl_bindings.operations import group
from nccl_bindings.types import DataType

LAUNCHED = 32  # messages at a time: one launch for them, and they travel while the next ones are issued


class NcclPair(NcclCommunicator):
    """Leaver (group rank 0) and joiner. Never parked. `activate` connects both directions: call it before the pause."""

    def _meet(self, store: dist.Store, ends_s: float) -> bytes:
        unique_id = super()._meet(store, ends_s)
        self.switch = "connected"
        return unique_id

    def _build_inner(self) -> Any:
        return PairGroup(self._bare, self.device, self.abort, self._operation_timeout_s)

    def send_all(self, tensors: Iterable[torch.Tensor], peer: int, timeout_s: float | None = None) -> None:
        self.inner.send(tensors, peer, timeout_s=timeout_s).wait()

    def recv_all(self, tensors: Iterable[torch.Tensor], peer: int, timeout_s: float | None = None) -> None:
        self.inner.recv(tensors, peer, timeout_s=timeout_s).wait()


class PairWork:
    """An operation of a pair. `wait` is what a transfer needs of torch's Work."""

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish = finish

    def wait(self) -> bool:
        """Blocks until the data have moved. Raises DeadlineExpired or Aborted, so that garbage isn't taken for data."""
        self._finish()
        return True


class PairGroup:
    """send and recv as a transfer calls them, straight on the communicator: no copies, no third thread, a deadline."""

    def __init__(self, bare: Bare, device: torch.device, abort: Callable[[], None], operation_timeout_s: float) -> None:
        self._bare, self._device, self._abort = bare, device, abort
        self._operation_timeout_s = operation_timeout_s  # where a call names none

    def send(self, tensors: Iterable[torch.Tensor], peer: int, _tag: int = 0,
             timeout_s: float | None = None) -> PairWork:
        return self._issue(self._bare.send, tensors, peer, "send", timeout_s)

    def recv(self, tensors: Iterable[torch.Tensor], peer: int, _tag: int = 0,
             timeout_s: float | None = None) -> PairWork:
        return self._issue(self._bare.recv, tensors, peer, "recv", timeout_s)

    def _issue(self, call: Callable[..., None], tensors: Iterable[torch.Tensor], peer: int, what: str,
               timeout_s: float | None) -> PairWork:
        stream = torch.cuda.current_stream(self._device).cuda_stream
        rest, num_bytes = iter(tensors), 0
        with self._bare.issuing:
            while launched := list(itertools.islice(rest, LAUNCHED)):
                self._check(launched, what)
                with group(self._bare.raw):
                    for tensor in launched:
                        call(tensor.data_ptr(), tensor.nbytes, DataType.UINT8, peer, stream)
                        num_bytes += tensor.nbytes
        ends_s = time.monotonic() + (self._operation_timeout_s if timeout_s is None else timeout_s)
        return PairWork(lambda: wait_for_stream(self._bare, self._device, ends_s, f"{what} of {num_bytes} bytes",
                                                self._abort))

    def _check(self, tensors: Iterable[torch.Tensor], what: str) -> None:
        if not all(tensor.is_contiguous() and tensor.device == self._device for tensor in tensors):
            raise ValueError(f"{self._bare.name}: {what} needs contiguous tensors on {self._device}")
