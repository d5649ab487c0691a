"""A device between its stream and its ClientApp: instructions in, replies out.

It builds Flower's messages and keeps the node's context. What the device keeps for the run goes to
disk before the answer that it belongs to is sent (``client.flower.state_file``).
"""

from __future__ import annotations

import contextlib
import json
import logging
from dataclasses import dataclass, field
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from headwater.client.device.bandwidth import Bandwidth
from headwater.client.flower.request import ALLOW_LIST, IDENTITY, SPOOL, spool_of
from headwater.client.flower.state_file import StateFile
from headwater.client.operations.counters import Counters
from headwater.client.training.trainer import Identity, Trainer, stop_requested
from headwater.common.errors import CorruptUpdate, HeadwaterError, StateError, error_of, travelling
from headwater.common.flower import records
from headwater.common.flower.grid import enter_run, numbered
from headwater.common.messages import ReadyReport, UpdateReport
from headwater.common.settings.schema import Settings

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeAnswer:
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
        trainer: Trainer,
        identity: Identity,
        settings: Settings,
        state_folder: Path,
    ) -> None:
        self.trainer = trainer
        self.name = identity.name
        self.link = Bandwidth()
        self.tally = Counters()
        self._app = app
        self._run_config = settings.to_run_config()
        self._node_config: dict[str, str | int | float | bool] = {
            "name": identity.name,
            "partition-id": identity.part,
            "num-partitions": identity.num_parts,
        }
        if identity.data is not None:
            self._node_config["data"] = str(identity.data)
        for key, path in (
            (SPOOL, settings.client.spool),
            (IDENTITY, settings.secure.identity),
            (ALLOW_LIST, settings.secure.allow_list),
        ):
            if path is not None:
                self._node_config[key] = str(path)
        self._state_folder = state_folder
        self._context: Context | None = None
        self._file: StateFile | None = None

    def enter(self, run_id: int) -> None:
        """Take part in a run; take up what was kept for it, if anything was.

        Raises:
            StateError: it cannot be read.
        """
        if self._context is not None and self._context.run_id == run_id:
            return
        self.leave()
        enter_run(run_id)
        self._context = Context(
            run_id=run_id,
            node_id=1,
            node_config=self._node_config,
            state=RecordDict(),
            run_config=self._run_config,
        )
        self._file = StateFile(self._state_folder / f"{self.name}-{run_id}.json")
        for name, kept in self._file.read().items():
            records.keep(self._context, name, kept)

    def leave(self) -> None:
        """Leave the run: what its secure sessions left in memory is erased."""
        self.trainer.held.forget(self.name)

    def answer(
        self,
        *,
        message_id: str,
        message_type: str,
        head_json: str,
        beside: memoryview | bytes | None,
    ) -> NodeAnswer:
        """Run the ClientApp on an instruction. It takes as long as training takes.

        ``beside`` is the model, or whatever else came with it. What the device keeps is on disk
        when this returns; if it cannot be, the answer is that error and nothing else.
        """
        assert self._context is not None
        self._context.node_config.update(self.link.as_config())
        try:
            array = None if beside is None else records.flat_array(beside, dtype="uint8")
            message = Message(records.content_with_head(head_json, array), 1, message_type)
            numbered(message)
            reply = self._app(message, self._context)
            self._keep(self._context)
        except StateError as error:
            return NodeAnswer(message_id=message_id, error=error)
        except Exception as error:  # of Flower's: a type of message that it does not know
            log.exception("the instruction could not be carried out")
            return NodeAnswer(message_id=message_id, error=error_of(*travelling(error)))
        if reply.has_error():
            return NodeAnswer(message_id=message_id, error=records.refused(reply))
        if message_type == "train":
            self._count(reply.content)
        return NodeAnswer(
            message_id=message_id,
            head_json=records.head_json(reply.content),
            vector=records.vector(reply.content) or b"",
        )

    def _count(self, content: RecordDict) -> None:
        """Count an update; one that the server will not be able to read either is not counted."""
        is_masked = "steps" not in json.loads(records.head_json(content))
        with contextlib.suppress(CorruptUpdate):
            if is_masked:
                self.tally.trained(records.read(content, ReadyReport))
            else:
                self.tally.trained(records.read(content, UpdateReport))

    def _keep(self, context: Context) -> None:
        assert self._file is not None
        self._file.write({name: records.kept(context, name) for name in sorted(context.state)})

    def handed_over(self) -> None:
        """Remove the spool of an update that the server has, whole."""
        assert self._context is not None
        spool = spool_of(self._context, self.name)
        if spool is not None:
            spool.remove()

    @property
    def awaits_session(self) -> bool:
        """Whether the device has an update whose secure session is not over."""
        return self.trainer.held.is_awaiting(self.name)

    def interrupt(self) -> None:
        """Let the work in progress end after the micro-batch that it is at."""
        stop_requested.set()

    def resume(self) -> None:
        """Let work begin again."""
        stop_requested.clear()
