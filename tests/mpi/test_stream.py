"""The stream beside training and the cut: a poisoned joiner takes the steps that its leaver takes, bit for bit.

Both jobs are in a sandbox, so nobody else is needed, and their next steps are equal if and only if their states are.
"""
from __future__ import annotations

import pytest
import torch
from four_ranks import WAIT_S, Background, world
from pairs import Ends, connected_pair, exchange, figures, is_leaver, open_own_job, run
from test_transfer import CONFIGS
from tiny_jobs import tiny_config

from migration import gradients, internals, state, stream, transfer
from migration.arms import cut
from migration.errors import DeadlineExpired, MoveFailed
from migration.follow import Follower
from migration.job import Job
from migration.stream import Sender

NUM_ITERATIONS = 5  # while the stream goes on
CONFIGS = {**CONFIGS, "loss per token": {"dp": 2, "per_token_loss": True},
           "tied over two stages, overlap": {"pp": 2, "overlap_grad_reduce": True, "bucket_size": 500},
           "sequence parallel, overlap": {"tp": 2, "sequence_parallel": True, "overlap_grad_reduce": True,
                                          "bucket_size": 500}}
NONE: frozenset[str] = frozenset()


def sender_of(job: Job, ends: Ends, limit_bytes_s: float = 0.0) -> Sender:
    return Sender(job=job, pair=ends.pair, wire=ends.wire, omit=NONE, limit_bytes_s=limit_bytes_s)


def follower_of(job: Job, ends: Ends) -> Follower:
    return Follower(job=job, pair=ends.pair, wire=ends.wire, omit=NONE, connect=lambda names, iteration: None)


def lead(job: Job, ends: Ends) -> str:
    """A leaver's iterations with a stream beside them, up to the cut. Returns the digest of the state there."""
    sender = sender_of(job, ends)
    per_iteration = -(-len(sender.batches) // NUM_ITERATIONS)
    for iteration in range(NUM_ITERATIONS):
        sender.open()
        for index in range(iteration * per_iteration, min((iteration + 1) * per_iteration, len(sender.batches))):
            sender._take_turn()
            sender._send(index, sender.batches[index])
            sender._is_sending = False
        job.compute_gradients()
        sender.hold_back()
        job.take_step()
    sender.open()
    ends.wire.send("FINAL", WAIT_S)
    digest = gradients.digest_stream(sender.batches)
    job.compute_gradients()
    return digest


def send_cut(job: Job, ends: Ends) -> None:
    """As if every bucket had gone before finalize_model_grads was through: its ranges go again."""
    early = list(internals.gradient_shards(job.chunks))
    shards = gradients.select(job, early, [])
    late = internals.late_ranges(job.chunks)
    kept = {name: shard.clone() for name, shard in zip(early, shards, strict=True)}
    for name, shard in zip(early, shards, strict=True):
        for start, end in late[name]:
            shard[start:end].fill_(7.0)  # not yet what it will be
    ends.wire.send("GRADIENTS", WAIT_S, names=early)
    transfer.send_tensors(ends.pair, shards)
    for name, shard in zip(early, shards, strict=True):
        shard.copy_(kept[name])
    ranges = [(name, start, end) for name in early for start, end in late[name]]
    own, losses = gradients.capture_rest(job, NONE), [float(loss).hex() for loss in job.micro_losses]
    ends.wire.send("CUT", WAIT_S, whole=[], ranges=ranges, losses=losses, values=own.values)
    transfer.send_tensors(ends.pair, [*gradients.select(job, [], ranges), *transfer.all_tensors(own)])


def receive_cut(job: Job, ends: Ends, follower: Follower) -> None:
    message = follower.follow()
    own = gradients.capture_rest(job, NONE)
    state.apply_values(job, message["values"], gradients.KINDS_OF_STREAM)
    transfer.receive_tensors(ends.pair, [*gradients.select(job, message["whole"], message["ranges"]),
                                         *transfer.all_tensors(own)])
    internals.prepare_for_step(job.chunks)
    job.iteration = NUM_ITERATIONS
    job.micro_losses = [torch.tensor(float.fromhex(text), device=job.device) for text in message["losses"]]


@pytest.mark.parametrize("changes", CONFIGS.values(), ids=CONFIGS)
def test_a_joiner_follows_over_iterations_and_steps_at_the_cut(changes: dict[str, object]) -> None:
    with connected_pair() as ends, open_own_job(tiny_config(**changes)) as job:
        job.run_shadow_iteration()
        job.iteration = 0
        if is_leaver():
            streamed = lead(job, ends)
            send_cut(job, ends)
        else:
            state.poison(job)
            follower = follower_of(job, ends)
            receive_cut(job, ends, follower)
            streamed = follower.state_digest
        assert exchange(streamed) == streamed
        digest = gradients.digest_gradients(job)
        assert exchange(digest) == digest
        followed = [figures(job.take_step()), run(job), run(job)]
        followed.append(gradients.digest_stream(stream.build_batches(job, NONE)))
        assert exchange(followed) == followed


def test_training_waits_for_the_batch_under_way_and_no_longer_than_it_has_patience(
        monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "patience_s", lambda num_bytes: 0.3)
    with connected_pair() as ends, open_own_job(tiny_config()) as job:
        if is_leaver():
            sender = sender_of(job, ends)
            sender.open()
            sender._take_turn()  # and its batch is never taken
            with pytest.raises(DeadlineExpired, match="can't wait longer"):
                sender.hold_back()
            with pytest.raises(MoveFailed, match="stopped"):
                sender._take_turn()
            sender.open()
            sender.hold_back()  # training goes on as if there were no stream
        world().barrier()


def test_the_gate_is_closed_during_a_step() -> None:
    with connected_pair() as ends, open_own_job(tiny_config()) as job:
        if is_leaver():
            sender = sender_of(job, ends)
            sender.open()
            job.compute_gradients()
            sender.hold_back()
            sending = Background(sender.run)
            sending.join(0.05)
            assert sending.is_alive() and sender.num_sent == 0
            job.take_step()
            sender.open()
            sending.outcome()
            assert sender.num_sent == len(sender.batches) > 4
        else:
            state.poison(job)
            follower = follower_of(job, ends)
            for _ in range(len(follower._batches)):
                follower._on_batch(ends.wire.receive(WAIT_S))
        digest = gradients.digest_stream(stream.build_batches(job, NONE))
        assert exchange(digest) == digest


def test_a_rate_limit_holds_while_training_does_not_wait() -> None:
    """A stop of the move ends the rest between two chunks at once."""
    with connected_pair() as ends, open_own_job(tiny_config()) as job:
        if is_leaver():
            sender = sender_of(job, ends, limit_bytes_s=1.0)  # for ever
            sender.open()
            sending = Background(sender.run)
            sending.join(0.1)
            assert sending.is_alive() and sender.num_sent == 0
            sender.stop_sending()
            with pytest.raises(MoveFailed):
                sending.outcome()
        else:
            follower = follower_of(job, ends)
            ends.wire.receive(WAIT_S)
            follower._take(follower._batches[0].tensors[:1])  # the next chunk never comes
        world().barrier()
