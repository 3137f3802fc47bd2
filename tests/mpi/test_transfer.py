"""The state's way over a pair: what comes out at the joiner is the leaver's, and what doesn't fit is refused.

Ranks 0 and 1 are one pair, ranks 2 and 3 another; the pairs move different slots at the same time.
"""
from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from four_ranks import WAIT_S, Background, new_store, world
from tiny_jobs import open_job, shared_groups, tiny_config

from migration import state, transfer
from migration.communicators.base import Communicator
from migration.config import Config
from migration.errors import StateMismatch
from migration.job import IterationResult, Job

SMALL_CHUNK_BYTES = 1000  # so that a tensor goes over in several, the last one shorter
CONFIGS = {f"{dtype} {'distributed' if distributed else 'plain'}{' overlap' if overlap else ''}": {
    "dp": 2, "dtype": dtype, "distributed_optimizer": distributed, "overlap_grad_reduce": overlap,
    "overlap_param_gather": overlap and distributed}
    for dtype in ("fp32", "bf16", "fp16") for distributed in (False, True) for overlap in (False, True)}
CONFIGS |= {"one slot": {"dp": 1}, "two stages": {"pp": 2}, "interleaved": {"pp": 2, "vpp": 2, "num_layers": 4},
            "sequence parallel": {"tp": 2, "sequence_parallel": True}}


@contextmanager
def connected_pair() -> Iterator[Communicator]:
    """This rank's pair. Collective over the world."""
    server, store = new_store()
    number, side = divmod(world().rank, 2)
    pair = shared_groups().prepare_pair(f"pair{number}", store, side, WAIT_S, 2 * WAIT_S)
    yield pair
    shared_groups().release_pair(pair)
    world().barrier()
    del server


def is_leaver() -> bool:
    return world().rank % 2 == 0


def open_own_job(config: Config) -> object:
    """The job of the slot that this rank's pair moves."""
    return open_job(config, world().rank // 2 % config.job_size)


def run(job: Job) -> tuple[str, ...]:
    """One iteration in the sandbox, in figures that compare bit for bit."""
    result: IterationResult = job.run_iteration()
    return result.loss.hex(), result.grad_norm.hex(), str(result.skipped)


def exchange(own: object) -> object:
    """What the other one of the pair has. Collective over the pair."""
    return world().sendrecv(own, dest=world().rank ^ 1, source=world().rank ^ 1)


def hand_over(job: Job, pair: Communicator) -> int:
    """The whole transfer, either side. Returns the bytes moved."""
    own = state.capture(job)
    if is_leaver():
        return transfer.send_state(pair, own, job.device)
    header, num_header_bytes = transfer.receive_header(pair, job.device)
    num_bytes = num_header_bytes + transfer.receive_tensors(pair, header, own)
    state.apply_values(job, header["values"])
    return num_bytes


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_a_poisoned_joiner_becomes_its_leaver(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", SMALL_CHUNK_BYTES)
    with connected_pair() as pair, open_own_job(tiny_config(**changes)) as job:
        for _ in range(3 if is_leaver() else 1):
            job.run_shadow_iteration()
        if not is_leaver():
            state.poison(job)
        places = {name: t.data_ptr() for named in state.capture(job).tensors.values() for name, t in named.items()}
        num_bytes = hand_over(job, pair)
        captured = state.capture(job)
        assert {name: t.data_ptr() for named in captured.tensors.values() for name, t in named.items()} == places
        digests = state.digests(captured)
        assert exchange((digests, num_bytes)) == (digests, num_bytes)
        assert num_bytes > captured.num_bytes, "the header counts too"
        # equal state is not enough: the next iterations must be equal too
        followed = [run(job), run(job), state.digests(state.capture(job))]
        assert exchange(followed) == followed


MISFITS = {
    "another shape": ({}, {"hidden_size": 32}, "state kind .*differ in name, dtype or shape"),
    "another dtype": ({}, {"dtype": "fp16"}, "state kind .*torch.bfloat16"),
    "main parameters that only the leaver has": ({}, {"dtype": "fp32"}, "state kind main_parameters"),
    "fewer tensors": ({}, {"num_layers": 1}, "state kind .*differ in name, dtype or shape"),
    "a kind that only the leaver has": ({"dtype": "fp16"}, {"dtype": "bf16"}, "state kind"),
    "a value that only the joiner has": ({}, {"overlap_grad_reduce": True},
                                         "kinds of state differ.*overlap_bookkeeping"),
}


@pytest.mark.parametrize("leaver, joiner, message", MISFITS.values(), ids=MISFITS)
def test_what_does_not_fit_is_refused(leaver: dict[str, object], joiner: dict[str, object], message: str) -> None:
    """The joiner says so; the leaver, which may still be sending, is released by an abort from another thread."""
    with connected_pair() as pair, open_own_job(tiny_config(**(leaver if is_leaver() else joiner))) as job:
        handing_over = Background(lambda: hand_over(job, pair))
        if not is_leaver():
            with pytest.raises(StateMismatch, match=message):
                handing_over.outcome()
        world().barrier()
        if is_leaver():
            if handing_over.is_alive():
                pair.abort()
            handing_over.join(WAIT_S)
            assert not handing_over.is_alive()
            assert handing_over.error is None or isinstance(handing_over.error, RuntimeError)
            assert math.isfinite(job.run_iteration().grad_norm), "the leaver goes on training"
        del handing_over


def test_a_joiner_that_never_receives() -> None:
    """An abort ends the leaver's wait; its tensors are as they were."""
    with connected_pair() as pair, open_own_job(tiny_config()) as job:
        job.run_shadow_iteration()
        before = state.digests(state.capture(job))
        if is_leaver():
            sending = Background(lambda: transfer.send_state(pair, state.capture(job), job.device))
            sending.join(0.05)
            assert sending.is_alive()
            pair.abort()
            with pytest.raises(RuntimeError):
                sending.outcome()
            assert state.digests(state.capture(job)) == before
        world().barrier()


def test_a_leaver_that_is_gone() -> None:
    """Its end of the pair is closed while the joiner waits for the header."""
    with connected_pair() as pair, open_own_job(tiny_config()) as job:
        if is_leaver():
            pair.abort()
        else:
            with pytest.raises(RuntimeError):
                Background(lambda: transfer.receive_header(pair, job.device)).outcome()
        world().barrier()


def test_a_leaver_that_goes_half_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """The header has come, the tensors don't."""
    with connected_pair() as pair, open_own_job(tiny_config()) as job:
        own = state.capture(job)
        if is_leaver():
            monkeypatch.setattr(transfer, "_chunks", lambda _: [])
            transfer.send_state(pair, own, job.device)
        else:
            header, _ = transfer.receive_header(pair, job.device)
            receiving = Background(lambda: transfer.receive_tensors(pair, header, own))
        world().barrier()
        if is_leaver():
            pair.abort()
        else:
            with pytest.raises(RuntimeError):
                receiving.outcome()
        world().barrier()


def test_the_header_alone() -> None:
    """A slot without tensors: nothing but values goes over."""
    empty = state.State(tensors={}, values={"history": {"num_losses": 3}} if is_leaver() else {})
    with connected_pair() as pair:
        if is_leaver():
            num_bytes = transfer.send_state(pair, empty, torch.device("cpu"))
        else:
            header, num_bytes = transfer.receive_header(pair, torch.device("cpu"))
            assert transfer.receive_tensors(pair, header, empty) == 0
            assert header["values"] == {"history": {"num_losses": 3}}
        assert exchange(num_bytes) == num_bytes
