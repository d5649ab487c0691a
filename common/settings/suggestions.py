"""Suggests what was meant by an unknown flag of a command, or keyword of the Python API."""

from __future__ import annotations

from difflib import get_close_matches

from headwater.common.settings.introspection import all_settings, keyword_of
from headwater.common.settings.sources import replacement_of

SET = "--set"
"""A flag that each command with settings has."""
OF_CLIENT = "--server"
"""A flag that the client has alone."""
MAIN_COMMANDS = ("server", "client", "simulate")


# Words of training scripts and of other tools, and what stands for each here.
_BATCH = (
    "--effective-batch-size is what one step sums over all devices, and --micro-batch-size what "
    "one pass holds; both are planned if they are not set"
)
_EPOCHS = "--rounds N sets the length of a run; --local-epochs N trains longer between two rounds"
_CPU = "all training is on the CPU; --threads N sets the threads"
_MODEL = "the model is what new_model of the task returns: --task FILE.py:CLASS"
_CLIENTS = "--clients N simulates N devices; --min-clients N is how many a server waits for"
ELSEWHERE = {
    "--batch": _BATCH,
    "--batch-size": _BATCH,
    "--cuda": _CPU,
    "--device": _CPU,
    "--epochs": _EPOCHS,
    "--gpu": _CPU,
    "--gpus": _CPU,
    "--leave": "--once ends the device with the run, as --leave did",
    "--model": _MODEL,
    "--model-name": _MODEL,
    "--num-clients": _CLIENTS,
    "--num-epochs": _EPOCHS,
    "--port": "an address has its port: --listen HOST:PORT of headwater-server, --server HOST:PORT "
    "of headwater-client; `headwater-server init` writes it into server.toml as server.listen",
}

_PASS = "effective_batch_size=N is what one step sums over all clients, micro_batch_size=N one pass"
_LENGTH = "rounds=N is the number of steps; local_epochs=N trains longer between two of them"
_HERE = "all training is on the CPU: leave it out; threads=N sets torch's"
_STOP = "stop_when='accuracy' or 'loss', with patience=N evaluations, ends a run early"
_ARGUMENT = "give it to the optimizer: optimizer_argument={'NAME': VALUE}"
_CLIP = "norm_multiple=N bounds a client's norm, privacy_clip=C clips it for privacy"
# Keywords of Lightning, accelerate, skorch, scikit-learn and Flower: ours, or what to do instead.
RENAMED = {
    "clients": "num_clients n_clients num_partitions num_supernodes nodes",
    "rounds": "num_rounds n_rounds steps max_steps num_server_rounds",
    "examples": "dataset train_dataset train_data trainset train_set dataloader train_dataloader "
    "train_dataloaders train_loader X",
    "test": "test_dataset test_data testset test_set val val_dataset validation_data valid_dataset "
    "val_dataloaders val_loader test_loader eval_dataset",
    "loss": "criterion loss_fn loss_function",
    "model": "net module network",
    "metrics": "metric",
    "seed": "random_state random_seed",
    "observer": "callbacks callback on_round logger",
    "out": "output_dir save_dir default_root_dir",
    "threads": "num_threads n_jobs",
    "workers": "num_workers",
    "schedule": "scheduler lr_scheduler",
    "algorithm": "strategy",
    "progress": "verbose",
}
INSTEAD = {
    _PASS: "batch batch_size train_batch_size",
    _LENGTH: "epochs num_epochs max_epochs n_epochs",
    _HERE: "device devices accelerator cuda gpu gpus use_cuda",
    _STOP: "early_stopping early_stop",
    _ARGUMENT.replace("NAME", "momentum"): "momentum",
    _ARGUMENT.replace("NAME", "weight_decay"): "weight_decay",
    _ARGUMENT.replace("NAME", "betas"): "betas",
    _CLIP: "grad_clip clip_grad_norm gradient_clip_val max_grad_norm",
    "give examples=[DATA_SET, ...], one for each client": "client_fn client_datasets",
    "cohort_size=N is how many clients a round invites": "fraction_fit fraction_train",
    "use accumulation_steps=K": "gradient_accumulation_steps accumulate_grad_batches",
    "give headwater.Task(..., collate=FUNCTION) as the task": "collate_fn collate",
}


def flag_hint(flag: str, own: list[str]) -> str:
    """Return what to write in place of an unknown flag, as a sentence; "" if nothing is near.

    Of a flag that other commands have, or nearly have, these are named. ``own`` are the flags of
    the command that was called. One without settings has flags of its own, which no flag of another
    command comes near to.
    """
    others: dict[str, set[str]] = {}
    for setting in all_settings().values():
        for name in filter(None, (*setting.flag.split("/"), setting.alias)):
            others.setdefault(name, set()).update(setting.commands.intersection(MAIN_COMMANDS))
    if flag not in others and (replacement := replacement_of(flag)):
        return replacement
    if flag in ELSEWHERE:
        return f" {ELSEWHERE[flag][0].upper()}{ELSEWHERE[flag][1:]}."
    known = (*others, *own) if SET in own else (*(others.keys() & {flag}), *own)
    names = {name.removeprefix("--"): name for name in known if others.get(name, own)}
    near = get_close_matches(flag.removeprefix("--"), names, n=1)
    if not near:
        return ""
    found = names[near[0]]
    question = "" if found == flag else f" Did you mean '{found}'?"
    if found in own:
        return question
    where = " and ".join(f"headwater-{name}" for name in sorted(others[found]))
    why = ": a device's data stays on the device" if found == "--data" else ""
    if "client" not in others[found] and OF_CLIENT in own:
        why = ". Whoever runs the server sets it there, and the devices follow: leave it out here"
    return f"{question} {found} is an option of {where}{why}."


def keyword_hint(word: str, names: list[str], command: str) -> str:
    """Return what an unknown keyword probably means; "" if nothing is near."""
    for ours, words in RENAMED.items():
        if word in words.split() and ours in names:
            return f": it is {ours} here"
    for instead, words in INSTEAD.items():
        if word in words.split() and "rounds" in names:
            return f": {instead}"
    if meant := ELSEWHERE.get(f"--{word.replace('_', '-')}"):
        return f": {meant}"
    for setting in all_settings().values():
        if setting.commands and command not in setting.commands:
            continue
        if word == keyword_of(setting.alias):
            return f"; did you mean {keyword_of(setting.flag)}?"
        if word in (keyword_of(setting.flag), setting.key.rpartition(".")[2]):
            if setting.commands:
                return f"; did you mean {keyword_of(setting.flag)}?"
            return f"; set it by its key: settings={{{setting.key!r}: ...}}"
    near = get_close_matches(word, names, n=1)
    return f"; did you mean {near[0]}?" if near else ""
