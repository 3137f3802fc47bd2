"""What a user can get wrong: one line that says what, where and what to do; a non-zero exit code; no traceback."""
from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from support import Case, Harness, Undisturbed, completed, refused, undisturbed  # noqa: F401

ROOT = Path(__file__).resolve().parents[2]
JOB = ("--profile", "tiny_TP2_PP1", "--hosts", "b0,b1,b2,b3", "--set", "iterations=4")


@pytest.mark.parametrize(("arguments", "words"), [
    (("--profile", "tiny_TP3"), ("tiny_TP3", "tiny_TP2_PP1")),
    ((*JOB, "--set", "iteratons=5"), ("iteratons", "iterations")),
    ((*JOB, "--set", "iterations=many"), ("many", "int")),
    ((*JOB, "--set", "dropout"), ("dropout", "field=value")),
    ((*JOB, "--set", "vocab_size=255"), ("vocab_size=255", "tp=2")),
    ((*JOB, "--set", "transformer_engine=true"), ("transformer_engine", "Transformer Engine")),
    ((*JOB, "--set", "num_experts=8"), ("num_experts", "MoE")),
    ((*JOB, "--set", "context_parallel=2"), ("context_parallel",)),
    ((*JOB, "--set", "fp8=true"), ("fp8",)),
    ((*JOB, "--set", "cuda_graphs=true"), ("cuda_graphs",)),
    ((*JOB, "--set", "nccl_user_buffers=true"), ("nccl_user_buffers",)),
    ((*JOB, "--vacate", "nowhere@2"), ("nowhere", "b0")),
    ((*JOB, "--vacate", "b1"), ("b1", "b1@12")),
    ((*JOB, "--vacate", "b1@soon"), ("soon",)),
    ((*JOB, "--vacate", "b3@2"), ("b3", "holds no slot")),
    ((*JOB, "--vacate", "b0,b1@2"), ("b0,b1@2", "spare")),
    ((*JOB, "--fault", "explode@2:READY"), ("explode",)),
    (("--profile", "tiny_TP2_PP1", "--hosts", "b0,b1,b2"), ("b0,b1,b2", "8")),
], ids=lambda value: " ".join(value[-2:]) if isinstance(value, tuple) and len(value) > 1 else None)
def test_wrong_argument(harness: Harness, arguments: tuple[str, ...], words: tuple[str, ...]) -> None:
    refused(harness(*arguments, timeout=60), *words)


def test_no_spares(harness: Harness) -> None:
    refused(harness("--profile", "tiny_TP2_PP1", "--hosts", "b0,b1,b2", "--vacate", "b1@2", np=6), "b1@2", "spare")


@pytest.mark.fast
def test_too_few_processes(harness: Harness) -> None:
    refused(harness("--profile", "tiny_TP2_PP1", "--hosts", "b0,b1", np=4), "tiny_TP2_PP1", "6", "4")


# data


def refused_data(harness: Harness, data: Path | str, *words: str) -> None:
    refused(harness(*JOB, "--data", data, timeout=60), str(data), *words)


def test_missing_data(harness: Harness, tmp_path: Path) -> None:
    refused_data(harness, tmp_path / "nowhere.txt", "no such file")


def test_empty_data(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "empty.txt").touch()
    refused_data(harness, tmp_path / "empty.txt", "no text")


def test_unreadable_data(harness: Harness) -> None:
    """A regular file that even root can't read: the start of a process's memory."""
    refused_data(harness, "/proc/self/mem", "can't be read")


def test_data_without_permission(harness: Harness, tmp_path: Path) -> None:
    if os.geteuid() == 0:
        pytest.skip("root may read everything")
    (tmp_path / "closed.txt").write_text("some text " * 100)
    (tmp_path / "closed.txt").chmod(0)
    refused_data(harness, tmp_path / "closed.txt", "can't be read")


def test_data_that_is_no_text(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "latin.txt").write_bytes("Prüfung ".encode("latin-1") * 100)
    refused_data(harness, tmp_path / "latin.txt", "byte 2", "UTF-8")


def test_data_shorter_than_a_sample(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "short.txt").write_text("short")
    refused_data(harness, tmp_path / "short.txt", "5 tokens", "65")


def test_half_an_indexed_dataset(harness: Harness, tmp_path: Path) -> None:
    (tmp_path / "corpus.bin").write_bytes(b"\1\0" * 100)
    refused_data(harness, tmp_path / "corpus", "corpus.idx", "missing")


# jobs and logs that aren't there


@pytest.mark.parametrize("command", [("request", "--vacate", "b1"), ("status",), ("cancel",)], ids=lambda c: c[0])
def test_command_to_no_job(harness: Harness, tmp_path: Path, command: tuple[str, ...]) -> None:
    (tmp_path / "empty").mkdir()
    for run in (tmp_path / "nowhere", tmp_path / "empty"):
        refused(harness(*command, "--run", run, np=None, timeout=30), str(run))


def test_request_to_a_job_that_has_ended(harness: Harness, undisturbed: Undisturbed) -> None:
    run = undisturbed(Case())
    refused(harness("request", "--run", run, "--vacate", "b1", np=None, timeout=30), str(run))


def analyse(tool: str, *runs: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", f"analysis.{tool}", *map(str, runs)], cwd=ROOT, capture_output=True,
                          text=True, timeout=60)


@pytest.mark.parametrize("tool", ["report", "compare"])
def test_truncated_log(undisturbed: Undisturbed, tmp_path: Path, tool: str) -> None:
    twin = undisturbed(Case())
    run = tmp_path / "cut"
    shutil.copytree(twin, run)
    log = run / "log" / "w0003.h5"
    os.truncate(log, log.stat().st_size // 2)
    done = analyse(tool, *((run,) if tool == "report" else (twin, run)))
    assert done.returncode == 2, done.stdout + done.stderr
    assert str(log) in done.stderr and "Traceback" not in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize("tool", ["report", "compare"])
def test_run_folder_without_a_run(tmp_path: Path, tool: str) -> None:
    done = analyse(tool, tmp_path) if tool == "report" else analyse(tool, tmp_path, tmp_path)
    assert done.returncode == 2 and str(tmp_path) in done.stderr and "Traceback" not in done.stderr
