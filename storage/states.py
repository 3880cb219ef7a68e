"""States of rows and codes of reasons: what is decided by."""

from __future__ import annotations

from enum import StrEnum


class DeviceState(StrEnum):
    """Where a device is in its life (see docs/architecture.md)."""

    ENROLLED = "enrolled"
    MEASURING = "measuring"
    TRAINING = "training"
    SERVING = "serving"
    QUARANTINED = "quarantined"
    RETIRED = "retired"


class MeasurementState(StrEnum):
    """The outcome of one measurement: a latency (OK) or an error, never both."""

    OK = "OK"
    BUILD_ERROR = "BUILD_ERROR"
    RUN_ERROR = "RUN_ERROR"
    TIMEOUT = "TIMEOUT"
    WRONG_RESULT = "WRONG_RESULT"
    DEVICE_LOST = "DEVICE_LOST"


class RunKind(StrEnum):
    """What a run does."""

    BOOTSTRAP = "bootstrap"
    MEASURE = "measure"
    TRAIN = "train"
    EVALUATE = "evaluate"
    TUNE = "tune"
    IMPORT = "import"


class RunState(StrEnum):
    """State of a run. RUNNING is the only unfinished one."""

    RUNNING = "RUNNING"
    DONE = "DONE"
    SKIPPED = "SKIPPED"
    FAILED = "FAILED"
    INTERRUPTED = "INTERRUPTED"  # Ctrl-C or SIGTERM: it closed itself
    CRASHED = "CRASHED"  # its process is gone; closed by the next start

    def is_finished(self) -> bool:
        """Whether the run accepts no more writes."""
        return self is not RunState.RUNNING


class ReasonCode(StrEnum):
    """What is decided by, beside the sentence that tells a person the same; see `DeviceEvent`, `Run`, `ModelEvent`."""

    OTHER = "other"  # nothing is decided by it
    # of a device's event
    ENROLLED = "enrolled"
    WORK = "work"  # a run began
    WORK_OVER = "work_over"  # it ended, or its process is gone
    LOST = "lost"
    PROBE = "probe"  # of a lost device: it began, it failed, it went well
    PROBE_FAILED = "probe_failed"
    PROBE_OK = "probe_ok"
    RETURNED = "returned"  # after a probe that went well
    PROMOTED = "promoted"  # a champion has a head for it
    RETIRED = "retired"
    RESUMED = "resumed"
    # of a run's end
    DONE = "done"
    NOTHING_TO_DO = "nothing_to_do"
    FLAT = "flat"  # tuning stopped: the network gets no faster
    EXHAUSTED = "exhausted"  # no programs are left to measure
    GAVE_UP = "gave_up"  # too few programs were OK
    TIME_UP = "time_up"  # its part of the night is over
    FAILED = "failed"
    BUSY = "busy"  # other work had what it needed
    INTERRUPTED = "interrupted"
    CRASHED = "crashed"
    NOT_ENOUGH_EVIDENCE = "not_enough_evidence"  # the gate could not tell: a training's end
    NOT_REPRODUCED = "not_reproduced"  # the registered version is not the one that was judged
    # of a model's event
    MOVED_IN_MLFLOW = "moved_in_mlflow"  # by a person, found afterwards
    LIVE_FALL = "live_fall"  # rolled back: the version's live quality fell
    HELD = "held"  # a person: nothing is promoted; of a version's event, too
    RELEASED = "released"
    # of a version's event
    GATE = "gate"  # it did not pass
    SAME_WEIGHTS = "same_weights"  # bit for bit those of a version that was promoted or rejected before
    SUPERSEDED = "superseded"  # `champion` was moved since it was judged, or its parent was rejected
    APPROVAL = "approval"  # it waits for a person's
    DISAPPROVED = "disapproved"
    NO_DEVICE = "no_device"  # it waits for one to be tried on
    TRIAL = "trial"  # it ranked worse there than the champion


class VersionState(StrEnum):
    """What became of a registered version; the code of its event says why."""

    REGISTERED = "registered"
    WAITING = "waiting"  # it passed the gate
    STAGED = "staged"  # on trial: the pin of one device
    PROMOTED = "promoted"
    REFUSED = "refused"  # the pipeline will not promote it

    def is_final(self) -> bool:
        """Whether the pipeline is through with the version."""
        return self in (VersionState.PROMOTED, VersionState.REFUSED)


class Actor(StrEnum):
    """Who moved an alias."""

    PIPELINE = "pipeline"
    PERSON = "person"


class CanaryState(StrEnum):
    """What a canary measurement found, or what a person decided about it."""

    REFERENCE = "reference"  # the first one since the device was enrolled or re-based: others are compared with it
    STEADY = "steady"
    OFF = "off"
    FAILED = "failed"  # no reference could be taken: the kernel does not run, or too unsteadily. Nothing is known
    REBASE = "rebase"  # a person: the next canary becomes the reference
