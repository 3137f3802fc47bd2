"""What lets Megatron-Core run on a machine without CUDA, and the few questions the rest asks about the device.

Owns every replacement inside `torch` and `torch.cuda`; no other file touches their internals. Must not know Megatron's
objects, process groups or moves. Where CUDA exists nothing is replaced and the same program runs on the GPU.

`install()` comes before the first import of megatron.core, which binds `torch.cuda._lazy_call` by name. Megatron asks
for CUDA in the ways below; found by running it (fp32, bf16 and fp16, both optimizers, overlap, sequence parallelism,
recompute, interleaved pipeline) and by reading its sources. Tried: megatron-core 0.16.1 (Python 3.11) and 0.19.2
(Python 3.12), torch 2.13.

| replaced                                | by                         | because Megatron                              |
| --------------------------------------- | -------------------------- | ----------------------------------------------|
| torch.cuda.current_device               | the CPU device             | places buffers, gathers and pipeline receives |
|                                         |                            | by it                                         |
| torch.cuda.synchronize                  | torch.cpu.synchronize      | waits after a batch of pipeline sends         |
| torch.cuda.current_stream               | torch.cpu.current_stream   | (0.19) asks for it before a gradient reduction|
| torch.cuda.default_generators           | the CPU generator, for any | switches random states in its RNG tracker; the|
|                                         | index                      | index is what current_device gave             |
| torch.cuda.get_rng_state, set_rng_state | those of the CPU generator | keeps one random state for each tracker stream|
| torch.cuda.manual_seed                  | seed of the CPU generator  | makes the states of the streams               |
| torch.cuda._lazy_call                   | a call at once             | sets a state through it: stock torch queues   |
|                                         |                            | the call for a CUDA start that never comes, so|
|                                         |                            | that the tracker silently wouldn't switch     |
| torch.tensor, zeros, ones, empty,       | device="cuda" means "cpu"  | writes "cuda" into them (loss scale, norms,   |
| empty_like                              |                            | token counts, masks, checkpoints)             |
| Tensor.cuda                             | the tensor itself          | moves tied embeddings and the loss scale      |
| Tensor.type() called by Megatron        | "torch.cuda.FloatTensor"   | sorts parameters by that very string          |
|                                         | and so on                  |                                               |
| (a log line)                            | nothing                    | warns that the CPU's random state changed     |
|                                         |                            | while a stream was on, which is meant here    |

Not covered, and refused or left off elsewhere: CUDA graphs, fused kernels, torch.compile, FP8, MoE, NCCL buffers.
"""
from __future__ import annotations

import functools
import logging
import sys
from collections.abc import Callable
from typing import Any

import torch

from migration.errors import UserError
from migration.placement import has_gpu

_FACTORIES = ("tensor", "zeros", "ones", "empty", "empty_like")
_CUDA_TYPE_NAMES = {torch.float32: "torch.cuda.FloatTensor", torch.float16: "torch.cuda.HalfTensor",
                    torch.bfloat16: "torch.cuda.BFloat16Tensor"}
_RNG_MODULE = "megatron.core.tensor_parallel.random"


def install() -> bool:
    """Makes "cuda" mean the CPU where there is no CUDA. Returns True there, False (and does nothing) where CUDA is.

    A second call changes nothing. Must be called before the first import of megatron.core.
    """
    if has_gpu() and torch.backends.cuda.is_built():
        return False
    if is_installed():
        return True
    assert _RNG_MODULE not in sys.modules, "device.install() must be called before megatron.core is imported"
    _replace_places()
    _replace_random_numbers()
    for name in _FACTORIES:
        setattr(torch, name, _redirected(getattr(torch, name)))
    _replace_tensor_methods()
    return True


def is_installed() -> bool:
    """Whether "cuda" means the CPU in this process."""
    return isinstance(torch.cuda.default_generators, _CpuGenerators)


def check_usable() -> None:
    """Raises UserError where a GPU's device file and torch don't agree: what "cuda" means would not be clear.

    Asks CUDA, so that this process must not be copied afterwards.
    """
    if is_installed() and torch.cuda.is_available():
        raise UserError("torch has a GPU on this machine, but there is no device file /dev/nvidia0 or the like, by "
                        "which it is looked for: set CUDA_VISIBLE_DEVICES= to train on the CPU")
    if not is_installed() and not torch.cuda.is_available():
        raise UserError("this machine has an NVIDIA GPU that torch can't use: look at its driver with nvidia-smi, or "
                        "set CUDA_VISIBLE_DEVICES= to train on the CPU")


def is_cpu() -> bool:
    """Whether the job trains on the CPU, for want of CUDA."""
    return not torch.cuda.is_available()


def current_device() -> torch.device:
    """The device on which this process keeps its tensors."""
    return torch.device("cpu") if is_cpu() else torch.device("cuda", torch.cuda.current_device())


def memory_bytes() -> int:
    """Bytes that tensors of this process hold on the device; 0 on the CPU, where they are part of the process's own."""
    return 0 if is_cpu() else torch.cuda.memory_allocated()


class _CpuGenerators:
    """`torch.cuda.default_generators` where every index names the CPU's generator."""

    def __getitem__(self, index: object) -> torch.Generator:
        return torch.default_generator

    def __len__(self) -> int:
        return 1


def _replace_places() -> None:
    cpu = torch.device("cpu")
    torch.cuda.current_device = lambda: cpu
    torch.cuda.synchronize = torch.cpu.synchronize
    torch.cuda.current_stream = torch.cpu.current_stream  # a stream that does everything at once


def _replace_random_numbers() -> None:
    def get_rng_state(device: object = "cuda") -> torch.Tensor:
        return torch.get_rng_state()

    def set_rng_state(new_state: torch.Tensor, device: object = "cuda") -> None:
        torch.set_rng_state(new_state)

    def manual_seed(seed: int) -> None:
        # Not torch.manual_seed, which seeds CUDA too and so would come back here.
        torch.default_generator.manual_seed(int(seed))

    def call_at_once(callback: Callable[[], None], **_: object) -> None:
        callback()

    for module in (torch.cuda, torch.cuda.random):  # Megatron reads some of them from the one, some from the other
        module.get_rng_state = get_rng_state
        module.set_rng_state = set_rng_state
        module.manual_seed = manual_seed
    torch.cuda._lazy_call = call_at_once
    torch.cuda.default_generators = _CpuGenerators()
    logging.getLogger(_RNG_MODULE).addFilter(lambda record: "CPU RNG state changed" not in record.getMessage())


def _redirected(factory: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    @functools.wraps(factory)
    def create(*args: Any, **kwargs: Any) -> torch.Tensor:
        device = kwargs.get("device")
        if device is not None and not isinstance(device, int) and torch.device(device).type == "cuda":
            kwargs["device"] = "cpu"
            kwargs.pop("pin_memory", None)  # pinning needs CUDA
        return factory(*args, **kwargs)

    return create


def _replace_tensor_methods() -> None:
    stock_type = torch.Tensor.type

    def type_for_megatron(self: torch.Tensor, *args: Any, **kwargs: Any) -> str | torch.Tensor:
        asked = not args and not kwargs and self.device.type == "cpu"
        if asked and sys._getframe(1).f_globals.get("__name__", "").startswith("megatron.core"):
            return _CUDA_TYPE_NAMES.get(self.dtype) or stock_type(self)
        return stock_type(self, *args, **kwargs)

    def stay(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        return self

    torch.Tensor.type = type_for_megatron
    torch.Tensor.cuda = stay
