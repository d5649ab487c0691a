"""A device between its stream and its ClientApp: instructions in, replies out.

It builds Flower's messages, keeps the node's context, and writes the device's place in its examples
to disk before the update is sent, so that a restart goes on where the server's count says.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from client.app import SPOOL, WALK, spool_of
from client.link import Link
from client.micro_batches import Place, Walk
from client.resident import Identity, Resident, stop_asked
from common import records
from common.errors import HeadwaterError, StateError, error_of, travelling
from common.own_grid import enter_run, numbered
from common.settings import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Answer:
    """A reply's head and vector, or the error that stands for it."""

    message_id: str
    head_json: str = ""
    vector: memoryview | bytes = field(default=b"", repr=False)
    error: HeadwaterError | None = None


class Node:
    """One device's ClientApp, kept in memory from round to round."""

    def __init__(
        self,
        app: ClientApp,
        resident: Resident,
        identity: Identity,
        settings: Settings,
        state_folder: Path,
    ) -> None:
        self.resident = resident
        self.name = identity.name
        self.link = Link()
        self._app = app
        self._run_config = settings.to_run_config()
        self._node_config: dict[str, str | int | float | bool] = {
            "name": identity.name,
            "partition-id": identity.part,
            "num-partitions": identity.num_parts,
        }
        if identity.data is not None:
            self._node_config["data"] = str(identity.data)
        if settings.client.spool is not None:
            self._node_config[SPOOL] = str(settings.client.spool)
        self._state_folder = state_folder
        self._context: Context | None = None

    def enter(self, run_id: int) -> None:
        """Take part in a run; take up the place that was kept for it, if any.

        Raises:
            StateError: the place that was kept cannot be read.
        """
        if self._context is not None and self._context.run_id == run_id:
            return
        enter_run(run_id)
        self._context = Context(
            run_id=run_id,
            node_id=1,
            node_config=self._node_config,
            state=RecordDict(),
            run_config=self._run_config,
        )
        path = self._state_path(run_id)
        if path.exists():
            records.keep(self._context, WALK, _read_place(path))

    def answer(
        self, *, message_id: str, message_type: str, head_json: str, image: memoryview | None
    ) -> Answer:
        """Run the ClientApp on an instruction. It takes as long as training takes."""
        assert self._context is not None
        self._context.node_config.update(self.link.as_config())
        try:
            array = None if image is None else records.flat_array(image, dtype="uint8")
            message = Message(records.content_with_head(head_json, array), 1, message_type)
            numbered(message)
            reply = self._app(message, self._context)
        except Exception as error:  # of Flower's: a type of message that it does not know
            log.exception("the instruction could not be carried out")
            return Answer(message_id=message_id, error=error_of(*travelling(error)))
        if reply.has_error():
            return Answer(message_id=message_id, error=records.refused(reply))
        if message_type == "train":
            try:
                self._keep_place(self._context)
            except OSError as error:
                failed = StateError(f"{self.name} cannot keep its place: {error.strerror}")
                return Answer(message_id=message_id, error=failed)
        return Answer(
            message_id=message_id,
            head_json=records.head_json(reply.content),
            vector=records.vector(reply.content) or b"",
        )

    def handed_over(self) -> None:
        """Remove the spool of an update that the server has, whole."""
        assert self._context is not None
        spool = spool_of(self._context, self.name)
        if spool is not None:
            spool.remove()

    def interrupt(self) -> None:
        """Let the work in progress end after the micro-batch that it is at."""
        stop_asked.set()

    def resume(self) -> None:
        """Let work begin again."""
        stop_asked.clear()

    def _state_path(self, run_id: int) -> Path:
        return self._state_folder / f"{self.name}-{run_id}.json"

    def _keep_place(self, context: Context) -> None:
        walk = records.kept(context, WALK)
        path = self._state_path(context.run_id)
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(".part")
        try:
            with part.open("w") as file:
                json.dump(walk, file)
                file.flush()
                os.fsync(file.fileno())
            part.replace(path)
        except OSError:
            with contextlib.suppress(OSError):
                part.unlink(missing_ok=True)
            raise


def _read_place(path: Path) -> Walk:
    try:
        walk = json.loads(path.read_text())
        return Walk(
            place=Place(**walk["place"]),
            pending_round=walk["pending_round"],
            pending_place=Place(**walk["pending_place"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise StateError(
            f"the device's place in {path} cannot be read: {error}",
            remedy="delete the file: the device then starts at its first example",
        ) from error
