#!/bin/bash
# The tests in tests/mpi, in 4 ranks: tests/run_mpi_tests.sh [pytest options]. PYTHON: the Python of the environment;
# MPI_TESTS: one file of them.
# On Gloo, or on NCCL where there is a GPU. A failed rank aborts all (tests/mpi/conftest.py); a rank that hangs is ended
# by the thread time limit, and then mpiexec ends the others. The outer limit is for a hang in MPI's own start or end.
set -euo pipefail
cd "$(dirname "$0")/.."
PYTHON=${PYTHON:-.venv/bin/python}
MPIEXEC="$(dirname "$PYTHON")/mpiexec"
test -x "$MPIEXEC" || MPIEXEC=mpiexec
export OMP_NUM_THREADS=${OMP_NUM_THREADS:-1}
exec timeout --kill-after=10 "${MPI_TESTS_TIMEOUT_S:-900}" "$MPIEXEC" -n "${NUM_RANKS:-4}" \
    "$PYTHON" -m pytest --with-mpi -q -p no:cacheprovider --timeout-method=thread tests/mpi/test_checkpoint.py tests/mpi/test_stream.py "$@" </dev/null
