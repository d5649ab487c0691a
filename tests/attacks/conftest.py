"""What several of the attacks are held against."""

import pytest

from tests.attacks.raw import honest_model


@pytest.fixture(scope="session")
def model() -> bytes:
    """Return the model that an honest device alone makes in one round."""
    return honest_model()
