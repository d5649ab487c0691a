"""Where a round's time goes, and when accumulation is worth it: the planner's own figures.

One half of the devices is faster than the other. The planner divides the examples so that all
finish together; what is left are the transfers, which more examples a round pay for.
"""

from __future__ import annotations

from typing import Any

from headwater.common.estimates.linear_fit import Line
from headwater.common.messages import Vitals
from headwater.common.settings.schema import PlanSettings
from headwater.server.planning.device_estimates import DeviceEstimate, EstimateColumns
from headwater.server.planning.planner import TransferCosts, assign
from headwater.server.planning.vitals_columns import VitalsColumns

FIXED_SECONDS = 0.002  # of each micro-batch, whatever its size


def plan(
    *,
    num_devices: int,
    spread: float,
    examples: int,
    micro_batch_size: int,
    seconds_per_example: float,
    megabytes: float,
    megabytes_per_second: float,
) -> dict[str, Any]:
    """Return each device's K and seconds as planned, and what a round spends them on."""
    rate = 1e6 * megabytes_per_second
    link = Vitals(upload_bytes_per_second=rate, download_bytes_per_second=rate)
    estimates = [
        DeviceEstimate(
            num_examples=1_000_000,
            line=Line(
                base=FIXED_SECONDS,
                each=seconds_per_example * (spread if n % 2 else 1.0),
            ),
            vitals=link,
            is_outdated=False,
        )
        for n in range(num_devices)
    ]
    names = [str(n) for n in range(num_devices)]
    size = int(1e6 * megabytes)
    costs = TransferCosts(image_bytes=size, update_bytes=size)
    chosen = PlanSettings(micro_batch_size=micro_batch_size)
    assigned = assign(
        names, EstimateColumns.of(estimates), {}, chosen, target=examples, costs=costs
    )
    transfer = float(costs.transfer_seconds(VitalsColumns.of([link]))[0])
    devices, steps, seconds_of = [], [], []
    predicted = assigned.predicted_seconds(assigned.micro_batch_size).tolist()
    for one, seconds in zip(assigned.values(), predicted, strict=True):
        seconds_of.append(seconds)
        steps.append(-(-one.quota // one.micro_batch_size))
        devices.append(
            {
                "quota": one.quota,
                "k": steps[-1],
                "seconds": seconds,
                "transfer": transfer,
            }
        )
    longest = max(seconds_of)
    whole = longest + transfer
    alone = sum(one.quota for one in assigned.values()) * seconds_per_example
    alone += FIXED_SECONDS * sum(steps)
    return {
        "devices": devices,
        "round": whole,
        "transfer_share": transfer / whole if whole else 0.0,
        "one_device": alone,
        "advice": _advice(transfer, longest, alone, whole, max(steps)),
    }


def _advice(transfer: float, compute: float, alone: float, whole: float, most: int) -> str:
    if most == 1:
        return (
            "Every quota fits in one micro-batch: accumulation changes nothing here. Larger "
            "micro-batches or fewer devices do not help either; more examples a round might."
        )
    if whole >= alone:
        return (
            "One fast device alone would need no longer than this round: the links cost more than "
            "the other devices save. Train centrally, if the data may move."
        )
    if transfer > compute:
        return (
            "More than half of the round is transfer: raise the examples a round, or take local "
            "steps (--algorithm fedavg), or send fewer bytes (--compress)."
        )
    return (
        f"The devices together are {alone / whole:.1f} times as fast as one fast device, and no "
        "device waits for the slow half: it is given fewer micro-batches."
    )
