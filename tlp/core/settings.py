"""One typed settings object: `TLP_*` environment variables over `TLP_HOME/settings.toml` over defaults.

Imports nothing heavy: `tlp --help` and `tlp status` read it.
"""

from __future__ import annotations

import os
from functools import lru_cache
from pathlib import Path
from typing import Literal

from pydantic import Field, ValidationError, field_validator
from pydantic_settings import BaseSettings, SettingsConfigDict, TomlConfigSettingsSource
from pydantic_settings import PydanticBaseSettingsSource as Source

from tlp.core.errors import InvalidInputError


def _home() -> Path:
    return Path(os.environ.get("TLP_HOME") or "~/.tlp").expanduser().absolute()


class Settings(BaseSettings):
    """Everything that can be set. Field `x` is the variable `TLP_X` or the key `x` in `settings.toml`."""

    model_config = SettingsConfigDict(env_prefix="TLP_", extra="forbid", frozen=True)

    home: Path = Field(default_factory=_home, description="Folder that holds everything the product writes.")

    # -- store
    store_lock_timeout_s: float = Field(60.0, gt=0, description="Longest wait for the store's lock, seconds.")

    # -- services
    mlflow_uri: str | None = Field(None, description="MLflow's tracking and registry URI; None: SQLite under TLP_HOME.")
    mlflow_port: int = Field(5000, ge=1, le=65535, description="Port of the MLflow server of `tlp up`.")
    prefect_port: int = Field(4200, ge=1, le=65535, description="Port of the Prefect server of `tlp up`.")
    bind_host: str = Field("127.0.0.1", description="Address the servers of `tlp up` listen on.")
    allowed_hosts: str = Field("", description="Further host names of these servers in a browser, comma-separated.")

    # -- devices and measuring
    min_samples: int = Field(500_000, ge=1, description="OK samples a device needs before it is trained as a task.")
    build_timeout_s: float = Field(30.0, gt=0, description="Longest time one program may take to compile, seconds.")
    run_timeout_s: float = Field(10.0, gt=0, description="Longest time a program may run, all repeats, seconds.")
    queue_timeout_s: float = Field(600.0, gt=0, description="Longest wait for a busy or rebooting board, seconds.")
    upload_timeout_s: float = Field(30.0, gt=0, description="Longest time to send a program to a board, seconds.")
    device_max_losses: int = Field(8, ge=1, description="Connections lost in a row before a device is quarantined.")
    probe_first_s: float = Field(60.0, gt=0, description="Wait before quarantine's first probe; then doubled, seconds.")
    probe_longest_s: float = Field(6 * 3600.0, gt=0, description="Longest time between two such probes, seconds.")
    probe_patience_s: float = Field(3600.0, ge=0, description="How long measuring waits for a lost device, seconds.")
    check_every: int = Field(50, ge=0, description="Every n-th program is checked against a reference; 0: none.")
    build_workers: int = Field(0, ge=0, description="Processes that build for remote boards; 0: cores, less one.")
    measure_number: int = Field(1, ge=1, description="Runs averaged within one repeat (1: cache flush between runs).")
    measure_repeat: int = Field(3, ge=1, description="Repeats per program; all are stored.")
    measure_warmup: int = Field(1, ge=1, description="Runs of a program before its first repeat.")
    measure_extra_repeats: int = Field(3, ge=0, description="Most repeats added for a program whose repeats disagree.")
    measure_max_dispersion: float = Field(0.05, ge=0, description="Relative dispersion of repeats that is good enough.")
    measure_workers: int = Field(1, ge=1, description="Worker processes per local device.")
    measure_batch: int = Field(32, ge=1, description="Programs per batch; a batch is committed in one transaction.")

    measure_night_programs: int = Field(50_000, ge=1, description="OK samples a measuring night adds, on all devices.")
    measure_night_s: float = Field(
        4 * 3600.0, gt=0, description="Time after which a measuring night measures nothing, seconds."
    )
    measure_landing: bool = Field(False, description="Hand batches in through TLP_HOME/landing: no store lock.")
    canary: bool = Field(True, description="Measure a fixed kernel before each batch to notice a machine that drifts.")
    canary_tolerance: float = Field(
        0.10, ge=0, description="Part of its reference latency the canary may be off by, besides its own dispersion."
    )
    canary_dispersions: float = Field(3.0, ge=0, description="Dispersions of its reference it may be off by on top.")
    canary_max_dispersion: float = Field(0.15, gt=0, description="Largest relative dispersion of a canary reference.")

    # -- live quality of a model
    live_accuracy_drop: float = Field(
        0.09, ge=0, lt=1, description="Fall of the live pair accuracy (0 to 1) that is still allowed."
    )
    live_baseline_rounds: int = Field(2, ge=1, description="First rounds of a workload with a version: its baseline.")
    live_window_rounds: int = Field(64, ge=2, description="Newest tuning rounds that are compared with baselines.")
    live_min_pairs: int = Field(300, ge=1, description="Pairs of programs either side needs before a fall is judged.")
    live_tie_margin: float = Field(0.05, ge=0, description="Relative difference of latencies that is still a tie.")
    on_live_fall: Literal["retrain", "rollback"] = Field(
        "retrain", description="What follows a fall: a retraining is due, or champion goes back first."
    )

    # -- training
    seed: int = Field(0, ge=0, lt=1 << 31, description="Seed of samplers, training and bootstrap.")
    torch_threads: int = Field(0, ge=0, le=1024, description="Threads torch may use; 0: one per physical core.")
    torch_device: str = Field("cpu", description="torch device for training and scoring, e.g. cpu or cuda.")
    train_epochs: int = Field(16, ge=1, description="Passes over the snapshot in one training.")
    train_batch_groups: int = Field(8, ge=1, description="Workloads (lists of up to 64 programs) per optimiser step.")
    train_learning_rate: float = Field(2e-3, gt=0, description="Adam's peak; falls to 0 along a cosine (paper: 7e-4).")
    train_strategy: Literal["joint", "fine-tune", "replay", "distill"] = Field(
        "joint", description="How new samples enter a model that has a parent (docs/continual.md)."
    )
    retrain_min_new_samples: int = Field(20_000, ge=1, description="New OK samples of a device that make training due.")

    # -- gate
    gate_margin: float = Field(
        0.04, ge=0, lt=1, description="What a candidate may lose of the choice among eight programs (0 to 1)."
    )
    gate_min_tasks: int = Field(20, ge=2, description="Held-out tasks of a device that the gate needs to judge it.")
    gate_min_programs: int = Field(16, ge=2, description="Measured programs a held-out task needs to count for that.")
    gate_max_task_slowdown: float = Field(2.0, ge=1, description="Times slower that a candidate may make a task.")
    gate_bootstrap: int = Field(2000, ge=10, description="Bootstrap resamples of held-out tasks in the gate.")

    # -- promotion
    promotion: Literal["auto", "approval", "staged"] = Field(
        "auto", description="What follows the gate: champion at once, a person's approval, a trial on one device."
    )
    stage_rounds: int = Field(64, ge=1, description="Tuning rounds of a trial on one device (promotion staged).")

    # -- registry
    registry_patience_s: float = Field(
        300.0,
        ge=0,
        description="Longest wait for a silent MLflow before a model is kept for the next start, seconds.",
    )

    # -- tuning
    tune_trials: int = Field(640, ge=1, description="Programs measured in one tuning run, all tasks together.")
    tune_remeasure: int = Field(5, ge=0, description="Best programs measured again at a tuning run's end; 0: none.")
    tune_remeasure_gap: float = Field(0.10, gt=0, description="Relative gap of its two latencies that is flagged.")
    tune_batch: int = Field(10, ge=1, description="Programs measured per tuning round (paper: 10).")
    tune_population: int = Field(2048, ge=8, description="Programs per generation of a search; TVM's own: a quarter.")
    tune_generations: int = Field(4, ge=0, description="Generations of the evolutionary search per round.")
    tune_precision: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="Of the scores a search breeds with; auto: bfloat16 where the CPU has instructions for it.",
    )
    tune_flat_rounds: int = Field(24, ge=1, description="Rounds without gain after which a scheduled tuning run stops.")
    tune_flat_gain: float = Field(0.005, gt=0, lt=1, description="Part by which the network must get faster in those.")
    tune_night_trials: int = Field(2560, ge=1, description="Programs a tuning night measures, over all networks.")
    tune_night_s: float = Field(4 * 3600.0, gt=0, description="Time after which a night starts no network, seconds.")

    @field_validator("home")
    @classmethod
    def _absolute(cls, value: Path) -> Path:
        return value.expanduser().absolute()

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],
        init_settings: Source,
        env_settings: Source,
        dotenv_settings: Source,
        file_secret_settings: Source,
    ) -> tuple[Source, ...]:
        """Constructor arguments, then the environment, then TLP_HOME/settings.toml."""
        toml = TomlConfigSettingsSource(settings_cls, toml_file=_home() / "settings.toml")
        return init_settings, env_settings, toml

    # -- where things lie; nothing else builds a path under `home`
    @property
    def store_path(self) -> Path:
        """The DuckDB file."""
        return self.home / "store.duckdb"

    @property
    def store_url(self) -> str:
        """What `storage.open_store` takes."""
        return f"duckdb://{self.store_path}"

    @property
    def locks_dir(self) -> Path:
        """flock files device-NAME, measure-night, train-FAMILY, promote-FAMILY, registry-FAMILY, work-KEY, services."""
        return self.home / "locks"

    @property
    def landing_dir(self) -> Path:
        """Batches on their way into the store, one Parquet file each; `rejected/` below it."""
        return self.home / "landing"

    @property
    def mlflow_dir(self) -> Path:
        """mlflow.db and the artifacts folder."""
        return self.home / "mlflow"

    @property
    def prefect_dir(self) -> Path:
        """PREFECT_HOME of the servers and flows."""
        return self.home / "prefect"

    @property
    def cache_dir(self) -> Path:
        """Model versions fetched from a server, features of programs; can be deleted at any time."""
        return self.home / "cache"

    @property
    def pending_dir(self) -> Path:
        """Trained models that are not registered and promoted yet; a start goes on with what it finds there."""
        return self.home / "pending"

    @property
    def logs_dir(self) -> Path:
        """Logs of the servers and workers."""
        return self.home / "logs"

    @property
    def login_path(self) -> Path:
        """`user:password` of the servers of `tlp up`, for their owner's eyes."""
        return self.home / "login"

    @property
    def identity_path(self) -> Path:
        """A random word that tells this home from every other; see `tlp.core.home.store_name`."""
        return self.home / "identity"

    @property
    def artifacts_dir(self) -> Path:
        """Plots, reports and compiled libraries."""
        return self.home / "artifacts"

    @property
    def deployed_path(self) -> Path:
        """What `tlp deploy` deployed last, so that `tlp status` can tell when schedules have no server."""
        return self.home / "deployed.json"

    @property
    def mlflow_tracking_uri(self) -> str:
        """The URI in force: `mlflow_uri`, or SQLite under `home` (always absolute)."""
        return self.mlflow_uri or f"sqlite:///{self.mlflow_dir / 'mlflow.db'}"


@lru_cache(maxsize=1)
def get_settings() -> Settings:
    """The settings of this process, read once.

    Raises:
        InvalidInputError: a variable or a key of settings.toml is not acceptable; all of them are named.
    """
    try:
        return Settings()
    except ValidationError as exc:
        problems = "; ".join(
            f"TLP_{'.'.join(str(p) for p in e['loc']).upper()}={e.get('input')!r}: {e['msg']}" for e in exc.errors()
        )
        raise InvalidInputError(f"settings are not acceptable: {problems}", next_command="tlp doctor") from exc
    except (OSError, ValueError) as exc:
        raise InvalidInputError(
            f"{_home() / 'settings.toml'} cannot be read: {exc}", next_command="tlp doctor"
        ) from exc
