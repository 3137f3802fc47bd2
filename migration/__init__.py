"""Moves the processes of a host to a standby host while a Megatron-Core job trains. The map of this package:

What a run is: config.py (what it trains), profiles.py (named configs), options.py (how it is carried out),
argument_groups.py and arguments.py (the command line), errors.py.

A process's life: bringup.py (MPI comes up, everybody compares notes), preload.py (the heavy imports), placement.py
(which GPU), process.py (wires a process together), slot_work.py (what it does for a slot besides training), world.py
(MPI and the control thread), mpich.py (what MPICH needs for it), bell.py (wakes another's control thread),
whereabouts.py (host and address), standby.py (a spare's life), warmup.py, recording.py and slot_recording.py (the first
iteration paid for before the switch), job.py and model.py (the Megatron-Core job), data.py (samples as a function of
their index), device.py (Megatron without CUDA), internals.py (Megatron's private names).

A move: roster.py (who holds which slot), plan.py (who goes where), schedule.py (when), protocol.py (phases, events,
actions in one table), move.py (the tally of reports), controller.py (decides), controller_base.py (what its parts
share), answering.py (requests to it, and which is next), actions.py (carries out), watch.py (heartbeats, deadlines),
starting.py (all slots begin a generation together), member.py (what a process does at the controller's word), stops.py
(where training may stop), part.py (a process's part), part_threads.py (what its threads call), preparation.py and
switchover.py (what it does in these phases), acceptance.py (is a joiner fit for its slot), pacing.py (how long threads
beside training rest), handles.py and groups.py (process groups that outlive their communicator), next_generation.py
(their next ones), usage.py (which of them training uses), communicators/ (what is inside), heap.py (gives the system
back what they had), stores.py (where members of one meet), attempt.py (a call that may hang), costs.py (what those
take), state_kinds.py (every kind of state that moves), state.py (all of a slot's), digest.py, digest_sums.py and
digest_triton.py (whether it came over whole), faults.py.

Why a move: own_time.py (what a process works without waiting), straggler.py (who is slow); experiments.py (the jobs of
each experiment).

When a process is lost: recovery.py (who is lost, and how the job goes on), neighbours.py (sees who died), rebuilding.py
(what each process does about it), sums.py (whether sums keep their bits). When it is the controller's: role.py (what
this process is to it), deputy.py (who has all that it must not lose, and when it takes over), succession.py (what that
is, and a planned hand-over), takeover.py (the first decision of the next one), told.py (what members tell it again).

Without a move: checkpoint.py (the whole state through Megatron's distributed checkpoint), checkpoint_files.py (which
one counts, and where a run starts), checkpoint_writing.py (how one comes to count), stopping.py (how a running job is
asked to save and end).

The state's way: arms.py (how much is done beside training, and where membership changes), wire.py (words between leaver
and joiner), transfer.py (bytes), stream.py, leader.py and follow.py (beside training), gradients.py (what is left at
the cut), hand_over.py (in the pause), proof.py (the leaver's own step, to compare with).

In Slurm: slurm_watch.py (looks at Slurm, gives nodes back), slurm_nodes.py (what it says, and which nodes are to be
left), departures.py (how far each of them is), leaving.py (what the controller does about it).

Beside it: topology.py and sizes.py (arithmetic), plan_report.py, check*.py (the preflight), requests.py (from outside),
commands.py, kill.py and footprint.py (the processes of a run), sync.py and unpack.py (the code to every node),
versions.py (whether it is the same), record.py (progress, verdict), timeline.py (the log), demo.py, launch.py,
forkserver.py and zygote.py (one machine, one import).

Imports go one way, without a cycle: harness -> process -> {controller -> {plan, protocol, ...}, member -> {groups,
state, transfer, ...} -> communicators}. Nothing here imports harness. protocol, move, schedule, arms, roster, plan,
topology, config, profiles, deputy, told, sums, sizes, slurm_nodes, departures, options, pacing, checkpoint_files,
checkpoint_writing, straggler, experiments and errors import the standard library and numpy only.
"""
