"""The saved model: its record, loading it as a plain module, and the files that are refused."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import headwater
from headwater.common.errors import ModelMismatch, SettingsError, UnknownTask
from headwater.common.model.parameters import build_model
from headwater.common.model.trained_model import MODEL, ModelRecord, load_model, read_model
from headwater.common.settings.keywords import Objects
from headwater.common.settings.schema import Settings
from headwater.server.rounds.model_files import recorded_settings, save_model
from tests.tasks import TwoLayers

TASK = "tests/tasks.py:TwoLayers"


class Pictures(TwoLayers):
    """A model with BatchNorm, with a buffer that is not saved and drawn at random."""

    channels = 8

    def new_model(self) -> nn.Module:
        model = nn.Sequential(
            nn.Conv2d(3, self.channels, 1),
            nn.Sequential(nn.BatchNorm2d(self.channels), nn.ReLU()),
            nn.Flatten(),
            nn.BatchNorm1d(4 * self.channels, affine=False),
            nn.Linear(4 * self.channels, 2),
            nn.Dropout(0.5),
        )
        model.register_buffer("noise", torch.rand(3), persistent=False)
        return model


class WiderPictures(Pictures):
    channels = 16


def saved(folder: Path, task: TwoLayers, *, name: str | None = TASK, **changes: Any) -> Path:
    settings = Settings.model_validate({"task": name, "seed": 3, **changes})
    image = build_model(task, seed=settings.seed, batch_norm="group")
    image.values_P.uniform_(generator=torch.Generator().manual_seed(9))
    save_model(folder / MODEL, image, settings, round_number=7)
    return folder / MODEL


def outputs(model: nn.Module) -> Tensor:
    pictures = torch.rand(2, 3, 2, 2, generator=torch.Generator().manual_seed(1))
    result: Tensor = model(pictures)
    return result.detach()


def test_the_record_can_be_read_without_headwater(tmp_path: Path) -> None:
    saved(tmp_path, Pictures(), optimizer={"name": "adam"})
    with safe_open(tmp_path / MODEL, framework="pt") as opened:
        metadata = opened.metadata()
    assert metadata["format"] == "pt"
    assert metadata["task"] == TASK
    assert metadata["rounds"] == "7"
    assert metadata["headwater"] == headwater.__version__
    assert metadata["torch"] == torch.__version__
    assert json.loads(metadata["settings"])["optimizer"]["name"] == "adam"
    assert json.loads(metadata["replaced_layers"])["1.0"] == {
        "num_groups": 8,
        "num_channels": 8,
        "eps": 1e-5,
        "affine": True,
    }
    assert len(metadata["layout_digest"]) == 64


def test_the_record_comes_back_as_it_was(tmp_path: Path) -> None:
    record = ModelRecord(
        task=TASK,
        settings={"seed": 1},
        rounds=2,
        headwater="9",
        torch="8",
        layout_digest="7",
        best={"metric": "test_loss", "value": 0.5, "round": 2},
    )
    assert ModelRecord.of_metadata(record.to_metadata()) == record


def test_the_record_tells_no_path_address_or_secret() -> None:
    private = Path("/home/ann/private")
    settings = Settings.model_validate(
        {
            "out": private,
            "model": {"initial": private},
            "secure": {"identity": private, "allow_list": private},
            "tls": {"ca": private, "certificate": private, "key": private},
            "client": {"data": private, "state": private, "name": "ann"},
            "server": {"listen": "ann.example:1"},
            "simulation": {"fleet": private},
        }
    )
    assert "ann" not in json.dumps(recorded_settings(settings))


def test_a_loaded_model_gives_the_trained_model_s_outputs(tmp_path: Path) -> None:
    saved(tmp_path, Pictures())
    trained = build_model(Pictures(), seed=3, batch_norm="group").model
    trained.load_state_dict(load_file(tmp_path / MODEL))
    loaded = load_model(tmp_path, Pictures())
    assert not loaded.training
    assert torch.equal(outputs(loaded), outputs(trained.eval()))
    assert torch.equal(loaded.get_buffer("noise"), trained.get_buffer("noise"))


def test_the_file_and_its_folder_are_the_same_model(tmp_path: Path) -> None:
    file = saved(tmp_path, Pictures())
    assert torch.equal(
        outputs(load_model(file, Pictures())), outputs(load_model(tmp_path, Pictures()))
    )


def test_replaced_layers_go_into_a_plain_model_by_the_record_alone(tmp_path: Path) -> None:
    file = saved(tmp_path, Pictures())
    plain = Pictures().new_model()
    with safe_open(file, framework="pt") as opened:
        for name, arguments in json.loads(opened.metadata()["replaced_layers"]).items():
            plain.set_submodule(name, nn.GroupNorm(**arguments))
    plain.load_state_dict(load_file(file))
    assert torch.equal(outputs(plain.eval()), outputs(load_model(file, Pictures())))


def test_an_error_of_load_model_has_its_remedy_in_the_traceback(tmp_path: Path) -> None:
    (tmp_path / MODEL).write_bytes(b"x")
    with pytest.raises(SettingsError, match="cannot be read") as caught:
        load_model(tmp_path, TwoLayers())
    assert caught.value.__notes__ == [f"remedy: {caught.value.remedy}"]


def test_loading_leaves_the_caller_s_random_state_alone(tmp_path: Path) -> None:
    saved(tmp_path, Pictures())
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    load_model(tmp_path, Pictures())
    assert torch.equal(torch.rand(1), expected)


@pytest.mark.parametrize("task", [None, TASK, TwoLayers()])
def test_the_task_may_be_named_be_an_object_or_come_from_the_record(
    tmp_path: Path, task: TwoLayers | str | None
) -> None:
    saved(tmp_path, TwoLayers())
    assert isinstance(headwater.load_model(tmp_path, task), nn.Sequential)


@pytest.mark.parametrize(
    "spec", ["/tmp/evil.py:Task", "../evil.py:Task", r"\\host\evil.py:Task", r"C:\evil.py:Task"]
)
def test_a_file_does_not_choose_code_outside_of_the_working_folder(
    tmp_path: Path, spec: str
) -> None:
    saved(tmp_path, TwoLayers(), name=spec)
    with pytest.raises(UnknownTask, match="does not choose the code"):
        load_model(tmp_path)


@pytest.fixture
def working(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder; evil.py, which leaves a mark, is beside it, in the home, and linked."""
    folder = tmp_path / "working"
    (folder / "examples").mkdir(parents=True)
    for evil in (tmp_path / "evil.py", tmp_path / "working-too" / "evil.py"):
        evil.parent.mkdir(exist_ok=True)
        evil.write_text(
            f"open({str(tmp_path / 'mark')!r}, 'w')\nfrom tests.tasks import TwoLayers as T\n"
        )
    (folder / "linked.py").symlink_to(tmp_path / "evil.py")
    (folder / "linked").symlink_to(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("USERPROFILE", str(tmp_path))
    monkeypatch.chdir(folder)
    return folder


@pytest.mark.parametrize("class_name", ["", ":T"])
@pytest.mark.parametrize(
    "place",
    [
        "{beside}/evil.py",
        "/{beside}/evil.py",
        "{beside}/working/../evil.py",
        "{beside}/working-too/evil.py",
        "../evil.py",
        "./../evil.py",
        "examples/../../evil.py",
        "~/evil.py",
        "./~/evil.py",
        "~root/evil.py",
        "linked.py",
        "./linked/evil.py",
        "//host/share/evil.py",
        r"\\host\share\evil.py",
        r"\\?\C:\evil.py",
        r"C:\evil.py",
        "C:/evil.py",
    ],
)
def test_a_file_outside_of_the_working_folder_is_not_run_with_or_without_its_class(
    working: Path, place: str, class_name: str
) -> None:
    spec = place.format(beside=working.parent) + class_name
    saved(working, TwoLayers(), name=spec)
    with pytest.raises(UnknownTask, match="does not choose the code"):
        load_model(working)
    assert not (working.parent / "mark").exists()


@pytest.mark.parametrize("place", ["mine.py", "{working}/mine.py", "./examples/../mine.py"])
@pytest.mark.parametrize("class_name", ["", ":Mine"])
def test_a_recorded_file_below_the_working_folder_is_accepted(
    working: Path, place: str, class_name: str
) -> None:
    (working / "mine.py").write_text(
        "from tests.tasks import TwoLayers\n\n\nclass Mine(TwoLayers): ...\n"
    )
    saved(working, TwoLayers(), name=place.format(working=working) + class_name)
    load_model(working)


def test_a_task_that_is_a_python_object_is_not_recorded(tmp_path: Path) -> None:
    saved(tmp_path, TwoLayers(), name=Objects().name(TwoLayers()))
    with pytest.raises(UnknownTask, match="does not say which task") as found:
        load_model(tmp_path)
    assert "task=" in str(found.value.remedy)


def test_the_record_names_the_client_algorithm() -> None:
    algorithm = {"name": "my_fedprox.py:FedProx", "arguments": {"mu": 0.1}}
    settings = Settings.model_validate({"algorithm": algorithm})
    assert recorded_settings(settings)["algorithm"] == algorithm


def test_the_user_may_name_a_task_anywhere(tmp_path: Path) -> None:
    spec = f"{tmp_path}/mine.py:Mine"
    (tmp_path / "mine.py").write_text("from tests.tasks import TwoLayers as Mine\n")
    saved(tmp_path, TwoLayers(), name=spec)
    load_model(tmp_path, spec)


def test_a_file_without_a_record_needs_a_task(tmp_path: Path) -> None:
    state = build_model(TwoLayers(), seed=1).model.state_dict()
    save_file({name: tensor.clone() for name, tensor in state.items()}, tmp_path / MODEL)
    with pytest.raises(UnknownTask, match="does not say which task"):
        load_model(tmp_path)
    assert torch.equal(load_model(tmp_path, TwoLayers()).state_dict()["0.bias"], state["0.bias"])


def test_the_record_of_another_program_is_no_error(tmp_path: Path) -> None:
    foreign = {"format": "pt", "best": "yes", "rounds": "many"}
    save_file({"a": torch.zeros(1)}, tmp_path / MODEL, metadata=foreign)
    assert read_model(tmp_path / MODEL)[0] == ModelRecord()


def test_another_task_is_a_mismatch_that_names_the_first_tensor(tmp_path: Path) -> None:
    class Wider(TwoLayers):
        def new_model(self) -> nn.Module:
            return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 1))

    saved(tmp_path, TwoLayers())
    named = r"0\.weight has shape \(2, 3\) in the file, \(4, 3\) in the task's model"
    with pytest.raises(ModelMismatch, match=named):
        load_model(tmp_path, Wider())


def test_a_replaced_layer_that_the_task_does_not_have_is_a_mismatch(tmp_path: Path) -> None:
    saved(tmp_path, Pictures())
    with pytest.raises(ModelMismatch, match=r"GroupNorm of 32 channels .* 3; .*BatchNorm1d\(64"):
        load_model(tmp_path, WiderPictures())
    with pytest.raises(ModelMismatch, match=r"3; the task's model has no such layer"):
        load_model(tmp_path, TwoLayers())


def test_a_missing_model_is_named(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match=r"there is no model at .*model\.safetensors"):
        load_model(tmp_path, TwoLayers())


@pytest.mark.parametrize("length", [0, 7, 100, -1])
def test_a_truncated_model_is_a_settings_error(tmp_path: Path, length: int) -> None:
    file = saved(tmp_path, TwoLayers())
    file.write_bytes(file.read_bytes()[:length])
    with pytest.raises(SettingsError, match="cannot be read"):
        load_model(tmp_path, TwoLayers())


@pytest.mark.parametrize("layers", ["[", "[]", '{"0": 1}', '{"0": {"num_groups": "many"}}'])
def test_a_malformed_record_is_a_settings_error(tmp_path: Path, layers: str) -> None:
    metadata = {"headwater": "1", "replaced_layers": layers}
    save_file({"a": torch.zeros(1)}, tmp_path / MODEL, metadata=metadata)
    with pytest.raises(SettingsError, match="cannot be read"):
        load_model(tmp_path, TwoLayers())
