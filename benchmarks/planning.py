"""Seconds to plan a round of 100,000 devices: cohort, micro-batches, quotas, and the reasons.

The devices differ in speed, memory, link, data, share of their time and place in the epoch; a fifth
of them is too slow for the deadline in the runs that have one. ``assign`` decides how much each
does. ``whole_round`` is all that the server does between the devices' reports and their plans: also
the cohort, the reasons, and a checked message for each. CPU seconds leave out what other programs
took meanwhile.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

from benchmarks.measure import Figures, arguments, report
from headwater.common.messages import DeviceReport, Vitals
from headwater.common.model.parameters import build_model
from headwater.common.settings import schema as settings
from headwater.common.task import load_task
from headwater.server.planning.cohort import ConnectedClients
from headwater.server.planning.known_clients import KnownClients
from headwater.server.planning.planner import TransferCosts, assign
from headwater.server.planning.round_plans import RoundPlanner
from headwater.server.planning.target_batch import Target

MIB = 2**20
TASK = "benchmarks/tasks.py:Vector"
DEADLINE_SECONDS = 10.0


def device_report(number: int) -> DeviceReport:
    """Return a device's report: of 13 speeds, 9 memories, 7 links and 977 data sets."""
    slow = 1000.0 if number % 5 == 0 else 1.0
    return DeviceReport(
        name=str(number),
        num_examples=1 + number % 977,
        layout_digest="",
        seconds_per_micro_batch=1e-3 * (number % 3),
        seconds_per_example=1e-3 * (1 + number % 13) * slow,
        fastest_micro_batch_size=64 if number % 2 else None,
        vitals=Vitals(
            memory_limit_bytes=512 * MIB,
            base_bytes=256 * MIB,
            bytes_per_example=MIB * (1 + number % 9),
            upload_bytes_per_second=1e6 * (1 + number % 7),
            download_bytes_per_second=1e7,
            share=0.5 if number % 4 == 0 else 1.0,
        ),
    )


def seconds_of(work: Callable[[], object], *, times: int) -> Figures:
    """Return the medians of some runs, by the wall and of the CPU."""
    wall, cpu = [], []
    for _ in range(times):
        start, cpu_start = time.perf_counter(), time.process_time()
        work()
        cpu.append(time.process_time() - cpu_start)
        wall.append(time.perf_counter() - start)
    return {"wall_seconds": statistics.median(wall), "cpu_seconds": statistics.median(cpu)}


def measure(num_devices: int, *, times: int) -> Figures:
    """Plan rounds of so many devices, with and without a deadline, and with turns."""
    reports = [device_report(number) for number in range(num_devices)]
    clients = ConnectedClients(reports={report.name: report for report in reports})
    clients_known = KnownClients()
    names = clients_known.describable(list(clients.reports), clients.reports, ())
    known = clients_known.columns(names)
    costs = TransferCosts(image_bytes=MIB, update_bytes=MIB)
    turns = TransferCosts(image_bytes=MIB, update_bytes=MIB, turn_seconds=1e-4)
    target = 20 * num_devices
    figures: Figures = {"devices": num_devices}
    for name, its_costs in (("assign", costs), ("assign_with_turns", turns)):
        figures[name] = seconds_of(
            lambda its_costs=its_costs: assign(  # type: ignore[misc]
                names, known, {}, settings.PlanSettings(), target=target, costs=its_costs
            ),
            times=times,
        )
    layout = build_model(load_task(TASK), seed=0).layout
    for name, deadline in (("whole_round", None), ("whole_round_with_deadline", DEADLINE_SECONDS)):
        chosen = settings.Settings(
            plan=settings.PlanSettings(effective_batch_size=target),
            cohort=settings.CohortSettings(deadline_seconds=deadline),
        )
        planner = RoundPlanner(chosen, Target(chosen.plan, max_weight_per_example=1), layout)
        figures[name] = seconds_of(
            lambda planner=planner: planner.plan(  # type: ignore[misc]
                clients,
                round_number=1,
                counted={},
                turn_seconds=1e-4,
            ),
            times=times,
        )
    return figures


def main() -> None:
    flags = arguments(__doc__)
    figures = measure(1000 if flags.quick else 100_000, times=1 if flags.quick else 5)
    figures["target"] = "assign: 1 s at most, for 100,000 devices"
    report(figures, as_json=flags.json, doc=__doc__)


if __name__ == "__main__":
    main()
