"""What a person or a schedule asks for, one object per operation.

The command line builds them, Prefect shows them as parameters of a flow, and the operation takes them as they are.
A value that names an entry of a table (a sampler, a search, a strategy, a kind of model) is checked by that table.
Each request has a `title`, by which a person recognises its flow run.
"""

from __future__ import annotations

from typing import Annotated, Final

from pydantic import BaseModel, ConfigDict, Field

MAX_PROGRAMS: Final = 10**9
"""A device that measures 30 programs a second needs a year for these; beyond lies what the store cannot count."""
Count = Annotated[int, Field(ge=1, le=MAX_PROGRAMS)]


class Request(BaseModel):
    """A request: immutable, no unknown fields."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    @property
    def title(self) -> str:
        """What its flow run is called."""
        return self._title()

    def _title(self) -> str:
        raise NotImplementedError


class MeasureRequest(Request):
    """Measure new programs on a device; see `tlp.pipeline`."""

    device: str = Field(description="Device to measure on.")
    samples: Count = Field(1000, description="OK samples to add. Programs that fail do not count.")
    sampler: str = Field("random", description="How programs are chosen, an entry of the sampler table.")
    networks: tuple[str, ...] | None = Field(None, description="Only subgraphs of these networks; None: of all.")

    def _title(self) -> str:
        return f"measure {self.device}"


class BootstrapRequest(Request):
    """Enroll this machine if it is new, measure its quota, train, promote."""

    device: str = Field(description="Device; this machine is enrolled under that name if it is new.")
    target: str | None = Field(None, description="Target for enrolling, a tag or JSON; None: what this machine is.")
    min_samples: Count | None = Field(None, description="For enrolling: OK samples needed; None: the setting.")
    sampler: str = Field("select", description="How programs are chosen, an entry of the sampler table.")
    networks: tuple[str, ...] | None = Field(None, description="Only subgraphs of these networks; None: of all.")
    until_flat: bool = Field(False, description="Stop when more samples would not make the model better.")

    def _title(self) -> str:
        return f"bootstrap {self.device}"


class TrainRequest(Request):
    """Train what is due, evaluate, register, and promote what passes the gate."""

    device: str | None = Field(None, description="Device the training is for; None: every device that is due.")
    from_scratch: bool = Field(False, description="New weights instead of the champion's.")
    dry_run: bool = Field(False, description="Only say what would be trained, and why.")
    force: bool = Field(False, description="Train `device` without waiting for new samples.")
    strategy: str | None = Field(None, description="An entry of the strategy table; None: `train_strategy`.")
    model: str = Field("mtl-tlp", description="Kind of model, an entry of the kind table.")

    def _title(self) -> str:
        return f"retrain {self.device or 'what is due'}" + (", dry run" if self.dry_run else "")


class TuneRequest(Request):
    """Tune a network for a device."""

    network: str = Field(description="Network, as added with `tlp network add`.")
    device: str = Field(description="Device to tune for.")
    trials: Count | None = Field(
        None, description="Programs to measure; None: `tune_trials`, or what is left of the run that is resumed."
    )
    model: str = Field("champion", description="champion, a version number, xgb (TVM's), or random.")
    search: str = Field("evolutionary", description="How programs are looked for, an entry of the search table.")
    resume: bool = Field(False, description="Continue the last run, which was interrupted; its parameters hold.")
    frozen: bool = Field(False, description="Do not let the device's head learn from this run's measurements.")
    until_flat: bool = Field(False, description="End early when the network gets no faster.")

    def _title(self) -> str:
        return f"tune {self.network} on {self.device}"


class MeasureNightRequest(Request):
    """Measure what every device lacks."""

    device: str | None = Field(None, description="Only this device; None: all.")
    samples: Count | None = Field(None, description="OK samples to add in all; None: `measure_night_programs`.")
    dry_run: bool = Field(False, description="Only say what devices lack, and their shares.")

    def _title(self) -> str:
        return "measuring night" + (f" of {self.device}" if self.device else "") + (", dry run" if self.dry_run else "")


class NightRequest(Request):
    """Tune every network on every device that is due."""

    device: str | None = Field(None, description="Only this device; None: all.")
    trials: Count | None = Field(None, description="Programs in all; None: `tune_night_trials`.")
    dry_run: bool = Field(False, description="Only say what is due, and why.")

    def _title(self) -> str:
        return "tuning night" + (f" of {self.device}" if self.device else "") + (", dry run" if self.dry_run else "")
