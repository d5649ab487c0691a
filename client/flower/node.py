"""Runs the ClientApp for one device: takes the stream's instructions and returns its answers.

The node builds Flower's messages and keeps the node's context. It writes the context's entries to
the state file (``client.flower.state_file``) before an answer is sent.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from pathlib import Path

from flwr.app import Context, Message, RecordDict
from flwr.clientapp import ClientApp

from headwater.client.device.bandwidth import Bandwidth
from headwater.client.flower.request import (
    ALLOW_LIST,
    IDENTITY,
    OWN_SETTINGS,
    SIMULATED,
    SPOOL,
    spool_of,
)
from headwater.client.flower.state_file import NOT_ASKED, OFFLINE, STATE, StateFile
from headwater.client.node_features import NodeAnswer, node_features
from headwater.client.operations.activity import Activity
from headwater.client.operations.counters import Counters
from headwater.client.operations.installed_tasks import installed_tasks, loaded_bundle, own_task
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.errors import (
    CorruptUpdate,
    HeadwaterError,
    OlderTerm,
    StateError,
    UnexpectedUpdate,
    error_of,
    travelling,
)
from headwater.common.flower import records
from headwater.common.flower.grid import ensure_message_id, enter_run
from headwater.common.messages import Plan, ReadyReport, UpdateReport
from headwater.common.parsed_text import json_of
from headwater.common.settings.schema import Settings

log = logging.getLogger(__name__)


class Node:
    """One device's ClientApp, its model and its context, kept in memory from round to round."""

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
        self.counters = Counters()
        self.activity = Activity(self.counters, trainer.progress)
        self._app, self.settings = app, settings
        self.task, self.tasks = own_task(settings), installed_tasks(settings)
        """The name of the loaded task, and of all that are installed, if the owner lists them."""
        self.bundle = loaded_bundle(settings)
        """The digest of the loaded task's bundle, "none", or "" if the owner trusts no signer."""
        self._run_config = settings.to_run_config()
        self._node_config: dict[str, str | int | float | bool] = {
            "name": identity.name,
            "partition-id": identity.part,
            "num-partitions": identity.num_parts,
            STATE: str(state_folder),
        }
        paths = {
            STATE: state_folder,
            "data": identity.data,
            SPOOL: settings.client.spool,
            IDENTITY: settings.secure.identity,
            ALLOW_LIST: settings.secure.allow_list,
        }
        self._node_config |= {key: str(path) for key, path in paths.items() if path is not None}
        if identity.labels is not None:
            self._node_config["labels"] = identity.labels
        self._node_config[OWN_SETTINGS] = True
        self.state_folder = state_folder
        self._context: Context | None = None
        self._file: StateFile | None = None

    def enter(self, run_id: int, *, term: int = 0) -> None:
        """Join a run, with the entries of its state file, if there is one.

        ``term`` is the server's; a later one than the file has is on disk when this returns.

        Raises:
            StateError: the state file cannot be read, or the new term cannot be written.
            OlderTerm: the device has met a server of a later term.
        """
        if self._context is not None and self._context.run_id == run_id:
            self._follow_term(term)
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
        self._file = StateFile(self.state_folder / f"{self.name}-{run_id}.json")
        for name, plain in self._file.read().items():
            records.save_state(self._context, name, plain)
        self._follow_term(term)

    @property
    def term(self) -> int:
        """The latest term of the run's servers that the node has met; 0 if none had one."""
        return 0 if self._file is None else self._file.term

    def _follow_term(self, term: int) -> None:
        assert self._file is not None
        met = self._file.term
        if term < met:
            raise OlderTerm(
                f"the server has term {term} of the run, and this device has met term {met}"
            )
        if term > met:
            self._file.write_term(term)

    @property
    def run_id(self) -> int:
        """The run that the node has joined."""
        assert self._context is not None
        return self._context.run_id

    def leave(self) -> None:
        """Leave the run: erase what features have in memory of it."""
        for feature in node_features(self):
            feature.left()

    def answer(
        self,
        *,
        message_id: str,
        message_type: str,
        head_json: str,
        payload: memoryview | bytes | None,
        is_own: bool = False,
    ) -> NodeAnswer:
        """Run the ClientApp on an instruction; this takes as long as training takes.

        ``payload`` is the model, or other binary data of the instruction. The state file is on disk
        when this returns; if it cannot be written, the answer is that error and nothing else. An
        instruction of the device's own (``is_own``) may be one that no server may send.
        """
        if message_type == f"query.{OFFLINE}" and not is_own:
            return NodeAnswer(message_id=message_id, error=UnexpectedUpdate(NOT_ASKED))
        assert self._context is not None
        self._context.node_config.update(self.link.as_config())
        self.counters.has_plan |= message_type.partition(".")[0] == "train"  # or an aggregator's
        try:
            # A model always as a view: this process stays, and keeps no update for another one.
            seen = memoryview(payload) if payload and message_type == "train" else payload
            array = None if seen is None else records.flat_array(seen, dtype="uint8")
            message = Message(records.content_with_head(head_json, array), 1, message_type)
            ensure_message_id(message)
            reply = self._app(message, self._context)
            self._write_state_file(self._context)
        except StateError as error:
            return NodeAnswer(message_id=message_id, error=error)
        except Exception as error:  # Flower's own: a message type that it does not know
            log.exception("the instruction could not be carried out")
            return NodeAnswer(message_id=message_id, error=error_of(*travelling(error)))
        if reply.has_error():
            self.counters.refusal = self._error_of(reply)
            return NodeAnswer(message_id=message_id, error=self.counters.refusal)
        if message_type == "train":
            self._count(reply.content)
        return NodeAnswer(
            message_id=message_id,
            head_json=records.head_json(reply.content),
            vector=records.vector(reply.content) or b"",
        )

    def update_bytes(self, plan_json: str) -> int:
        """Return the bytes of a plan's vector as the plan has it encoded; float32 if it is none.

        A masked vector may be a half or a quarter of that, by the session's ring.
        """
        num_values = self.trainer.image.layout.num_parameters
        plan = self.plan_in(plan_json)
        if plan is None:
            return 4 * num_values
        if not plan.keeps_update:
            return plan.update_bytes(num_values)
        # A masked vector and its sums come in a later reply, and are counted here.
        return 4 * plan.num_sent(num_values) + 2 * plan.extra_sums(num_values).num_bytes

    def plan_in(self, head_json: str) -> Plan | None:
        """Return an instruction's plan; None if it is none, or none of those known here."""
        try:
            return records.parse(head_json, Plan)
        except HeadwaterError:  # the plan itself is refused when it is carried out
            return None

    def no_link(self, plan_json: str, answer: NodeAnswer) -> Iterator[NodeAnswer] | None:
        """Return the answers that may replace one, while no link can carry it; None: it waits."""
        found = (feature.no_link(plan_json, answer) for feature in node_features(self))
        return next((answers for answers in found if answers is not None), None)

    def _error_of(self, reply: Message) -> HeadwaterError:
        """Return the error of a reply; a simulated device shows its server the whole message."""
        assert self._context is not None
        error = records.error_of_reply(reply)
        error.is_private &= SIMULATED not in self._context.node_config
        return error

    def _count(self, content: RecordDict) -> None:
        """Count an update, unless its report is one that the server will not be able to read."""
        is_masked = "steps" not in json_of(records.head_json(content))
        with contextlib.suppress(CorruptUpdate):
            if is_masked:
                self.counters.add_update(records.read(content, ReadyReport))
            else:
                self.counters.add_update(records.read(content, UpdateReport))

    def _write_state_file(self, context: Context) -> None:
        assert self._file is not None
        self._file.write(
            {name: records.load_state(context, name) for name in sorted(context.state)}
        )

    def delivered(self, *, has_next: bool = False) -> None:
        """Remove what was kept of an update that the server has completely received.

        A next plan that is being carried out has taken over the spool.
        """
        assert self._context is not None
        spool = None if has_next else spool_of(self._context, self.name)
        if spool is not None:
            spool.remove()
        for feature in node_features(self):
            feature.delivered()

    @property
    def is_waiting(self) -> bool:
        """Whether the server may still ask for something of the last update."""
        return any(feature.is_waiting for feature in node_features(self))

    def interrupt(self) -> None:
        """End the running training after its current micro-batch."""
        self.trainer.stop_requested.set()

    def abort(self) -> None:
        """End a training for which the server no longer waits, after its current micro-batch.

        A masked one goes on to the end of its own time: when the device answers the next
        instruction would otherwise show how long a micro-batch took, and what it leaves out shows
        the other members' parts. So where the owner requires masks nothing is ended: not even the
        plan of which the training has not begun to speak.
        """
        plan = self.trainer.progress.plan
        has_masks = self.settings.secure.aggregation != "off"
        if not has_masks and (plan is None or not plan.keeps_update):
            self.interrupt()

    def resume(self) -> None:
        """Allow training again."""
        self.trainer.stop_requested.clear()
