"""The registry from several processes, and through a real server."""

from __future__ import annotations

import subprocess
import sys
import textwrap
import traceback
from pathlib import Path
from typing import TYPE_CHECKING

import httpx
import pytest

from storage import DuckDBStore
from tlp.core import secrets
from tlp.core.errors import NotFoundError, RegistryError
from tlp.core.settings import Settings
from tlp.registry import Registry, model_name, models_at
from tlp.registry import mlflow as door

if TYPE_CHECKING:
    from tests.conftest import ServedRegistry

from tests.tlp.registry.helpers import add_versions, moves


@pytest.mark.slow
def test_four_cold_processes_at_once(settings: Settings, checkpoint: Path) -> None:
    """Database, experiment, model and version numbers are asked for by all of them in the same moment."""
    code = textwrap.dedent("""
        import sys
        from pathlib import Path
        from storage import DuckDBStore
        from tlp.core.registry import Submission
        from tlp.registry import Registry
        from tlp.core.settings import Settings
        registry = Registry(Settings(home=Path(sys.argv[1])), DuckDBStore())
        print(registry.register(Submission(Path(sys.argv[2]), "x86_64")))
    """)
    command = [sys.executable, "-c", code, str(settings.home), str(checkpoint)]
    processes = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(4)]
    outputs = [process.communicate(timeout=240) for process in processes]
    assert [err for _, err in outputs] == ["", "", "", ""]
    assert sorted(int(out) for out, _ in outputs) == [1, 2, 3, 4]
    assert not list(settings.mlflow_dir.glob("*.partial"))


def move_in_ui(url: str, model: str, alias: str, version: int) -> None:
    """The one request that MLflow's page sends when an alias is moved there."""
    answer = httpx.post(
        f"{url}/ajax-api/2.0/mlflow/registered-models/alias",
        json={"name": model, "alias": alias, "version": str(version)},
        trust_env=False,
    )
    answer.raise_for_status()


@pytest.mark.slow
class TestServer:
    """A real `mlflow server`; a class of one family per test, because the server is shared."""

    @pytest.mark.parametrize("how", ["direct", "served"])
    def test_alias_moved_in_the_ui_is_obeyed(self, mlflow_server: ServedRegistry, checkpoint: Path, how: str) -> None:
        family = f"ui-{how}"
        registry = Registry(getattr(mlflow_server, how), DuckDBStore())
        add_versions(registry, checkpoint, 2, family)
        registry.promote(family, 1, reason="first")
        registry.promote(family, 2, reason="better")
        assert registry.resolve(family).version == 2

        move_in_ui(mlflow_server.url, model_name(family), "champion", 1)

        for settings in (mlflow_server.direct, mlflow_server.served):
            found = Registry(settings, DuckDBStore()).resolve(family)
            assert found.version == 1
            assert (found.checkpoint_dir / "weights.safetensors").read_text() == "weights"
        registry.hold(family, "a demonstration")
        (row,) = [row for row in models_at(DuckDBStore(), mlflow_server.url)[0] if row["name"] == model_name(family)]
        assert row == {
            "name": model_name(family),
            "champion_version": "1",
            "versions": 2,
            "pins": {},
            "holds": {"": "a demonstration"},
        }  # `tlp status`
        registry.reconcile()
        assert ("champion", "2", "1", "person") in moves(registry, family)
        assert registry.show(family, 2).rejected
        assert registry.list_versions(family)[1].aliases == ("champion",)

    def test_rollback_through_the_server(self, mlflow_server: ServedRegistry, checkpoint: Path) -> None:
        registry = Registry(mlflow_server.served, DuckDBStore())
        add_versions(registry, checkpoint, 3, "back")
        for version in (1, 2, 3):
            registry.promote("back", version, reason="better")
        assert registry.rollback("back").to_version == "2"
        assert registry.rollback("back").to_version == "1"
        assert Registry(mlflow_server.direct).resolve("back").version == 1
        with pytest.raises(NotFoundError, match=r"no version 9 \(there: 3, 2, 1\)"):
            registry.show("back", 9)
        password = mlflow_server.url.partition("@")[0].rpartition(":")[2]
        assert (
            password.encode() not in (mlflow_server.direct.mlflow_dir / "mlflow.db").read_bytes()
        )  # no tag, no source
        assert mlflow_server.direct.login_path.read_text() == f"tlp:{password}\n"

    def test_a_wrong_password_is_said_to_be_so(
        self, mlflow_server: ServedRegistry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        for name in ("USERNAME", "PASSWORD"):
            monkeypatch.setenv(f"MLFLOW_TRACKING_{name}", "")  # which the registry sets: for this test only
        bare, _ = secrets.split_login(mlflow_server.url)
        wrong = Settings(home=tmp_path, mlflow_uri=secrets.with_login(bare, "tlp:guessed"))
        with pytest.raises(RegistryError, match="refuses the user or the password") as caught:
            Registry(wrong, DuckDBStore()).list_versions("any")
        assert secrets.mask(str(wrong.mlflow_uri)) in str(caught.value)
        assert "guessed" not in "".join(traceback.format_exception(caught.value))
        rows, warning = models_at(DuckDBStore(), wrong.mlflow_uri)
        assert (rows, "guessed" in str(warning), "cannot be read" in str(warning)) == ([], False, True)

    def test_client_without_the_files(
        self, mlflow_server: ServedRegistry, checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """An experiment whose files lie with the server, as on a server that is not ours: they are fetched once."""
        monkeypatch.setattr(door, "EXPERIMENT", "elsewhere")
        remote = Settings(home=tmp_path / "other-machine", mlflow_uri=mlflow_server.url)
        registry = Registry(remote, DuckDBStore())
        add_versions(registry, checkpoint, 1, "remote")
        registry.promote("remote", 1, reason="first")
        first = registry.resolve("remote").checkpoint_dir
        assert first.is_relative_to(remote.cache_dir)
        assert (first / "weights.safetensors").read_text() == "weights"
        before = first.stat().st_mtime_ns
        assert registry.resolve("remote").checkpoint_dir == first
        assert first.stat().st_mtime_ns == before
