"""For whom a message is, and what its node says of that device.

A node's configuration is the machine's own: behind our stream it is made from the device's settings
(``client.flower.node``), on a SuperNode it is what ``--node-config`` says.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from flwr.app import Context, Message

from headwater.client.device.interfaces import Hardware
from headwater.client.enrolment.signing_identity import (
    Enrolment,
    host_name,
    read_enrolment,
    simulated_enrolment,
)
from headwater.client.flower.state_file import PACE, WALK, pace_of, walk_of
from headwater.client.secagg.prepare import strictest_settings
from headwater.client.training.micro_batches import SamplerState
from headwater.client.training.spool import Spool
from headwater.client.training.trainer import HardwareOf, Identity, Trainer, trainer_of
from headwater.common.errors import SettingsError
from headwater.common.flower import records
from headwater.common.settings.schema import SecureSettings, Settings, from_run_config
from headwater.common.stats.linear_fit import Line

if TYPE_CHECKING:
    from headwater.client.flower.between_messages import BetweenMessages

# The mark in a node's configuration that devices and server are one simulation: nothing is hidden.
SIMULATED = "simulated"

# In a node's configuration: the folder in which a half-summed update outlives a power cut.
SPOOL = "spool"

# Likewise: the files of its identity, and of the identities that it trusts.
IDENTITY, ALLOW_LIST = "identity", "allow-list"

# Likewise, on a SuperNode: what it insists on whatever the run says (``Asked.secure``).
INSISTS, MIN_MEMBERS = "secure-aggregation", "min-members"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRequest:
    """A message, and the device that it is for."""

    message: Message
    context: Context
    settings: Settings
    identity: Identity
    hardware_of: HardwareOf

    @property
    def trainer(self) -> Trainer:
        """The task's model and data in this process; they are loaded when first asked for.

        Raises:
            SettingsError: no task is set.
        """
        settings = self.settings
        if settings.task is None:
            raise SettingsError("no task is set", remedy="name it with --task FILE.py:Class")
        return trainer_of(
            settings.task,
            replace_batch_norm=settings.model.replace_batch_norm,
            check_task=settings.check_task,
        )

    @property
    def between(self) -> BetweenMessages:
        """What waits for the next message where no process does."""
        from headwater.client.flower.between_messages import BetweenMessages

        is_simulated = SIMULATED in self.context.node_config
        return BetweenMessages(self.context, self.identity.name, is_simulated=is_simulated)

    @property
    def secure(self) -> SecureSettings:
        """What the device insists on: its node's word if that is more than the run's.

        Behind our own stream the settings are the device's own. On Flower's engines they come with
        the run, from whoever submits it.
        """
        return strictest_settings(
            self.settings.secure,
            mode=self.context.node_config.get(INSISTS),
            min_members=self.context.node_config.get(MIN_MEMBERS),
        )

    @property
    def enrolment(self) -> Enrolment:
        """The device's identity and allow-list, with whose files its node is configured.

        They are the machine's own, as the spool is.

        Raises:
            IdentityProblem: a file is not what it should be.
        """
        name, node_config = self.identity.name, self.context.node_config
        if SIMULATED in node_config:
            return simulated_enrolment(name)
        identity, allow_list = (node_config.get(key) for key in (IDENTITY, ALLOW_LIST))
        return read_enrolment(
            name,
            identity=None if identity is None else Path(str(identity)),
            allow_list=None if allow_list is None else Path(str(allow_list)),
        )

    @property
    def hardware(self) -> Hardware:
        """The machine under the device, real or simulated."""
        return self.hardware_of(self.identity, self.settings, self.trainer.image.layout)

    @property
    def walk(self) -> SamplerState:
        """The device's walk through its examples."""
        return walk_of(records.kept(self.context, WALK))

    @property
    def pace(self) -> Line | None:
        """The seconds of a micro-batch, as told and followed; None if they were not asked."""
        return pace_of(records.kept(self.context, PACE))


def read_request(message: Message, context: Context, hardware_of: HardwareOf) -> DeviceRequest:
    """Read for which device a message is, and under which settings.

    Raises:
        SettingsError: they are impossible.
    """
    settings = from_run_config(context.run_config)
    if settings.threads is not None:
        torch.set_num_threads(settings.threads)
    return DeviceRequest(
        message=message,
        context=context,
        settings=settings,
        identity=_identity(context, settings),
        hardware_of=hardware_of,
    )


def _identity(context: Context, settings: Settings) -> Identity:
    node = records.node_identity(context.node_config)
    name = node["name"] or (str(node["part"]) if node["is_partition"] else host_name())
    return Identity(
        name=name,
        data=node["data"],
        part=node["part"],
        num_parts=node["num_parts"],
        rule=settings.partition.rule(seed=settings.seed),
    )


def spool_of(context: Context, name: str) -> Spool | None:
    """Return the device's spool, if its node is configured with a folder for one.

    The folder is the machine's own and no setting of the run, so that no simulated device has it.
    """
    folder = context.node_config.get(SPOOL)
    return None if folder is None else Spool(Path(str(folder)), name=name, run_id=context.run_id)
