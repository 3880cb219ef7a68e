"""What is used when the version in force cannot be: the last good one."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

from storage import ModelEvent
from tlp.core.errors import NotFoundError, RegistryError, RegistryUnavailableError
from tlp.registry import _history
from tlp.registry._types import CHAMPION, REJECTED, ModelVersion, pin_alias, rejected_tag

T = TypeVar("T")


class _Numbered(Protocol):
    @property
    def version(self) -> int: ...


R = TypeVar("R", bound=_Numbered)


@dataclass(frozen=True)
class UsableVersion(Generic[T]):
    """A version that was loaded.

    Attributes:
        version: its number.
        loaded: what loading it gave.
        fallback: why it is another one than the alias says, one sentence; None if it is the one.
    """

    version: int
    loaded: T
    fallback: str | None = None


def last_good(events: Sequence[ModelEvent], versions: Iterable[ModelVersion], device: str | None) -> list[int]:
    """Versions to fall back to, best first: where the device's pin was, then where `champion` was, newest first.

    Args:
        events: recorded moves of the model, oldest first.
        versions: those there are; a rejected one is never fallen back to.
        device: whose pin counts; None: none.
    """
    aliases = [CHAMPION] if device is None else [pin_alias(device), CHAMPION]
    barred = {REJECTED, *map(rejected_tag, aliases)}
    there = {version.version for version in versions if not barred & version.tags.keys()}
    order: list[int] = []
    for alias in aliases:
        stack = _history.champion_stack(event for event in events if event.alias == alias)
        order += [version for version in reversed(stack) if version in there and version not in order]
    return order


def first_usable(
    model: str,
    wanted: Callable[[], R],
    earlier: Callable[[], Iterable[int]],
    resolve: Callable[[int], R],
    load: Callable[[R], T],
) -> UsableVersion[T]:
    """Load what is wanted, else the first of the earlier versions that loads.

    Raises:
        RegistryUnavailableError: MLflow does not answer.
        NotFoundError, RegistryError: why the wanted one cannot be used; no earlier one can, either.
    """
    tried: int | None = None
    try:
        found = wanted()
        tried = found.version
        return UsableVersion(found.version, load(found))
    except RegistryUnavailableError:
        raise
    except (NotFoundError, RegistryError) as exc:
        problem = exc
    for version in earlier():
        if version == tried:
            continue
        try:
            loaded = load(resolve(version))
        except RegistryUnavailableError:
            raise
        except (NotFoundError, RegistryError):
            continue
        return UsableVersion(
            version,
            loaded,
            f"the champion of {model} cannot be used ({problem.message}); version {version}, the last good one, is "
            "used instead",
        )
    raise problem
