"""A plan in words and as JSON: what `python harness.py plan` says without a job.

Owns what is told of a move before it happens: who goes where, which groups are rebuilt, bytes and memory by arithmetic.
Pure: standard library only. Must not know of a running job; plan.py decides, this file only tells.
"""
from __future__ import annotations

from typing import Any

from migration.config import Config
from migration.plan import VacateRequest, plan_move, touched_groups
from migration.roster import MovePlan, Roster
from migration.sizes import format_bytes, gradient_buffer_bytes, slot_state_bytes
from migration.topology import GROUP_KINDS, Group, grid_of


def plan_as_dict(config: Config, roster: Roster, request: VacateRequest) -> dict[str, Any]:
    """Everything `describe_plan` says, ready for JSON. Raises UserError where the request can't be done."""
    plan = plan_move(roster, request)
    moves = _moves(config, roster, plan)
    shared_groups = [group for group in grid_of(config).groups() if len(group.slots) > 1]
    rebuilt, kept = touched_groups(shared_groups, plan.slots)
    after = roster.after(plan)
    return {
        "profile": config.profile,
        "request": request.text,
        "iteration": request.iteration,
        "moves": moves,
        "state_bytes": sum(move["state_bytes"] for move in moves),
        "groups": _counts_by_kind(rebuilt, kept),
        "num_groups_rebuilt": len(rebuilt),
        "num_groups_kept": len(kept),
        "hosts_after": {host: {"slots": list(after.slots_on(host)),
                               "spares": [r for r in after.spares() if after.hosts[r] == host]}
                        for host in after.host_names()},
    }


def describe_plan(config: Config, roster: Roster, request: VacateRequest) -> str:
    """The plan for people, several lines. Raises UserError where the request can't be done."""
    told = plan_as_dict(config, roster, request)
    when = "as soon as it is ready" if told["iteration"] is None else f"at the start of iteration {told['iteration']}"
    lines = [f"{config.profile}: TP{config.tp} x PP{config.pp} x DP{config.dp}, {config.job_size} slots; "
             f"vacate {request.text}, {when}", "", "slot  place          from            to              state"]
    for move in told["moves"]:
        place = f"tp{move['tp']} dp{move['dp']} pp{move['pp']}"
        lines.append(f"{move['slot']:4}  {place:13}  {_process(move, 'from'):14}  {_process(move, 'to'):14}  "
                     f"{format_bytes(move['state_bytes'])} ({format_bytes(move['parameters_bytes'])} parameters, "
                     f"{format_bytes(move['optimizer_bytes'])} optimizer)")
    joiner_bytes = max(move["joiner_bytes"] for move in told["moves"])
    lines += ["", f"state moved: {format_bytes(told['state_bytes'])} in all",
              f"memory of a joiner: {format_bytes(joiner_bytes)} at most, for state and gradient buffer; activations "
              "and communicators come on top", "",
              f"groups: {told['num_groups_rebuilt']} rebuilt, {told['num_groups_kept']} kept "
              "(groups of one slot aren't counted;",
              "a run counts more: Megatron makes several of a kind, such as a data-parallel group with and without cp)"]
    lines += [f"  {kind:9}  {count['rebuilt']:3} rebuilt  {count['kept']:3} kept"
              for kind, count in told["groups"].items()]
    lines += ["", "hosts after the move:"]
    for host, held in told["hosts_after"].items():
        parts = [f"{name} {' '.join(map(str, held[name]))}" for name in ("slots", "spares") if held[name]]
        lines.append(f"  {host}: {'; '.join(parts) or 'no living process'}")
    return "\n".join(lines)


def _moves(config: Config, roster: Roster, plan: MovePlan) -> list[dict[str, Any]]:
    moves = []
    for a in plan.assignments:
        place, state = grid_of(config).coordinates(a.slot), slot_state_bytes(config, a.slot)
        moves.append({
            "slot": a.slot, "tp": place.tp, "dp": place.dp, "pp": place.pp,
            "from_host": roster.hosts[a.leaver], "from_world_rank": a.leaver,
            "to_host": roster.hosts[a.joiner], "to_world_rank": a.joiner,
            "parameters_bytes": state.parameters,
            "optimizer_bytes": state.main_parameters + state.moments,
            "state_bytes": state.total,
            "gradient_buffer_bytes": gradient_buffer_bytes(config, a.slot),
            "joiner_bytes": state.total + gradient_buffer_bytes(config, a.slot),
        })
    return moves


def _counts_by_kind(rebuilt: tuple[Group, ...], kept: tuple[Group, ...]) -> dict[str, dict[str, int]]:
    """Kinds without any group, such as pp where there is one stage, are left out."""
    counts = {kind: {"rebuilt": sum(group.kind == kind for group in rebuilt),
                     "kept": sum(group.kind == kind for group in kept)} for kind in GROUP_KINDS}
    return {kind: count for kind, count in counts.items() if any(count.values())}


def _process(move: dict[str, Any], end: str) -> str:
    return f"{move[f'{end}_host']}/w{move[f'{end}_world_rank']}"
