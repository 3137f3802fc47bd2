"""A slot's first iteration is recorded and repeated: every call is compared, every answer given, memory is bounded."""
from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from test_sandbox import CASES, assert_finite
from tiny_jobs import open_job, shared_groups, tiny_config
from torch._C._distributed_c10d import Work

from migration.communicators.recorded import RecordingGroup, ReplayGroup
from migration.errors import MoveFailed, WarmUpMismatch
from migration.job import Job, ShadowUnwanted
from migration.recording import (Answer, Call, Recorder, Recording, Replay, fill, load_recording, recording_path,
                                 save_recording)
from migration.warmup import compare, run_shadow

MIB = 1 << 20
CALL = Call(group="g7", slots=(0, 1), operation="allreduce", given=("float32[4]", "RedOpType.SUM"))
REPEATED = ("first stage", "middle stage", "last stage", "last stage, interleaved", "sequence parallel", "recompute",
            "plain, fp32, overlap of gradients", "distributed, fp16, overlap of nothing",
            "distributed, bf16, overlap of both", "everything at once")


def record(job: Job, limit_bytes: int = 64 * MIB) -> Recording:
    """The first iteration of `job`, whose peers are a sandbox's."""
    recorder = Recorder(job.slot, limit_bytes)
    with job.groups.replaced(lambda handle: RecordingGroup(handle, handle.inner, recorder)):
        job.tie_embeddings()
        result = job.run_shadow_iteration()
    return recorder.finish(result.loss, result.grad_norm)


# an iteration


@pytest.mark.parametrize("name", REPEATED)
def test_the_same_slot_repeats_it_bit_for_bit(name: str, tmp_path: Path) -> None:
    slot, changes = CASES[name]
    with open_job(tiny_config(**changes), slot) as job:
        recording = record(job)
    assert len(recording.calls) >= 2 and recording.is_whole
    path = tmp_path / "slot.rec"
    save_recording(recording, path)
    with open_job(tiny_config(**changes), slot) as job:
        result = run_shadow(job, load_recording(path), {}, lambda: False)
        assert "bit for bit the same" in compare(recording, result, must_be_equal=True)
        job.check_drained()


def test_answers_are_used() -> None:
    """Other answers, other figures: or the comparison would hold whatever came back."""
    with open_job(tiny_config(dp=2), 1) as job:
        recording = record(job)
    largest = max((i for i, c in enumerate(recording.calls) if c.operation == "allreduce"),
                  key=lambda i: max(a.num_bytes for a in recording.answers[i]))
    answers = list(recording.answers)
    answers[largest] = tuple(Answer(num_bytes=a.num_bytes, kept=bytes(a.num_bytes)) for a in answers[largest])
    with open_job(tiny_config(dp=2), 1) as job:
        result = run_shadow(job, dataclasses.replace(recording, answers=tuple(answers)), {}, lambda: False)
    assert "other bits" in compare(recording, result, must_be_equal=False)
    with pytest.raises(MoveFailed, match="slot 1: .* other bits"):
        compare(recording, result, must_be_equal=True)


def test_another_iteration_is_refused_at_the_first_other_call() -> None:
    with open_job(tiny_config(tp=2, dp=2), 1) as job:
        recording = record(job)
    with open_job(tiny_config(tp=2, dp=2, seq_length=16), 1) as job, \
            pytest.raises(WarmUpMismatch, match=r"slot 1: call 0 of .*\[1, 16, 16\], .*the recorded one is .*\[1, 8, "):
        run_shadow(job, recording, {}, lambda: False)
    with open_job(tiny_config(tp=2, dp=2, num_microbatches=1), 1) as job, pytest.raises(WarmUpMismatch):
        run_shadow(job, recording, {}, lambda: False)
    with open_job(tiny_config(tp=2, dp=2), 1) as job, pytest.raises(WarmUpMismatch, match="ended after .* the next"):
        more = dataclasses.replace(recording, calls=(*recording.calls, CALL), answers=(*recording.answers, ()))
        run_shadow(job, more, {}, lambda: False)
    with open_job(tiny_config(tp=2, dp=2), 1) as job, pytest.raises(WarmUpMismatch, match="the iteration was over"):
        less = dataclasses.replace(recording, calls=recording.calls[:-1], answers=recording.answers[:-1])
        run_shadow(job, less, {}, lambda: False)
    assert all(h.inner.__class__.__name__ == "SandboxGroup" for h in shared_groups().handles.values())


def test_kept_in_part_it_still_ends_finite() -> None:
    with open_job(tiny_config(tp=2, dp=2, sequence_parallel=True), 1) as job:
        recording = record(job, limit_bytes=20_000)
    assert not recording.is_whole and 0 < recording.kept_bytes <= 20_000
    with open_job(tiny_config(tp=2, dp=2, sequence_parallel=True), 1) as job:
        result = run_shadow(job, recording, {}, lambda: False)
        assert_finite(job)
    assert "can't be compared, since answers were kept in part" in compare(recording, result, must_be_equal=True)
    begun = dataclasses.replace(recording, from_seeds=False)
    assert "since the run began from a checkpoint" in compare(begun, result, must_be_equal=True)


def test_a_shadow_iteration_that_nobody_wants_ends_before_the_next_micro_batch() -> None:
    asked: list[int] = []
    with open_job(tiny_config(dp=2, num_microbatches=4), 1) as job:
        with pytest.raises(ShadowUnwanted, match="slot 1"):
            job.run_shadow_iteration(lambda: len(asked) == 2 or asked.append(1) is not None)
        assert len(asked) == 2 and job.iteration == 0
    with open_job(tiny_config(dp=2), 1) as job:  # the process is none the worse for it
        assert job.run_shadow_iteration().grad_norm > 0


# calls


class LateGroup:
    """A real group's stand-in: results are there when somebody has waited, as on a device."""

    def __init__(self) -> None:
        self.waiting: list[torch.Tensor] = []

    def _deliver(self) -> None:
        for tensor in self.waiting:
            tensor.fill_(3.0)
        self.waiting.clear()

    def allreduce(self, tensors: list[torch.Tensor], *_args: Any) -> Work:
        self.waiting += tensors
        return LateWork(self)

    recv = allreduce

    def send(self, *_args: Any) -> Work:
        return LateWork(self)

    def _start_coalescing(self, _device: torch.device) -> None:
        assert not self.waiting

    def _end_coalescing(self, _device: torch.device) -> Work:
        return LateWork(self)


class LateWork(Work):
    def __init__(self, group: LateGroup) -> None:
        super().__init__()
        self.group = group

    def wait(self, timeout: Any = None) -> bool:
        self.group._deliver()
        return True


@pytest.fixture
def recorded() -> Any:
    """(handle over a LateGroup, recorder): slot 2 of 4, alone."""
    groups, recorder = shared_groups(), Recorder(2, MIB)
    groups.open(2, 4)
    with groups.replaced(lambda handle: RecordingGroup(handle, LateGroup(), recorder)):
        yield dist.group.WORLD, recorder
    groups.close()


def test_results_are_taken_down_when_they_are_there(recorded: Any) -> None:
    group, recorder = recorded
    tensor = torch.ones(2)
    work = dist.all_reduce(tensor, group=group, async_op=True)
    with pytest.raises(AssertionError, match="slot 2: nobody waited for .*allreduce"):
        recorder.finish(0.0, 0.0)
    work.wait()
    tensor.fill_(9.0)
    work.wait()  # a second time changes nothing
    (answers,) = recorder.finish(0.0, 0.0).answers
    assert answers == (Answer(num_bytes=8, kept=torch.full((2,), 3.0).numpy().tobytes()),)


def test_a_batch_is_taken_down_when_it_ends(recorded: Any) -> None:
    group, recorder = recorded
    first, second = torch.ones(2), torch.ones(3)
    group._start_coalescing(torch.device("cpu"))
    group.recv([first], 1, 0)
    group.send([second], 3, 0)
    group._end_coalescing(torch.device("cpu")).wait()
    recording = recorder.finish(0.0, 0.0)
    assert [call.operation for call in recording.calls] == ["recv", "send"]
    assert [call.given for call in recording.calls] == [("float32[2]", "1", "0"), ("float32[3]", "3", "0")]
    assert [[a.num_bytes for a in answers] for answers in recording.answers] == [[8], []]
    assert recording.answers[0][0].kept == torch.full((2,), 3.0).numpy().tobytes()


def test_kinds_of_sums_and_roots_are_compared(recorded: Any) -> None:
    group, recorder = recorded
    dist.all_reduce(torch.ones(2), group=group)
    dist.all_reduce(torch.ones(2), op=dist.ReduceOp.MAX, group=group)
    given = [call.given for call in recorder.finish(0.0, 0.0).calls]
    assert given[0] != given[1] and given[0][0] == given[1][0] == "float32[2]"


def test_a_real_group_is_used_after_the_call_was_compared() -> None:
    recorder, groups, late = Recorder(2, MIB), shared_groups(), LateGroup()
    groups.open(2, 4)
    with groups.replaced(lambda handle: RecordingGroup(handle, LateGroup(), recorder)):
        dist.all_reduce(torch.ones(2))
    replay, tensor = Replay(recorder.finish(0.0, 0.0)), torch.ones(2)
    with groups.replaced(lambda handle: ReplayGroup(handle, replay, late)):
        work = dist.all_reduce(tensor, async_op=True)
        assert late.waiting and bool((tensor == 1.0).all()), "the real group does it, not the recording"
        work.wait()
        with pytest.raises(WarmUpMismatch, match="the iteration was over"):
            dist.all_reduce(tensor)
    groups.close()
    assert bool((tensor == 3.0).all())


# memory and files


def test_memory_is_bounded_however_much_comes() -> None:
    limit = 1 << 13
    recorder = Recorder(0, limit)
    for i in range(2000):
        recorder.keep(recorder.begin(CALL), [torch.full((37 * (i % 50) + 1,), float(i))])
    recording = recorder.finish(1.0, 2.0)
    tensors = [a for answers in recording.answers for a in answers]
    assert 0 < recording.kept_bytes <= limit
    assert tensors[0].is_whole and any(a.kept and not a.is_whole for a in tensors) and not all(a.kept for a in tensors)
    assert all(len(a.kept) % 4 == 0 for a in tensors)
    assert f"{recording.kept_bytes} bytes" in recording.describe() and "2000 calls" in recording.describe()


@pytest.mark.parametrize(("kept", "expected"), [
    (torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]), [1.0, 2.0, 3.0, 4.0, 5.0]),
    (torch.tensor([1.0, 2.0]), [1.0, 2.0, 1.0, 2.0, 1.0]),
    (torch.empty(0), [0.0] * 5)], ids=["whole", "in part", "not at all"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64])
def test_fill(kept: torch.Tensor, expected: list[float], dtype: torch.dtype) -> None:
    tensor = torch.full((5,), 7).to(dtype)
    data = kept.to(dtype).view(torch.uint8).numpy().tobytes()
    fill(tensor, Answer(num_bytes=5 * tensor.element_size(), kept=data))
    assert tensor.tolist() == expected


def test_a_file_gives_back_what_was_written_or_says_that_it_is_damaged(tmp_path: Path) -> None:
    recorder = Recorder(3, MIB, from_seeds=False)
    for count in (0, 5, 1):
        recorder.keep(recorder.begin(CALL), [torch.arange(i + 1) for i in range(count)])
    recording = recorder.finish(float("nan"), 0.1)
    path = recording_path(tmp_path, 3)
    save_recording(recording, path)
    assert load_recording(path) == recording and [p.name for p in path.parent.iterdir()] == ["slot0003.rec"]
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    with pytest.raises(MoveFailed, match="damaged"):
        load_recording(path)
    path.write_bytes(data[:-3])
    with pytest.raises(MoveFailed, match="damaged"):
        load_recording(path)
