"""The servers of `tlp up`: MLflow, Prefect and a Prefect worker, all on this machine.

`look` is cheap (one small file, a few pids) and imports neither MLflow nor Prefect; those only run as processes.
"""

from tlp.services._commands import POOL, prefect_env
from tlp.services._schedules import Schedules, ask, schedule_page, schedule_warnings
from tlp.services._state import Service, ServicesView, look, prefect_api_url
from tlp.services._updown import down, temporary_services, up

__all__ = [
    "POOL",
    "Schedules",
    "Service",
    "ServicesView",
    "ask",
    "down",
    "look",
    "prefect_api_url",
    "prefect_env",
    "schedule_page",
    "schedule_warnings",
    "temporary_services",
    "up",
]
