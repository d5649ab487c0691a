"""A device's share of a data set that is there once for all of them: a view, no copy."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

if TYPE_CHECKING:
    from headwater.common.task import Examples


class Rows:
    """Some examples of a data set, by their positions in it.

    ``torch.utils.data.Subset`` does the same with positions that are Python numbers. These are an
    array, which may itself be a view of one that all devices share; so a device costs a few hundred
    bytes, and ``headwater.common.task.batch_of`` takes a micro-batch out of a ``TensorDataset`` at once.
    """

    def __init__(self, whole: Examples, positions: NDArray[np.int64]) -> None:
        self.whole = whole
        self.positions = positions

    def __len__(self) -> int:
        return len(self.positions)

    def __getitem__(self, position: int) -> Any:
        return self.whole[int(self.positions[position])]

    def __getitems__(self, positions: Sequence[int]) -> Sequence[Any]:
        chosen: list[int] = self.in_whole(positions).tolist()
        fetch_all = getattr(self.whole, "__getitems__", None)
        if fetch_all is not None:
            return list(fetch_all(chosen))
        return [self.whole[position] for position in chosen]

    def in_whole(self, positions: Sequence[int] | NDArray[np.int64]) -> NDArray[np.int64]:
        """Return where these examples lie in the whole data set, as an array of its own."""
        return self.positions[np.asarray(positions, dtype=np.int64)]
