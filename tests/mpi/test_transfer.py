"""The state's way over a pair: what comes out at the joiner is the leaver's, and what doesn't fit is refused."""
from __future__ import annotations

import math
import time

import pytest
import torch
from four_ranks import WAIT_S, Background, Issued, device, end_for_peer, world
from pairs import Ends, connected_pair, exchange, is_leaver, open_own_job, run
from tiny_jobs import tiny_config

from migration import state, transfer
from migration.errors import MoveFailed, StateMismatch
from migration.job import Job

SMALL_CHUNK_BYTES = 1000  # so that a tensor goes over in several, the last one shorter
# A send that nobody receives is done as soon as NCCL's buffers hold it, so the state must be larger than these
BEYOND_BUFFERS = {"cpu": {}, "cuda": {"num_layers": 4, "hidden_size": 1024}}
CONFIGS = {f"{dtype} {'distributed' if distributed else 'plain'}{' overlap' if overlap else ''}": {
    "dp": 2, "dtype": dtype, "distributed_optimizer": distributed, "overlap_grad_reduce": overlap,
    "overlap_param_gather": overlap and distributed}
    for dtype in ("fp32", "bf16", "fp16") for distributed in (False, True) for overlap in (False, True)}
CONFIGS |= {"one slot": {"dp": 1}, "two stages": {"pp": 2}, "interleaved": {"pp": 2, "vpp": 2, "num_layers": 4},
            "sequence parallel": {"tp": 2, "sequence_parallel": True}}


def hand_over(job: Job, ends: Ends) -> int:
    """The whole transfer, either side. Returns the bytes of tensors moved."""
    own = state.capture(job)
    if is_leaver():
        transfer.send_state(ends.pair, ends.wire, own)
        return own.num_bytes
    message = ends.wire.receive(WAIT_S)
    num_bytes = transfer.receive_state(ends.pair, message, own)
    state.apply_values(job, message["values"])
    return num_bytes


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_a_poisoned_joiner_becomes_its_leaver(changes: dict[str, object], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfer, "CHUNK_BYTES", SMALL_CHUNK_BYTES)
    with connected_pair() as ends, open_own_job(tiny_config(**changes)) as job:
        for _ in range(3 if is_leaver() else 1):
            job.run_shadow_iteration()
        if not is_leaver():
            state.poison(job)
        places = {name: t.data_ptr() for named in state.capture(job).tensors.values() for name, t in named.items()}
        num_bytes = hand_over(job, ends)
        captured = state.capture(job)
        assert {name: t.data_ptr() for named in captured.tensors.values() for name, t in named.items()} == places
        digests = state.digests(captured)
        assert exchange((digests, num_bytes)) == (digests, num_bytes)
        assert num_bytes == captured.num_bytes
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
    with connected_pair() as ends, open_own_job(tiny_config(**(leaver if is_leaver() else joiner))) as job:
        issued = Issued(ends.pair)
        handing_over = Background(lambda: hand_over(job, ends))
        if not is_leaver():
            with pytest.raises(StateMismatch, match=message):
                handing_over.outcome()
        world().barrier()
        if is_leaver():
            issued.wait_for(1, handing_over)
            if handing_over.is_alive():
                ends.pair.abort()
            handing_over.join(WAIT_S)
            assert not handing_over.is_alive()
            assert handing_over.error is None or isinstance(handing_over.error, RuntimeError)
            assert math.isfinite(job.run_iteration().grad_norm), "the leaver goes on training"
        del handing_over


def test_a_joiner_that_never_receives() -> None:
    """An abort ends the leaver's wait; its tensors are as they were."""
    config = tiny_config(**BEYOND_BUFFERS[device().type])
    with connected_pair() as ends, open_own_job(config) as job:
        job.run_shadow_iteration()
        before = state.digests(state.capture(job))
        if is_leaver():
            issued = Issued(ends.pair)
            sending = Background(lambda: transfer.send_state(ends.pair, ends.wire, state.capture(job)))
            issued.wait_for(1, sending)
            sending.join(0.05)
            assert sending.is_alive()
            ends.pair.abort()
            with pytest.raises(RuntimeError):
                sending.outcome()
            assert state.digests(state.capture(job)) == before
        world().barrier()


def test_a_joiner_that_is_too_slow() -> None:
    """Training waits for a joiner as long as it has patience, and no longer."""
    config = tiny_config(**BEYOND_BUFFERS[device().type])
    with connected_pair() as ends, open_own_job(config) as job:
        if is_leaver():
            tensors = transfer.all_tensors(state.capture(job))
            with pytest.raises(RuntimeError):
                transfer.send_tensors(ends.pair, tensors, timeout_s=0.2)
        world().barrier()


def test_a_wait_without_a_limit_of_its_own_has_the_pairs() -> None:
    with connected_pair(operation_timeout_s=1.0) as ends:
        if not is_leaver():
            started_s = time.monotonic()
            with pytest.raises(RuntimeError):
                ends.pair.recv_all([torch.zeros(1, device=device())], 0)
            assert 0.9 < time.monotonic() - started_s < WAIT_S / 3
        world().barrier()


def test_words_end_when_either_end_is_closed() -> None:
    with connected_pair() as ends:
        waiting = None if is_leaver() else Background(lambda: ends.wire.receive(WAIT_S))
        world().barrier()
        if is_leaver():
            ends.wire.close()
            with pytest.raises(MoveFailed, match="GO"):
                ends.wire.send("GO", WAIT_S)
        else:
            with pytest.raises(MoveFailed, match="no message"):
                waiting.outcome()
        world().barrier()


def test_a_leaver_that_goes_half_way() -> None:
    """The words have come, the tensors don't."""
    with connected_pair() as ends, open_own_job(tiny_config()) as job:
        own = state.capture(job)
        if is_leaver():
            ends.wire.send("STATE", WAIT_S, manifest=own.manifest(), values=own.values)
        else:
            message = ends.wire.receive(WAIT_S)
            issued = Issued(ends.pair)
            receiving = Background(lambda: transfer.receive_state(ends.pair, message, own))
        world().barrier()
        if is_leaver():
            ends.pair.abort()
        else:
            issued.wait_for(1, receiving)
            end_for_peer(ends.pair)
            with pytest.raises(RuntimeError):
                receiving.outcome()
        world().barrier()


def test_words_alone() -> None:
    """A slot without tensors: nothing but values goes over."""
    empty = state.State(tensors={}, values={"history": {"num_losses": 3}} if is_leaver() else {})
    with connected_pair() as ends:
        if is_leaver():
            transfer.send_state(ends.pair, ends.wire, empty)
        else:
            message = ends.wire.receive(WAIT_S)
            assert transfer.receive_state(ends.pair, message, empty) == 0
            assert message["values"] == {"history": {"num_losses": 3}}
        world().barrier()
