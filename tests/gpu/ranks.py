"""Starts a body of bodies.py, closing_bodies.py or parking_bodies.py in several ranks on this machine's GPUs.

Imports no torch.

See analysis/ranks.py, which does the work.
"""
from __future__ import annotations

from pathlib import Path
from typing import Any

from analysis import ranks
from analysis.ranks import Rank

__all__ = ["Rank", "run_ranks"]


def run_ranks(body: str, *, world: int, hosts: str, timeout_s: float = 150.0) -> list[dict[str, Any]]:
    """What `body`, MODULE:FUNCTION, returned on each rank. `hosts`: "one" for all ranks, or "each" its own."""
    return ranks.run_ranks(body, world=world, hosts=hosts, timeout_s=timeout_s, path=Path(__file__).parent)
