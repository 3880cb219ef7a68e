"""The whole loop on this machine, small: the same flows as ever, with the numbers of `tlp.pipeline.demo.DemoPlan`."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from prefect import flow

from flows import _prefect
from flows.bootstrap import bootstrap
from flows.tune import tune
from tlp import deploy, exchange
from tlp.core.fleet import Fleet
from tlp.core.progress import say
from tlp.core.requests import BootstrapRequest, TuneRequest
from tlp.core.settings import get_settings
from tlp.pipeline import demo as plans
from tlp.pipeline import stages as pipeline


def start() -> dict[str, Any]:
    """Run the demo with its small settings, tracked by a Prefect server of its own if none is up."""
    plan = plans.DemoPlan()
    with plans.small_settings(plan), _prefect.server(get_settings(), say):
        report: dict[str, Any] = _prefect.call(demo)
        return report


@_prefect.step()
def load_starter_data(fleet: Fleet) -> dict[str, Any]:
    """Bring in the samples of the auxiliary platforms that come with this program."""
    return exchange.import_folder(fleet.store, plans.starter_dir())


@_prefect.step()
def add_networks(fleet: Fleet, names: Sequence[str]) -> list[str]:
    """Import real networks and store their subgraphs; those that are there already are left alone."""
    return [name for name in names if pipeline.add_builtin_once(fleet.store, name)]


@_prefect.step()
def choose_enrolment(fleet: Fleet) -> dict[str, Any]:
    """The plan's target and quota for a new device; one that is there already keeps its own."""
    plan = plans.DemoPlan()
    if any(device.name == plan.device for device in fleet.store.list_devices()):
        return {}
    return {"target": plans.target(plan), "min_samples": plan.min_samples}


@_prefect.step()
def choose_tuning(fleet: Fleet, trained: dict[str, Any]) -> TuneRequest:
    """The champion if there is one; the run that was interrupted if there is one."""
    plan = plans.DemoPlan()
    if pipeline.has_unfinished_tuning(fleet.store, plan.tuned_network, plan.device):
        return TuneRequest(network=plan.tuned_network, device=plan.device, resume=True)
    model = plans.model_to_tune_with(fleet, plan.device, trained)
    trials = plans.trials(fleet.store, plan)
    return TuneRequest(network=plan.tuned_network, device=plan.device, model=model, trials=trials)


@_prefect.step()
def compile_and_check(fleet: Fleet, network: str, device: str) -> dict[str, Any]:
    """Compile the tuned network, compare it with torch, measure it tuned and untuned."""
    return deploy.best(fleet, network=network, device=device, on_progress=say).to_json()


@_prefect.step()
def draw(fleet: Fleet, trained: dict[str, Any], tuned: dict[str, Any], best: dict[str, Any]) -> dict[str, Any]:
    """The last table and the plot."""
    return plans.summary(fleet, plans.DemoPlan(), trained=trained, tuned=tuned, best=best)


@flow(name="demo", flow_run_name="demo", persist_result=False)
def demo() -> dict[str, Any]:
    """Enroll this machine, measure, train, register, promote, tune and compile."""
    started = time.monotonic()
    plan = plans.DemoPlan()
    fleet = _prefect.begin()
    say("1/6 starter data: samples of auxiliary platforms")
    load_starter_data(fleet)
    say(f"2/6 networks: {', '.join(plan.networks)}")
    add_networks(fleet, plan.networks)
    say("3/6 enroll this machine, measure programs, train MTL-TLP, evaluate, register, promote")
    booted = _prefect.call(
        bootstrap, BootstrapRequest(device=plan.device, networks=plan.networks, **choose_enrolment(fleet))
    )
    tuning = choose_tuning(fleet, booted["trained"])
    say(f"4/6 tune {plan.tuned_network} with {'the run that was interrupted' if tuning.resume else tuning.model}")
    tuned = _prefect.call(tune, tuning)
    say("5/6 compile, check against torch, measure tuned and untuned")
    best = compile_and_check(fleet, plan.tuned_network, plan.device)
    say("6/6 table and plot")
    report = draw(fleet, booted["trained"], tuned, best)
    report["seconds"] = time.monotonic() - started
    scalars = {key: value for key, value in report.items() if isinstance(value, str | int | float)}
    _prefect.table("demo", [scalars], "The demo's outcome")
    return report
