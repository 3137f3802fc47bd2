"""The job under Slurm: a Slurm of several nodes on one machine for development and tests.

cluster.py (the local Slurm: up, down, status, a node that dies), local_conf.py (its slurm.conf, pure), daemons.py (its
processes), __main__.py (the commands).
"""
