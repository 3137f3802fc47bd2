"""The device shim: that it replaces nothing where CUDA is, and that random streams and types work where it isn't."""
from __future__ import annotations

import contextlib
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from migration import device
from migration.errors import UserError

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def cpu_shim() -> None:
    if not device.install():
        pytest.skip("this machine has CUDA, so nothing is replaced")


@pytest.fixture
def tracker(cpu_shim: None) -> object:
    """Megatron's tracker of random streams, with one stream called "stream"."""
    from megatron.core.tensor_parallel.random import CudaRNGStatesTracker

    torch.manual_seed(7)
    tracker = CudaRNGStatesTracker()
    tracker.add("stream", 11)
    return tracker


def names_of(*owners: object) -> dict[tuple[int, str], object]:
    """Everything that the owners' names refer to, private ones included."""
    return {(i, name): vars(owner)[name] for i, owner in enumerate(owners) for name in list(vars(owner))}


def test_nothing_is_replaced_where_cuda_exists(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fake GPU, as far as device files and torch's build can tell."""
    monkeypatch.setattr(device, "has_gpu", lambda: True)
    monkeypatch.setattr(torch.backends.cuda, "is_built", lambda: True)
    owners = (torch, torch.cuda, torch.cuda.random, torch.Tensor)
    before = names_of(*owners)
    assert device.install() is False
    after = names_of(*owners)
    assert before.keys() == after.keys()
    assert [name for name in before if before[name] is not after[name]] == []


@pytest.mark.parametrize(("is_replaced", "has_cuda", "told"), [
    (True, False, ""), (False, True, ""), (False, False, "that torch can't use"), (True, True, "no device file")])
def test_device_files_and_torch_must_agree(monkeypatch: pytest.MonkeyPatch, is_replaced: bool, has_cuda: bool,
                                           told: str) -> None:
    """A fake GPU, and a fake torch that sees it or not."""
    monkeypatch.setattr(device, "is_installed", lambda: is_replaced)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_cuda)
    with pytest.raises(UserError, match=told) if told else contextlib.nullcontext():
        device.check_usable()


def test_second_install_wraps_nothing_twice(cpu_shim: None) -> None:
    before = names_of(torch, torch.cuda, torch.Tensor)
    assert device.install() is True
    assert all(before[name] is thing for name, thing in names_of(torch, torch.cuda, torch.Tensor).items())


def test_install_after_megatron_is_refused() -> None:
    """In a process of its own, since a process imports Megatron once."""
    if torch.cuda.is_available():
        pytest.skip("where CUDA exists the order doesn't matter")
    program = ("import sys, types\nsys.modules['megatron.core.tensor_parallel.random'] = types.ModuleType('late')\n"
               "from migration import device\ndevice.install()\n")
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    assert "before megatron.core is imported" in done.stderr


def test_questions_about_the_device(cpu_shim: None) -> None:
    assert device.is_cpu()
    assert device.current_device() == torch.device("cpu")
    assert device.memory_bytes() == 0


def test_cuda_literals_mean_the_cpu(cpu_shim: None) -> None:
    made = [torch.tensor([1.0], device="cuda"), torch.zeros(2, device=torch.device("cuda", 0)),
            torch.ones(2, device="cuda:0"), torch.empty(2, device=torch.cuda.current_device()),
            torch.empty_like(torch.ones(2), device="cuda"), torch.tensor([1], device="cuda", pin_memory=True),
            torch.ones(2).cuda(), torch.ones(2).cuda(torch.cuda.current_device())]
    assert all(tensor.device.type == "cpu" for tensor in made)
    assert torch.zeros(2, device="meta").device.type == "meta"  # other devices are left as they are
    torch.cuda.synchronize()


def test_type_names_are_cuda_ones_for_megatron_alone(cpu_shim: None) -> None:
    caller = {"__name__": "megatron.core.optimizer.anything"}
    exec("def name_of(tensor):\n    return tensor.type()", caller)
    for dtype, name in ((torch.float32, "Float"), (torch.float16, "Half"), (torch.bfloat16, "BFloat16")):
        parameter = torch.nn.Parameter(torch.ones(1, dtype=dtype))
        assert caller["name_of"](parameter) == f"torch.cuda.{name}Tensor"
        assert parameter.type() == f"torch.{name}Tensor"
    assert caller["name_of"](torch.ones(1, dtype=torch.int64)) == "torch.LongTensor"
    assert torch.ones(1).type(torch.float64).dtype == torch.float64


def test_fork_gives_another_stream_than_the_default(tracker: object) -> None:
    """The trap of the stock `_lazy_call`: without it fork() would go on in the default stream and say nothing."""
    torch.manual_seed(7)
    default = [torch.rand(4) for _ in range(3)]
    torch.manual_seed(7)
    drawn = [torch.rand(4)]
    with tracker.fork("stream"):
        first = torch.rand(4)
    drawn.append(torch.rand(4))
    with tracker.fork("stream"):
        second = torch.rand(4)
    drawn.append(torch.rand(4))
    assert all(torch.equal(a, b) for a, b in zip(default, drawn, strict=True)), "fork() disturbed the default stream"
    expected = torch.Generator().manual_seed(11)
    assert torch.equal(first, torch.rand(4, generator=expected))
    assert torch.equal(second, torch.rand(4, generator=expected)), "the stream didn't go on where it was left"


def test_states_of_a_stream_can_be_taken_over(tracker: object) -> None:
    with tracker.fork("stream"):
        torch.rand(5)
    states = {name: state.clone() for name, state in tracker.get_states().items()}
    with tracker.fork("stream"):
        expected = torch.rand(5)
    tracker.set_states(states)
    with tracker.fork("stream"):
        assert torch.equal(torch.rand(5), expected)


def test_cuda_state_is_the_cpu_state(cpu_shim: None) -> None:
    torch.cuda.manual_seed(5)
    state = torch.cuda.get_rng_state()
    expected = torch.rand(3)
    torch.cuda.set_rng_state(state)
    assert torch.equal(torch.rand(3), expected)
    assert torch.equal(torch.rand(3, generator=torch.Generator().manual_seed(5)), expected)


def test_fork_logs_no_warning(tracker: object, caplog: pytest.LogCaptureFixture) -> None:
    with tracker.fork("stream"):
        torch.rand(1)
    assert "CPU RNG state changed" not in caplog.text
