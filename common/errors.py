"""The project's errors: one class for each thing that a caller can do about an error.

A message says what was expected, what was found and where; ``remedy`` says what to do about it.
The name of the class is the error's code: it travels to the other side, and is counted there.
Only the code and the message travel, and of an exception that is not defined here only the name; to
a device also a remedy of the error's own.
"""

# ruff: noqa: D204
# Each class is two to five lines without blank lines between, so that a branch reads as a table.

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager

# The system's refusals: what to do about each.

SHARED_MEMORY = ("/dev/shm", "</torch_", "'/psm_")  # how torch and Python name it in an error
_FILES = "raise the limit of open files: `ulimit -n 65536` in this shell, LimitNOFILE= of a service"
_SPACE = "free space on that disk (`df -h` and `df -i` show it), or name a folder on another one"
_RIGHTS = "give this user the right: `ls -ld` of the file and its folders, then chmod or chown"

_REMEDIES = {
    errno.EMFILE: _FILES,
    errno.ENFILE: "the machine has no more open files: stop some programs, or raise fs.file-max",
    errno.ENOSPC: _SPACE,
    errno.EDQUOT: "the user's disk quota is used up: free space, or name a folder on another disk",
    errno.EROFS: "the disk is read-only: name a folder on another one, or mount it writable",
    errno.EACCES: _RIGHTS,
    errno.EPERM: _RIGHTS,
    errno.EIO: "the disk fails: look into dmesg, and copy what is on it",
}


def system_remedy(text: str) -> str | None:
    """Return what to do about a text that quotes the system; None if it quotes no such fault.

    A full disk, a limit of open files or a missing right may show in a task's code, in torch, or in
    another process's log: all quote the words of strerror(3).
    """
    found = next((number for number in _REMEDIES if os.strerror(number) in text), None)
    if found == errno.ENOSPC and (
        _is_full("/dev/shm") or any(one in text for one in SHARED_MEMORY)
    ):
        return (
            "/dev/shm is full: remove what lies there, or enlarge it (`mount -o remount,size=2G "
            "/dev/shm`; `--shm-size` of docker run); a DataLoader with num_workers=0 needs none"
        )
    return None if found is None else _REMEDIES[found]


def _is_full(folder: str) -> bool:
    """Return whether a disk is full: a lock of multiprocessing does not name the one it lies on."""
    try:
        return shutil.disk_usage(folder).free == 0
    except OSError:
        return False


OTHER_DTYPE = (
    *("must have the same dtype", "expected scalar type", "expected target dtype"),
    "Found dtype Double",
)
"""Torch's words of numbers that are no float32, or of classes that are no int64."""


class HeadwaterError(Exception):
    """An error with a code, a message and a remedy."""

    remedy = ""
    exit_status = 1
    is_private = False
    """Whether the message may quote what must stay on the device: a path, a line of a file."""

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        """Take the remedy as given, or that of a system's fault in the message, or the class's."""
        super().__init__(message)
        self.message = message
        own = system_remedy(message) if remedy is None else remedy
        if own is not None:
            self.remedy = own

    @property
    def code(self) -> str:
        """The name under which the error travels and is counted."""
        return type(self).__name__


def without_frames(error: HeadwaterError) -> HeadwaterError:
    """Return the error without its traceback and causes, to be kept for long.

    A frame keeps its variables alive: of a task's method these may be the whole data set.
    """
    error.__cause__ = error.__context__ = None
    return error.with_traceback(None)


@contextmanager
def remedy_in_traceback() -> Iterator[None]:
    """Give an error its remedy as a note, which a traceback shows, once."""
    try:
        yield
    except HeadwaterError as error:
        note = f"remedy: {error.remedy}"
        if error.remedy and note not in getattr(error, "__notes__", ()):
            error.add_note(note)
        raise


# fmt: off

# Settings: fix the command line or the settings file. -------------------------------------------

class SettingsError(HeadwaterError):
    """A setting is missing, unknown or out of range."""
    remedy = "see --help-all for the flags, and docs/settings.md for the settings file"
    exit_status = 2
class UnknownTask(SettingsError):
    """The task's file, module or class does not exist or cannot be imported."""
    is_private = True
    remedy = "name it as --task path/to/my_task.py:MyTask, or package.module:MyTask"
class UnknownObject(SettingsError):
    """What a setting names by its import path is not there, or cannot be made."""
    is_private = True
class CodeChanged(SettingsError):
    """A queued run's file of code is not the one that it was submitted with."""
    remedy = "put the file back as it was, or submit the run again"
class MissingData(SettingsError):
    """The data path does not exist or cannot be read."""
    is_private = True
    remedy = (
        "point --data at a file or folder that the task can read; at those of several devices with "
        "a pattern in quotes, as 'folder/*.csv'"
    )
class EmptyDataset(SettingsError):
    """The device has no example to train on."""
    is_private = True
    remedy = "check --data: the task found no example there"
class TooFewExamples(SettingsError):
    """The device has too few examples to fine-tune a model and to test it."""
    remedy = "use the common model as it is, or collect more examples"
class MissingColumn(SettingsError):
    """The examples do not have the labels, or the column, that a partition needs."""
    is_private = True  # the message quotes the task's own exception
    remedy = "give the task a method columns(examples) that returns it by name, see docs/data.md"
class UnsupportedFlower(SettingsError):
    """The installed Flower lacks a private part of its own that this project uses."""
    remedy = "install a Flower that headwater was tried with: pip install 'flwr>=1.41,<1.45'"
class NoSuchPartition(SettingsError):
    """There are too few examples, labels or values to partition the data set as requested."""
    remedy = "ask for fewer devices, or for another --partition (docs/data.md)"
class UnknownMetric(SettingsError):
    """No evaluation of the run has the metric of --best or --stop-when."""
    remedy = "name one of these metrics, or return it from the task's loss_sum (docs/model.md)"
class LocalParametersUnusable(SettingsError):
    """--local-parameters names nothing, everything, a frozen one, or one name of a tied weight."""
    remedy = (
        "name some of model.named_parameters(), as in --local-parameters 'head.*'; docs/extend.md"
    )
class PortInUse(SettingsError):
    """Another process holds the port."""
    remedy = "choose another port with --listen HOST:PORT, or stop the process that holds this one"
class InsecureAddress(SettingsError):
    """The address is not a loopback address, and TLS is not configured."""
    remedy = (
        "make certificates with `headwater-server init`, enrol each device with a token of "
        "`headwater-server enroll NAME`, and start both sides as these say; or say --plain-text if "
        "you accept that anyone on the way may read and change models and updates, and join"
    )
class CertificateProblem(SettingsError):
    """A TLS file is missing, unreadable, expired or of the wrong kind."""
    remedy = (
        "make a new server certificate with `headwater-server init`, a device's with a join "
        "token of `headwater-server enroll NAME`"
    )
class JoinTokenBroken(SettingsError):
    """The text is not a join token, or only part of one."""
    remedy = "copy the whole line that `headwater-server enroll NAME` printed"
class TokenInArguments(SettingsError):
    """A join token is among the arguments, where every user of the machine can read it."""
    remedy = (
        "leave it out: `headwater-client join` asks for it, or reads it from the standard input or "
        "--token-file FILE. If others use this machine, revoke the token: enroll NAME again"
    )
class NameTaken(SettingsError):
    """A device of this name is enrolled, and its certificate is valid."""
    remedy = "choose another name, or end its certificate: `headwater-server revoke NAME`"
class ClockWrong(SettingsError):
    """This machine's clock is outside the validity period of a certificate."""
    remedy = "set this machine's clock, and the server's if that one is wrong"
class IdentityProblem(SettingsError):
    """An identity file or an allow-list is malformed."""
    is_private = True
    remedy = "make one with `headwater-client identity`; a line of the allow-list is NAME BASE64"
class NoSuchGraph(SettingsError):
    """No sparse mask graph tolerates the assumed corruption and dropout."""
    remedy = "assume less (secure.corrupted, secure.dropout), or invite no more: --cohort-size 64"

# Task: fix the task file. -----------------------------------------------------------------------

class TaskError(HeadwaterError):
    """The task file breaks one of the rules of ``headwater.common.task.Task``."""
    is_private = True  # the message quotes losses and weights of single examples
    remedy = "see docs/task.md for what a task must keep to"
class TaskNotAdditive(TaskError):
    """The loss of two examples together is not the sum of their losses."""
    remedy = "return the sum of the per-example losses and what it was summed over, never a mean"
class BatchDependentLayer(TaskError):
    """The output of a layer for one example depends on the rest of the batch."""
    remedy = (
        "for a pretrained network --batch-norm frozen, which keeps its running statistics; for one "
        "from scratch --batch-norm group, which puts GroupNorm in its place, or a norm of your own"
    )
class BuffersChanged(TaskError):
    """A pass wrote to a buffer or a parameter of the model; they belong to the server."""
    remedy = (
        "keep running statistics out of the model: only gradients travel to the server; give a "
        "table that grows with its input, such as one of positions, its full length in new_model"
    )
class HiddenState(TaskError):
    """A forward pass changes what the next one computes, outside of parameters and buffers."""
    remedy = (
        "compute what the loss needs from the batch and the parameters alone: no counter, cache or "
        "moving average in an attribute of the model or the task"
    )
class AlgorithmBroken(TaskError):
    """The client algorithm breaks one of the rules of docs/extend.md."""
    remedy = "see docs/extend.md for a client algorithm"
class UnsupportedModel(TaskError):
    """The model has no trainable parameter, or one that is not float32."""
    remedy = "build the model in float32; ask for bfloat16 arithmetic with --precision bfloat16"
class TaskFailed(TaskError):
    """The task's own code raised an exception; on examples, on every one that was tried."""
    remedy = (
        "correct what is shown, in the task or in the data that it reads; `headwater-client check` "
        "tries them without a server"
    )

    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        """Take the remedy as given, or what helps against torch's words of unlike dtypes."""
        super().__init__(message, remedy=remedy)
        if remedy is None and any(one in message for one in OTHER_DTYPE):
            self.remedy = (
                "give numbers as float32 (tensor.float()), and classes as int64 (tensor.long())"
            )
class NoFiniteExample(TaskError):
    """Every example that was looked at has a loss or gradient of NaN or infinity."""
    remedy = "look for NaN in the data: empty cells of a CSV file, divisions by zero, logarithms"

TASK_MISTAKES: tuple[type[HeadwaterError], ...] = (
    TaskNotAdditive,
    BuffersChanged,
    HiddenState,
    AlgorithmBroken,
)
"""Mistakes of the user's code, whichever device's examples show them: they end a simulation."""

# Flower app: change the lines that convert it to sums of gradients. ------------------------------

class ConversionError(HeadwaterError):
    """A Flower app does not use ``GradientSum`` and ``SumOfGradients`` as docs/flower.md says.

    Flower prints and sends only the text of an exception, so that the text has the remedy, too.
    """
    remedy = "see docs/flower.md for the lines that change"
    def __str__(self) -> str:
        return f"{self.message}. To fix it: {self.remedy}" if self.remedy else self.message
class MeanLeftIn(ConversionError):
    """The loss is a mean over the batch, or a sum that was divided or multiplied by its size."""
    remedy = (
        'sum the loss: criterion = nn.CrossEntropyLoss(reduction="sum"), then '
        "sums.backward(criterion(outputs, labels), len(labels))"
    )
class CountsDisagree(ConversionError):
    """The weight that was counted is not the number of examples that the app names."""
    remedy = (
        "count the examples of each batch, sums.backward(loss_sum, len(labels)), and leave the "
        "count out of the metrics: sums.reply(message, metrics) sends it"
    )
class ParametersChanged(ConversionError):
    """The parameters changed while their gradients were summed."""
    remedy = (
        "take optimizer.step() and the loop over epochs out of the client: the server takes the "
        "step, one a round. Load the server's parameters before the first batch of a round, or "
        "after reply() where one GradientSum serves several"
    )
class GradientsChanged(ConversionError):
    """Something else than ``GradientSum.backward`` wrote to the gradients."""
    remedy = (
        "replace loss.backward() by sums.backward(loss_sum, len(labels)), and take "
        "optimizer.zero_grad() and the clipping of gradients out of the loop"
    )
class OtherParameters(ConversionError):
    """The gradients are those of other parameters than the server sent."""
    remedy = (
        "load the message's arrays before GradientSum(model) and restore nothing afterwards; a "
        "layer that stays on the client is frozen on both sides: net.head.requires_grad_(False)"
    )
class UntaggedReply(ConversionError):
    """A reply was not made by ``GradientSum.reply``."""
    remedy = "end the client's train function with: return sums.reply(message, metrics)"
class WeightsSent(ConversionError):
    """A reply has the model's parameters where sums of gradients are due."""
    remedy = (
        "replace ArrayRecord(model.state_dict()), and the Message around it, by: return "
        "sums.reply(message, metrics)"
    )
class OtherReplies(ConversionError):
    """A reply has a difference of parameters where sums of gradients are due, or the reverse."""
    remedy = (
        "use ModelDifference in the client with SumOfGradients(model, local_training=True), and "
        "GradientSum without"
    )
class ReplyChanged(ConversionError):
    """A reply's arrays are not those that ``GradientSum.reply`` put in it."""
    remedy = (
        "take Flower's mods that clip or add noise (fixedclipping_mod, adaptiveclipping_mod, "
        "LocalDpMod) out of ClientApp(mods=[...]): they treat a reply as a model"
    )
class StrategyWrapped(ConversionError):
    """A wrapper around the strategy treats replies, or the arrays between rounds, as a model."""
    remedy = (
        "start SumOfGradients itself: strategy.start(grid=grid, ...); docs/flower.md says why "
        "Flower's differential privacy does not fit sums of gradients"
    )

# Device refused: this client cannot take part as it is. -----------------------------------------

class DeviceRefused(HeadwaterError):
    """This client cannot take part as it is."""
class ModelMismatch(DeviceRefused):
    """A model has another layout than expected: other tensors, shapes or an other order.

    ``layout`` has the rows of the model that was expected (``common.model.mismatch``), if known.
    """
    remedy = (
        "give server and client the same task file and what it reads to build the model, such as "
        "a folder with its config, and the same --batch-norm and --frozen-dtype"
    )
    def __init__(self, message: str, *, remedy: str | None = None, layout: str = "") -> None:
        super().__init__(message, remedy=remedy)
        self.layout = layout
class LocalParametersMismatch(ModelMismatch):
    """Other parameters stay on the device than the server's run leaves there."""
    remedy = "start server and clients with the same --local-parameters"
class LocalParametersMissing(ModelMismatch):
    """A model file lacks the parameters that stayed on the devices."""
    remedy = (
        "add a device's own: load_model(path, task, local=FILE), or --local FILE; docs/model.md "
        "says where a device keeps them"
    )
class FrozenPartMismatch(ModelMismatch):
    """The frozen part of the task's model is not the one that a run, or an adapter, has."""
    remedy = "give the task the weights that the run was started with"
class AlgorithmMismatch(DeviceRefused):
    """The plan is for another client algorithm, or other arguments, than the device has."""
    remedy = "start server and clients with the same --client-algorithm and --algorithm-argument"
class TaskMismatch(DeviceRefused):
    """The device has another task than the run, or another file of it, and the run has masks."""
    remedy = (
        "install the same file of the task on the server and on all devices: under masks, all "
        "members of a session train the same code"
    )
class FeatureMissing(DeviceRefused):
    """The run uses a feature that is not on this side."""
    remedy = (
        "install the same version of headwater on both sides, and start both with the same "
        "--feature"
    )
class TaskNotInstalled(DeviceRefused):
    """The server's run has a task that this device does not have."""
    remedy = (
        "copy the task's file to the device and name it in [client.tasks] of client.toml; until "
        "then the device takes part in the runs of its other tasks"
    )
class TaskBundleRefused(TaskNotInstalled):
    """The server's task is one that this device's owner does not take, or is damaged."""
    remedy = "ask the operator to publish the task again"
class AggregatorRefused(DeviceRefused):
    """The server's run cannot count the sums of aggregators, or does not trust this one."""
    remedy = (
        "name the aggregator in --trusted-aggregators of the server above, or connect the devices "
        "to that server, without --upstream"
    )
class ProtocolMismatch(DeviceRefused):
    """The other side speaks another version of the protocol, or breaks its rules."""
    remedy = "install the same version of headwater on both sides"
class IdentityRefused(DeviceRefused):
    """The client's name is invalid, taken, or not the name in its certificate."""
    remedy = "give each device a --name of its own, the one its certificate was made for"
class CertificateRevoked(DeviceRefused):
    """The operator has revoked the device's certificate."""
    remedy = (
        "ask the operator for a new join token: `headwater-server enroll NAME`, then "
        "`headwater-client join`"
    )
class AuthorityMismatch(DeviceRefused):
    """The server showed another certificate authority than the one in the join token."""
    remedy = (
        "somebody may intercept the connection, or the server has a new authority: ask the "
        "operator for a new token, over another channel than this network"
    )
class JoinTokenUnknown(DeviceRefused):
    """This server never made the token, replaced or revoked it, or made it for another name."""
    remedy = "ask the operator for a new one: `headwater-server enroll NAME`"
class JoinTokenExpired(DeviceRefused):
    """The token has expired."""
    remedy = "ask the operator for a new one: `headwater-server enroll NAME`, with a longer --valid"
class JoinTokenUsed(DeviceRefused):
    """The token has enrolled a device; it is valid for one device only."""
    remedy = (
        "if that was not you, somebody else had the token: the operator should revoke the name. "
        "Ask for a new one: `headwater-server enroll NAME`"
    )

class PrivacyRequired(DeviceRefused):
    """The device's owner allows only rounds with noise, and the server plans one without."""
    remedy = "start the server with --privacy-epsilon, or this device without --privacy-budget"
class ExamplesForgotten(DeviceRefused):
    """The device no longer knows which of its examples the run has used."""
    remedy = (
        "restore the device's state folder from a backup; without it no epsilon bounds what the "
        "run shows of an example that is used again"
    )
class PrivacyBudgetSpent(DeviceRefused):
    """One more update would spend more privacy than the device's owner allows."""
    is_private = True  # the message says what the device has spent, also with other servers
    remedy = "the device takes part no longer; its owner may allow more with --privacy-budget"
class PrivacyBudgetElsewhere(DeviceRefused):
    """The privacy of the device's data was spent under another name, in the same state folder."""
    is_private = True
    remedy = "start the device under the name that has spent"

# Device away: the owner's settings keep the device away for a while. ----------------------------

class DeviceAway(HeadwaterError):
    """The owner's settings keep the device away; it connects again by itself."""
    remedy = "nothing needs to be done: the device connects again by itself"
class OutsideActiveHours(DeviceAway):
    """The device is outside the active hours that its owner set."""
class BytesUsedUp(DeviceAway):
    """The rest of the day's byte quota is too small for a round."""
class DeviceBusy(DeviceAway):
    """Another process of the device answers a message of the run, as training behind a deadline."""

# Update refused: drop this update; the round goes on without it. --------------------------------

class UpdateRefused(HeadwaterError):
    """This update must not enter the sum; the round goes on without it."""
class CorruptUpdate(UpdateRefused):
    """A message is malformed, or its digest, chunk order or framing is wrong."""
class FrozenPartMissing(UpdateRefused):
    """The device lost the frozen part of the model after it had it; it is sent again."""
    remedy = "look at the space and the rights of the device's state folder"
class OversizeUpdate(UpdateRefused):
    """More bytes arrived than the model's layout allows."""
class NonFiniteUpdate(UpdateRefused):
    """The vector, or a sum in the report, is NaN or infinite."""
class CountOutOfRange(UpdateRefused):
    """The report has counts that the plan cannot have led to."""
class OutlierUpdate(UpdateRefused):
    """The update's norm is far above those of the cohort."""
    remedy = "look at the device's data; if it is honest, set --beyond-norm clip or keep"
class EmptyUpdate(UpdateRefused):
    """The update was computed from no example: all of them were left out."""
    remedy = (
        "look at the device's data: every example that it tried raised an exception, or gave a "
        "loss or gradient of NaN or infinity"
    )
class NothingWeighed(EmptyUpdate):
    """Every example of the update has a weight of 0."""
    remedy = "look at what loss_sum counts: are all targets ignored (ignore_index, padding)?"
class LateUpdate(UpdateRefused):
    """The round's deadline passed before the update arrived."""
    remedy = "lengthen --deadline, or let the planner choose the quotas"
class PlanWithoutEarlier(UpdateRefused):
    """The plan or update follows on one of the same device that did not count."""
    remedy = "none needed: the device's next plan has the same examples again"
class BranchRefused(UpdateRefused):
    """The sum of the device's aggregator was refused, or the aggregator refused the device."""
    remedy = "look into the aggregator: it answers for the devices that are connected to it"
class StaleUpdate(UpdateRefused):
    """The update was computed at a model that is more steps old than --max-staleness allows."""
    remedy = "raise --max-staleness, or let each step have more updates: --buffer"
class TooFewOfModel(UpdateRefused):
    """Fewer masked updates are left of a model than a secure session needs."""
    remedy = (
        "none is needed: the device gets the newest model. With a larger --buffer fewer updates "
        "are late"
    )
class UnexpectedUpdate(UpdateRefused):
    """The update was replayed, never requested, or sent under another client's name."""
class WrongShare(UpdateRefused):
    """A share differs from its dealer's commitment; the holder that sent it is at fault."""
class SealBroken(UpdateRefused):
    """A sealed share does not open with the key of its dealer and holder."""

# Session refused: a device does not answer a message of a secure session. -----------------------

class SessionRefused(HeadwaterError):
    """A device does not answer a message of a secure session.

    The messages that it sent before reveal nothing of its update; ``client.secagg.checks`` lists
    the checks.
    """
class CohortTooSmall(SessionRefused):
    """The session has fewer than three members, or fewer than the device's own minimum."""
    remedy = "wait for more devices: from a sum of two, each learns the other's update"
class RosterRefused(SessionRefused):
    """The roster has a name or a key twice, or changes the device's own entry."""
class IdentityUnknown(SessionRefused):
    """A member of the session is not on the device's allow-list."""
    remedy = "add its line to the allow-list of every device, or keep it out of the run"
class SignatureRefused(SessionRefused):
    """A signature is missing, or is not that member's over exactly these bytes."""
    remedy = "find out whether the member or the server changed the keys on their way"
class BadPublicKey(SessionRefused):
    """A public key has the wrong length or low order, so that the agreed key would be no secret."""
class ThresholdTooLow(SessionRefused):
    """With this threshold and number of neighbours, too few members could open a secret."""
class ThresholdTooHigh(SessionRefused):
    """With this threshold and number of neighbours, expected dropouts often block the sum."""
class MaskingTooWeak(SessionRefused):
    """The server chose a mode, ring or clip bound below the device's own minimum."""
    remedy = (
        "start the server and all devices with the same --secure-aggregation; in active mode each "
        "device also needs --identity and --allow-list (`headwater-client identity`)"
    )
class TooLittleTime(MaskingTooWeak):
    """The plan gives less time than the device needs; the server asks for its speed again."""
class RingCanWrap(SessionRefused):
    """The sum of the whole cohort might not fit the ring."""
class SessionReplayed(SessionRefused):
    """The session is not newer than every session that the device has seen."""
class SessionMismatch(SessionRefused):
    """Other members were shown another model, roster or parameter set."""
class PlanMismatch(SessionRefused):
    """The session's parameters are for plans that differ from the device's own."""
    remedy = (
        "the server must give all devices of a round one local rate, precision and algorithm, and "
        "all must have the same file of the task"
    )
class WeightTooLarge(SessionRefused):
    """Most of the session's sum would be the device's own update."""
    remedy = "plan more alike quotas, invite more devices, or raise secure.max_share on the device"
class ComplaintIgnored(SessionRefused):
    """The session keeps a dealer whose share the device reported as bad."""
class MaskingRequired(SessionRefused):
    """The plan would show the server the device's own sums; the device's settings forbid it."""
    remedy = "start the server with --secure-aggregation, or this device without it"
class UpdateNotHeld(SessionRefused):
    """The device's process holds no update of this round; it may have been restarted since."""
class UpdateAlreadyMasked(SessionRefused):
    """The update was masked in an earlier session and may never be masked in another."""
    remedy = "train on new examples: two sums with one update in both differ by the dropouts"
class OutOfPhase(SessionRefused):
    """The device does not expect this message now."""
class SecretErased(SessionRefused):
    """The key was erased: its session has ended on this device."""
class SurvivorsRefused(SessionRefused):
    """The survivors did not all share keys, or are too few of the members that did."""
class BothSharesAsked(SessionRefused):
    """A member is named as survived and as dropped: both its shares would open its update."""
class SurvivorsChanged(SessionRefused):
    """The server sent a second survivor set in a session where the device answered one."""
class SurvivorsNotAgreed(SessionRefused):
    """Too few members signed the survivor set."""

# Round aborted: nothing was committed; the round may be tried again. ----------------------------

class RoundAborted(HeadwaterError):
    """The round was not committed: model, optimizer and places are as before it."""
class TooFewClients(RoundAborted):
    """Fewer clients answered than --min-clients."""
    remedy = "lower --min-clients, lengthen --deadline, or look at why the clients were refused"
class OutlierInRound(RoundAborted):
    """An update's norm is far above the cohort's median, which no earlier round had shown."""
    remedy = "none is needed: the round is repeated, now with the median known"
class TooFewSurvivors(RoundAborted):
    """Too few members are left in the session to open the masked sum."""
    remedy = (
        "the log says why devices left; the next attempt takes new examples. If they are slow, "
        "lengthen the phases' deadline"
    )
class DealerCheated(RoundAborted):
    """Correct shares of a device's secret do not open what the device committed to."""
    remedy = "the next rounds exclude the devices that are named: check what runs on them"
    def __init__(
        self, message: str, *, remedy: str | None = None, dealers: tuple[str, ...] = ()
    ) -> None:
        super().__init__(message, remedy=remedy)
        self.dealers = dealers
class NothingSummed(RoundAborted):
    """The weights of a round add up to 0: no device had an example that counts."""
    remedy = (
        "each device's own log says why: look at what loss_sum counts (are all targets ignored: "
        "ignore_index, padding?) and at the devices' data; lower --learning-rate if the model "
        "diverged"
    )
class FirstSumClipped(RoundAborted):
    """A run's first masked sum was clipped, at bounds that followed from no sum before."""
    remedy = (
        "none is needed: the round is repeated with wider bounds. If it recurs, scale the targets "
        "or the loss, as gradients of this size resolve poorly in a ring of few bits"
    )
class SumOutOfRange(RoundAborted):
    """A masked sum is larger than the plans allow; the masks hide which device is at fault."""
    remedy = (
        "a device breaks the protocol: the next rounds are divided into groups until it is named "
        "and left out. No more devices than secure.min_members cannot be divided: connect more"
    )

# State: the disk. -------------------------------------------------------------------------------

class StateError(HeadwaterError):
    """State on disk cannot be read or written."""
class CheckpointCorrupt(StateError):
    """The checkpoint cannot be read."""
    remedy = "restore it from a backup, or start a new run with another --out"
class CheckpointFailed(StateError):
    """The checkpoint cannot be written; the previous one is untouched."""
    remedy = "free space under --out and go on with --resume: the last committed round is kept"
    def __init__(self, message: str, *, remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy or self.remedy)  # --resume, whatever the disk says
class RunFolderGone(StateError):
    """Somebody has removed the files of a run while it went on."""
    remedy = "begin the run anew, with its --task, and leave its folder alone until it has ended"
class TermEnded(StateError):
    """This server may no longer serve its run: another one does, or may by now."""
    remedy = (
        "nothing that was acknowledged is lost: the run continues on the other server. Start this "
        "one again with --standby"
    )

# The run or a process ends. ---------------------------------------------------------------------

class PrivacySpent(HeadwaterError):
    """The run has spent its privacy: one more round would exceed --privacy-epsilon."""
    remedy = "the model of the last round is kept; a larger --privacy-epsilon with --resume goes on"
class TooFewPermitted(HeadwaterError):
    """Too few of the connected devices may take part in another round: their owners set limits."""
    remedy = (
        "the model of the last round is kept: lower --min-clients, add devices, or ask the owners "
        "for a larger --privacy-budget, and go on with --resume"
    )
class Diverged(HeadwaterError):
    """A step led to parameters that are not finite; the checkpoint before it is kept."""
    remedy = "lower --learning-rate, and go on from the checkpoint with --resume"
class OutOfMemory(HeadwaterError):
    """A micro-batch of one example does not fit in the memory that the device may use."""
    remedy = "give the device more memory, or train a smaller model"
class WorkerDied(HeadwaterError):
    """A process that computes simulated devices ended unexpectedly."""
    remedy = (
        "its own output is above; after SIGKILL the machine may have run out of memory: use "
        "fewer --workers. The rounds before are kept: go on with --resume"
    )

# Connection lost: retry later. ------------------------------------------------------------------

class ConnectionLost(HeadwaterError):
    """The other side cannot be reached."""
    remedy = "check the address and that the server runs"
class OlderTerm(ConnectionLost):
    """The server's term has ended: the device has met a later server of the same run."""
    remedy = "the device tries the next address of --server; end the server of the older term"
class EnrolmentClosed(ConnectionLost):
    """No server listens at the enrolment port."""
    remedy = (
        "the port is open while headwater-server runs and a join token exists that is neither used "
        "nor expired: check these, and the address in the token (`headwater-server enroll NAME "
        "--address HOST:PORT`)"
    )
class NoStream(ConnectionLost):
    """A connection to the server's port never opened a stream, as a stranger's does not."""
class TooManyAttempts(ConnectionLost):
    """The server, or its enrolment port, turned this address away for a while."""
    remedy = "wait a minute and try again"

# fmt: on


def _subclasses(root: type[HeadwaterError]) -> list[type[HeadwaterError]]:
    return [root, *(leaf for child in root.__subclasses__() for leaf in _subclasses(child))]


def error_of(code: str, message: str, *, remedy: str = "", lines: str = "") -> HeadwaterError:
    """Rebuild an error from the code and message that the other side sent.

    An unknown ``code`` gives a plain ``HeadwaterError`` that quotes it: versions may differ.
    Line breaks and control characters become spaces, so the text stays on one line of a log.
    ``remedy`` is the error's own; empty: that of its code.
    ``lines`` are signs to keep: a line break, if the other side is a process of one's own.
    """
    code, message, remedy = (
        "".join(sign if sign.isprintable() or sign in lines else " " for sign in text)
        for text in (code, message, remedy)
    )
    by_code = {leaf.__name__: leaf for leaf in _subclasses(HeadwaterError)}
    kind = by_code.get(code)
    if kind is None:
        return HeadwaterError(f"{code}: {message}", remedy=remedy or None)
    return kind(message, remedy=remedy or None)


def travelling(error: BaseException) -> tuple[str, str]:
    """Return the code and the message of an error as the other side may see them.

    The message of a private error, or of an exception that is not ours, may quote private data and
    is replaced.
    """
    if isinstance(error, HeadwaterError) and not error.is_private:
        return error.code, error.message
    return type(error).__name__, "the device keeps the details in its own log"
