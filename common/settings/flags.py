"""The command-line flags that more than one command has, each defined once.

A flag that is not given is ``None`` and leaves the settings file's value, or the default, in place;
``headwater.common.settings.schema.sources`` says where each lies in the settings.
Nothing heavy is imported here: ``--help`` must come at once.
"""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

import typer

TASK = "Task"
TRAINING = "Training"
PLAN = "What each client does"
RUN = "The run"
SECURE = "Secure aggregation (docs/security.md)"
TLS = "TLS (all three files on both sides, or none on loopback)"

Config = Annotated[
    Path | None,
    typer.Option("--config", help="TOML settings file; flags override it.", rich_help_panel=RUN),
]
TaskSpec = Annotated[
    str | None,
    typer.Option(
        "--task",
        metavar="FILE.py:Class",
        help="The task: its model, its data and its loss. A file of yours.",
        rich_help_panel=TASK,
    ),
]
Partition = Annotated[
    str | None,
    typer.Option(
        "--partition",
        metavar="KIND",
        help="Deal one data set out: iid, dirichlet:ALPHA, labels:N, column:NAME, quantity:SIGMA "
        "(docs/data.md). [default: task, as the task itself splits it]",
        rich_help_panel=TASK,
    ),
]
ExamplesPerDevice = Annotated[
    int | None,
    typer.Option(
        "--examples-per-device",
        help="With --partition: each device draws so many for itself, and devices share examples. "
        "Not given: each example is on one device.",
        rich_help_panel=TASK,
    ),
]
Check = Annotated[
    bool | None,
    typer.Option(
        "--check/--no-check",
        help="Try on real examples that the task's loss is a sum. [default: check]",
        rich_help_panel=TASK,
    ),
]
ReplaceBatchNorm = Annotated[
    bool | None,
    typer.Option(
        "--replace-batch-norm/--keep-batch-norm",
        help="Put GroupNorm in place of BatchNorm, which mixes examples. Same on both sides.",
        rich_help_panel=TASK,
    ),
]
InitialModel = Annotated[
    Path | None,
    typer.Option(
        "--initial-model",
        help="Start from this model.safetensors instead of the seed.",
        rich_help_panel=TASK,
    ),
]
Rounds = Annotated[
    int | None,
    typer.Option("--rounds", help="Server steps to take. [default: 30]", rich_help_panel=TRAINING),
]
Seed = Annotated[
    int | None,
    typer.Option(
        "--seed",
        help="Of the model's start, the partition, the order of examples, the cohorts. "
        "[default: 0]",
        rich_help_panel=TRAINING,
    ),
]
OptimizerName = Annotated[
    str | None,
    typer.Option(
        "--optimizer",
        help="Any optimizer of torch.optim: sgd, adam, adamw, ... [default: sgd]",
        rich_help_panel=TRAINING,
    ),
]
LearningRate = Annotated[
    float | None,
    typer.Option("--learning-rate", help="Of the server. [default: 0.1]", rich_help_panel=TRAINING),
]
OptimizerArgument = Annotated[
    list[str] | None,
    typer.Option(
        "--optimizer-argument",
        metavar="KEY=VALUE",
        help="Another argument of the optimizer, e.g. momentum=0.9. May be repeated.",
        rich_help_panel=TRAINING,
    ),
]
ScheduleName = Annotated[
    str | None,
    typer.Option(
        "--schedule",
        help="A scheduler of torch.optim.lr_scheduler, e.g. CosineAnnealingLR.",
        rich_help_panel=TRAINING,
    ),
]
ScheduleArgument = Annotated[
    list[str] | None,
    typer.Option(
        "--schedule-argument",
        metavar="KEY=VALUE",
        help="An argument of the scheduler, e.g. T_max=100. May be repeated.",
        rich_help_panel=TRAINING,
    ),
]
WarmupRounds = Annotated[
    int | None,
    typer.Option(
        "--warmup-rounds", help="Rounds of linear warmup. [default: 0]", rich_help_panel=TRAINING
    ),
]
BatchScaling = Annotated[
    str | None,
    typer.Option(
        "--batch-scaling",
        help="Let the rate grow with the batch that a round gathers, over --effective-batch-size "
        "(or --tokens-per-update): none, linear or sqrt. [default: none]",
        rich_help_panel=TRAINING,
    ),
]
AccumulationSteps = Annotated[
    int | None,
    typer.Option(
        "--accumulation-steps",
        help="K, micro-batches per update, the same for all. Not given: the planner decides by "
        "each device's speed.",
        rich_help_panel=PLAN,
    ),
]
MicroBatchSize = Annotated[
    int | None,
    typer.Option(
        "--micro-batch-size",
        help="Examples per micro-batch. Not given: by each device's memory (16 with a set K).",
        rich_help_panel=PLAN,
    ),
]
EffectiveBatchSize = Annotated[
    int | None,
    typer.Option(
        "--effective-batch-size",
        help="Examples per round over the whole cohort, which the planner shares out. "
        "[default: 512]",
        rich_help_panel=PLAN,
    ),
]
TokensPerUpdate = Annotated[
    int | None,
    typer.Option(
        "--tokens-per-update",
        help="The same in tokens, or whatever the task's weight counts: examples follow from the "
        "mean weight of an example.",
        rich_help_panel=PLAN,
    ),
]
FollowNoiseScale = Annotated[
    bool | None,
    typer.Option(
        "--follow-noise-scale/--no-follow-noise-scale",
        help="Start from --effective-batch-size and gather what the gradient noise scale says "
        "(docs/batch.md). [default: no]",
        rich_help_panel=PLAN,
    ),
]
MaxEffectiveBatchSize = Annotated[
    int | None,
    typer.Option(
        "--max-effective-batch-size",
        help="The most examples per round that the noise scale may ask for. [default: 65536]",
        rich_help_panel=PLAN,
    ),
]
LocalSteps = Annotated[
    int | None,
    typer.Option(
        "--local-steps",
        help="H > 1: each client takes H steps of SGD of its own per round (use a server "
        "learning rate of 1). [default: 1]",
        rich_help_panel=PLAN,
    ),
]
LocalLearningRate = Annotated[
    float | None,
    typer.Option(
        "--local-learning-rate", help="Of those local steps. [default: 0.1]", rich_help_panel=PLAN
    ),
]
Precision = Annotated[
    str | None,
    typer.Option(
        "--precision",
        help="Of the forward pass: float32 or bfloat16. Sums are float32. [default: float32]",
        rich_help_panel=PLAN,
    ),
]
CohortSize = Annotated[
    int | None,
    typer.Option(
        "--cohort-size", help="Clients invited per round. Not given: all.", rich_help_panel=RUN
    ),
]
MinClients = Annotated[
    int | None,
    typer.Option(
        "--min-clients",
        help="Clients without which no round starts or counts. [default: 1]",
        rich_help_panel=RUN,
    ),
]
InviteWithin = Annotated[
    int | None,
    typer.Option(
        "--invite-within",
        metavar="ROUNDS",
        help="A client that is too slow for the deadline is still asked once in so many rounds. "
        "[default: 10]",
        rich_help_panel=RUN,
    ),
]
Weighting = Annotated[
    str | None,
    typer.Option(
        "--weighting",
        help="What a client's update weighs: samples, what it was summed over, or dataset, the "
        "examples that the client owns. [default: samples]",
        rich_help_panel=RUN,
    ),
]
Deadline = Annotated[
    float | None,
    typer.Option(
        "--deadline",
        metavar="SECONDS",
        help="A round closes then with those who have answered. Not given: wait for all.",
        rich_help_panel=RUN,
    ),
]
HeldOut = Annotated[
    bool | None,
    typer.Option(
        "--evaluate-on-devices/--no-evaluate-on-devices",
        help="Devices hold out a tenth of their examples and test on it. [default: no]",
        rich_help_panel=RUN,
    ),
]
EvaluateEvery = Annotated[
    int | None,
    typer.Option(
        "--evaluate-every", help="Rounds between tests. [default: 1]", rich_help_panel=RUN
    ),
]
Threads = Annotated[
    int | None,
    typer.Option(
        "--threads",
        help="Of torch. The same number gives the same bits. Not given: 1 in the simulator, all "
        "usable cores elsewhere.",
        rich_help_panel=RUN,
    ),
]
Out = Annotated[
    Path | None,
    typer.Option(
        "--out",
        metavar="DIR",
        help="Folder for model, metrics, plot and checkpoint. [default: runs/TASK-TIME]",
        rich_help_panel=RUN,
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume",
        help="Go on from the checkpoint in --out, exactly, with the settings that are there.",
        rich_help_panel=RUN,
    ),
]
Verbose = Annotated[
    bool, typer.Option("--verbose", "-v", help="Log what is done.", rich_help_panel=RUN)
]
LogFormat = Annotated[
    Literal["text", "json"] | None,
    typer.Option(
        "--log-format",
        metavar="text|json",
        help="json: all that is logged or printed is one JSON object a line, on the standard "
        "error stream. [default: text]",
        rich_help_panel=RUN,
    ),
]
SecureAggregation = Annotated[
    str | None,
    typer.Option(
        "--secure-aggregation",
        metavar="off|semi-honest|active",
        help="Show the server the cohort's sum and no device's update; active: with identities, "
        "against a server that cheats. [default: off]",
        rich_help_panel=SECURE,
    ),
]
RingBits = Annotated[
    int | None,
    typer.Option(
        "--ring-bits",
        metavar="16|32",
        help="Of a masked coordinate; 16 halves the traffic and rounds coarser. [default: 32]",
        rich_help_panel=SECURE,
    ),
]
MinMembers = Annotated[
    int | None,
    typer.Option(
        "--min-members",
        help="Devices that a secure session has at least, 3 or more. [default: 3]",
        rich_help_panel=SECURE,
    ),
]
TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", help="The authority's certificate (PEM).", rich_help_panel=TLS),
]
TlsCertificate = Annotated[
    Path | None,
    typer.Option("--tls-certificate", help="This side's certificate (PEM).", rich_help_panel=TLS),
]
TlsKey = Annotated[
    Path | None,
    typer.Option("--tls-key", help="This side's private key (PEM).", rich_help_panel=TLS),
]
Insecure = Annotated[
    bool | None,
    typer.Option(
        "--insecure",
        help="Plain text beyond loopback: anyone on the way may read, change and join.",
        rich_help_panel=TLS,
    ),
]
Metrics = Annotated[
    str | None,
    typer.Option(
        "--metrics",
        metavar="HOST:PORT",
        help="Show Prometheus metrics at http://HOST:PORT/metrics, in plain text: beyond loopback "
        "it needs --insecure. Not given: there are none.",
        rich_help_panel=RUN,
    ),
]
