"""The errors of the project, one class for each thing that a caller can do about it.

::

    HeadwaterError
    ├── SettingsError           fix the command line or the settings file
    │   ├── UnknownTask             the --task file or class is not there
    │   ├── MissingData             the --data path is not there or cannot be read
    │   ├── EmptyDataset            the device has no example
    │   ├── MissingColumn           the examples do not tell what they are to be dealt out by
    │   ├── NoSuchPartition         too few examples or labels for so many devices
    │   ├── PortInUse               --listen names a port that somebody else holds
    │   ├── InsecureAddress         no TLS beyond loopback
    │   ├── CertificateProblem      a TLS file is missing, unreadable or of the wrong kind
    │   ├── JoinTokenBroken         not a join token, or not whole
    │   ├── NameTaken               a device of this name is enrolled
    │   ├── ClockWrong              the clock is outside of what a certificate is valid for
    │   ├── IdentityProblem         an identity or an allow-list is not what it should be
    │   └── NoSuchGraph             no sparse graph bears the assumed corruption and dropout
    ├── TaskError               fix the task file
    │   ├── TaskNotAdditive         loss_sum([a, b]) is not loss_sum([a]) + loss_sum([b])
    │   ├── BatchDependentLayer     BatchNorm and its kin
    │   ├── BuffersChanged          training changes a buffer of the model
    │   ├── UnsupportedModel        parameters that are not float32, or none at all
    │   └── TaskFailed              the task raised an exception on every example
    ├── DeviceRefused           this client cannot take part as it is
    │   ├── ModelMismatch           its model is laid out otherwise than the server's
    │   ├── ProtocolMismatch        it speaks another version of the wire
    │   ├── IdentityRefused         its name is invalid, taken, or not that of its certificate
    │   ├── CertificateRevoked      the operator has ended its certificate
    │   ├── AuthorityMismatch       another authority than its join token names
    │   ├── JoinTokenUnknown        never made, void, or for another name
    │   ├── JoinTokenExpired        it came too late
    │   └── JoinTokenUsed           it lets in one device, and has done so
    ├── DeviceAway              its owner's settings keep it away; it comes back by itself
    │   ├── OutsideUploadWindow     its link is not to be used now
    │   ├── WorkingHours            its owner needs it
    │   └── BytesUsedUp             its link's bytes of today do not suffice for a round
    ├── UpdateRefused           drop this update, the round goes on
    │   ├── CorruptUpdate           digest, order of chunks or framing is wrong
    │   ├── OversizeUpdate          longer than the model's own layout allows
    │   ├── NonFiniteUpdate         NaN or infinity in the vector or the sums
    │   ├── CountOutOfRange         counts that the plan cannot have led to
    │   ├── EmptyUpdate             no finite example behind it
    │   ├── LateUpdate              the deadline passed before it came
    │   ├── UnexpectedUpdate        replayed, never asked for, or under another's name
    │   ├── WrongShare              a share that is not the one its dealer committed to
    │   └── SealBroken              a sealed share that its key does not open
    ├── SessionRefused          a device does not answer a message of a secure session
    │   ├── CohortTooSmall          fewer than three members, or than its own minimum
    │   ├── RosterRefused           a name or a key twice, or its own entry changed
    │   ├── IdentityUnknown         a member that is not on its allow-list
    │   ├── SignatureRefused        not that member's signature over exactly this
    │   ├── BadPublicKey            an agreement with it would be known to everybody
    │   ├── ThresholdTooLow         fewer shares would open a secret than the rule allows
    │   ├── ThresholdTooHigh        the expected dropouts would leave too few to open the sum
    │   ├── MaskingTooWeak          mode, ring or clip bound below its own floor
    │   ├── RingCanWrap             the whole cohort's sum might not fit the ring
    │   ├── SessionReplayed         not newer than every session it has seen
    │   ├── SessionMismatch         others were shown another model, roster or parameters
    │   ├── ComplaintIgnored        a dealer stays whose share was bad
    │   ├── MaskingRequired         a plan without masks, which its own settings ask for
    │   ├── UpdateNotHeld           its process has no update for the session
    │   ├── UpdateAlreadyMasked     this update went into a session before
    │   ├── OutOfPhase              a message that it does not await now
    │   ├── SecretErased            the session's keys are gone
    │   ├── SurvivorsRefused        not a large enough part of those who shared
    │   ├── BothSharesAsked         a client as survived and as dropped
    │   ├── SurvivorsChanged        a second survivor set in one session
    │   └── SurvivorsNotAgreed      too few signatures on the survivor set
    ├── RoundAborted            nothing was committed; the round may be tried again
    │   ├── TooFewClients           fewer answers than --min-clients
    │   ├── TooFewSurvivors         too few are left to open the masked sum
    │   ├── DealerCheated           a device's shares do not open what it committed to
    │   └── SumOutOfRange           the sum is more than the plans allow: a device lied
    ├── StateError              the disk
    │   ├── CheckpointCorrupt       it cannot be read back
    │   └── CheckpointFailed        it cannot be written (disk full, read-only)
    ├── Diverged                the model is no longer finite
    ├── OutOfMemory             not even one example fits
    ├── WorkerDied              a process that computed simulated devices is gone
    └── ConnectionLost          retry later
        ├── EnrolmentClosed         the enrolment port is not open
        ├── NoStream                it came to the port and never opened a stream
        └── TooManyAttempts         the server has had enough of this name or address

A message says what was expected, what was found and where; ``remedy`` says what to do about it.
Only the class name and message of these errors may travel to the other side; of any other
exception the class name alone does.
"""


class HeadwaterError(Exception):
    """An error with a name, a cause and a remedy."""

    remedy = ""
    exit_status = 1
    is_private = False
    """Whether the message may quote what must stay on the device: a path, a line of a file."""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        if remedy is not None:
            self.remedy = remedy

    @property
    def code(self) -> str:
        """The name under which the error travels and is counted."""
        return type(self).__name__


class SettingsError(HeadwaterError):
    """A setting is missing, unknown or out of range."""

    remedy = "see --help for the flags, and docs/settings.md for the settings file"
    exit_status = 2


class UnknownTask(SettingsError):
    """The task file or the class in it is not there."""

    is_private = True
    remedy = "name it as --task path/to/my_task.py:MyTask"


class MissingData(SettingsError):
    """The data path is not there or cannot be read."""

    is_private = True
    remedy = "point --data at this device's own file or folder"


class EmptyDataset(SettingsError):
    """The device has no example to train on."""

    is_private = True
    remedy = "check --data: the task found no example there"


class MissingColumn(SettingsError):
    """The examples do not tell the labels, or the column, that a partition goes by."""

    is_private = True  # it quotes the task's own exception
    remedy = "give the task a method columns(examples) that returns it by name, see docs/data.md"


class NoSuchPartition(SettingsError):
    """The examples cannot be dealt out to the devices as the partition asks."""

    remedy = "ask for fewer devices, or for another --partition (docs/data.md)"


class PortInUse(SettingsError):
    """Another process holds the port."""

    remedy = "choose another port with --listen HOST:PORT, or stop the process that holds this one"


class InsecureAddress(SettingsError):
    """An address beyond loopback without TLS."""

    remedy = (
        "make certificates with `headwater-server init`, enrol each device with a token of "
        "`headwater-server enroll NAME`, and start both sides as these say; or say --insecure if "
        "you accept that anyone may read and join"
    )


class CertificateProblem(SettingsError):
    """A TLS file is missing, unreadable or of the wrong kind."""

    remedy = (
        "make the server's certificate anew with `headwater-server init`, a device's with a join "
        "token of `headwater-server enroll NAME`"
    )


class JoinTokenBroken(SettingsError):
    """A text that is not a join token, or not all of one."""

    remedy = "copy the whole line that `headwater-server enroll NAME` printed"


class NameTaken(SettingsError):
    """A device of this name is enrolled, and its certificate counts."""

    remedy = "choose another name, or end that one's certificate: `headwater-server revoke NAME`"


class ClockWrong(SettingsError):
    """This machine's clock is outside of the time for which a certificate is valid."""

    remedy = "set this machine's clock, and the server's if it is the one that is off"


class IdentityProblem(SettingsError):
    """An identity or an allow-list is not what it should be."""

    is_private = True
    remedy = "make one with `headwater-client identity`; a line of the allow-list is NAME BASE64"


class NoSuchGraph(SettingsError):
    """No sparse graph of masks bears the corruption and dropout that are assumed."""

    remedy = "assume less (secure.corrupted, secure.dropout), or invite no more: --cohort-size 64"


class TaskError(HeadwaterError):
    """The task file breaks one of the rules of ``headwater.common.task.Task``."""

    is_private = True  # it quotes losses and weights of single examples
    remedy = "see docs/task.md for what a task must keep to"


class TaskNotAdditive(TaskError):
    """The loss of two examples together is not the sum of their losses."""

    remedy = "return the sum of the per-example losses and what it was summed over, never a mean"


class BatchDependentLayer(TaskError):
    """A layer whose output for one example depends on the rest of the batch."""

    remedy = "use GroupNorm or LayerNorm, or let --replace-batch-norm put GroupNorm in its place"


class BuffersChanged(TaskError):
    """Training changed a buffer; buffers belong to the server."""

    remedy = "keep running statistics out of the model: only gradients travel to the server"


class UnsupportedModel(TaskError):
    """A model that cannot be trained through one float32 vector."""

    remedy = "build the model in float32; ask for bfloat16 arithmetic with --precision bfloat16"


class TaskFailed(TaskError):
    """The task raised an exception on every example it was given."""

    remedy = "try the task on its data alone with `headwater-client check`"


class DeviceRefused(HeadwaterError):
    """This client cannot take part as it is."""


class ModelMismatch(DeviceRefused):
    """The client's model is laid out otherwise than the server's."""

    remedy = "give server and client the same task file and the same --replace-batch-norm"


class ProtocolMismatch(DeviceRefused):
    """The other side speaks another version of the wire."""

    remedy = "install the same version of headwater on both sides"


class IdentityRefused(DeviceRefused):
    """The client's name is invalid, taken, or not the one in its certificate."""

    remedy = "give each device a --name of its own, the one its certificate was made for"


class CertificateRevoked(DeviceRefused):
    """The device's certificate counts no more."""

    remedy = (
        "ask the operator for a new join token: `headwater-server enroll NAME`, then "
        "`headwater-client join`"
    )


class AuthorityMismatch(DeviceRefused):
    """The authority that was shown is not the one that the join token names."""

    remedy = (
        "somebody may be in between, or the server has another authority now: ask the operator, "
        "by other ways than this network, for a new token"
    )


class JoinTokenUnknown(DeviceRefused):
    """A token that was never made here, was replaced or revoked, or is for another name."""

    remedy = "ask the operator for a new one: `headwater-server enroll NAME`"


class JoinTokenExpired(DeviceRefused):
    """The token's time has passed."""

    remedy = "ask the operator for a new one: `headwater-server enroll NAME`, with a longer --valid"


class JoinTokenUsed(DeviceRefused):
    """The token has let a device in; it is good for one."""

    remedy = (
        "if that was not you, somebody else had the token: the operator should revoke the name. "
        "Ask for a new one: `headwater-server enroll NAME`"
    )


class DeviceAway(HeadwaterError):
    """The device is kept away by its owner's settings, and comes back by itself."""

    remedy = "nothing is to be done: the device comes back by itself"


class OutsideUploadWindow(DeviceAway):
    """The device's link is not to be used now."""


class WorkingHours(DeviceAway):
    """The device's owner needs it."""


class BytesUsedUp(DeviceAway):
    """What is left of the day's bytes does not suffice for a round."""


class UpdateRefused(HeadwaterError):
    """An update that must not enter the sum; the round goes on without it."""


class CorruptUpdate(UpdateRefused):
    """The bytes that arrived are not the bytes that were announced."""


class OversizeUpdate(UpdateRefused):
    """More bytes than the model's layout allows."""


class NonFiniteUpdate(UpdateRefused):
    """NaN or infinity in the vector or in its sums."""


class CountOutOfRange(UpdateRefused):
    """Counts that the plan cannot have led to."""


class EmptyUpdate(UpdateRefused):
    """An update without a finite example behind it."""

    remedy = "look at the device's data: every example it tried gave a loss or gradient of NaN"


class LateUpdate(UpdateRefused):
    """The round's deadline passed before the update came."""

    remedy = "lengthen --deadline, or let the planner choose the quotas"


class UnexpectedUpdate(UpdateRefused):
    """An update that was replayed, was never asked for, or came under another's name."""


class WrongShare(UpdateRefused):
    """A share that is not the one its dealer committed to; its holder is at fault."""


class SealBroken(UpdateRefused):
    """A sealed share that the key of its dealer and holder does not open."""


class SessionRefused(HeadwaterError):
    """A device does not answer a message of a secure session.

    What it gave until then opens nothing of it; ``client.secagg.checks`` lists the checks.
    """


class CohortTooSmall(SessionRefused):
    """Fewer members than three, or than the device's own minimum."""

    remedy = "wait for more devices: a sum of two tells each the other's update"


class RosterRefused(SessionRefused):
    """A name or a key stands twice in the roster, or the device's own entry was changed."""


class IdentityUnknown(SessionRefused):
    """A member of the session that is not on the device's allow-list."""

    remedy = "add its line to the allow-list of every device, or keep it out of the run"


class SignatureRefused(SessionRefused):
    """A signature that is missing, or is not that member's over exactly this."""

    remedy = "find out who changed the keys on their way: the member, or the server"


class BadPublicKey(SessionRefused):
    """A public key of the wrong length, or of low order: the agreement would be no secret."""


class ThresholdTooLow(SessionRefused):
    """Threshold and neighbours under which too few could open a secret."""


class ThresholdTooHigh(SessionRefused):
    """Threshold and neighbours under which the expected dropouts would often close the sum."""


class MaskingTooWeak(SessionRefused):
    """Parameters of the server's choice that are below the device's own floor."""


class RingCanWrap(SessionRefused):
    """The sum of the whole cohort might not fit the ring."""


class SessionReplayed(SessionRefused):
    """A session that is not newer than every one that the device has seen."""


class SessionMismatch(SessionRefused):
    """Others were shown another model, another roster or other parameters."""


class ComplaintIgnored(SessionRefused):
    """A dealer stays in the session whose share the device found bad."""


class MaskingRequired(SessionRefused):
    """The server would see the device's own sums, and the device's settings ask for masks."""

    remedy = "start the server with --secure-aggregation, or this device without it"


class UpdateNotHeld(SessionRefused):
    """The device's process has no update of this round; it may have been started anew since."""


class UpdateAlreadyMasked(SessionRefused):
    """The update went into a session before: it may never go into another."""

    remedy = "train on new examples: two sums with one update in both differ by the dropouts"


class OutOfPhase(SessionRefused):
    """A message that the device does not await now."""


class SecretErased(SessionRefused):
    """The key was erased: its session has ended on this device."""


class SurvivorsRefused(SessionRefused):
    """Survivors who did not share, or too few of those who did."""


class BothSharesAsked(SessionRefused):
    """A client is named as survived and as dropped: both its shares would open its update."""


class SurvivorsChanged(SessionRefused):
    """A second survivor set in a session for which the device has answered one."""


class SurvivorsNotAgreed(SessionRefused):
    """Too few valid signatures on the survivor set."""


class RoundAborted(HeadwaterError):
    """The round was not committed: model, optimizer and places are as before it."""


class TooFewClients(RoundAborted):
    """Fewer clients answered than --min-clients."""

    remedy = "lower --min-clients, lengthen --deadline, or look at why the clients were refused"


class TooFewSurvivors(RoundAborted):
    """Too few devices are left in the session to open the masked sum."""

    remedy = (
        "the log says why devices left; the next attempt takes new examples. If they are slow, "
        "lengthen the phases' deadline"
    )


class DealerCheated(RoundAborted):
    """Good shares of a device's secret that do not open what the device committed to."""

    remedy = "the next rounds go on without the devices that are named: look what runs on them"

    def __init__(
        self, message: str, *, remedy: str | None = None, dealers: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.dealers = dealers


class SumOutOfRange(RoundAborted):
    """A masked sum beyond what the plans allow; the masks hide whose lie it is."""

    remedy = (
        "a device does not keep to the protocol; invite other cohorts, and see with which of them "
        "it happens"
    )


class StateError(HeadwaterError):
    """State on disk could not be read or written."""


class CheckpointCorrupt(StateError):
    """The checkpoint cannot be read back."""

    remedy = "restore it from a backup, or start anew with another --out"


class CheckpointFailed(StateError):
    """The checkpoint could not be written; the one before it is untouched."""

    remedy = "free space under --out and go on with --resume: the last committed round is kept"


class Diverged(HeadwaterError):
    """A step led to parameters that are not finite; the checkpoint before it is kept."""

    remedy = "lower --learning-rate, and go on from the checkpoint with --resume"


class OutOfMemory(HeadwaterError):
    """Not even one example fits in the memory that the device may use."""

    remedy = "give the device more memory, or train a smaller model"


class WorkerDied(HeadwaterError):
    """A process that computed simulated devices ended before its time."""

    remedy = (
        "its own words stand above; after SIGKILL the machine may have run out of memory: take "
        "fewer --workers. The rounds before are kept: go on with --resume"
    )


class ConnectionLost(HeadwaterError):
    """The other side is not to be reached."""

    remedy = "check the address and that the server runs"


class EnrolmentClosed(ConnectionLost):
    """Nobody listens at the enrolment port."""

    remedy = (
        "the port is open while headwater-server runs and a join token is out that is neither used "
        "nor expired: check these, and the address in the token (`headwater-server enroll NAME "
        "--address HOST:PORT`)"
    )


class NoStream(ConnectionLost):
    """A connection to the server's port that never opened a stream, as strangers' do not."""


class TooManyAttempts(ConnectionLost):
    """The server, or its enrolment port, turned this address away for a while."""

    remedy = "wait a minute and try again"


def _subclasses(root: type[HeadwaterError]) -> list[type[HeadwaterError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _subclasses(child))]


def error_of(code: str, message: str) -> HeadwaterError:
    """Rebuild an error that travelled as its class name and message.

    An unknown ``code`` gives a plain ``HeadwaterError`` that quotes it: versions may differ. What
    the other side wrote stays on its line of a log.
    """
    code, message = (
        "".join(sign if sign.isprintable() else " " for sign in text) for text in (code, message)
    )
    by_code = {leaf.__name__: leaf for leaf in _subclasses(HeadwaterError)}
    kind = by_code.get(code)
    return HeadwaterError(f"{code}: {message}") if kind is None else kind(message)


def travelling(error: BaseException) -> tuple[str, str]:
    """Return the (code, message) of an error that may be shown to the other side.

    The message of an exception that is not ours may quote private data; it stays here.
    """
    if isinstance(error, HeadwaterError) and not error.is_private:
        return error.code, error.message
    return type(error).__name__, "the device keeps the details in its own log"
