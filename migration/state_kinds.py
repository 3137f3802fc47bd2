"""Every kind of state that moves from a leaver to its joiner, in one literal: KINDS.

A kind is either tensors, which are copied in place so that every view stays what it was, or a value that JSON can
hold, which goes along with the header. The iteration isn't among them: it is the position that all members agreed on.
State that KINDS doesn't know (a new key in the optimizer, an unknown scaler) raises StateMismatch: better no move than
a silent loss. What is done with all kinds together is state.py's.
"""
from __future__ import annotations

import base64
import bisect
import random
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from migration import internals
from migration.errors import StateMismatch

if TYPE_CHECKING:
    from migration.job import Job

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """One kind of state: `tensors(job)` for what is copied in place, or `get(job)` / `set(job, value)`.

    `applies(job)` is False where a job has no such state. `poison` is what the joiner's own value is replaced with
    before the transfer; tensors are filled with NaN (or their highest integer).
    """

    what: str
    tensors: Callable[[Job], Tensors] | None = None
    get: Callable[[Job], Any] | None = None
    set: Callable[[Job, Any], None] | None = None
    poison: Callable[[Any], Any] | None = None
    applies: Callable[[Job], bool] = lambda job: True


# ---- tensors

def _parameters(job: Job) -> Tensors:
    found: Tensors = {}
    for i, chunk in enumerate(job.chunks):
        buffers = internals.param_buffers(chunk)
        if buffers:  # the distributed optimizer's parameters are views of these
            found.update({f"{i}.buffer{j}": b for j, b in enumerate(buffers)})
        else:
            found.update({f"{i}.{n}": p.data for n, p in chunk.named_parameters()})
    return found


def _buffers(job: Job) -> Tensors:
    return {f"{i}.{n}": b for i, chunk in enumerate(job.chunks) for n, b in chunk.named_buffers()}


def _main_parameters(job: Job) -> Tensors:
    """Those with memory of their own: in fp32 the optimizer steps the parameters themselves, or views of them."""
    ends = {t.data_ptr(): t.data_ptr() + t.numel() * t.element_size() for t in _parameters(job).values()}
    starts = sorted(ends)

    def is_parameter(address: int) -> bool:
        i = bisect.bisect(starts, address)
        return i > 0 and address < ends[starts[i - 1]]

    return {name: parameter.data for name, parameter, _ in internals.adam_states(job.optimizer)
            if not is_parameter(parameter.data_ptr())}


def _adam(job: Job, keys: tuple[str, ...]) -> Tensors:
    found: Tensors = {}
    for name, _, state in internals.adam_states(job.optimizer):
        if set(state) != internals.ADAM_STATE:
            raise StateMismatch(f"optimizer state of parameter {name} has the keys {sorted(state)}, known are "
                                f"{sorted(internals.ADAM_STATE)}: state that would be lost in a move")
        found.update({f"{name}.{key}": state[key] for key in keys})
    return found


# ---- values

def _get_steps(job: Job) -> list[float]:
    return [state["step"].item() for _, _, state in internals.adam_states(job.optimizer)]


def _set_steps(job: Job, value: list[float]) -> None:
    states = [state for _, _, state in internals.adam_states(job.optimizer)]
    for state, step in zip(states, value, strict=True):
        state["step"].fill_(step)


def _get_param_groups(job: Job) -> list[Any]:
    groups = []
    for inner in internals.inner_optimizers(job.optimizer):
        for group in inner.optimizer.param_groups:
            groups.append({k: list(v) if isinstance(v, tuple) else v for k, v in group.items() if k != "params"})
    return groups


def _set_param_groups(job: Job, value: list[Any]) -> None:
    groups = [g for inner in internals.inner_optimizers(job.optimizer) for g in inner.optimizer.param_groups]
    for group, new in zip(groups, value, strict=True):
        group.update({k: tuple(v) if isinstance(group[k], tuple) else v for k, v in new.items()})


def _set_scheduler(job: Job, value: dict[str, Any]) -> None:
    job.scheduler.num_steps = 0  # Megatron adds the loaded count to the present one
    job.scheduler.load_state_dict(value)


def _get_scalers(job: Job) -> list[Any]:
    states = [scaler.state_dict() for scaler in internals.grad_scalers(job.optimizer)]
    for state in states:
        if set(state) not in internals.SCALER_STATES:
            raise StateMismatch(f"state of the gradient scaler has the keys {sorted(state)}, known are "
                                f"{sorted(internals.SCALER_STATES[0])}: state that would be lost in a move")
    return [{k: v.tolist() if torch.is_tensor(v) else v for k, v in state.items()} for state in states]


def _set_scalers(job: Job, value: list[Any]) -> None:
    for scaler, new in zip(internals.grad_scalers(job.optimizer), value, strict=True):
        own = scaler.state_dict()
        scaler.load_state_dict({k: torch.tensor(v, dtype=own[k].dtype, device=own[k].device).reshape(own[k].shape)
                                if torch.is_tensor(own[k]) else v for k, v in new.items()})


def _encode(tensor: torch.Tensor) -> str:
    return base64.b64encode(tensor.cpu().numpy().tobytes()).decode()


def _decode(text: str) -> torch.Tensor:
    return torch.frombuffer(bytearray(base64.b64decode(text)), dtype=torch.uint8)


def _get_numpy(_job: Job) -> list[Any]:
    name, keys, position, has_gauss, gauss = np.random.get_state()
    return [name, base64.b64encode(keys.tobytes()).decode(), position, has_gauss, float(gauss).hex()]


def _set_numpy(_job: Job, value: list[Any]) -> None:
    name, keys, position, has_gauss, gauss = value
    words = np.frombuffer(base64.b64decode(keys), dtype=np.uint32).copy()
    np.random.set_state((name, words, position, has_gauss, float.fromhex(gauss)))


def _set_python(_job: Job, value: list[Any]) -> None:
    random.setstate((value[0], tuple(value[1]), value[2]))


def _get_trackers(_job: Job) -> dict[str, str]:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    return {name: _encode(state) for name, state in get_cuda_rng_tracker().get_states().items()}


def _set_trackers(_job: Job, value: dict[str, str]) -> None:
    from megatron.core.tensor_parallel import get_cuda_rng_tracker
    get_cuda_rng_tracker().set_states({name: _decode(text) for name, text in value.items()})


def _other_generator(text: str) -> str:
    return _encode(torch.Generator().manual_seed(987654321).get_state()) if len(_decode(text)) > 64 else text


def _wrong_bookkeeping(value: list[Any]) -> list[Any]:
    return [[[False, [[name, count + 1] for name, count in golden], []] for _, golden, _ in rows] for rows in value]


def _listed(state: tuple[Any, ...]) -> list[Any]:
    return [state[0], list(state[1]), state[2]]


KINDS: dict[str, Kind] = {
    "parameters": Kind(what="model parameters, or the buffers that they are views of", tensors=_parameters),
    "buffers": Kind(what="module buffers", tensors=_buffers, applies=lambda job: bool(_buffers(job))),
    "main_parameters": Kind(what="what the optimizer steps, where it isn't the parameters: fp32 copies or shards",
                            tensors=_main_parameters, applies=lambda job: bool(_main_parameters(job))),
    "moments": Kind(what="Adam's moments", tensors=lambda job: _adam(job, ("exp_avg", "exp_avg_sq"))),
    # on the host whatever the device, so not sent as tensors
    "optimizer_steps": Kind(what="Adam's step counts", get=_get_steps, set=_set_steps,
                            poison=lambda steps: [step + 1000.0 for step in steps]),
    "grad_scaler": Kind(what="loss scale and its counters (fp16)", get=_get_scalers, set=_set_scalers,
                        poison=lambda rows: [{k: [2.0] if k == "scale" else v + 1000 for k, v in r.items()}
                                             for r in rows],
                        applies=lambda job: bool(internals.grad_scalers(job.optimizer))),
    # before param_groups: setting the scheduler recomputes what stands there
    "lr_scheduler": Kind(what="the scheduler's counters", get=lambda job: job.scheduler.state_dict(),
                         set=_set_scheduler, poison=lambda value: {**value, "num_steps": 1_000_003}),
    "param_groups": Kind(what="learning rate, weight decay and the rest of each parameter group",
                         get=_get_param_groups, set=_set_param_groups,
                         # not the learning rate alone: the scheduler sets that anew
                         poison=lambda groups: [{**g, "lr": -1.0, "betas": [0.5, 0.5]} for g in groups]),
    "overlap_bookkeeping": Kind(what="how often each gradient becomes ready before its bucket is reduced",
                                get=lambda job: internals.get_bookkeeping(job.chunks),
                                set=lambda job, value: internals.set_bookkeeping(job.chunks, value),
                                poison=_wrong_bookkeeping, applies=lambda job: job.config.overlap_grad_reduce),
    "norm_group_cache": Kind(what="cached answers of one-off collectives",
                             get=lambda job: internals.get_norm_group_cache(job.optimizer),
                             set=lambda job, value: internals.set_norm_group_cache(job.optimizer, value),
                             poison=lambda value: [None if c is None else {k: not v for k, v in c.items()}
                                                   for c in value],
                             applies=lambda job: internals.caches_norm_groups(job.optimizer)),
    "rng_python": Kind(what="Python's generator", get=lambda job: _listed(random.getstate()), set=_set_python,
                       poison=lambda _: _listed(random.Random(987654321).getstate())),
    "rng_numpy": Kind(what="numpy's global generator", get=_get_numpy, set=_set_numpy,
                      poison=lambda value: [*value[:2], (value[2] + 1) % 624, *value[3:]]),
    "rng_torch": Kind(what="torch's CPU generator", get=lambda job: _encode(torch.get_rng_state()),
                      set=lambda job, value: torch.set_rng_state(_decode(value)), poison=_other_generator),
    "rng_cuda": Kind(what="the device's generator", get=lambda job: _encode(torch.cuda.get_rng_state()),
                     set=lambda job, value: torch.cuda.set_rng_state(_decode(value)), poison=lambda value: value,
                     applies=lambda job: job.device.type == "cuda"),
    "rng_trackers": Kind(what="each stream of Megatron's RNG tracker", get=_get_trackers, set=_set_trackers,
                         poison=lambda value: {n: _other_generator(t) for n, t in value.items()}),
    "data_position": Kind(what="samples consumed by the job", get=lambda job: job.cursor.consumed_samples,
                          set=lambda job, value: setattr(job.cursor, "consumed_samples", value),
                          poison=lambda value: value + 1_000_003),
    "history": Kind(what="logging accumulators", get=lambda job: job.history.to_json(),
                    set=lambda job, value: job.history.load_json(value),
                    poison=lambda value: {**value, "num_skipped": -1}),
}


def kinds_of(job: Job, omit: frozenset[str] = frozenset()) -> dict[str, Kind]:
    return {name: kind for name, kind in KINDS.items() if name not in omit and kind.applies(job)}
