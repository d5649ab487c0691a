"""Where a device's residuals are kept: in files, in memory, or in the context of a Flower node."""

from __future__ import annotations

import contextlib
import mmap
import re
import time
from collections.abc import Callable
from pathlib import Path

from headwater.client.flower.request import RESIDUAL, DeviceRequest
from headwater.client.flower.state_file import STATE
from headwater.common.flower import records
from headwater.common.settings.schema import ClientSettings
from headwater.common.system.atomic_file import OWNER_ONLY, atomic_writer, make_private_folder

# A file that has not been written for so long belongs to a run that ended, as in the spool.
STALE_SECONDS = 7 * 86_400.0
SLOTS = (0, 1, 2)
NAME_PATTERN = r"-\d+\.residual-[012](\.part)?"


class ResidualFiles:
    """Files in a folder, which only their owner may read: they hold sums of gradients."""

    def __init__(
        self,
        folder: Path,
        *,
        name: str,
        run_id: int,
        is_durable: bool = True,
        wall_clock: Callable[[], float] = time.time,
    ) -> None:
        """``is_durable`` forces each write to the disk, and removes old files of other runs."""
        self.where = str(folder / f"{name}-{run_id}.residual")
        self._folder, self._name, self._run_id = folder, name, run_id
        self._is_durable = is_durable
        self._wall_clock = wall_clock

    def path(self, slot: int) -> Path:
        """Return the file of a slot."""
        return self._folder / f"{self._name}-{self._run_id}.residual-{slot}"

    def read(self, slot: int) -> memoryview | None:
        """Map a file into memory, so that its pages are read as they are needed."""
        try:
            with self.path(slot).open("rb") as file:
                return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))
        except FileNotFoundError:
            return None
        except ValueError:  # an empty file cannot be mapped
            return memoryview(b"")

    def write(self, slot: int, head: bytes, values: memoryview) -> None:
        path = self.path(slot)
        make_private_folder(path.parent)
        # Once in a run, and not by simulated devices, thousands of which share a run's folder.
        if self._is_durable and not path.exists():
            self._remove_stale()
        writer = atomic_writer(path, mode=OWNER_ONLY, is_durable=self._is_durable)
        with writer as part, part.open("wb") as file:
            file.write(head)
            file.write(values)

    def remove(self, slot: int) -> None:
        with contextlib.suppress(OSError):
            self.path(slot).unlink(missing_ok=True)

    def _remove_stale(self) -> None:
        """Remove old files of this device's other runs, each 4 bytes per parameter."""
        is_own = re.compile(re.escape(self._name) + NAME_PATTERN).fullmatch
        # A device may be away for longer, and this run's residual is still to be sent.
        current = {self.path(slot).name for slot in SLOTS}
        for path in self._folder.iterdir():
            if path.name in current or not is_own(path.name):
                continue
            if self._wall_clock() - path.stat().st_mtime > STALE_SECONDS:
                path.unlink(missing_ok=True)


class ResidualsByCall:
    """Entries that functions load, save and delete: of a simulation, or a node's context."""

    def __init__(
        self,
        where: str,
        *,
        load: Callable[[int], bytes | None],
        save: Callable[[int, bytes], None],
        delete: Callable[[int], object],
    ) -> None:
        self.where = where
        self._load, self._save, self._delete = load, save, delete

    def read(self, slot: int) -> memoryview | None:
        data = self._load(slot)
        return None if data is None else memoryview(data)

    def write(self, slot: int, head: bytes, values: memoryview) -> None:
        self._save(slot, head + bytes(values))

    def remove(self, slot: int) -> None:
        self._delete(slot)


def residual_slots_of(request: DeviceRequest) -> ResidualFiles | ResidualsByCall:
    """Return where the device keeps what its compressed updates left out.

    As ``local_store_of``: in files of its state folder or, for a simulated device without one, in
    the context of its node.
    """
    context, name, is_simulated = request.context, request.identity.name, request.is_simulated
    folder = context.node_config.get(STATE)
    if folder is None and is_simulated:
        return ResidualsByCall(
            f"{name}: the node's entry {RESIDUAL}",
            load=lambda slot: records.load_bytes(context, f"{RESIDUAL}-{slot}"),
            save=lambda slot, data: records.save_bytes(context, f"{RESIDUAL}-{slot}", data),
            delete=lambda slot: records.delete_state(context, f"{RESIDUAL}-{slot}"),
        )
    if folder is not None and is_simulated:  # the run's own folder
        return ResidualFiles(Path(str(folder)), name=name, run_id=0, is_durable=False)
    path = ClientSettings().state_folder if folder is None else Path(str(folder))
    return ResidualFiles(path, name=name, run_id=context.run_id)
