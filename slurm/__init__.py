"""The job under Slurm: what is submitted, and a Slurm of several nodes on one machine for development and tests.

render.py (a job and what its site sets -> the batch script, pure), site.py (the TOML of a site), submit.py (the
commands that render and submit), verdict.py (how a run ended, for the script), m24.sbatch (the recorded script of the
job of 24 slots), site.toml (an example of a site), container.def and container_setup.sh (a recipe).

cluster_up.py (the local Slurm comes up), cluster.py (status, a node that dies, down), local_conf.py (its slurm.conf,
pure), daemons.py (its processes). __main__.py has all commands.

What the job itself does inside Slurm (drains, signals, nodes given back) is in migration/.
"""
