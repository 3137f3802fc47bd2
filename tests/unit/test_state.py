"""KINDS: everything is in it, everything can be poisoned, told apart by its digest, and put back."""
from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_jobs import open_job, tiny_config

from migration import internals, state
from migration.errors import StateMismatch
from migration.job import Job

CONFIGS = {
    "fp32 plain": {"dtype": "fp32", "distributed_optimizer": False},
    "bf16 plain": {"distributed_optimizer": False},
    "bf16 distributed": {"dp": 2},
    "fp16 plain": {"dtype": "fp16", "distributed_optimizer": False},
    "fp16 distributed overlap": {"dtype": "fp16", "dp": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "bf16 interleaved overlap": {"pp": 2, "vpp": 2, "num_layers": 4, "overlap_grad_reduce": True},
}
NEVER_HERE = {"rng_cuda"}  # needs CUDA


@pytest.fixture(params=CONFIGS)
def job(request: pytest.FixtureRequest) -> Iterator[Job]:
    """A job that has done one iteration, so that nothing still has its first value."""
    with open_job(tiny_config(**CONFIGS[request.param])) as made:
        made.run_shadow_iteration()
        yield made


def digests_of(job: Job) -> dict[str, str]:
    return state.digests(state.capture(job))


def test_poison_changes_every_kind(job: Job) -> None:
    before = digests_of(job)
    state.poison(job)
    after = digests_of(job)
    assert before.keys() == after.keys()
    # a cache that is empty stays so, and there is nothing in it to lose
    unchanged = [kind for kind in before if before[kind] == after[kind]]
    assert all(not any(state.KINDS[kind].get(job)) for kind in unchanged), unchanged


def test_poison_leaves_no_tensor_whole(job: Job) -> None:
    state.poison(job)
    for named in state.capture(job).tensors.values():
        for name, tensor in named.items():
            bad = tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).max
            assert bool(bad.all()), name


def test_values_go_through_json_and_back(job: Job) -> None:
    before = digests_of(job)
    values = json.loads(json.dumps(state.capture(job).values))
    state.poison(job)
    poisoned = digests_of(job)
    state.apply_values(job, values)
    after = digests_of(job)
    for name, kind in state.KINDS.items():
        if name in before:
            assert after[name] == (before if kind.set else poisoned)[name], name


@pytest.mark.parametrize("name", [n for n, kind in state.KINDS.items() if kind.set and n not in NEVER_HERE])
def test_one_value_set_alone_changes_nothing_else(job: Job, name: str) -> None:
    kind = state.KINDS[name]
    if not kind.applies(job):
        pytest.skip(f"this job has no {name}")
    before, own = digests_of(job), kind.get(job)
    kind.set(job, kind.poison(own))
    others = {other for other, digest in digests_of(job).items() if digest != before[other]} - {name}
    # Megatron's scheduler writes the learning rate when its state is loaded; rng_torch is nobody else's here
    assert others <= ({"param_groups"} if name == "lr_scheduler" else set())
    for restored in (name, *others):
        state.KINDS[restored].set(job, json.loads(json.dumps(own if restored == name else original(before, job))))


def original(_before: dict[str, str], job: Job) -> Any:
    return state.KINDS["param_groups"].get(job)
