"""Every way between the nodes of a step is tried, and each node knows of both directions."""

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from dspark_lab.cluster.neighbours import Neighbour, Node, Step, meet


def met(folder: Path, *addresses: str, num_tasks: int | None = None, deadline_s: float = 20.0) -> list[list[Neighbour]]:
    """What each of the nodes, here threads with addresses of loopback, finds of the others."""

    def one(rank: int) -> list[Neighbour]:
        step = Step(rank=rank, num_tasks=num_tasks or len(addresses), folder=folder / "step")
        own = Node(name=f"gb{rank}", address=addresses[rank], networks=())
        return meet(step, own, deadline_s=deadline_s)

    with ThreadPoolExecutor(len(addresses)) as pool:
        return list(pool.map(one, range(len(addresses))))


def test_nodes_that_reach_each_other(tmp_path: Path) -> None:
    found = met(tmp_path, "127.0.0.2", "127.0.0.3", "127.0.0.4")
    assert [[str(entry.node) for entry in entries] for entries in found] == [
        ["gb1 127.0.0.3", "gb2 127.0.0.4"],
        ["gb0 127.0.0.2", "gb2 127.0.0.4"],
        ["gb0 127.0.0.2", "gb1 127.0.0.3"],
    ]
    assert all((entry.reached, entry.reaches) == (None, None) for entries in found for entry in entries)


def test_a_way_that_is_broken_is_known_at_both_ends_with_its_direction(tmp_path: Path, monkeypatch) -> None:
    from dspark_lab.cluster import neighbours

    whole = neighbours.try_to_reach

    def one_way(rank, told):
        # Another listener than the one that was meant: as a name that leads to the asking machine itself.
        return whole(rank, told) if told["name"] == "gb1" else whole(7, told)

    monkeypatch.setattr(neighbours, "try_to_reach", one_way)
    ((first,), (second,)) = met(tmp_path, "127.0.0.2", "127.0.0.3")
    assert (first.reached, first.reaches) == (None, "another machine answers there")
    assert (second.reached, second.reaches) == ("another machine answers there", None)


def test_a_node_that_cannot_listen_or_does_not_come_is_named(tmp_path: Path) -> None:
    ((other,), (own,)) = met(tmp_path / "a", "127.0.0.2", "203.0.113.9")
    assert other.reached is not None and other.reached.startswith("it cannot listen there: ")
    assert (other.reaches, own.reached) == (None, None)
    ((absent,),) = met(tmp_path / "b", "127.0.0.2", num_tasks=2, deadline_s=0.3)
    assert (absent.node.name, absent.reached) == ("task 1", "did not come within 0.3 s")


def test_a_step_has_a_folder_of_its_own(tmp_path: Path) -> None:
    assert Step.found(tmp_path, {"SLURM_STEP_ID": "2"}) is None
    step = {"SLURM_JOB_ID": "7", "SLURM_STEP_ID": "2", "SLURM_STEP_NUM_TASKS": "3", "SLURM_PROCID": "1"}
    assert Step.found(tmp_path, step) == Step(rank=1, num_tasks=3, folder=tmp_path / "step-7.0.2")
