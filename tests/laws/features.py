"""The features and their rooms, and how much of them the core still knows.

A feature is what a plain round does without. Its rooms are folders, or files that lie in a room of
the core until they move. The numbers of ``LIMITS`` may only fall: write a lower one here.
"""

from __future__ import annotations

ROOMS: dict[str, tuple[str, ...]] = {
    "secagg": (
        *("common/secagg/", "client/secagg/", "server/secagg/"),
        "client/masked_rounds/",
        "server/secagg/masked_rounds.py",
        "client/enrolment/signing_identity.py",
    ),
    "privacy": (
        *("common/privacy/", "common/privacy_terms.py", "client/privacy/", "server/privacy/"),
    ),
    "compression": (
        *("common/compression/", "common/compression_terms.py", "client/compression/"),
        "server/compression/",
    ),
    "local_training": (
        *("common/optimizers/local_optimizer.py", "common/optimizers/local_terms.py"),
        "common/local_training/",
        "client/local_training/",
        *("client/algorithms/lookup.py", "client/algorithms/trial.py"),
        *("server/local_training/", "simulation/vectorised/stacked_model.py"),
        *("simulation/vectorised/stacked_optimizer.py", "simulation/vectorised/stacked_steps.py"),
    ),
    "robust": ("server/robust/",),
    "frozen": ("common/model/adapter.py", "client/frozen/"),
    "own_parameters": (
        *("common/own_parameters/", "client/own_parameters/", "server/own_parameters/"),
    ),
    "growing_data": ("client/growing_data/",),
    "offline": ("common/offline/", "client/offline/"),
    "asynchronous": ("server/asynchronous/", "server/flower/dispatched_plans.py"),
    "tree": (
        *("server/tree/", "server/flower/branches.py", "common/tree/"),
        "aggregator/",
    ),
    "standby": ("server/standby/",),
    "succession": ("server/succession/", "server/run_sequence.py"),
    "selection": ("server/selection/",),
    "tracking": ("server/tracking/",),
    "page": ("server/page/",),
    "same_data": ("client/same_data/", "server/same_data/"),
    "enrolment": ("client/enrolment/", "server/enrolment/"),
    "energy": ("client/energy/",),
    "own_feature": ("common/own_feature/", "client/own_feature/", "server/own_feature/"),
}

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
    "imports, client": 6,
    "imports, common": 5,
    "imports, server": 13,
    "reads of settings": 0,
    "modules, simulation": 273,
    "modules, server": 182,
    "modules, client": 176,
}
