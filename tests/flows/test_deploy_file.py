"""prefect.yaml: what `tlp deploy` relies on."""

from __future__ import annotations

import importlib

import pytest
import yaml

from flows import deploy
from tlp.core.errors import InvalidInputError, NotFoundError

PATH = deploy.PROJECT_DIR / "prefect.yaml"
CONTENT = yaml.safe_load(PATH.read_text())


def test_every_schedule_has_a_slug_and_none_says_active():
    slugs = deploy.wanted(PATH)
    by_hand = {"bootstrap": set(), "measure": set(), "tune": set()}
    assert slugs == by_hand | {name: {"nightly"} for name in ("measure-night", "retrain", "tune-night")}
    for deployment in CONTENT["deployments"]:
        for schedule in deployment.get("schedules", []):
            assert "active" not in schedule
            assert schedule["timezone"]


def test_entry_points_and_parameters_are_those_of_the_flows():
    for deployment in CONTENT["deployments"]:
        path, _, name = deployment["entrypoint"].partition(":")
        flow = getattr(importlib.import_module(path.removesuffix(".py").replace("/", ".")), name)
        assert flow.validate_parameters(deployment["parameters"])["request"]
        assert deployment["work_pool"]["name"] == deploy.WORK_POOL


def test_the_locks_exclude_and_no_limit_of_prefect():
    assert not [deployment["name"] for deployment in CONTENT["deployments"] if "concurrency_limit" in deployment]


@pytest.mark.parametrize(
    ("text", "error"),
    [
        ("deployments: [{name: a, schedules: [{cron: '0 2 * * *'}]}]", InvalidInputError),
        ("deployments: []", InvalidInputError),
        ("- a", InvalidInputError),
        ("a: [", InvalidInputError),
        (None, NotFoundError),
    ],
)
def test_a_file_that_cannot_be_deployed_is_refused(tmp_path, text, error):
    path = tmp_path / "prefect.yaml"
    if text is not None:
        path.write_text(text)
    with pytest.raises(error):
        deploy.wanted(path)
