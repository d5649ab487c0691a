"""The features and their rooms, and how much a plain run loads.

A feature is what a plain round does without. Its rooms are folders, and single files where it has
no more in a package. The numbers of ``LIMITS`` may only fall: write a lower one here.
"""

from __future__ import annotations

ROOMS: dict[str, tuple[str, ...]] = {
    "secagg": (
        *("common/secagg/", "client/secagg/", "client/masked_rounds/", "server/secagg/"),
        "client/enrolment/signing_identity.py",
    ),
    "privacy": ("common/privacy/", "client/privacy/", "server/privacy/"),
    "compression": ("common/compression/", "client/compression/", "server/compression/"),
    "local_training": (
        *("common/local_training/", "client/algorithms/", "client/local_training/"),
        *("server/local_training/", "simulation/vectorised/stacked_model.py"),
        *("simulation/vectorised/stacked_optimizer.py", "simulation/vectorised/stacked_steps.py"),
    ),
    "local_state": ("common/local_state/", "client/local_state/", "server/local_state/"),
    "robust": ("server/robust/",),
    "batch_scaling": ("server/batch_scaling/",),
    "frozen": ("common/frozen/", "client/frozen/"),
    "own_parameters": (
        *("common/own_parameters/", "client/own_parameters/", "server/own_parameters/"),
    ),
    "growing_data": ("client/growing_data/",),
    "offline": ("common/offline/", "client/offline/"),
    "overlap": ("common/overlap/", "client/overlap/"),
    "asynchronous": ("server/asynchronous/",),
    "tree": ("common/tree/", "server/tree/", "aggregator/"),
    "standby": ("server/standby/",),
    "succession": ("server/succession/",),
    "selection": ("server/selection/",),
    "tracking": ("server/tracking/",),
    "page": ("server/page/",),
    "enrolment": ("client/enrolment/", "server/enrolment/"),
    "energy": ("client/energy/",),
    "own_feature": ("common/own_feature/", "client/own_feature/", "server/own_feature/"),
    "evaluation": ("common/evaluation/", "client/evaluation/", "server/evaluation/"),
    "adaptation": ("client/adaptation/",),
    "alerts": ("server/alerts/",),
    "device_labels": ("server/device_labels/",),
    "task_bundles": ("client/task_bundles/", "server/task_bundles/"),
    "samples": ("server/samples/",),
    "statistics": ("common/statistics/", "client/statistics/", "server/statistics/"),
}

ALWAYS = {"energy", "tracking"}
"""What acts in each run as its settings are by default: a device gives less on battery, and the
server writes the TensorBoard log."""

KNOWS: dict[str, set[str]] = {
    "asynchronous": {"local_training", "offline", "overlap", "secagg"},
    "local_state": {"local_training", "own_feature"},
    "offline": {"local_training"},
    "own_feature": {"local_training"},
    "privacy": {"local_training", "secagg"},
    "secagg": {"compression", "frozen", "local_training", "privacy"},
    "standby": {"privacy"},
    "statistics": {"privacy"},
    "tree": {"energy", "enrolment", "frozen", "own_feature"},
}
"""The features that each imports, beside the core. Masks and noise know each other, and no other
two do: the ring must hold the noise (``server.secagg.parameters._encoding``), and each member's
share of the noise follows from the session's survivors (``common.privacy.noise_shares``).
Statistics know noise: what an example adds to them bounds it."""

# Applications, commands and services start features; so may the files at the top.
OUTER = (
    *("client/cli.py", "client/commands.py", "client/api.py", "client/operations/"),
    *("client/features.py", "client/plan_features.py", "client/node_features.py"),
    "server/rounds/features.py",
    "server/planning/features.py",
    *("server/cli.py", "server/serve.py", "server/app.py", "server/api.py", "server/__main__.py"),
    *("client/__main__.py", "server/features.py", "server/run_result.py", "server/run_sequence.py"),
)

LIMITS = {
    "modules, simulation": 200,
    "modules, server": 148,
    "modules, client": 142,
}
