"""The whole loop on this machine, small: the same flows as ever, with the numbers of `DemoPlan`."""

from __future__ import annotations

import time
from dataclasses import asdict
from typing import Any

from prefect import flow

from flows import _prefect
from flows.bootstrap import bootstrap
from flows.tune import tune
from tlp import deploy, exchange
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.requests import TuneRequest
from tlp.core.settings import get_settings
from tlp.pipeline import demo as demos
from tlp.pipeline.demo import DemoPlan


def start() -> dict[str, Any]:
    """Run the demo with its small settings, tracked by a Prefect server of its own if none is up."""
    plan = DemoPlan()
    with demos.small_settings(plan), _prefect.server(get_settings(), say):
        report: dict[str, Any] = _prefect.call(demo)
        return report


@_prefect.step()
def load_starter_data(fleet: Fleet) -> dict[str, Any]:
    """Bring in the samples of the auxiliary platforms that come with this program."""
    return exchange.import_folder(fleet.store, demos.starter_dir())


@_prefect.step()
def add_networks(fleet: Fleet, plan: DemoPlan) -> list[str]:
    """Import real networks and store their subgraphs; those that are there already are left alone."""
    return [name for name in plan.networks if demos.add_builtin_once(fleet.store, name)]


@_prefect.step()
def choose_tuning(fleet: Fleet, plan: DemoPlan, trained: dict[str, Any]) -> TuneRequest:
    """The run that was interrupted if there is one; else a run with the champion if there is one."""
    return demos.choose_tuning(fleet, plan, trained)


@_prefect.step()
def compile_and_check(fleet: Fleet, plan: DemoPlan) -> dict[str, Any]:
    """Compile the tuned network, compare it with torch, measure it tuned and untuned."""
    return asdict(deploy.best(fleet, network=plan.tuned_network, device=plan.device, on_progress=say))


@_prefect.step()
def draw(
    fleet: Fleet, plan: DemoPlan, trained: dict[str, Any], tuned: dict[str, Any], best: dict[str, Any]
) -> dict[str, Any]:
    """The last table and the plot."""
    return demos.summary(fleet, plan, trained=trained, tuned=tuned, best=best)


@flow(name="demo", flow_run_name="demo", persist_result=False)
def demo() -> dict[str, Any]:
    """Enroll this machine, measure, train, register, promote, tune and compile."""
    started = time.monotonic()
    plan = DemoPlan()
    fleet = _prefect.begin()
    say("1/6 starter data: samples of auxiliary platforms")
    load_starter_data(fleet)
    say(f"2/6 networks: {', '.join(plan.networks)}")
    add_networks(fleet, plan)
    say("3/6 enroll this machine, measure programs, train MTL-TLP, evaluate, register, promote")
    booted = _prefect.call(bootstrap, demos.choose_enrolment(fleet, plan))
    tuning = choose_tuning(fleet, plan, booted["trained"])
    say(f"4/6 tune {plan.tuned_network} with {'the run that was interrupted' if tuning.resume else tuning.model}")
    tuned = _prefect.call(tune, tuning)
    say("5/6 compile, check against torch, measure tuned and untuned")
    best = compile_and_check(fleet, plan)
    say("6/6 table and plot")
    report = draw(fleet, plan, booted["trained"], tuned, best)
    report["seconds"] = time.monotonic() - started
    scalars = {key: value for key, value in report.items() if isinstance(value, str | int | float)}
    _prefect.table("demo", [scalars], "The demo's outcome")
    return report
