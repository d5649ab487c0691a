"""What several of the devices' tests begin with."""

from collections.abc import Iterator

import pytest

from headwater.client.algorithms.run_trainer import trainer_of


@pytest.fixture
def a_process_of_its_own() -> Iterator[None]:
    """Begin without updates, and without what another test learned of the task."""
    trainer_of.cache_clear()
    yield
    trainer_of.cache_clear()
