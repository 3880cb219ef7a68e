"""The login of a home is made once and for its owner; passwords in addresses are split off, carried and masked."""

from __future__ import annotations

import logging
import os
import subprocess
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from tlp.core import secrets
from tlp.core.errors import InvalidInputError


class TestLogin:
    def test_many_at_once_get_the_same_whatever_the_umask(self, tmp_path: Path) -> None:
        path, before = tmp_path / "home" / "login", os.umask(0)
        try:
            with ThreadPoolExecutor(8) as threads:
                logins = set(threads.map(lambda _: secrets.make_login(path), range(32)))
        finally:
            os.umask(before)
        (login,) = logins
        user, _, password = login.partition(":")
        assert (user, len(password)) == ("tlp", 32)
        assert path.stat().st_mode & 0o777 == 0o600
        assert secrets.is_private(path)
        assert [entry.name for entry in path.parent.iterdir()] == ["login"]
        assert secrets.make_login(tmp_path / "other") != login

    @pytest.mark.skipif(os.geteuid() != 0, reason="only root can be somebody else")
    def test_another_user_of_this_machine_cannot_read_it(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            home = Path(folder)
            home.chmod(0o755)
            (home / "other").write_text("for all")
            secrets.make_login(home / "login")

            def read(name: str) -> subprocess.CompletedProcess[bytes]:
                nobody = {"user": 65534, "group": 65534, "extra_groups": []}
                return subprocess.run(["cat", home / name], capture_output=True, check=False, **nobody)  # type: ignore[call-overload,no-any-return]

            assert read("other").stdout == b"for all"
            assert read("login").stdout == b""
            assert b"Permission denied" in read("login").stderr

    def test_one_of_ones_own_stays(self, tmp_path: Path) -> None:
        path = tmp_path / "login"
        path.write_text("me:pass:word\n")
        assert secrets.make_login(path) == "me:pass:word"

    @pytest.mark.parametrize("content", ["", "no colon", "me:", ":secret", "me:two words", "me:a\nyou:b"])
    def test_what_is_no_login_is_refused_and_not_replaced(self, tmp_path: Path, content: str) -> None:
        path = tmp_path / "login"
        path.write_text(content)
        with pytest.raises(InvalidInputError, match="does not hold one line") as caught:
            secrets.make_login(path)
        assert path.read_text() == content
        assert "secret" not in str(caught.value)

    def test_a_folder_in_its_place(self, tmp_path: Path) -> None:
        with pytest.raises(InvalidInputError, match="cannot be read"):
            secrets.read_login(tmp_path)


class TestAddresses:
    @pytest.mark.parametrize("login", ["tlp:abc", "me:p@ss/w:rd?#%"])
    def test_there_and_back(self, login: str) -> None:
        address = secrets.with_login("http://127.0.0.1:5000/api", login)
        assert secrets.split_login(address) == ("http://127.0.0.1:5000/api", login)
        assert httpx.URL(address).username + ":" + httpx.URL(address).password == login  # as httpx understands it
        assert "***" in secrets.mask(address)
        assert login.partition(":")[2] not in secrets.mask(address)

    def test_its_own_login_stays(self) -> None:
        assert secrets.with_login("http://you:x@host", "me:y") == "http://you:x@host"
        assert secrets.split_login("https://[::1]:5000/api") == ("https://[::1]:5000/api", None)


@pytest.mark.parametrize(
    ("text", "masked"),
    [
        ("postgresql://me:secret@db/tlp", "postgresql://me:***@db/tlp"),
        ("postgresql+psycopg2://me:se@cret@db:5432/tlp", "postgresql+psycopg2://me:***@db:5432/tlp"),
        (
            "postgresql://db/tlp?user=me&password=secret&sslmode=off",
            "postgresql://db/tlp?user=me&password=***&sslmode=off",
        ),
        ("host=db user=me password=secret", "host=db user=me password=***"),
        ("http://:secret@h and http://a:secret@h", "http://:***@h and http://a:***@h"),
        ('{"a": "http://h:80", "b": "me@host"}', '{"a": "http://h:80", "b": "me@host"}'),
        ("http://127.0.0.1:5000/#/models/m@champion", "http://127.0.0.1:5000/#/models/m@champion"),
        ("http://h:80/?to=me@host", "http://h:80/?to=me@host"),
        ("sqlite:////home/me@host/mlflow.db", "sqlite:////home/me@host/mlflow.db"),
    ],
)
def test_passwords_are_masked_and_nothing_else(text: str, masked: str) -> None:
    assert secrets.mask(text) == masked
    assert secrets.mask(masked) == masked


@pytest.fixture
def masked_logs() -> Iterator[None]:
    before = logging.getLogRecordFactory()
    secrets.mask_logs()
    secrets.mask_logs()  # a second call changes nothing
    yield
    logging.setLogRecordFactory(before)


@pytest.mark.usefixtures("masked_logs")
def test_logs_of_libraries_and_their_tracebacks_are_masked(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ConnectionError("http://me:secret@host refused")
    except ConnectionError:
        logging.getLogger("some.library").exception("asking %s", "postgresql://me:secret@db")
    (record,) = caplog.records
    text = logging.Formatter().format(record)
    assert "asking postgresql://me:***@db" in text
    assert "ConnectionError: http://me:***@host refused" in text
    assert "me:secret" not in text + caplog.text
