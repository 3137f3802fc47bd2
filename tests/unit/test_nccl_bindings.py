"""The NCCL bindings against the real library of the wheel, for all that needs no GPU: what isn't loaded can't be wrong.

Old versions are fakes: the real library under a version that it doesn't have. Where nccl4py is installed, NVIDIA's own
bindings say the same.
"""
from __future__ import annotations

import ctypes
import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from nccl_bindings import __main__ as table
from nccl_bindings import types
from nccl_bindings.communicator import Communicator
from nccl_bindings.errors import Aborted, LibraryProblem, MissingFeature, NcclError
from nccl_bindings.library import FEATURES, Library, load, version_text
from nccl_bindings.operations import State, check, group, leave_groups, new_unique_id
from nccl_bindings.raw import PROTOTYPES, Raw

ROOT = Path(__file__).resolve().parents[2]
NEEDS_NO_CUDA = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def library() -> Library:
    return load()


@pytest.fixture
def fake_old(library: Library) -> Library:
    """The real library, said to be 2.28.9."""
    return Library(handle=library.handle, path="fake", version=22809)


class FakeWithoutSymbols:
    """A library of a new version, built without anything optional."""


# ---- library


def test_version_and_path(library: Library) -> None:
    header = Path(library.path).parents[1] / "include" / "nccl.h"
    assert f"NCCL_VERSION_CODE {library.version}\n" in header.read_text(), "the wheel's header tells the same version"
    assert version_text(22809) == "2.28.9" and version_text(23007) == "2.30.7"


def test_one_copy_in_the_process(library: Library) -> None:
    again = load()
    assert again.handle._handle == library.handle._handle and again.path == library.path


def test_every_prototype_is_exported(library: Library) -> None:
    gated = {feature.name: feature for feature in FEATURES}
    for name, (feature, _result, _arguments) in PROTOTYPES.items():
        assert feature in gated
        assert not library.has(feature) or hasattr(library.handle, name), name


def test_features_follow_the_version(library: Library) -> None:
    for feature in FEATURES:
        assert library.has(feature.name) == (library.version >= feature.first_version), feature.name


def test_fake_old_version_is_gated_although_the_symbols_are_there(fake_old: Library) -> None:
    assert hasattr(fake_old.handle, "ncclCommSuspend")
    assert fake_old.has("revoke") and not fake_old.has("suspend") and not fake_old.has("memory_stats")
    with pytest.raises(MissingFeature, match="NCCL 2.28.9 .* can't do suspend: it comes with 2.29.7"):
        Raw(fake_old).ncclCommSuspend
    with pytest.raises(MissingFeature, match="park: it comes with 2.30.3"):
        fake_old.require("park")


def test_fake_without_symbols_is_gated_although_the_version_is_new() -> None:
    fake = Library(handle=FakeWithoutSymbols(), path="fake", version=23204)
    assert not fake.has("suspend") and not fake.has("init")
    assert fake.has("multi_rank_gpu"), "this one has no symbol of its own"


def test_raw_has_no_other_names(library: Library) -> None:
    with pytest.raises(AttributeError, match="no row for ncclBogus"):
        Raw(library).ncclBogus


def test_table_names_every_feature(library: Library, fake_old: Library) -> None:
    lines = table.feature_table(library)
    assert len(lines) == 2 + len(FEATURES)
    assert f"{'park':<20}no" in "\n".join(table.feature_table(fake_old))


def test_the_command_prints_it() -> None:
    done = subprocess.run([sys.executable, "-m", "nccl_bindings"], cwd=ROOT, env=NEEDS_NO_CUDA, capture_output=True,
                          text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("NCCL 2."), done.stderr


def test_the_command_without_a_library_says_one_line(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "nccl_bindings", str(tmp_path / "none.so")], cwd=ROOT,
                          capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and done.stderr.startswith("nccl_bindings: ") and done.stderr.count("\n") == 1


def test_no_library_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(name: str, mode: int = 0) -> None:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.setattr(ctypes, "CDLL", refuse)
    with pytest.raises(LibraryProblem, match="no NCCL found .* install the wheel"):
        load()


def test_imports_nothing_heavy() -> None:
    program = "import sys; sys.modules['torch'] = sys.modules['numpy'] = None; import nccl_bindings.communicator"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


# ---- types


def test_config_has_the_newest_layout() -> None:
    offsets = {name: getattr(types.Config, name).offset for name, _ in types.Config._fields_}
    assert ctypes.sizeof(types.Config) == 120
    assert (offsets["blocking"], offsets["netName"], offsets["commName"]) == (16, 32, 48)
    assert (offsets["graphStreamOrdering"], offsets["nvlsHostMode"]) == (92, 112)
    assert ctypes.sizeof(types.UniqueId) == types.UNIQUE_ID_BYTES == 128


def test_config_matches_the_header_as_far_as_it_goes(library: Library) -> None:
    text = (Path(library.path).parents[1] / "include" / "nccl.h").read_text()
    body = text[text.index("typedef struct ncclConfig"):text.index("} ncclConfig_t;")]
    names = [line.strip().rstrip(";").replace("*", "").split()[-1] for line in body.splitlines()
             if line.strip().endswith(";")]
    assert names == [name for name, _ in types.Config._fields_][:len(names)]


def test_config_is_undefined_unless_set(library: Library) -> None:
    config = types.make_config(library.version, blocking=1, commName=b"some")
    assert (config.size, config.magic, config.version) == (120, 0xCAFEBEEF, library.version)
    assert config.blocking == 1 and config.commName == b"some"
    assert config.netName is None and config.maxCTAs == config.nvlsHostMode == -(2**31)
    with pytest.raises(AttributeError, match="no field bogus"):
        types.make_config(library.version, bogus=1)


# ---- calls


def test_unique_ids_differ(library: Library) -> None:
    raw = Raw(library)
    first, second = new_unique_id(raw), new_unique_id(raw)
    assert len(first) == 128 and first != second


def test_init_without_a_gpu_says_which_call_failed_and_why() -> None:
    program = """
from nccl_bindings.communicator import Communicator, State
from nccl_bindings.errors import NcclError
from nccl_bindings.library import load
from nccl_bindings.operations import new_unique_id
library = load()
own = Communicator(library, 0, 1, "lonely")
try:
    own.init(new_unique_id(own.raw))
except NcclError as error:
    assert error.code in (1, 2) and error.text and error.call.startswith("ncclCommInitRankConfig"), error
    assert "lonely, rank 0 of 1" in str(error) and error.last_error, error
    assert own.state is State.GONE and own.pointer == 0
    own.abort()  # of what never was: nothing to do
    print("refused")
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, env=NEEDS_NO_CUDA, capture_output=True, text=True,
                          timeout=60)
    assert done.stdout.strip().endswith("refused"), done.stderr


def test_error_codes_become_errors(library: Library) -> None:
    raw = Raw(library)
    check(raw, "some call", types.Result.SUCCESS)
    check(raw, "some call", types.Result.IN_PROGRESS)
    with pytest.raises(NcclError, match="some call failed with code 5: invalid usage") as caught:
        check(raw, "some call", types.Result.INVALID_USAGE)
    assert caught.value.code == 5


def test_a_group_is_closed_after_an_error_inside(library: Library) -> None:
    raw = Raw(library)
    with pytest.raises(ZeroDivisionError), group(raw):
        raise ZeroDivisionError
    with group(raw):
        pass


def test_groups_that_are_left_open_are_ended(library: Library) -> None:
    raw = Raw(library)
    for _ in range(2):
        check(raw, "ncclGroupStart", raw.ncclGroupStart())
    assert leave_groups(raw) == 2 and leave_groups(raw) == 0


def test_an_operation_that_fails_leaves_no_group_open(library: Library) -> None:
    own = Communicator(library, 0, 2, "none")
    own.state = State.READY  # without a pointer, so NCCL refuses
    check(own.raw, "ncclGroupStart", own.raw.ncclGroupStart())  # as NCCL itself leaves it, where a connection fails
    with pytest.raises(NcclError, match="ncclAllReduce on communicator none"):
        own.all_reduce(0, 0, 1, types.DataType.FLOAT32, types.RedOp.SUM, 0)
    assert leave_groups(own.raw) == 0


# ---- misuse


def test_a_new_communicator_can_do_nothing_yet(library: Library) -> None:
    own = Communicator(library, 0, 2, "new")
    for call in (own.suspend, own.resume, own.finalize, own.destroy, own.hand_over, own.memory_stats, own.query_size):
        with pytest.raises(RuntimeError, match="is new; this needs it"):
            call()
    with pytest.raises(RuntimeError, match="is new"):
        own.all_reduce(0, 0, 1, types.DataType.FLOAT32, types.RedOp.SUM, 0)
    with pytest.raises(ValueError, match="rank 2 isn't in 0..1"):
        Communicator(library, 2, 2)


def test_abort_before_init_ends_the_init(library: Library) -> None:
    own = Communicator(library, 0, 2, "early")
    threading.Thread(target=own.abort).start()
    while own.state is not State.ABORTED:
        pass
    with pytest.raises(Aborted, match="before its init"):
        own.init(bytes(128))
    with pytest.raises(Aborted):
        own.suspend()
    own.abort()


def test_a_fake_ready_one_that_was_handed_over_isnt_freed_here(library: Library) -> None:
    own = Communicator(library, 1, 2, "given")
    own._pointer.value, own.state = 0xABC0, State.READY  # never dereferenced below
    assert own.hand_over() == 0xABC0
    for call in (own.abort, own.destroy, own.finalize, own.hand_over):
        with pytest.raises(RuntimeError, match="was handed over"):
            call()
    own.mark_aborted()
    with pytest.raises(Aborted):
        own.query_rank()
    assert own.pointer == 0


# ---- against NVIDIA's own bindings


@pytest.fixture(scope="module")
def nvidia() -> object:
    return pytest.importorskip("nccl.bindings.nccl", reason="nccl4py isn't installed")


def test_enums_equal_those_of_nccl4py(nvidia: object) -> None:
    def plain(name: str) -> str:
        return name.replace("_", "").lower()

    for own, theirs in ((types.DataType, nvidia.DataType), (types.RedOp, nvidia.RedOp), (types.Result, nvidia.Result)):
        values = {plain(member.name): member.value for member in theirs}
        assert {plain(m.name): values[plain(m.name)] for m in own} == {plain(m.name): m.value for m in own}
    assert [m.value for m in nvidia.CommMemStat] == [m.value for m in types.MemoryStat]


def test_layout_equals_that_of_nccl4py(nvidia: object) -> None:
    theirs = nvidia.config_dtype
    own = [(getattr(types.Config, name).offset, getattr(types.Config, name).size) for name, _ in types.Config._fields_]
    assert theirs.itemsize == ctypes.sizeof(types.Config)
    assert own == [(theirs.fields[name][1], theirs.fields[name][0].itemsize) for name in theirs.names]


def test_version_equals_that_of_nccl4py(nvidia: object, library: Library) -> None:
    assert nvidia.get_version() == library.version
