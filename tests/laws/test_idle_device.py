"""What a device that waits for its next round does not hold: modules that it has no use for."""

import json
from pathlib import Path

import pytest

from tests.commands import python

ROOT = Path(__file__).parents[2]

# What headwater-client imports before it connects, where its settings name no files of TLS.
PLAIN_DEVICE = """
import json, sys
import headwater.client.app, headwater.client.cli
import headwater.client.device.hardware, headwater.client.energy.time_share
import headwater.client.enrolment.signing_identity, headwater.client.flower.node
import headwater.client.memory.process_limits, headwater.client.trainer.trainer
import headwater.client.transport.lasting_connection
import headwater.common.system.console, headwater.common.transport.tls
json.dump(sorted(sys.modules), sys.stdout)
"""

# Each a megabyte or half of one; see client_memory in benchmarks/RESULTS.md.
UNUSED = {
    "cryptography.x509",
    "psutil",
    "headwater.client.secagg.session",
    "headwater.client.masked_rounds.suspended_updates",
    "torch._dynamo",
}


@pytest.mark.slow
def test_a_device_in_clear_imports_neither_x509_nor_psutil_nor_a_secure_session() -> None:
    assert UNUSED.isdisjoint(json.loads(python("-c", PLAIN_DEVICE).stdout))
