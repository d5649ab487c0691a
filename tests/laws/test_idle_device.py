"""What a device that waits for its next round does not hold: modules that it has no use for."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]

# What headwater-client imports before it connects, where its settings name no files of TLS.
PLAIN_DEVICE = """
import json, sys
import client.absence, client.app, client.cli, client.device, client.enrolment, client.limits
import client.node, client.resident, client.uplink
import common.console, common.tls
json.dump(sorted(sys.modules), sys.stdout)
"""

# Each a megabyte or half of one; see client_memory in benchmarks/RESULTS.md.
UNUSED = {"cryptography.x509", "psutil", "client.secure_session", "client.parked", "torch._dynamo"}


def test_a_device_in_clear_imports_neither_x509_nor_psutil_nor_a_secure_session() -> None:
    done = subprocess.run(
        [sys.executable, "-c", PLAIN_DEVICE], cwd=ROOT, capture_output=True, text=True, check=True
    )

    assert UNUSED.isdisjoint(json.loads(done.stdout))
