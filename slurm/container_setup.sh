#!/bin/bash
# What Live Migrator needs inside NVIDIA's PyTorch image, whose own torch, CUDA and NCCL stay: run once, as root, in it.
# Versions are those of pyproject.toml. An environment of its own, since the image brings an Open MPI, and this program
# is to find MPICH, which --mpi=pmi2 is for.
set -euo pipefail
python3 -m venv --system-site-packages /opt/live-migrator
/opt/live-migrator/bin/pip install --no-cache-dir --no-deps \
    megatron-core==0.19.2 mpich==5.0.2 mpi4py==4.1.2 h5py==3.16.0
# these need others in turn; what the image holds already stays as it is
/opt/live-migrator/bin/pip install --no-cache-dir matplotlib==3.11.2
