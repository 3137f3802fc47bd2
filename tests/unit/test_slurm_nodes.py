"""What Slurm prints, read; which nodes are to be left; how far each host is on its way out. Texts are Slurm 22.05's."""
from __future__ import annotations

from datetime import datetime

import pytest

from migration.departures import Departures, Stage
from migration.errors import UserError
from migration.plan import parse_vacate, plan_move
from migration.roster import Roster, choose_successor
from migration.slurm_nodes import (Judge, Node, Sighting, SlurmJob, Trouble, expand_nodes, parse_job, parse_maintenance,
                                   parse_nodes)

JOB = ("JobId=2 JobName=interactive UserId=root(0) GroupId=root(0) JobState=RUNNING Reason=None Dependency=(null) "
       "Requeue=1 Restarts=0 BatchFlag={flag} RunTime=00:00:06 TimeLimit=00:10:00 StartTime=2026-11-29T21:07:07 "
       "EndTime={end} Partition=main NodeList=b[0,2-3] BatchHost=b0 NumNodes=3 "
       "Comment=JobState=PENDING NodeList=b9 Power= \n")
RESERVATIONS = ("ReservationName=root_1 StartTime=2026-11-29T21:07:26 EndTime=2026-11-29T21:17:26 Duration=00:10:00 "
                "Nodes=b[2-3] NodeCnt=2 Flags=MAINT,IGNORE_JOBS,SPEC_NODES Users=root State=INACTIVE\n"
                "ReservationName=course StartTime=2026-11-29T21:00:00 EndTime=2026-11-29T22:00:00 Nodes=b1 "
                "Flags=SPEC_NODES State=ACTIVE\n"
                "ReservationName=root_2 StartTime=2026-11-29T21:05:00 Nodes=b3 Flags=MAINT State=INACTIVE\n")
ROSTER = Roster(hosts=("b0", "b0", "b1", "b1", "b2", "b2", "b3", "b3"), holders=(0, 1, 2, 3))


def sighting(nodes: str, *, allocation: tuple[str, ...] = ("b0", "b1", "b2", "b3"), batch_host: str = "",
             maintenance: dict[str, float] | None = None) -> Sighting:
    return Sighting(job=SlurmJob(nodes=allocation, batch_host=batch_host, end_s=None), nodes=parse_nodes(nodes),
                    maintenance=maintenance or {}, time_s=1000.0)


# texts


@pytest.mark.parametrize(("text", "names"), [
    ("b0", ["b0"]), ("b[0-2,5],login1", ["b0", "b1", "b2", "b5", "login1"]),
    ("n[08-11]", ["n08", "n09", "n10", "n11"]), ("r[1-2]n[3,5]-ib", ["r1n3-ib", "r1n5-ib", "r2n3-ib", "r2n5-ib"])])
def test_lists_of_nodes(text: str, names: list[str]) -> None:
    assert list(expand_nodes(text)) == names


@pytest.mark.parametrize("text", ["b[0-2", "b[x]", "b[]"])
def test_a_list_that_cannot_be_read(text: str) -> None:
    with pytest.raises(UserError, match="can't be read"):
        expand_nodes(text)


def test_job() -> None:
    """A comment is the user's and may hold anything; a job of salloc has no batch shell, whatever BatchHost says."""
    job = parse_job(JOB.format(flag=1, end="2026-11-29T21:17:07"))
    assert job == SlurmJob(nodes=("b0", "b2", "b3"), batch_host="b0",
                           end_s=datetime(2026, 11, 29, 21, 17, 7).timestamp())
    assert parse_job(JOB.format(flag=0, end="Unknown")) == SlurmJob(nodes=("b0", "b2", "b3"), batch_host="", end_s=None)
    with pytest.raises(UserError, match="isn't running"):
        parse_job(JOB.format(flag=1, end="Unknown").replace("RUNNING", "COMPLETING"))
    with pytest.raises(UserError, match="isn't running"):
        parse_job("")


def test_nodes() -> None:
    found = parse_nodes("b0|mixed|none\nb1|draining@|ECC | errors\nb2|idle*|none\nb2|idle*|none\nb3|mixed-|none\n")
    assert found == {"b0": Node(state="mixed", flag="", reason=""),
                     "b1": Node(state="draining", flag="@", reason="ECC | errors"),
                     "b2": Node(state="idle", flag="*", reason=""), "b3": Node(state="mixed", flag="-", reason="")}
    with pytest.raises(UserError, match="can't be read"):
        parse_nodes("slurm_load_node: error\n")


def test_maintenance() -> None:
    """Only reservations for maintenance count, and of several the first."""
    start, first = datetime(2026, 11, 29, 21, 7, 26).timestamp(), datetime(2026, 11, 29, 21, 5).timestamp()
    assert parse_maintenance(RESERVATIONS) == {"b2": start, "b3": first}
    assert parse_maintenance("No reservations in the system\n") == {}


# which nodes are to be left


@pytest.mark.parametrize(("state", "why"), [
    ("draining|ECC", "draining (ECC)"), ("drained|none", "drained"), ("fail*|bad", "fail (bad)"),
    ("failing|x", "failing (x)"), ("down*|gone", "down (gone)"), ("maint|none", "maint"), ("mixed$|none", "in maintenance"),
    ("allocated@|kernel", "to be rebooted (kernel)"), ("mixed!|none", "to be powered down")])
def test_states_that_are_left(state: str, why: str) -> None:
    assert Judge().judge(sighting(f"b1|{state}")) == {"b1": Trouble(why=why, give_back=True)}


@pytest.mark.parametrize("state", ["mixed", "allocated", "idle", "idle-", "mixed-", "completing", "reserved"])
def test_states_that_are_not(state: str) -> None:
    judge = Judge()
    assert all(judge.judge(sighting(f"b1|{state}|none")) == {} for _ in range(5))


def test_a_node_that_does_not_answer() -> None:
    """Three looks in a row: one that has come back from a drain is unheard for a moment. It isn't given back."""
    judge = Judge()
    unheard, heard = sighting("b1|mixed*|none"), sighting("b1|mixed|none")
    assert [bool(judge.judge(s)) for s in (unheard, unheard, heard, unheard, unheard)] == [False] * 5
    assert judge.judge(unheard) == {"b1": Trouble(why="not answering", give_back=False)}
    assert judge.judge(heard) == {}


def test_maintenance_ahead() -> None:
    judge = Judge(maintenance_lead_s=600)
    assert judge.judge(sighting("b1|mixed|none", maintenance={"b1": 1700.0})) == {}
    found = judge.judge(sighting("b1|mixed|none", maintenance={"b1": 1300.0}))
    assert found == {"b1": Trouble(why="in maintenance in 5 min", give_back=True)}


def test_a_node_that_was_taken_away() -> None:
    judge = Judge()
    assert judge.judge(sighting("")) == {}
    found = judge.judge(sighting("", allocation=("b0", "b2", "b3")))
    assert list(found) == ["b1"] and "allocation" in found["b1"].why


# how far each host is

DRAINING = Trouble(why="draining", give_back=True)
NODES = ("b0", "b1", "b2", "b3")


def hosts(departures: list) -> list[str]:
    return [d.host for d in departures]


def test_a_departure_from_drain_to_given_back() -> None:
    departures = Departures()
    new, returned = departures.see({"b1": DRAINING}, NODES)
    assert hosts(new) == ["b1"] and returned == [] and departures.avoided == {"b1"}
    assert departures.see({"b1": DRAINING}, NODES) == ([], [])
    assert hosts(departures.to_vacate(ROSTER)) == ["b1"] and departures.to_end(ROSTER, "") == []
    roster = ROSTER.after(plan_move(ROSTER, parse_vacate("b1", need_iteration=False)))
    assert departures.to_vacate(roster) == [] and hosts(departures.to_end(roster, "")) == ["b1"]
    new[0].stage = Stage.ENDING
    assert departures.avoided == frozenset() and departures.to_end(roster, "") == []
    assert departures.see({}, NODES) == ([], [])  # too late to change one's mind
    new[0].stage = Stage.EMPTY
    assert departures.forget_gone(NODES) == []
    assert hosts(departures.forget_gone(("b0", "b2", "b3"))) == ["b1"] and new[0].stage is Stage.GIVEN_BACK
    gone = {"b1": Trouble(why="no longer in the job's allocation", give_back=True)}
    assert departures.see(gone, ("b0", "b2", "b3")) == ([], [])


def test_an_undrained_host_is_no_longer_avoided() -> None:
    departures = Departures()
    departures.see({"b1": DRAINING, "b3": DRAINING}, NODES)
    assert departures.see({"b3": DRAINING}, NODES) == ([], ["b1"])
    assert departures.avoided == {"b3"}
    # but one that Slurm took away doesn't come back
    assert departures.see({}, ("b0", "b1", "b2")) == ([], []) and departures.avoided == {"b3"}


def test_the_batch_host_is_kept() -> None:
    departures = Departures()
    departures.see({"b2": DRAINING, "b3": DRAINING}, NODES)
    assert hosts(departures.to_keep(ROSTER, "b2")) == ["b2"] and hosts(departures.to_end(ROSTER, "b2")) == ["b3"]
    departures.to_keep(ROSTER, "b2")[0].stage = Stage.KEPT
    assert departures.to_keep(ROSTER, "b2") == [] and departures.avoided == {"b2", "b3"}
    assert departures.see({"b3": DRAINING}, NODES) == ([], ["b2"])


def test_a_silent_host_is_kept_until_it_is_drained() -> None:
    departures = Departures()
    departures.see({"b3": Trouble(why="not answering", give_back=False)}, NODES)
    departures.to_keep(ROSTER, "")[0].stage = Stage.KEPT
    assert departures.to_end(ROSTER, "") == []
    departures.see({"b3": DRAINING}, NODES)
    assert hosts(departures.to_end(ROSTER, "")) == ["b3"]


def test_the_next_controller_goes_on() -> None:
    departures, inherited = Departures(), Departures()
    departures.see({"b1": DRAINING, "b3": DRAINING}, NODES)
    departures.to_end(ROSTER, "")[0].stage = Stage.EMPTY
    inherited.load_json(departures.to_json())
    assert inherited.describe() == departures.describe() == {"b1": "draining, leaving", "b3": "draining, empty"}
    assert hosts(inherited.to_give_back()) == ["b3"] and inherited.avoided == {"b1"}


# the roster


def test_spares_on_a_host_to_be_left_never_join() -> None:
    plan = plan_move(ROSTER.avoiding({"b2"}), parse_vacate("b0", need_iteration=False))
    assert plan.joiners == (6, 7)
    with pytest.raises(UserError, match="2 spare processes are needed outside the hosts to vacate, 0 free"):
        plan_move(ROSTER.avoiding({"b2", "b3"}), parse_vacate("b0", need_iteration=False))
    with pytest.raises(UserError, match="b2 is to be left itself"):
        plan_move(ROSTER.avoiding({"b2"}), parse_vacate("b0->b2", need_iteration=False))


def test_a_released_host() -> None:
    roster = ROSTER.avoiding({"b2", "b3"}).release("b2")
    assert (roster.leaving, roster.released, roster.lost) == ({"b3"}, {"b2"}, {4, 5})
    assert roster.spares() == (6, 7) and Roster.from_json(roster.to_json()) == roster
    with pytest.raises(AssertionError, match="b0 still holds slots"):
        ROSTER.release("b0")


def test_the_role_goes_to_a_host_that_stays() -> None:
    assert choose_successor(ROSTER) == 0
    assert choose_successor(ROSTER.avoiding({"b0"})) == 2
    assert choose_successor(ROSTER.avoiding({"b0", "b1"})) == 0
