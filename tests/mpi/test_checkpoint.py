"""A checkpoint of a job of four slots, back into the poisoned job: every kind of state, and what is computed next."""
from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from four_ranks import build_generation, world
from tiny_jobs import CountingSource, open_job, shared_groups, tiny_config

from migration import checkpoint, checkpoint_files, digest, internals, state
from migration.errors import StateMismatch, UserError
from migration.job import Job
from migration.options import Options

VERSIONS = {"torch": "any"}
OVERLAP = {"overlap_grad_reduce": True, "bucket_size": 500}
FORMS: dict[str, dict[str, object]] = {
    "distributed": {"tp": 2, "dp": 2},
    "distributed, overlapped": {"dp": 4, **OVERLAP, "overlap_param_gather": True},
    "distributed, fp32": {"dp": 2, "pp": 2, "dtype": "fp32"},
    "distributed, fp16": {"dp": 2, "tp": 2, "dtype": "fp16", "initial_loss_scale": 2.0 ** 40},
    "plain": {"tp": 2, "pp": 2, "distributed_optimizer": False},
    "plain, overlapped": {"tp": 2, "dp": 2, "distributed_optimizer": False, **OVERLAP},
    "plain, fp32, untied": {"pp": 2, "dp": 2, "distributed_optimizer": False, "dtype": "fp32",
                            "tied_embeddings": False},
    "plain, fp16, no step taken yet": {"dp": 4, "distributed_optimizer": False, "dtype": "fp16",
                                       "initial_loss_scale": 2.0 ** 60},
    "interleaved, sequence parallel, recompute, rope": {
        "tp": 2, "pp": 2, "vpp": 2, "num_layers": 4, "sequence_parallel": True, "recompute": True,
        "position_embedding": "rope", **OVERLAP, "overlap_param_gather": True},
}


@contextmanager
def four_slots(**changes: object) -> Iterator[Job]:
    """The job of this rank's slot, connected to the other three."""
    with open_job(tiny_config(dropout=0.1, num_microbatches=2, **{"dp": 1, **changes}), world().rank) as job:
        build_generation(shared_groups(), 0, range(4))
        job.broadcast_parameters()
        job.tie_embeddings()
        yield job
        world().barrier()


@pytest.fixture
def root() -> Iterator[Path]:
    """A folder that all ranks see."""
    path = Path(world().bcast(tempfile.mkdtemp() if world().rank == 0 else None))
    yield path
    world().barrier()
    if world().rank == 0:
        shutil.rmtree(path)


def options(root: Path, **changes: object) -> Options:
    return Options(run=str(root), checkpoints=str(root / "c"), **{"checkpoint_digests": True, **changes})


def train(job: Job, num_iterations: int) -> list[tuple[str, ...]]:
    rows = []
    for _ in range(num_iterations):
        result = job.run_iteration()
        rows.append((result.loss.hex(), result.grad_norm.hex(), str(result.skipped), job.cursor.samples_digest()))
    return rows


def save(job: Job, root: Path) -> Path:
    """Collective. Returns the checkpoint's folder, which only the first rank is told."""
    return world().bcast(checkpoint.save(job, options(root), VERSIONS)[0])


def digests(job: Job) -> dict[str, str]:
    """With whole parameters, as a checkpoint holds them."""
    job.finish()
    return state.digests(state.capture(job))


@pytest.mark.parametrize("changes", FORMS.values(), ids=FORMS)
def test_a_poisoned_job_becomes_what_was_saved(changes: dict[str, object], root: Path) -> None:
    with four_slots(**changes) as job:
        train(job, 3)
        folder, num_bytes = checkpoint.save(job, options(root), VERSIONS)
        folder = world().bcast(folder)
        assert num_bytes > 0 or world().rank > 0
        saved = digests(job)
        expected = train(job, 3)
        assert digests(job)["rng_trackers"] != saved["rng_trackers"], "nothing happened after the save"
        final = digests(job)

        state.poison(job)
        job.iteration = -1
        same = {kind for kind, found in digests(job).items() if found == saved[kind]}
        assert same <= {"buffers", "rng_cuda", "norm_group_cache"}, "not poisoned, so it can't be missed"
        checkpoint.load(job, str(folder))
        assert job.iteration == 3
        assert digests(job) == saved
        assert train(job, 3) == expected
        assert digests(job) == final


def test_what_a_save_costs_the_job_is_nothing(root: Path) -> None:
    with four_slots(tp=2, dp=2) as job:
        train(job, 2)
        before = digests(job)
        save(job, root)
        assert digests(job) == before


def test_the_last_two_are_kept_and_latest_is_the_last(root: Path) -> None:
    with four_slots(tp=2, dp=2) as job:
        for _ in range(3):
            train(job, 1)
            save(job, root)
    if world().rank == 0:
        kept = [2, 3]
        assert [iteration for iteration, _ in checkpoint_files.list_complete(root / "c")] == kept
        assert (root / "c" / "latest").resolve().name == "iteration00000003"
        assert not list((root / "c").glob("*.unfinished"))


def test_megatrons_own_tools_read_it(root: Path) -> None:
    """It is a checkpoint like Megatron's own: its tensors by their names, whole, without our code."""
    from megatron.core import dist_checkpointing
    with four_slots(tp=2, dp=2) as job:
        train(job, 1)
        folder = save(job, root)
        tensors = dist_checkpointing.load_plain_tensors(str(folder))
        weights = [t for name, t in tensors.items() if name.startswith("decoder.layers") and "fc1.weight" in name]
        assert weights and all(t.shape[-2:] == (64, 16) for t in weights), "not whole: the job has tp=2"


def test_other_bits_than_were_saved_are_noticed(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the care that is taken for Adam's steps, say, they would be one tensor for all parameters."""
    with four_slots(tp=2, dp=2) as job:
        train(job, 2)
        folder = save(job, root)
        monkeypatch.setattr(internals, "undo_load_side_effects", lambda optimizer, keys: None)
        with pytest.raises(StateMismatch, match="param_groups"):
            checkpoint.load(job, str(folder))


def test_digests_of_another_version_are_not_compared(root: Path, monkeypatch: pytest.MonkeyPatch,
                                                     caplog: pytest.LogCaptureFixture) -> None:
    """They would all differ; and it is said."""
    with four_slots(tp=2, dp=2) as job:
        train(job, 1)
        with monkeypatch.context() as patch:
            patch.setattr(digest, "VERSION", 1)
            patch.setattr(state, "digests", lambda captured: {"main_parameters": "another"})
            folder = save(job, root)
        checkpoint.load(job, str(folder))
        assert "digests of version 1" in caplog.text and "not compared" in caplog.text
        monkeypatch.setattr(digest, "VERSION", 1)
        with pytest.raises(StateMismatch, match="main_parameters"):
            checkpoint.load(job, str(folder))


def test_damaged_contents_are_a_users_error(root: Path) -> None:
    """Sizes as they were, so that only reading finds it."""
    with four_slots(tp=2, dp=2) as job:
        train(job, 1)
        folder = save(job, root)
        if world().rank == 0:
            for path in folder.glob("*.distcp"):
                path.write_bytes(bytes(path.stat().st_size))
            manifest = checkpoint_files.read_manifest(folder)
            assert checkpoint_files.find_damage(folder, manifest) == ""
        world().barrier()
        with pytest.raises(UserError, match="can't be read: [A-Z]"):
            checkpoint.load(job, str(folder))


def test_source_and_config_are_written_down(root: Path) -> None:
    with four_slots(tp=2, dp=2) as job:
        train(job, 1)
        folder = save(job, root)
        found = checkpoint_files.read_manifest(folder)
        assert (found.data, found.iteration, found.versions) == (CountingSource.digest, 1, VERSIONS)
        assert found.config == json.loads(json.dumps(checkpoint_files.comparable(job.config)))


def test_a_slot_without_a_share_of_a_bucket_is_refused() -> None:
    """One bucket a parameter: the smallest are shorter than what is padded for four."""
    with four_slots(dp=4, bucket_size=1, overlap_grad_reduce=True) as job:
        refused = False
        try:
            checkpoint.check(job)
        except UserError as error:
            refused = "bucket_size" in str(error)
        assert any(world().allgather(refused))
