"""The text of a job: as recorded, in every variant a script that bash takes, and what a site can set arrives in it."""
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from jobs import ROOT

from migration.errors import UserError
from slurm.render import Job, batch_options, render
from slurm.site import Site, build_site, load_site
from slurm.submit import build_job

PURE = ("render", "site", "local_conf")
BLOCKED = ("torch", "mpi4py", "h5py", "megatron", "psutil", "matplotlib")
M24 = ("render", "--profile", "20B_TP4_PP2", "--name", "m24", "--spares", "1", "--site", "slurm/site.toml",
       "--", "--checkpoint-every", "20")
TINY = Job(name="tiny", profile="tiny_TP2_PP1", job_size=6, tasks_per_node=2, num_nodes=4, num_spare_nodes=1,
           arguments=("--set", "data=it's a file"))


def slurm(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-m", "slurm", *words], cwd=ROOT, capture_output=True, text=True, timeout=60)


def test_m24_is_as_recorded() -> None:
    """After a change that is meant: python -m slurm render ... > slurm/m24.sbatch; its third line has the command."""
    made = slurm(*M24)
    assert made.returncode == 0, made.stderr
    assert made.stdout == (ROOT / "slurm" / "m24.sbatch").read_text()


def test_m24_says_what_slurm_must_know() -> None:
    lines = (ROOT / "slurm" / "m24.sbatch").read_text().splitlines()
    for option in ("--nodes=4", "--ntasks-per-node=8", "--gpus-per-node=8", "--no-kill", "--requeue",
                   "--signal=B:USR1@600", "--open-mode=append"):
        assert f"#SBATCH {option}" in lines
    assert any(line.startswith("srun --no-kill --kill-on-bad-exit=0 --wait=0 --mpi=pmi2 ") for line in lines)


@pytest.mark.parametrize(("launcher", "container"), [("srun", ""), ("srun", "apptainer"), ("srun", "pyxis"),
                                                     ("mpirun", ""), ("mpirun", "apptainer")])
@pytest.mark.parametrize("checkpoints", ["", "check points"])
def test_every_variant_is_bash(launcher: str, container: str, checkpoints: str) -> None:
    site = Site(container=container, container_image="lm.sif" if container else "", checkpoints=checkpoints,
                container_mounts=("/data",), setup=("source 'the env'/bin/activate",), modules=("cuda/13",),
                environment=(("A", "it's $HOME"),))
    job = Job(**{name: getattr(TINY, name) for name in Job.__slots__ if name != "launcher"}, launcher=launcher)
    text = render(job, site)
    checked = subprocess.run(["bash", "-n"], input=text, capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")
    assert max(map(len, text.splitlines())) <= 140
    assert ("scontrol requeue" in text) == bool(checkpoints)


def stand_in(folder: Path) -> dict[str, str]:
    """In the place of Slurm's programs and Python, some that say in `calls` how they are called; the variables."""
    for name in ("srun", "python", "scontrol"):
        (folder / name).write_text(f'#!/bin/bash\n{{ printf "%s" "{name}"; printf "|%s" "$@"; echo; }} >> calls\n'
                                   f'[ {name} = python ] && [ "$2" = slurm ] && exit 75\nexit 0\n')
        (folder / name).chmod(0o755)
    (folder / "harness.py").touch()
    return {"PATH": f"{folder}:/usr/bin:/bin", "SLURM_JOB_NAME": "tiny", "SLURM_JOB_ID": "7", "HOME": "/root",
            "ENVIRONMENT": "BATCH"}


def test_the_program_gets_its_arguments_and_folders(tmp_path: Path) -> None:
    """The text itself is run by bash."""
    variables = stand_in(tmp_path)
    site = Site(runs="my runs", checkpoints="ck", gpus_per_node=2, environment=(("A", "it's $HOME"),))
    script = render(TINY, site).replace("\nverdict=$?",
                                        "\nverdict=$?; printenv A OMP_NUM_THREADS NCCL_DEBUG_FILE >> calls")

    def run(**more: str) -> tuple[int, str, str]:
        (tmp_path / "calls").unlink(missing_ok=True)
        done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=variables | more, capture_output=True,
                              text=True, timeout=60)
        return done.returncode, done.stdout + done.stderr, (tmp_path / "calls").read_text()

    code, _, calls = run()
    folder, checkpoints = f"{tmp_path}/my runs/tiny-7-r0", f"{tmp_path}/ck/tiny-7"
    assert code == 75 and calls.splitlines() == [
        "srun|--no-kill|--kill-on-bad-exit=0|--wait=0|--mpi=pmi2|python|harness.py|--set|data=it's a file|--run|"
        f"{folder}|--checkpoints|{checkpoints}",
        f"python|-m|slurm|verdict|--run|{folder}|--checkpoints|{checkpoints}",
        "it's $HOME", "1", f"{folder}/log/nccl.%h.%p",
        "scontrol|requeue|7"]
    code, said, calls = run(SLURM_RESTART_COUNT="20")
    assert code == 1 and "scontrol" not in calls and "requeued 20 times already" in said
    assert "tiny-7-r20" in calls and "/ck/tiny-7\n" in calls  # a new run folder, the same checkpoints
    code, said, calls = run(ENVIRONMENT="")
    assert code == 75 and "scontrol" not in calls and f"--load {checkpoints}" in said
    (tmp_path / "harness.py").unlink()
    assert subprocess.run(["bash", "-c", script], cwd=tmp_path, env=variables, timeout=60).returncode == 2


@pytest.mark.parametrize("load", [("--load", "it's a folder"), ("--load=it's a folder",)])
def test_a_requeued_job_goes_on_from_its_own_checkpoint(load: tuple[str, ...], tmp_path: Path) -> None:
    """What --load names is for a job that has none: beside a newer one the harness refuses it, at every start."""
    variables = stand_in(tmp_path)

    def loads(site: Site) -> bool:
        job = build_job(["--set", "dp=1", *load, "--checkpoint-every", "4"], site, name="tiny", num_spare_nodes=1)
        (tmp_path / "calls").unlink(missing_ok=True)
        subprocess.run(["bash", "-c", render(job, site)], cwd=tmp_path, env=variables, timeout=60)
        (call,) = [line for line in (tmp_path / "calls").read_text().splitlines() if line.startswith("srun|")]
        assert "|harness.py|--set|dp=1|--checkpoint-every|4|" in call and call.count("|--run|") == 1
        assert ("it's a folder" in call) == ("|4|--load|it's a folder|--run|" in call)
        return "--load" in call

    site, own = Site(checkpoints="c [k]"), tmp_path / "c [k]" / "tiny-7"
    assert loads(site) and loads(Site())
    (own / "iteration00000004.0123abcd-0.unfinished").mkdir(parents=True)
    assert loads(site)
    (own / "iteration00000004").mkdir()
    assert not loads(site) and loads(Site())


def test_what_a_site_sets_arrives() -> None:
    site = Site(partition="p", account="a", qos="q", time="1-0", cpus_per_task=12, sbatch=("--constraint=h200",),
                srun=("--cpu-bind=cores",), container="pyxis", container_image="nvcr.io#x", container_mounts=("/d:/e",))
    text = render(TINY, site)
    for option in ("--partition=p", "--account=a", "--qos=q", "--time=1-0", "--cpus-per-task=12", "--constraint=h200"):
        assert f"#SBATCH {option}\n" in text
    joined = text.replace(" \\\n    ", " ")
    assert ("--mpi=pmi2 --cpus-per-task=12 --cpu-bind=cores '--container-image=nvcr.io#x' "
            '"--container-mounts=$PWD:$PWD,/d:/e" "--container-workdir=$PWD" python harness.py' in joined)


def test_options_of_an_allocation_are_those_that_need_no_batch_job() -> None:
    assert batch_options(render(TINY, Site(gpus_per_node=2, time="1:00:00"))) == [
        "--job-name=tiny", "--nodes=4", "--ntasks-per-node=2", "--exclusive", "--gpus-per-node=2", "--time=1:00:00",
        "--no-kill"]


@pytest.mark.parametrize(("arguments", "words"), [
    (dict(num_spare_nodes=-1), "--spares -1"),
    (dict(num_spare_nodes=1, num_nodes=3), "--nodes 3: tiny_TP2_PP1 needs 3 of 2 processes, and --spares 1 more"),
    (dict(num_spare_nodes=1, name="a b"), "--name a b"),
    (dict(num_spare_nodes=1, arguments=["--profile", "tiny"]), "--profile tiny"),
    (dict(num_spare_nodes=1, launcher="mpirun", site=Site(container="pyxis", container_image="i")), "pyxis"),
])
def test_jobs_that_cannot_be(arguments: dict, words: str) -> None:
    with pytest.raises(UserError) as caught:
        build_job(**{"arguments": [], "site": Site(), "name": "tiny", **arguments})
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_nodes_follow_from_slots_and_spares() -> None:
    job = build_job(["--profile", "20B_TP4_PP2"], Site(), name="m24", num_spare_nodes=2)
    assert (job.job_size, job.tasks_per_node, job.num_nodes, job.num_spare_nodes) == (24, 8, 5, 2)
    job = build_job(["--profile", "20B_TP4_PP2"], Site(tasks_per_node=5), name="m24", num_spare_nodes=1, num_nodes=8)
    assert (job.num_nodes, job.num_spare_nodes) == (8, 3)


@pytest.mark.parametrize(("settings", "site", "nodes"), [
    ((), Site(gpus_per_node=4), (7, 4)), ((), Site(gpus_per_node=8, tasks_per_node=6), (5, 6)),
    (("--set", "dp=1"), Site(), (2, 8)), (("--set", "dp=1"), Site(gpus_per_node=8), (2, 8))])
def test_no_two_processes_share_a_gpu(settings: tuple[str, ...], site: Site, nodes: tuple[int, int]) -> None:
    job = build_job(["--profile", "20B_TP4_PP2", *settings], site, name="m24", num_spare_nodes=1)
    assert (job.num_nodes, job.tasks_per_node) == nodes


def test_growing_is_declined_in_one_line_and_the_text_is_the_same() -> None:
    made = slurm("render", "--grow", *M24[1:])
    assert made.returncode == 0 and made.stdout == (ROOT / "slurm" / "m24.sbatch").read_text()
    assert made.stderr.startswith("--grow: ") and "--spares" in made.stderr and made.stderr.count("\n") == 1


def test_the_example_is_a_site(tmp_path: Path) -> None:
    """Every key that the example leaves out by a # has the right kind of value there too."""
    text = (ROOT / "slurm" / "site.toml").read_text()
    assert load_site(ROOT / "slurm" / "site.toml").gpus_per_node == 8
    everything = tmp_path / "site.toml"
    everything.write_text("\n".join(line.removeprefix("#") if line.startswith("#") and " = " in line else line
                                    for line in text.splitlines()))
    site = load_site(everything)
    assert site.partition == "batch" and site.container == "apptainer" and len(site.environment) == 2


@pytest.mark.parametrize(("text", "words"), [
    ("partition = ", "is no TOML"),
    ("partitoin = 'x'", "partitoin: there is no such key; did you mean partition?"),
    ("gpus_per_node = '8'", "gpus_per_node: must be a number"),
    ("gpus_per_node = true", "gpus_per_node: must be a number"),
    ("gpus_per_node = 4\ntasks_per_node = 8", "tasks_per_node: 8 processes would share the GPUs of a node"),
    ("gpus_per_node = -8", "gpus_per_node: must not be negative"),
    ("partition = 8", "partition: must be a string"),
    ("partition = 'a b'", "partition: 'a b' has characters"),
    ("modules = 'cuda'", "modules: must be a list of strings"),
    ("sbatch = ['-C x']", "sbatch: '-C x' must be one option"),
    ("time = 'soon'", "time: 'soon' is no time limit"),
    ("time = '10:00'", "time: 10:00 is over before the job could do anything"),
    ("container = 'docker'\ncontainer_image = 'x'", "container: 'docker'; must be one of apptainer, pyxis"),
    ("container = 'pyxis'", "give both or none"),
    ("container = 'pyxis'\ncontainer_image = '$(x)'", "can't be passed on"),
    ("[environment]\nA-B = 'x'", "'A-B' can't be the name of a variable"),
    ("[environment]\nA = 1", "environment: must be a table of strings"),
    ("runs = ''", "runs: must name a folder"),
    ("runs = '$SCRATCH/runs'", "runs: '$SCRATCH/runs' would be a folder of this very name"),
    ("checkpoints = '~/ck'", "checkpoints: '~/ck' would be a folder of this very name"),
])
def test_a_wrong_site_is_one_line(text: str, words: str, tmp_path: Path) -> None:
    path = tmp_path / "site.toml"
    path.write_text(text + "\n")
    failed = slurm("render", "--site", str(path))
    assert failed.returncode == 2 and failed.stdout == ""
    assert failed.stderr.startswith(f"slurm: --site {path}: ") and failed.stderr.count("\n") == 1
    assert words in failed.stderr


def test_a_site_that_is_not_there_is_one_line() -> None:
    failed = slurm("render", "--site", "/nowhere/site.toml")
    assert (failed.returncode, failed.stderr) == (
        2, "slurm: --site /nowhere/site.toml: can't be read: No such file or directory\n")


@pytest.mark.parametrize(("time", "fits"), [("11", True), ("10", False), ("10:01", True), ("0:10:00", False),
                                            ("1-0", True), ("0-0:11", True), ("UNLIMITED", True)])
def test_a_limit_must_leave_time_before_its_warning(time: str, fits: bool) -> None:
    if fits:
        assert build_site({"time": time}).time == time
    else:
        with pytest.raises(UserError, match="is over before"):
            build_site({"time": time})


@pytest.mark.parametrize("module", PURE)
def test_pure_files_load_without_the_heavy_packages(module: str) -> None:
    program = (f"import sys\nfor name in {BLOCKED!r}:\n    sys.modules[name] = None\n"
               f"import importlib; importlib.import_module('slurm.{module}')")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
