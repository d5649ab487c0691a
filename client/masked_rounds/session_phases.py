"""A device's answers to the phases of a secure session."""

from __future__ import annotations

from flwr.app import RecordDict

from headwater.client.flower.request import DeviceRequest
from headwater.client.flower.state_file import SAMPLER, SECURE
from headwater.client.masked_rounds.of_request import enrolment_of, history_of
from headwater.client.masked_rounds.suspended_updates import suspended_of
from headwater.client.privacy.round_spending import correct_spent, spend
from headwater.client.secagg.pending import pending_in
from headwater.client.secagg.prepare import floor_of
from headwater.client.secagg.types import SessionRecord
from headwater.common.flower import records
from headwater.common.secagg.protocol import PHASES, MaskReply, UnmaskRequest


def answer_phase(action: str, request: DeviceRequest) -> RecordDict:
    """Answer a phase of a secure session, by the name of its query.

    Raises:
        HeadwaterError: see ``SecureSession.answer``.
    """
    phase = next(phase for phase in PHASES if phase.action == action)
    content, context, suspended = request.message.content, request.context, suspended_of(request)
    is_suspended = suspended.exists
    session = (
        suspended.resume(floor=floor_of(request.settings.secure), enrolment=enrolment_of(request))
        if is_suspended
        else pending_in(request.trainer.accumulator).get(context.run_id, request.identity.name)
    )

    terms, update = session.device.privacy, session.device.update_id

    def store(record: SessionRecord) -> None:
        if terms is not None and record.masked == update:
            spend(request, terms, request.sampler, update_id=update)
        records.save_state(context, SECURE, record)
        if record.masked == update:  # its examples count as used in any case
            records.save_state(context, SAMPLER, request.sampler.passed())
            if session.record.masked != record.masked:
                device = session.device
                for subject in (device.model_digest, *device.other_subjects):
                    history_of(request).add(
                        subject,
                        device.examples,
                        num_planned=device.num_planned,
                        update_id=update,
                    )
        if is_suspended:
            suspended.write_state_file()

    session.store = store
    asked = records.read(content, phase.request)
    reply = session.answer(asked, records.vector(content))
    if terms is not None and isinstance(asked, UnmaskRequest):
        correct_spent(request, session, asked)
    vector = session.vector if isinstance(reply, MaskReply) else None
    if is_suspended:
        suspended.suspend(session)
    if vector is None:
        return records.content_of(reply)
    memory = vector.data.cast("B")
    if len(session.sums_S):
        both = bytes(memory) + session.sums_S.astype("<u8").tobytes()
        return records.content_of(reply, records.flat_array(both, dtype="uint8"))
    array = records.flat_array(
        memory if session.is_view else bytes(memory), dtype=str(vector.dtype)
    )
    return records.content_of(reply, array)
