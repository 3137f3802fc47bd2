"""What a run left behind, read back.

log.py reads a run folder, measures.py turns it into figures, report.py prints them, plots.py draws them, and
compare.py tells whether two runs are equal to the last bit. Nothing here takes part in a run: torch, MPI and the
migration logic aren't imported, only the schema of the log and the errors.
"""
