"""The commands that have a setting's flag, and the headings of --help-all that it stands under."""

from __future__ import annotations

# The commands that have a flag; a branch names them for its fields. `check` and `doctor` take every
# flag of the client, so that its command line can be examined as it is.
RUNS = "server simulate"
DEVICE = "client check doctor"
ALL = f"{RUNS} {DEVICE}"

# The headings of --help-all, in this order.
TASK = "Task"
DEVICE_PANEL = "This device"
SERVER = "The server"
SIMULATION = "Simulation"
TRAINING = "Training"
PLAN = "What each client computes"
RUN = "The run"
SECURE = "Secure aggregation (docs/security.md)"
PRIVACY = "Differential privacy (docs/privacy.md)"
TLS = "TLS (all three files on both sides, or none on loopback)"
PANELS = (TASK, DEVICE_PANEL, SERVER, SIMULATION, TRAINING, PLAN, RUN, SECURE, PRIVACY, TLS)
