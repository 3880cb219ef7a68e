"""The command that gets a device more samples, ready to be pasted."""

from __future__ import annotations

from dataclasses import replace
from datetime import UTC, datetime

from storage import Network
from tests.tlp.pipeline import night_fleet
from tlp.fleet.counts import more_held_out


def test_held_out_samples_come_from_networks_that_can_be_compiled(night_store):
    board = replace(night_fleet.device("board"), endpoint={"kind": "local"})
    (tasks,) = {network.tasks for network in night_store.list_networks() if network.name == "one"}

    def network(name: str, *, holdout: bool, source: str = "builtin:x") -> Network:
        return Network(name, holdout, source, datetime.now(UTC), tasks)

    starter = network("a_starter", holdout=True, source="dataset:starter")
    there = [starter, network("b", holdout=False), network("c", holdout=True), network("d", holdout=True)]
    assert more_held_out(board, there) == "tlp measure board --samples 200 --network c --network d"
    assert more_held_out(board, [starter]) == "tlp network add bert_tiny --builtin bert_tiny"
    assert more_held_out(board, there[1:2]) == "tlp measure board --samples 200"
    # of many tasks: those of the networks that are there, else one more network
    wanted = {"tasks": 1, "programs": 500}
    assert (
        more_held_out(board, there, **wanted)
        == f"tlp measure board --samples {500 * len(tasks)} --network c --network d"
    )
    more = "tlp network add bert_tiny --builtin bert_tiny"
    assert more_held_out(board, there, tasks=20) == more_held_out(board, there[1:2], tasks=20) == more
    assert more_held_out(night_fleet.device("platform", "dataset"), there) == "tlp import --help"
