"""Which data a device's budget is for: no other name of the device has another one for them.

The file of what a name has spent lists the data that it was spent on, by their place and by a
digest of a few examples, which a copy elsewhere shares. A device whose owner sets a limit looks at
the files of all names in its state folder.
"""

from __future__ import annotations

from pathlib import Path
from weakref import WeakKeyDictionary

from headwater.client.privacy.budget import SUFFIX, SpentFile
from headwater.client.same_data.data_share import data_share
from headwater.client.trainer.trainer import Trainer
from headwater.client.training.context import Identity
from headwater.common.errors import PrivacyBudgetElsewhere
from headwater.common.settings.schema import PrivacySettings

_data: WeakKeyDictionary[Trainer, dict[Identity, tuple[str, ...]]] = WeakKeyDictionary()


def data_of(trainer: Trainer, identity: Identity) -> tuple[str, ...]:
    """Return what names a device's data, as this process opened them first."""
    known = _data.setdefault(trainer, {})
    if identity not in known:
        where = trainer.task_code.split()[0] if identity.data is None else identity.data.resolve()
        place = f"{where}, part {identity.part} of {identity.num_parts}"
        digest = data_share(identity, trainer.examples(identity), run_seed=0).digest
        known[identity] = (place,) if digest is None else (place, digest)
    return known[identity]


def check_start(
    trainer: Trainer, identity: Identity, folder: Path, chosen: PrivacySettings
) -> None:
    """Check that a device with a limit may begin: it knows what was spent on its data.

    Raises:
        PrivacyBudgetElsewhere: another name has spent on them.
        StateError: a file of what was spent is lost, or cannot be read.
    """
    if chosen.budget is None:
        return
    own = set(data_of(trainer, identity))
    # Also by the lock of a file that is lost: nobody knows what that name has spent, and on what.
    names = {path.name.rpartition(SUFFIX)[0] for path in folder.glob(f"*{SUFFIX}*")}
    for name in sorted(names | {identity.name}):
        spent = SpentFile.of(folder, name, chosen).read()
        if name != identity.name and own & set(spent.data):
            raise PrivacyBudgetElsewhere(
                f"{identity.name}: the privacy of its data was spent under the name {name}, and a "
                f"budget is for the data ({folder})",
                remedy=f"start the device with --name {name}, whose file counts on; or give this "
                "name other data",
            )
