"""A device on Flower's own engines, where another process may answer the next message.

A SuperNode starts a process for each message, and Ray takes any of its workers. What goes from one
to the next is the node's context alone, which a SuperNode keeps in its memory and sends nowhere.
So an update that awaits its secure session, or is in one, waits there, sealed (``client.flower.suspended``),
and its key lies elsewhere (``client.flower.suspended_keys``).

What must outlive all of them, the record of what was masked and answered and the place among the
examples, is forced to the device's state file before an answer leaves, as behind our own stream:
a SuperNode that was started anew, or a context that is older than the answer, masks nothing twice.
"""

from __future__ import annotations

from pathlib import Path

import torch
from flwr.app import Context

from headwater.client.enrolment.signing_identity import Enrolment
from headwater.client.flower.state_file import READERS, SECURE, StateFile, record_of
from headwater.client.flower.suspended import park, state_of, unpark
from headwater.client.flower.suspended_keys import KeyFile, ParkingKey, SimulatedKey
from headwater.client.secagg.pending import PendingUpdate
from headwater.client.secagg.types import Floor
from headwater.common.flower import records
from headwater.common.settings.schema import ClientSettings

PARKED = "parked"
"""The entry in the node's context."""

# In a SuperNode's configuration: the folders of its state files, and of the keys.
STATE, RUNTIME = "state", "runtime"


class BetweenMessages:
    """What is kept of one device from message to message."""

    def __init__(self, context: Context, name: str, *, is_simulated: bool) -> None:
        """``is_simulated`` says that devices and server are one simulation: no file is written."""
        self._context = context
        self._name = name
        self._file: StateFile | None = None
        self._key: ParkingKey
        if is_simulated:
            self._key = SimulatedKey(name=name, run_id=context.run_id)
            return
        state, runtime = (context.node_config.get(key) for key in (STATE, RUNTIME))
        folder = ClientSettings().state_folder if state is None else Path(str(state))
        self._file = StateFile(folder / f"{name}-{context.run_id}.json")
        self._key = KeyFile(
            name=name,
            run_id=context.run_id,
            folder=None if runtime is None else Path(str(runtime)),
        )

    @property
    def is_waiting(self) -> bool:
        """Whether an update waits here for its next message."""
        return records.kept_bytes(self._context, PARKED) is not None

    def prepare(self) -> None:
        """Take up what was forced to disk; see to it, before hours of work, that more can be.

        Raises:
            StateError: the state file can be read or written no more, or keys have no place.
        """
        self._recall()
        self.note()
        self._key.check()

    def _recall(self) -> None:
        """Take up what the state file says: that is never older than the context."""
        if self._file is not None:
            for name, plain in self._file.read().items():
                records.keep(self._context, name, plain)

    def note(self) -> None:
        """Force what the device keeps to its state file.

        Raises:
            StateError: it could not be written.
        """
        if self._file is not None:
            told = {name: records.kept(self._context, name) for name in READERS}
            self._file.write({name: plain for name, plain in told.items() if plain is not None})

    def drop(self) -> None:
        """Let an update go that waits here, and erase its key; of others there is none."""
        if records.forget(self._context, PARKED):
            self._key.erase()

    def hold(self, update: PendingUpdate) -> None:
        """Let a fresh update wait for its session.

        Raises:
            StateError: there is no place for its key, or the state file could not be written.
        """
        records.keep_bytes(self._context, PARKED, park(update.session, self._key.make()))
        self.note()

    def held(self, *, floor: Floor, enrolment: Enrolment) -> PendingUpdate:
        """Take up the update that waits here.

        Raises:
            UpdateNotHeld: there is none, or its key is gone.
            StateError: the state file cannot be read.
        """
        self._recall()
        sealed = records.kept_bytes(self._context, PARKED) or b""
        device, trained, parked = unpark(
            sealed,
            self._key.read(),
            name=self._name,
            run=self._context.run_id,
            floor=floor,
            enrolment=enrolment,
        )
        record = record_of(records.kept(self._context, SECURE))
        return PendingUpdate(
            device,
            record,
            trained,
            num_threads=torch.get_num_threads(),
            is_view=False,
            state=state_of(parked, device, record),
        )

    def wait(self, update: PendingUpdate) -> None:
        """Let an update wait for the next phase, or drop it if its session is over."""
        if update.is_over:
            self.drop()
        else:
            records.keep_bytes(self._context, PARKED, park(update.session, self._key.read()))
        update.close()
