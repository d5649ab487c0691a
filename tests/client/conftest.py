"""What several of the devices' tests begin with."""

from collections.abc import Iterator

import pytest

from headwater.client.training.trainer import resident_of


@pytest.fixture
def a_process_of_its_own() -> Iterator[None]:
    """Begin without updates, and without what another test learned of the task."""
    resident_of.cache_clear()
    yield
    resident_of.cache_clear()
