"""A device's share of a measuring night, measured in a process of its own: `python -m tlp.pipeline.night SHARE`.

Devices of several machines are measured side by side. In a process each has its own search, its own signals and its
own death: what ends one, ends no other. The process ends with the one that started it, however that ends.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from typing import Any, Final

from pydantic import BaseModel, ConfigDict

from storage import ReasonCode
from tlp.core import errors
from tlp.core.errors import DeviceError, InternalError, TlpError
from tlp.core.fleet import Fleet
from tlp.core.processes import owned_command
from tlp.core.progress import say
from tlp.core.requests import BootstrapRequest, MeasureRequest
from tlp.pipeline import measure as measuring
from tlp.pipeline.measure import Bounds
from tlp.pipeline.night._lacking import lacking
from tlp.pipeline.opening import open_fleet

OVERTIME_S: Final = 120.0  # a share that has not ended so long after its time is stopped
GATE_SAMPLER: Final = "random"  # no model may choose what models are judged on


class Share(BaseModel):
    """What a device gets: OK samples, and seconds from the start of its process; `night`: the run they belong to."""

    model_config = ConfigDict(frozen=True, extra="forbid")
    device: str
    samples: int
    seconds: float
    night: str


class ShareProcess:
    """The process that measures a share. Raises OSError if it cannot be started."""

    def __init__(self, share: Share) -> None:
        self._share, self._was_stopped = share, False
        command = [sys.executable, "-m", "tlp.pipeline.night", share.model_dump_json()]
        self._process = subprocess.Popen(
            owned_command(os.getpid(), command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )

    def stop(self) -> None:
        """End it; what it measured is stored."""
        self._was_stopped = True
        self._process.terminate()

    def report(self) -> dict[str, Any]:
        """Wait for its end, passing on what it says; the report of `measure_share`.

        Raises:
            TlpError: what it raised.
            DeviceError: it was stopped.
            InternalError: it died.
        """
        assert self._process.stdout is not None and self._process.stderr is not None
        late = threading.Timer(self._share.seconds + OVERTIME_S, self.stop)
        late.daemon = True
        late.start()
        last = ""
        with self._process:
            for line in self._process.stderr:
                last = line.strip() or last
                say(line.rstrip())
            answer = self._process.stdout.read()
        late.cancel()
        said: dict[str, Any] = json.loads(answer) if answer else {}
        if "error" in said:
            kind = getattr(errors, said["class"], TlpError)
            raise kind(said["error"], next_command=said["next_command"])
        if "report" not in said:
            if self._was_stopped:
                raise DeviceError(f"{self._share.device} was not through in time and was stopped: {last}")
            status = self._process.returncode
            raise InternalError(f"the process that measured {self._share.device} ended with status {status}: {last}")
        report: dict[str, Any] = said["report"]
        return report


def measure_share(fleet: Fleet, share: Share) -> dict[str, Any]:
    """Measure what the device lacks, its quota first and then what the gate needs, at most its share.

    Returns:
        `samples_ok, ok, failed, reason, code`; `enough` as of `tlp.pipeline.measure.fill_quota`.

    Raises:
        TlpError: as `tlp.pipeline.measure.measure` does.
    """
    until, lack = time.monotonic() + share.seconds, lacking(fleet, fleet.store.get_device(share.device))
    report: dict[str, Any] = {"samples_ok": lack.numbers["samples"], "ok": 0, "failed": 0, "enough": None}
    report |= {"reason": lack.reason, "code": ReasonCode.DONE.value}
    if lack.quota:
        quota = BootstrapRequest(device=share.device, until_flat=lack.until_flat)
        part = measuring.fill_quota(fleet, quota, Bounds(share.samples, until, share.night))
        _add(report, part)
        lack = lacking(fleet, fleet.store.get_device(share.device))
    left = share.samples - report["ok"]
    if lack.gate and left > 0 and report["code"] == ReasonCode.DONE:
        request = MeasureRequest(device=share.device, samples=min(lack.gate, left), sampler=GATE_SAMPLER)
        bounds = Bounds(left, until, share.night)
        _add(report, measuring.measure(fleet, request, workload_ids=lack.held_out, bounds=bounds))
    if report["code"] == ReasonCode.DONE:
        report["reason"] = report["enough"] or lacking(fleet, fleet.store.get_device(share.device)).reason
    return report


def _add(report: dict[str, Any], part: Mapping[str, Any]) -> None:
    for key in ("ok", "failed"):
        report[key] += part[key]
    report |= {key: part[key] for key in ("samples_ok", "reason", "code", "enough") if key in part}


def main(argument: str) -> int:
    """Measure a share and write `{"report": …}`, or `{"error", "class", "next_command"}`, to stdout."""
    answer = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # TVM and LLVM print there
    share = Share.model_validate_json(argument)
    try:
        said: dict[str, Any] = {"report": measure_share(open_fleet(), share)}
    except TlpError as exc:
        said = {"error": exc.message, "class": type(exc).__name__, "next_command": exc.next_command}
    except KeyboardInterrupt:
        say(f"{share.device}: stopped, what was measured is stored")
        return 130
    answer.write(json.dumps(said))
    answer.close()
    return 0
