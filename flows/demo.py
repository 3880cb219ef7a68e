"""The whole loop on this machine, small: the same flows as ever, with the numbers of `tlp.pipeline.demo.DemoPlan`."""

from __future__ import annotations

import time
from typing import Any

from prefect import flow, task
from prefect.cache_policies import NO_CACHE

from flows import _run
from flows.bootstrap import bootstrap
from flows.tune import tune
from tlp import deploy
from tlp.core.progress import say
from tlp.core.settings import get_settings
from tlp.exchange import transfer as exchange
from tlp.pipeline import demo as plans
from tlp.pipeline import stages as pipeline


def start() -> dict[str, Any]:
    """Run the demo with its small settings, tracked by a Prefect server of its own if none is up."""
    plan = plans.DemoPlan()
    with plans.small_settings(plan), _run.server(get_settings(), say):
        report: dict[str, Any] = _run.call(demo)
        return report


@task(name="load starter data", cache_policy=NO_CACHE, persist_result=False)
def load_starter() -> dict[str, Any]:
    """Bring in the samples of the auxiliary platforms that come with this program."""
    fleet = _run.begin()
    return exchange.import_folder(fleet.store, plans.starter_dir())


@task(name="add networks", cache_policy=NO_CACHE, persist_result=False)
def add_networks(names: list[str]) -> list[str]:
    """Import real networks and store their subgraphs; those that are there already are left alone."""
    fleet = _run.begin()
    return [name for name in names if pipeline.add_builtin_once(fleet.store, name)]


@task(name="choose enrolment", cache_policy=NO_CACHE, persist_result=False)
def choose_enrolment() -> dict[str, Any]:
    """The plan's target and quota for a new device; one that is there already keeps its own."""
    fleet = _run.begin()
    plan = plans.DemoPlan()
    if any(device.name == plan.device for device in fleet.store.list_devices()):
        return {}
    return {"target": plans.target(plan), "min_samples": plan.min_samples}


@task(name="choose tuning", cache_policy=NO_CACHE, persist_result=False)
def choose_tuning(trained: dict[str, Any]) -> dict[str, Any]:
    """The champion if there is one; the run that was interrupted if there is one."""
    fleet = _run.begin()
    plan = plans.DemoPlan()
    if pipeline.has_unfinished_tuning(fleet.store, plan.tuned_network, plan.device):
        return {"model": "the run that was interrupted", "resume": True}
    model = plans.model_to_tune_with(fleet, plan.device, trained)
    return {"model": model, "trials": plans.trials(fleet.store, plan), "resume": False}


@task(name="compile and check", cache_policy=NO_CACHE, persist_result=False)
def compile_best(network: str, device: str) -> dict[str, Any]:
    """Compile the tuned network, compare it with torch, measure it tuned and untuned."""
    fleet = _run.begin()
    return deploy.best(fleet, network=network, device=device, on_progress=say).to_json()


@task(name="draw", cache_policy=NO_CACHE, persist_result=False)
def draw(trained: dict[str, Any], tuned: dict[str, Any], best: dict[str, Any]) -> dict[str, Any]:
    """The last table and the plot."""
    fleet = _run.begin()
    return plans.summary(fleet, plans.DemoPlan(), trained=trained, tuned=tuned, best=best)


@flow(name="demo", persist_result=False)
def demo() -> dict[str, Any]:
    """Enroll this machine, measure, train, register, promote, tune and compile."""
    started = time.monotonic()
    plan = plans.DemoPlan()
    say("1/6 starter data: samples of auxiliary platforms")
    _run.step(load_starter)
    say(f"2/6 networks: {', '.join(plan.networks)}")
    _run.step(add_networks, list(plan.networks))
    say("3/6 enroll this machine, measure programs, train MTL-TLP, evaluate, register, promote")
    booted = _run.call(bootstrap, device=plan.device, networks=list(plan.networks), **_run.step(choose_enrolment))
    how = _run.step(choose_tuning, booted["trained"])
    say(f"4/6 tune {plan.tuned_network} with {how['model']}")
    tuned = _run.call(tune, network=plan.tuned_network, device=plan.device, **how)
    say("5/6 compile, check against torch, measure tuned and untuned")
    best = _run.step(compile_best, plan.tuned_network, plan.device)
    say("6/6 table and plot")
    report: dict[str, Any] = _run.step(draw, booted["trained"], tuned, best)
    report["seconds"] = time.monotonic() - started
    _run.table("demo", [{k: v for k, v in report.items() if isinstance(v, str | int | float)}], "The demo's outcome")
    return report
