"""A copy of a home is not confused by what the other home has running."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from tlp.core.home import name_store, store_name
from tlp.core.processes import identity
from tlp.core.settings import Settings
from tlp.services.contract import Service
from tlp.services.table import look, write


def test_the_services_of_the_other_home_are_not_those_of_the_copy(tmp_path: Path) -> None:
    first, second = (Settings(home=tmp_path / name) for name in ("first", "second"))
    first.logs_dir.mkdir(parents=True)
    alive = {**identity(os.getpid()), "log": first.logs_dir / "worker.log", "started_at": "now"}
    write(first, [Service.model_validate({"name": "worker", "url": None, "host": None, "port": None, **alive})])
    assert [service.alive for service in look(first).services] == [True]
    shutil.copytree(first.home, second.home)
    assert look(second).services == ()  # `tlp up` starts its own, `tlp down` stops nobody else's

    link = tmp_path / "link"
    link.symlink_to(first.home)
    assert len(look(Settings(home=link)).services) == 1


def test_a_copy_is_another_store(tmp_path: Path) -> None:
    first, second = (Settings(home=tmp_path / name) for name in ("first", "second"))
    assert store_name(first) is None and not first.home.exists()
    name = name_store(first)
    assert name_store(first) == store_name(first) == name
    shutil.copytree(first.home, second.home)
    assert store_name(second) == name.replace(str(first.home.resolve()), str(second.home.resolve())) != name
