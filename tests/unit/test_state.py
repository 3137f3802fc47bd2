"""KINDS: everything is in it, everything can be poisoned, told apart by its digest, and put back."""
from __future__ import annotations

import functools
import json
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch
from tiny_jobs import open_job, tiny_config

from migration import internals, state
from migration.errors import StateMismatch
from migration.job import Job
from migration.state_kinds import KINDS

CONFIGS = {
    "fp32 plain": {"dtype": "fp32", "distributed_optimizer": False},
    "fp32 distributed": {"dtype": "fp32", "dp": 2},
    "bf16 plain": {"distributed_optimizer": False},
    "bf16 distributed": {"dp": 2},
    "fp16 plain": {"dtype": "fp16", "distributed_optimizer": False},
    "fp16 distributed overlap": {"dtype": "fp16", "dp": 2, "overlap_grad_reduce": True, "overlap_param_gather": True},
    "bf16 interleaved overlap": {"pp": 2, "vpp": 2, "num_layers": 4, "overlap_grad_reduce": True},
}
MAY_BE_ABSENT = {"rng_cuda", "buffers", "norm_group_cache"}  # depends on the machine, or on Megatron's version


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
    assert all(not any(KINDS[kind].get(job)) for kind in unchanged), unchanged


def test_poison_leaves_no_tensor_whole(job: Job) -> None:
    """But for the padding of parameter buffers, which is zero in every process."""
    state.poison(job)
    for kind, named in state.capture(job).tensors.items():
        for name, tensor in named.items():
            bad = tensor.isnan() if tensor.is_floating_point() else tensor == torch.iinfo(tensor.dtype).max
            assert bool(bad.all()) or kind == "parameters" and bool((bad | (tensor == 0)).all()), name
    for chunk in job.chunks:
        assert all(bool(parameter.isnan().all()) for parameter in chunk.parameters())


def test_no_memory_goes_over_twice(job: Job) -> None:
    """In fp32 the optimizer steps the parameters themselves: they aren't main parameters as well."""
    found = state.capture(job).tensors
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.numel() * t.element_size())
                    for named in found.values() for t in named.values() if t.numel())
    assert all(end <= start for (_, end), (start, _) in zip(ranges, ranges[1:]))
    assert ("main_parameters" in found) is (job.config.dtype != "fp32")


def test_values_go_through_json_and_back(job: Job) -> None:
    before = digests_of(job)
    values = json.loads(json.dumps(state.capture(job).values))
    state.poison(job)
    poisoned = digests_of(job)
    state.apply_values(job, values)
    after = digests_of(job)
    for name, kind in KINDS.items():
        if name in before:
            assert after[name] == (before if kind.set else poisoned)[name], name


@dataclass(frozen=True, slots=True, kw_only=True)
class Captured:
    """A copy of a slot's state, as it would go over to a joiner."""

    tensors: dict[str, dict[str, torch.Tensor]]
    values: str  # JSON

    @classmethod
    def of(cls, job: Job) -> Captured:
        own = state.capture(job)
        return cls(tensors={k: {n: t.clone() for n, t in named.items()} for k, named in own.tensors.items()},
                   values=json.dumps(own.values))

    def put_into(self, job: Job, omit: frozenset[str] = frozenset()) -> None:
        """Everything but `omit`, in place."""
        for kind, named in state.capture(job, omit).tensors.items():
            for name, tensor in named.items():
                tensor.data.copy_(self.tensors[kind][name])
        state.apply_values(job, {k: v for k, v in json.loads(self.values).items() if k not in omit}, omit)


def go_on(job: Job) -> dict[str, str]:
    """One more iteration; what it leads to. An exception is an outcome as well: NaN can raise."""
    try:
        result = job.run_iteration()
    except (AssertionError, RuntimeError) as error:
        return {"raised": str(error)}
    return {**digests_of(job), "loss": result.loss.hex(), "grad_norm": result.grad_norm.hex()}


@functools.cache
def leaver(config_name: str) -> tuple[Captured, dict[str, str]]:
    """A leaver's state after two iterations, and what its third leads to."""
    with open_job(tiny_config(**CONFIGS[config_name])) as job:
        job.run_shadow_iteration()
        job.run_shadow_iteration()
        return Captured.of(job), go_on(job)


def joiner(config_name: str, omit: frozenset[str] = frozenset()) -> dict[str, str]:
    """What a joiner's next iteration leads to, whose state was poisoned and then filled with all but `omit`."""
    with open_job(tiny_config(**CONFIGS[config_name])) as job:
        job.run_shadow_iteration()
        state.poison(job)
        leaver(config_name)[0].put_into(job, omit)
        return go_on(job)


@pytest.fixture
def _fresh_leaver(request: pytest.FixtureRequest) -> None:
    """The leaver's own job must not be open beside the joiner's."""
    leaver(request.getfixturevalue("config_name"))


@pytest.mark.parametrize("config_name", CONFIGS)
def test_a_joiner_goes_on_as_its_leaver_does(config_name: str, _fresh_leaver: None) -> None:
    assert joiner(config_name) == leaver(config_name)[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("config_name", ["fp16 distributed overlap"])
def test_a_kind_left_out_shows(config_name: str, kind: str, _fresh_leaver: None) -> None:
    captured, expected = leaver(config_name)
    if kind not in captured.tensors and kind not in json.loads(captured.values):
        assert kind in MAY_BE_ABSENT
        pytest.skip(f"this job has no {kind}")
    assert joiner(config_name, frozenset({kind})) != expected


@pytest.mark.parametrize("config_name", ["fp32 plain", "fp32 distributed"])
def test_parameters_left_out_show_where_they_are_stepped(config_name: str, _fresh_leaver: None) -> None:
    """No other kind brings them."""
    assert joiner(config_name, frozenset({"parameters"})) != leaver(config_name)[1]


@pytest.mark.parametrize("config_name", ["fp32 plain", "bf16 distributed"])
def test_unknown_state_of_the_optimizer(config_name: str) -> None:
    with open_job(tiny_config(**CONFIGS[config_name])) as job:
        name, _, adam = list(internals.adam_states(job.optimizer))[-1]
        adam["max_exp_avg_sq"] = torch.zeros(1)
        with pytest.raises(StateMismatch, match=f"parameter {name} has the keys .*max_exp_avg_sq.*would be lost"):
            state.capture(job)


def test_unknown_state_of_the_scaler(monkeypatch: pytest.MonkeyPatch) -> None:
    with open_job(tiny_config(**CONFIGS["fp16 plain"])) as job:
        scaler = internals.grad_scalers(job.optimizer)[0]
        monkeypatch.setattr(scaler, "state_dict", lambda: {"scale": scaler.scale, "mood": 1})
        with pytest.raises(StateMismatch, match="scaler has the keys .*mood.*would be lost"):
            state.capture(job)


def test_values_of_another_job_are_refused() -> None:
    with open_job(tiny_config(**CONFIGS["fp16 plain"])) as job:
        values = state.capture(job).values
        del values["grad_scaler"]
        with pytest.raises(StateMismatch, match="slot 0.*grad_scaler"):
            state.apply_values(job, values)


def test_only_contiguous_memory_is_sent_in_place() -> None:
    with pytest.raises(StateMismatch, match=r"\(2, 3\) is not contiguous"):
        state.as_bytes(torch.zeros(3, 2).t())
