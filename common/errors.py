"""The errors of the project, one class for each thing that a caller can do about it.

::

    HeadwaterError
    ├── SettingsError           fix the command line or the settings file
    │   ├── UnknownTask             the --task file or class is not there
    │   ├── MissingData             the --data path is not there or cannot be read
    │   ├── EmptyDataset            the device has no example
    │   ├── PortInUse               --listen names a port that somebody else holds
    │   ├── InsecureAddress         no TLS beyond loopback
    │   └── CertificateProblem      a TLS file is missing, unreadable or of the wrong kind
    ├── TaskError               fix the task file
    │   ├── TaskNotAdditive         loss_sum([a, b]) is not loss_sum([a]) + loss_sum([b])
    │   ├── BatchDependentLayer     BatchNorm and its kin
    │   ├── BuffersChanged          training changes a buffer of the model
    │   ├── UnsupportedModel        parameters that are not float32, or none at all
    │   └── TaskFailed              the task raised an exception on every example
    ├── DeviceRefused           this client cannot take part as it is
    │   ├── ModelMismatch           its model is laid out otherwise than the server's
    │   ├── ProtocolMismatch        it speaks another version of the wire
    │   └── IdentityRefused         its name is invalid, taken, or not that of its certificate
    ├── UpdateRefused           drop this update, the round goes on
    │   ├── CorruptUpdate           digest, order of chunks or framing is wrong
    │   ├── OversizeUpdate          longer than the model's own layout allows
    │   ├── NonFiniteUpdate         NaN or infinity in the vector or the sums
    │   ├── CountOutOfRange         counts that the plan cannot have led to
    │   ├── EmptyUpdate             no finite example behind it
    │   ├── LateUpdate              the deadline passed before it came
    │   └── UnexpectedUpdate        replayed, or never asked for
    ├── RoundAborted            nothing was committed; the round may be tried again
    │   └── TooFewClients           fewer answers than --min-clients
    ├── StateError              the disk
    │   ├── CheckpointCorrupt       it cannot be read back
    │   └── CheckpointFailed        it cannot be written (disk full, read-only)
    ├── Diverged                the model is no longer finite
    ├── OutOfMemory             not even one example fits
    └── ConnectionLost          retry later

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


class PortInUse(SettingsError):
    """Another process holds the port."""

    remedy = "choose another port with --listen HOST:PORT, or stop the process that holds this one"


class InsecureAddress(SettingsError):
    """An address beyond loopback without TLS."""

    remedy = (
        "make certificates with `headwater-server init` and pass --tls-ca, --tls-certificate and "
        "--tls-key on both sides; or say --insecure if you accept that anyone may read and join"
    )


class CertificateProblem(SettingsError):
    """A TLS file is missing, unreadable or of the wrong kind."""

    remedy = "make the certificates anew with `headwater-server init`"


class TaskError(HeadwaterError):
    """The task file breaks one of the rules of ``common.task.Task``."""

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
    """An update that was replayed, or was never asked for."""


class RoundAborted(HeadwaterError):
    """The round was not committed: model, optimizer and places are as before it."""


class TooFewClients(RoundAborted):
    """Fewer clients answered than --min-clients."""

    remedy = "lower --min-clients, lengthen --deadline, or look at why the clients were refused"


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


class ConnectionLost(HeadwaterError):
    """The other side is not to be reached."""

    remedy = "check the address and that the server runs"


def _subclasses(root: type[HeadwaterError]) -> list[type[HeadwaterError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _subclasses(child))]


def error_of(code: str, message: str) -> HeadwaterError:
    """Rebuild an error that travelled as its class name and message.

    An unknown ``code`` gives a plain ``HeadwaterError`` that quotes it: versions may differ.
    """
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
