"""How a run is carried out, apart from what it trains: hosts, moves, deadlines, faults. Pure."""
from __future__ import annotations

from dataclasses import dataclass

REQUEUE_CODE = 75  # of a run that is to be started again: EX_TEMPFAIL of sysexits.h

from migration.schedule import Schedule

# What --omit-state may name: the keys of state_kinds.KINDS and gradients.KIND, which need torch. A test compares them.
STATE_KINDS = ("parameters", "buffers", "main_parameters", "moments", "optimizer_steps", "grad_scaler", "lr_scheduler",
               "param_groups", "overlap_bookkeeping", "norm_group_cache", "rng_python", "rng_numpy", "rng_torch",
               "rng_cuda", "rng_trackers", "data_position", "history")
AT_THE_CUT = "gradients"  # of the slot's own shard, which no log has a digest of


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """Times in seconds. The same on every process of a run."""

    run: str
    hosts: tuple[str, ...] = ()  # virtual hosts; empty: the real ones
    vacate: tuple[str, ...] = ()  # as the user wrote them, each with @ITERATION
    hold: bool = False  # training waits at the named iteration until the move is ready
    lead: int = 10  # iterations ahead of the named one at which preparation starts
    arms: tuple[str, ...] = ("full",)  # names of arms (arms.py); moves take them in turn
    transfer_limit_bytes_s: float = 0.0  # of a leaver, while training goes on; 0: none
    leaver_steps: bool = False  # for the proof: the leaver takes the step of the cut too, and states are compared
    prepare_deadline_s: float = 300.0
    prepare_share: float | None = None  # of the time that preparing groups may take; None: see pacing.py
    switch_deadline_s: float = 60.0
    heartbeat_timeout_s: float = 15.0
    orphan_timeout_s: float = 60.0
    require_bitwise: bool = False
    accept: str = ""  # limits of a joiner's figures: see acceptance.py
    switch: str = "auto"  # of communicators: see communicators/nccl_policy.py
    allow_lazy: bool = False  # old communicators may be closed before the commit, and are rebuilt if the move aborts
    pins: str = ""  # NAME=VALUE,... that fix the order of NCCL's sums, likewise
    connect: str = "ahead"  # when new ones are connected: ahead (by training, at boundaries), pause, background
    warm_up: str = "synthetic"  # a joiner's shadow iteration: off, synthetic, recorded
    joiner_traffic: bool = True  # in it, groups that have joiners of one host only communicate for real
    record_limit_mib: int = 64  # host memory of a recording, per slot
    standby: str = "auto"  # spares: cold, warm (every pipeline role has run in a sandbox), auto (warm on GPUs)
    progress_s: float = 2.0  # pause between progress lines where the output isn't a terminal
    checkpoints: str = ""  # folder of them; "": none are made
    checkpoint_every: int = 0  # iterations; 0: only where the run ends or is stopped
    keep_checkpoints: int = 2
    checkpoint_digests: bool = False  # save the digests of the state too, and compare after a load
    report: bool = True  # at the end
    save_at: int | None = None  # stop before this iteration with a checkpoint
    load: str = ""  # a checkpoint to start from, or a folder of them
    watch_slurm: str = "auto"  # in a job of Slurm, its drained nodes are vacated; or off
    slurm_poll_s: float = 5.0
    # for tests and experiments
    faults: tuple[str, ...] = ()
    omit_state: tuple[str, ...] = ()
    slow_joiner_s: float = 0.0
    slow_checkpoint_s: float = 0.0
    recover: str = "host"  # when a slot's process is lost: host (spares take all slots of its host), slot, off (end)
    find_stragglers: bool = False  # each slot reports what it works by itself, and the controller compares
    auto_evict: bool = False  # and vacates the host of one that is slow
    slow: tuple[str, ...] = ()  # SLOT:FACTOR@ITERATION: see straggler.py

    def last_iteration(self, num_iterations: int) -> int:
        """The number of iterations after which this run ends: all, or those before `save_at`."""
        return num_iterations if self.save_at is None else self.save_at

    def certain_moves(self) -> tuple[str, ...]:
        """The moves that can be checked beforehand: with injected faults, nobody knows which of them come about."""
        return () if self.faults else self.vacate

    def schedule(self) -> Schedule:
        """The moves of the command line, none begun yet."""
        return Schedule(self.vacate, hold=self.hold, lead=self.lead, arms=self.arms)
