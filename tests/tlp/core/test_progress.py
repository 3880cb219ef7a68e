"""Lines of progress where there is no terminal."""

from __future__ import annotations

import pytest

from tlp.core import progress


def test_the_first_line_comes_at_once_and_slow_steps_are_not_silent(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: now[0])  # type: ignore[attr-defined]
    with progress.track("measure cpu", 100, every=32) as update:
        assert capsys.readouterr().err == "measure cpu: 0/100\n"
        for done in range(1, 101):
            now[0] += 6.0 if done <= 10 else 0.1
            update(done)
    lines = capsys.readouterr().err.splitlines()
    assert [line.partition("  ")[0].removeprefix("measure cpu: ") for line in lines] == [
        *("3/100", "6/100", "9/100", "41/100", "73/100", "100/100"),
    ]
