"""Reads which device a Flower message is for, and that device's own settings.

A node's configuration belongs to the machine. With our own stream it is made from the device's
settings (``client.flower.node``); on a SuperNode it is ``--node-config``.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from pathlib import Path

import torch
from flwr.app import Context, Message

from headwater.client.device.host_name import host_name
from headwater.client.device.interfaces import Hardware
from headwater.client.flower.state_file import (
    SAMPLER,
    SPEED,
    STATE,
    local_file,
    read_sampler,
    read_speed,
)
from headwater.client.trainer.run_trainer import run_trainer
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import HardwareOf, Identity
from headwater.client.training.sampler import SamplerState
from headwater.client.training.spool import Spool
from headwater.common.estimates.linear_fit import Line
from headwater.common.flower import records
from headwater.common.model.local_state import LocalStore
from headwater.common.settings.schema import ClientSettings, Settings
from headwater.common.settings.sources import from_run_config

# Keys of a node's configuration.
SIMULATED = "simulated"
"""Set if clients and server are one simulation, where nothing is hidden."""
OWN_SETTINGS = "own-settings"
"""Set if the settings are the owner's own, as those of ``headwater-client`` are."""
SPOOL = "spool"
"""The folder in which a half-summed update survives a power cut."""
LOCAL, RESIDUAL = "local", "residual"
"""The context's entries of a simulated device: its own parameters, and what was not sent."""
IDENTITY, ALLOW_LIST = "identity", "allow-list"
"""The files of the device's signing identity, and of the identities that it trusts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DeviceRequest:
    """A message, with the device that it is for and the settings that apply to it."""

    message: Message
    context: Context
    settings: Settings
    identity: Identity
    hardware_of: HardwareOf

    @property
    def trainer(self) -> Trainer:
        """The task's model and data in this process, loaded at the first use.

        Raises:
            HeadwaterError: see ``run_trainer``.
        """
        return run_trainer(self.settings)

    @property
    def state_folder(self) -> Path:
        """The folder of what the device remembers, from the node's configuration."""
        folder = self.context.node_config.get(STATE)
        return ClientSettings().state_folder if folder is None else Path(str(folder))

    @property
    def is_simulated(self) -> bool:
        """Whether one party plays the server and all devices, and nothing is hidden."""
        return SIMULATED in self.context.node_config

    @property
    def is_on_supernode(self) -> bool:
        """Whether processes of a SuperNode answer, and not one of the device's own."""
        return not self.is_simulated and OWN_SETTINGS not in self.context.node_config

    @property
    def hardware(self) -> Hardware:
        """The device's machine, real or simulated."""
        return self.hardware_of(self.identity, self.settings, self.trainer.image.layout)

    @property
    def sampler(self) -> SamplerState:
        """The state of the device's sampler: its place among its examples."""
        return read_sampler(records.load_state(self.context, SAMPLER))

    @property
    def local_store(self) -> LocalStore | None:
        """Where the parameters that stay on the device are kept; None if none do."""
        if not self.trainer.image.layout.local:
            return None
        return local_store_of(self.context, self.identity.name)

    def feature_store(self, name: str) -> LocalStore:
        """Return where the state of a feature of the user's is kept."""
        return local_store_of(self.context, f"{self.identity.name}.{name}", entry=name)

    @property
    def speed(self) -> Line | None:
        """The seconds of a micro-batch as reported and then followed; None if never measured."""
        return read_speed(records.load_state(self.context, SPEED))


def local_store_of(context: Context, name: str, *, entry: str = LOCAL) -> LocalStore:
    """Return where the device keeps the parameters that stay on it, or a feature its state.

    A real device has a file for each run in its state folder. A simulated one has a file in the
    folder of its run, or, if there is none, an ``entry`` in the context of its node.
    """
    folder, is_simulated = context.node_config.get(STATE), SIMULATED in context.node_config
    if folder is None and is_simulated:
        return LocalStore(
            f"{name}: the node's entry {entry}",
            lambda: records.load_bytes(context, entry),
            lambda data: records.save_bytes(context, entry, data),
        )
    path = ClientSettings().state_folder if folder is None else Path(str(folder))
    if is_simulated:
        return local_file(path / f"{name}.safetensors", is_durable=False)
    return local_file(path / f"{name}-{context.run_id}.local.safetensors")


def read_request(message: Message, context: Context, hardware_of: HardwareOf) -> DeviceRequest:
    """Return a message with its device and settings.

    Raises:
        SettingsError: the settings are not valid.
    """
    settings = from_run_config(context.run_config)
    if SIMULATED not in context.node_config and OWN_SETTINGS not in context.node_config:
        from headwater.client.flower.owners_word import as_owner_requires  # a SuperNode alone

        settings = as_owner_requires(settings, context.node_config)
        records.forget_other_runs(context)
    if settings.feature.name is not None:  # before a plan with its terms is read
        import_module("headwater.common.own_feature.found").own_features(settings.feature)
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
        labels=node["labels"],
        rule=settings.partition.rule(seed=settings.seed),
    )


def spool_of(context: Context, name: str) -> Spool | None:
    """Return the device's spool; None if the node's configuration has no folder for it.

    The folder is a setting of the machine and not of the run, so simulated devices have none.
    """
    folder = context.node_config.get(SPOOL)
    return None if folder is None else Spool(Path(str(folder)), name=name, run_id=context.run_id)
