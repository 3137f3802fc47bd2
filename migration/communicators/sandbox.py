"""A communicator that talks to nobody: a joiner builds its model and runs shadow iterations on it.

Every operation is done at once and leaves finite numbers behind: reductions keep the own contribution, gathers repeat
it, receives give zeros. The values are of no use; shapes, code paths, allocations and lazy initialisation are real.
"""
from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import Work

from migration.communicators.base import Communicator


class FinishedWork(Work):
    """A finished operation."""

    def wait(self, timeout: Any = None) -> bool:
        return True

    def is_completed(self) -> bool:
        return True

    def is_success(self) -> bool:
        return True


class SandboxGroup:
    """Answers the calls that a MigratableGroup forwards. Method names are torch's."""

    def __init__(self, group_rank: int, group_size: int) -> None:
        self._rank, self._size = group_rank, group_size

    def _get_backend_name(self) -> str:
        return "sandbox"

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device("cuda" if torch.cuda.is_available() else "cpu")]

    # every contribution stays what it was
    def _nothing(self, *_args: Any, **_kwargs: Any) -> Work:
        return FinishedWork()

    allreduce = allreduce_coalesced = broadcast = reduce = barrier = send = _nothing

    def recv(self, tensors: Sequence[torch.Tensor], *_args: Any) -> Work:
        for tensor in tensors:
            tensor.detach().zero_()  # a pipeline's receive buffer requires gradients
        return FinishedWork()

    def allgather(self, outputs: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], *_a: Any) -> Work:
        for parts, source in zip(outputs, inputs, strict=True):
            for part in parts:
                if part.shape == source.shape:
                    part.copy_(source)
                else:
                    part.zero_()
        return FinishedWork()

    def _allgather_base(self, output: torch.Tensor, source: torch.Tensor, *_args: Any) -> Work:
        # in place is usual: the source is this rank's part of the output
        output.view(self._size, -1).copy_(source.reshape(1, -1).clone())
        return FinishedWork()

    def allgather_into_tensor_coalesced(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
                                        *_args: Any) -> Work:
        for output, source in zip(outputs, inputs, strict=True):
            self._allgather_base(output, source)
        return FinishedWork()

    def _reduce_scatter_base(self, output: torch.Tensor, source: torch.Tensor, *_args: Any) -> Work:
        output.reshape(-1).copy_(source.view(self._size, -1)[self._rank].clone())
        return FinishedWork()

    def reduce_scatter_tensor_coalesced(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor],
                                        *_args: Any) -> Work:
        for output, source in zip(outputs, inputs, strict=True):
            self._reduce_scatter_base(output, source)
        return FinishedWork()

    def alltoall_base(self, output: torch.Tensor, *_args: Any) -> Work:
        output.zero_()
        return FinishedWork()

    all_gather_single, all_gather_single_coalesced = _allgather_base, allgather_into_tensor_coalesced
    reduce_scatter_single, reduce_scatter_single_coalesced = _reduce_scatter_base, reduce_scatter_tensor_coalesced
    all_to_all_single = alltoall_base

    def _get_backend(self, _device: torch.device) -> SandboxGroup:
        return self

    supports_coalescing = True

    def _start_coalescing(self, _device: torch.device) -> None:
        """Nothing to group."""

    def _end_coalescing(self, _device: torch.device) -> Work:
        return FinishedWork()


class SandboxCommunicator(Communicator):
    """Ready at once, without a store and without peers."""

    def prepare(self, store: dist.Store | None = None, timeout_s: float = 0.0,
                operation_timeout_s: float = 0.0) -> None:
        self.inner = SandboxGroup(self.group_rank, len(self.slots))

    def activate(self) -> None:
        """Always active."""

    def park(self) -> None:
        """Holds nothing."""

    def resume(self) -> None:
        """Nothing was parked."""

    def abort(self) -> None:
        """Nothing can be under way."""

    def close(self) -> None:
        self.inner = None
