"""Runs an aggregator: the devices' port below, and a device's stream to the server above.

It ends when the run above has ended, and dismisses its devices. If the server above cannot be
reached it keeps trying, and its devices stay connected.
"""

from __future__ import annotations

import asyncio
import math
from pathlib import Path

import torch

from headwater.aggregator.answers_above import branch_app
from headwater.aggregator.branch import Branch
from headwater.aggregator.settings_above import check_own, settings_above
from headwater.client.device.host_name import host_name
from headwater.client.energy.availability import availability_of
from headwater.client.enrolment.renewal import Renewal
from headwater.client.flower.node import Node
from headwater.client.trainer.run_trainer import run_trainer
from headwater.client.training.context import Identity
from headwater.client.transport.lasting_connection import Connection, stay_connected
from headwater.common.settings.schema import Settings
from headwater.common.system.command_line import check_addresses
from headwater.common.system.console import console
from headwater.common.system.heap import use_one_heap
from headwater.common.transport.tls import split_addresses


def serve_branch(settings: Settings) -> None:
    """Serve this server's devices for the server above, until its run ends.

    Raises:
        SettingsError: a setting is the server's above, see ``check_own``.
        HeadwaterError: see ``headwater.common.errors``.
    """
    check_own(settings)
    above = settings_above(settings)
    addresses = split_addresses(above.client.server)
    credentials = check_addresses(settings, settings.server.listen, metrics=None)
    if settings.feature.name is not None:  # before a plan with its terms is read
        from headwater.common.own_feature.found import own_features  # most runs have none

        own_features(settings.feature)
    own = check_addresses(above, *addresses, metrics=None)
    use_one_heap()
    torch.set_num_threads(settings.threads or torch.get_num_threads())
    trainer = run_trainer(above)
    name = above.client.name or host_name()
    must_end = trainer.stop_requested
    branch = Branch(name, settings, credentials, trainer.image, must_end=must_end)
    identity = Identity(name=name, data=None, part=0, num_parts=1)
    folder: Path = above.client.state_folder
    node = Node(branch_app(branch), trainer, identity, above, folder)
    branch.term_above = lambda: node.term
    connection = Connection(
        node,
        addresses,
        certificate=None if own is None else Renewal(above.tls, own),
        limits=availability_of(above.client, name, trainer.image.layout),
        patience_seconds=math.inf,
    )
    console.print(f"{name}: aggregator of {above.client.server}", soft_wrap=True)
    has_ended = False
    try:
        asyncio.run(stay_connected(connection, stay=False))
        has_ended = not connection.is_stopping
        console.print(f"{name}: {'done' if has_ended else 'stopped'}", soft_wrap=True)
    finally:
        branch.close(say_goodbye=has_ended)
