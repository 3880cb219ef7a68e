"""The kinds of models: what they have in common, and the table that the packages fill.

`mtl-tlp` is here; `felix` adds itself (`tlp.felix`). Imports neither torch nor mlflow.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Annotated, Any, Final, Protocol, TypeVar

from pydantic import Field, TypeAdapter, ValidationError

from tlp.core.errors import ModelFormatError
from tlp.core.lazy import later

T = TypeVar("T")
Count = Annotated[int, Field(ge=0, lt=1 << 63)]

MTL_TLP: Final = "mtl-tlp"
"""The kind that training and tuning take unless another is asked for."""
MANIFEST: Final = "manifest.json"
FORMAT: Final = 1
_AGAIN: Final = "tlp train --from-scratch"


@dataclass(frozen=True)
class Manifest:
    """Where a checkpoint came from."""

    family: str  # ISA family of its heads
    encoder_version: str  # as in the config, as are `heads`
    heads: tuple[str, ...]  # device names
    targets: Mapping[str, Mapping[str, Any]]  # TVM target of each head's device
    samples: Mapping[str, Count]  # OK samples of each device in the snapshot it was trained on
    watermark: Count  # largest sequence number of that snapshot
    holdout: tuple[str, ...]  # networks that were held out; empty if workloads were, by hash
    strategy: str  # how the data entered the model (`joint`)
    parent: str | None  # version it was trained from; None: from scratch
    seeds: tuple[Count, ...]
    metrics: Mapping[str, float] = field(default_factory=dict)  # final, e.g. `train_loss`, `validation_top1`, `seconds`
    curves: Mapping[str, list[float]] = field(default_factory=dict)  # one value per epoch
    # Of devices whose head was kept and not trained: largest sequence number that the weights learned from.
    watermarks: Mapping[str, Count] = field(default_factory=dict)
    format: int = FORMAT  # version of the directory's layout
    kind: str = MTL_TLP  # manifests written before there was another kind have none

    def learned_until(self, device: str) -> int:
        """The largest sequence number of a device's samples that the weights learned from."""
        return self.watermarks.get(device, self.watermark)

    def to_json(self) -> dict[str, Any]:
        """Plain JSON; the inverse of `from_json`."""
        return {key: list(value) if isinstance(value, tuple) else value for key, value in asdict(self).items()}

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Manifest:
        """A manifest from `to_json`'s value. Raises ModelFormatError."""
        if value.get("format") != FORMAT:
            raise ModelFormatError(
                f"{MANIFEST} is of format {value.get('format')!r}, this release reads format {FORMAT}",
                next_command=_AGAIN,
            )
        return parsed(Manifest, value, MANIFEST)


def parsed(form: type[T], value: Mapping[str, Any], name: str, required: Collection[str] = ()) -> T:
    """A dataclass from a checkpoint's JSON document `name`, which must have the `required` fields also if defaulted.

    Raises ModelFormatError: a field is missing, unknown or of another type; the message has it.
    """
    names = {entry.name for entry in fields(form)}  # type: ignore[arg-type]  # a dataclass
    problems = [f"{key} is missing" for key in required if key not in value]
    problems += [f"{key} is unknown" for key in sorted(value.keys() - names)]
    if not problems:
        try:
            return TypeAdapter(form).validate_json(json.dumps(value), strict=True)
        except ValidationError as exc:
            key, why = str(exc.errors()[0]["loc"][0]), exc.errors()[0]["msg"]
            problems = [f"{key} is {value.get(key)!r:.80} ({why})"]
    raise ModelFormatError(f"{name} does not fit this release: {problems[0]}", next_command=_AGAIN)


class Model(Protocol):
    """What every kind of model has."""

    @property
    def manifest(self) -> Manifest:
        """Where it came from."""

    @property
    def heads(self) -> tuple[str, ...]:
        """Devices with a head, in order."""

    @property
    def encoder_version(self) -> str:
        """What the network reads of a program; its language stands before the first hyphen."""

    def save(self, directory: Path) -> Path:
        """Write the files; the directory is made. Returns it."""


@dataclass(frozen=True)
class Kind:
    """A kind of models."""

    name: str  # in manifests and on the command line
    summary: str  # one line for `tlp train --help`
    load: Callable[[Path], Model]  # reads and checks a checkpoint directory; raises ModelFormatError
    serving: Path  # script that MLflow keeps with each version and runs to serve it ("models from code")
    training: str  # the command that trains one

    @property
    def prefix(self) -> str:
        """What the names of its registered models begin with."""
        return f"{self.name}-"


KINDS: Final[dict[str, Kind]] = {
    MTL_TLP: Kind(
        MTL_TLP,
        "reads schedule primitives, one head per device; what tuning asks",
        later("tlp.model.checkpoint", "Checkpoint.load"),
        Path(__file__).with_name("serving.py"),
        "tlp train",
    )
}


def read_bytes(directory: Path, name: str) -> bytes:
    """One of a checkpoint's files. Raises ModelFormatError: it cannot be read."""
    try:
        return (directory / name).read_bytes()
    except OSError as exc:
        raise ModelFormatError(
            f"{directory} is not a complete model: {name} cannot be read ({exc.strerror})",
            next_command="tlp model list",
        ) from exc


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """One of a checkpoint's JSON files. Raises ModelFormatError: it is missing, or no JSON object."""
    try:
        value = json.loads(read_bytes(directory, name))
    except ValueError as exc:
        raise ModelFormatError(f"{directory / name} is damaged: {exc}", next_command="tlp model list") from exc
    if not isinstance(value, dict):
        raise ModelFormatError(f"{directory / name} is damaged: not a JSON object", next_command="tlp model list")
    return value


def load_model(directory: Path) -> Model:
    """Read and check a checkpoint directory of any registered kind. Raises ModelFormatError."""
    try:
        name = read_json(directory, MANIFEST).get("kind", MTL_TLP)
    except ModelFormatError:
        name = MTL_TLP  # its loader says best what is wrong
    kind = KINDS.get(str(name))
    if kind is None:
        raise ModelFormatError(
            f"the model in {directory} is of kind {name!r:.80}, this release has {', '.join(KINDS)}",
            next_command="tlp model list",
        )
    return kind.load(directory)


def kind_of(model: str) -> Kind:
    """The kind of a registered model, by its name."""
    return next((kind for kind in KINDS.values() if model.startswith(kind.prefix)), KINDS[MTL_TLP])
