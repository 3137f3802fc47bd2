"""What a run left behind, read back.

log.py reads a run folder, measures.py and moves.py turn it into figures, report.py prints them (tables.py), plots.py
draws them, and compare.py tells whether two runs are equal to the last bit. Nothing of these takes part in a run:
torch, MPI and the migration logic aren't imported, only the schema of the log and the errors.

`harness.py --experiment` is experiments.py: it starts jobs, whose tables are in ablation.py, speed.py, scale.py and
straggling.py, and a save and restart of them (restart_arm.py).

Benchmarks start what they measure: wrapper_cost.py, and those of GPUs, which share bench_parts.py (time box, parts),
gpu_moves.py (whole runs), device_memory.py, machine.py and results.py (targets, JSON, Markdown). bench_gpu.py has
gpu_bodies.py, prepare_beside.py and its preparer.py (inside ranks, which ranks.py starts), gpu_figures.py and
beside_plot.py. bench_gpus.py, with a GPU for every process, has gpus_plan.py (which runs, how long), gpus_model.py
(which model), gpus_parts.py, gpus_ablation.py, gpus_kill.py and flatness.py. results/ keeps the newest results of GPUs.
"""
