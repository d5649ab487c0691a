"""The example tasks: additive, trained by the real simulator, clear about data that is missing."""

import csv
import sysconfig
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from sklearn.datasets import load_breast_cancer, load_digits

from examples.digits import SPLIT_SEED, Digits
from examples.image_folder import CLASSES, SIDE, ImageFolder
from examples.tabular_csv import RANGES, TabularCsv
from examples.text_transformer import CONTEXT, PADDING, TextTransformer, stretches
from headwater.common.data.batches import SubsetView, batch_of
from headwater.common.data.client_datasets import ClientDatasets
from headwater.common.data.partition_spec import parse_rule
from headwater.common.errors import EmptyDataset, MissingData
from headwater.common.settings.schema import Settings
from headwater.common.settings.sources import load
from headwater.common.task import Task, load_task, loss_sum, open_train_examples
from headwater.server.rounds.round_row import RoundRow
from headwater.simulation.run import run_engine
from tests.additivity import check_additive

SPECS = {
    "tabular": "examples/tabular_csv.py:TabularCsv",
    "pictures": "examples/image_folder.py:ImageFolder",
    "text": "examples/text_transformer.py:TextTransformer",
}
TASKS: dict[str, Callable[[], Task]] = {
    "tabular": TabularCsv,
    "pictures": ImageFolder,
    "text": TextTransformer,
}


def settings_of(spec: str, out: Path) -> Settings:
    overrides: dict[str, Any] = {
        "task": spec,
        "rounds": 4,
        "threads": 1,
        "simulation.clients": 3,
        "optimizer.name": "adam",
        "optimizer.learning_rate": 0.01,
        "plan.accumulation_steps": 2,
        "plan.micro_batch_size": 16,
        "out": out,
    }
    return load(None, overrides)


def write_table(path: Path, num_rows: int = 6) -> None:
    columns, labels = load_breast_cancer(return_X_y=True)
    with path.open("w", newline="") as lines:
        writer = csv.writer(lines)
        writer.writerow([*reversed(RANGES), "diagnosis"])
        for row, label in zip(columns[:num_rows], labels[:num_rows], strict=True):
            writer.writerow([*reversed(row), ("malignant", "benign")[label]])


def write_pictures(folder: Path) -> None:
    random = np.random.default_rng(1)
    for name, mode in (("3", "RGB"), ("7", "L")):
        (folder / name).mkdir(parents=True)
        for number in range(3):
            shape = (20, 30, 3) if mode == "RGB" else (20, 30)
            pixels = random.integers(0, 256, shape, dtype=np.uint8)
            Image.fromarray(pixels).save(folder / name / f"{number}.png")
    (folder / "3" / "notes.txt").write_text("not a picture")


def write_texts(folder: Path) -> None:
    (folder / "sub").mkdir(parents=True)
    (folder / "a.txt").write_text("short\n" + "x" * (2 * CONTEXT) + "\nlast line")
    (folder / "sub" / "b.txt").write_text("Grüße\n")
    (folder / "image.bin").write_bytes(b"\0\1\2")


WRITERS: dict[str, Callable[[Path], None]] = {
    "tabular": write_table,
    "pictures": write_pictures,
    "text": write_texts,
}


@pytest.mark.parametrize("kind", SPECS)
def test_the_task_is_additive_on_its_sample(kind: str) -> None:
    task = load_task(SPECS[kind])
    check_additive(task, task.new_model(), task.train_examples(data=None, part=1, num_parts=3))


@pytest.mark.parametrize("kind", SPECS)
def test_the_task_is_additive_on_data_of_its_owner(kind: str, tmp_path: Path) -> None:
    task = load_task(SPECS[kind])
    WRITERS[kind](tmp_path / "data")
    check_additive(
        task, task.new_model(), task.train_examples(data=tmp_path / "data", part=0, num_parts=1)
    )


@pytest.mark.slow
@pytest.mark.parametrize("kind", SPECS)
def test_the_loss_falls_in_the_simulator(kind: str, tmp_path: Path) -> None:
    rows: list[RoundRow] = []
    run_engine(settings_of(SPECS[kind], tmp_path), on_round=rows.append, resume=False)
    assert [row.num_clients for row in rows] == [3, 3, 3, 3]
    assert rows[-1].metrics["test_loss"] < rows[0].metrics["test_loss"]


@pytest.mark.parametrize("kind", SPECS)
def test_parts_of_the_sample_are_disjoint_and_complete(kind: str) -> None:
    task = TASKS[kind]()

    def contents(part: int, num_parts: int) -> list[bytes]:
        examples = task.train_examples(data=None, part=part, num_parts=num_parts)
        fetched = (examples[position] for position in range(len(examples)))
        return [
            one if isinstance(one, bytes) else one[0].numpy().tobytes() + bytes([int(one[1])])
            for one in fetched
        ]

    parts = [contents(part, 3) for part in range(3)]
    assert sorted(one for part in parts for one in part) == sorted(contents(0, 1))


@pytest.mark.parametrize("kind", SPECS)
def test_a_missing_path_is_named_and_comes_as_missing_data(kind: str, tmp_path: Path) -> None:
    with pytest.raises(MissingData, match=r"there is .*nowhere"):
        open_train_examples(TASKS[kind](), data=tmp_path / "nowhere", part=0, num_parts=1)


@pytest.mark.parametrize(
    "spec", ["digits.py:Digits", "synthetic.py:Synthetic", "slow_owners.py:SlowOwners"]
)
def test_a_task_that_brings_its_own_examples_refuses_data(spec: str, tmp_path: Path) -> None:
    task = load_task(f"examples/{spec}")
    with pytest.raises(MissingData, match="leave --data out, or name"):
        open_train_examples(task, data=tmp_path, part=0, num_parts=1)


@pytest.mark.parametrize("kind", ["pictures", "text"])
def test_an_empty_folder_is_an_empty_data_set(kind: str, tmp_path: Path) -> None:
    with pytest.raises(EmptyDataset):
        open_train_examples(TASKS[kind](), data=tmp_path, part=0, num_parts=1)


def test_a_table_without_rows_is_an_empty_data_set(tmp_path: Path) -> None:
    write_table(tmp_path / "table.csv", num_rows=0)
    with pytest.raises(EmptyDataset):
        open_train_examples(TabularCsv(), data=tmp_path / "table.csv", part=0, num_parts=1)


def test_a_table_of_the_sample_reads_as_the_sample_whatever_the_order_of_its_columns(
    tmp_path: Path,
) -> None:
    num_rows = len(load_breast_cancer(return_X_y=True)[1])
    write_table(tmp_path / "table.csv", num_rows=num_rows)
    task = TabularCsv()
    read = task.train_examples(data=tmp_path / "table.csv", part=0, num_parts=1).tensors
    sample = [
        torch.cat(tensors)
        for tensors in zip(
            task.test_examples().tensors,
            task.train_examples(data=None, part=0, num_parts=1).tensors,
            strict=True,
        )
    ]
    from_file, bundled = (
        {tuple(row) for row in torch.cat([rows, classes[:, None]], 1).tolist()}
        for rows, classes in (read, sample)
    )
    assert from_file == bundled


def test_published_ranges_scale_the_sample_to_minus_one_to_one() -> None:
    columns, _ = TabularCsv().train_examples(data=None, part=0, num_parts=1).tensors
    # The published ranges are rounded to three decimals; the narrowest range is 0.029 wide.
    assert float(columns.abs().max()) <= 1 + 2 * 0.0005 / 0.029


@pytest.mark.parametrize(
    ("cell", "complaint"),
    [
        ("", "must be a number, the cell is empty"),
        ("nan", "must be a number"),
        ("1e999", "must be a"),
    ],
)
def test_a_cell_that_is_no_number_is_named_with_its_line(
    cell: str, complaint: str, tmp_path: Path
) -> None:
    path = tmp_path / "table.csv"
    header = ",".join([*RANGES, "label"])
    path.write_text(f"{header}\n{','.join(['1'] * 30)},benign\n{cell},{','.join(['1'] * 29)},0\n")
    with pytest.raises(ValueError, match=f"line 3: 'mean radius' {complaint}"):
        TabularCsv().train_examples(data=path, part=0, num_parts=1)


def test_a_table_without_one_of_the_columns_says_which(tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text("mean radius,label\n1,benign\n")
    with pytest.raises(ValueError, match="no column 'mean texture'"):
        TabularCsv().train_examples(data=tmp_path / "table.csv", part=0, num_parts=1)


def test_an_unknown_label_is_named(tmp_path: Path) -> None:
    header = ",".join([*RANGES, "label"])
    (tmp_path / "table.csv").write_text(f"{header}\n{','.join(['1'] * 30)},unsure\n")
    with pytest.raises(ValueError, match="line 2: the label must be one of"):
        TabularCsv().train_examples(data=tmp_path / "table.csv", part=0, num_parts=1)


def test_pictures_of_any_size_and_mode_become_one_shape(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    examples = ImageFolder().train_examples(data=tmp_path, part=0, num_parts=1)
    labels = []
    for position in range(6):
        pixels, label = examples[position]
        labels.append(CLASSES[label])
        assert pixels.shape == (3, SIDE, SIDE)
        assert float(pixels.abs().max()) <= 1
    assert labels == ["3"] * 3 + ["7"] * 3


def test_files_that_are_no_pictures_are_counted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_pictures(tmp_path)
    ImageFolder().train_examples(data=tmp_path, part=0, num_parts=1)
    assert "1 files are no pictures" in caplog.text


def test_a_picture_is_opened_when_it_is_asked_for_and_not_before(tmp_path: Path) -> None:
    write_pictures(tmp_path)
    (tmp_path / "3" / "0.png").write_bytes(b"broken")
    examples = ImageFolder().train_examples(data=tmp_path, part=0, num_parts=1)
    with pytest.raises(OSError, match="cannot identify"):
        examples[0]
    examples[1]


def test_a_class_folder_that_the_task_does_not_know_is_refused(tmp_path: Path) -> None:
    (tmp_path / "cat").mkdir()
    with pytest.raises(ValueError, match="the classes are 0, 1"):
        ImageFolder().train_examples(data=tmp_path, part=0, num_parts=1)


def test_the_weight_of_ragged_text_counts_real_bytes_only() -> None:
    task = TextTransformer()
    examples = [b"a", b"four", b"a little longer"]
    batch = batch_of(task, examples, [0, 1, 2])
    _, weight, _ = loss_sum(task, task.new_model(), batch)
    assert batch[0].shape == (3, 15)
    assert weight == 1 + 4 + 15


def test_padding_does_not_reach_the_loss() -> None:
    task = TextTransformer()
    model = task.new_model()
    tokens, targets = task.collate([b"short", b"a much longer one"])
    before, _, _ = task.loss_sum(model, (tokens, targets))
    tokens[targets == PADDING] = 77
    after, _, _ = task.loss_sum(model, (tokens, targets))
    assert after.item() == before.item()


def test_no_byte_is_predicted_from_itself_or_from_later_ones() -> None:
    task = TextTransformer()
    model = task.new_model()
    tokens, _ = task.collate([b"abcdef"])
    others, _ = task.collate([b"abcXYZ"])
    with torch.no_grad():
        first, second = model(tokens), model(others)
    # Position t predicts byte t from the bytes before it: 0 to 3 have seen "abc" at the most.
    assert torch.equal(first[0, :4], second[0, :4])
    assert not torch.equal(first[0, 4], second[0, 4])


def test_stretches_lose_no_byte_and_none_is_longer_than_the_context() -> None:
    texts = [b"", b"line\n" * 40, b"y" * (3 * CONTEXT + 1), b"z\n" + b"w" * CONTEXT + b"\nend"]
    cut = stretches(texts)
    assert b"".join(cut) == b"".join(texts)
    assert all(1 <= len(stretch) <= CONTEXT for stretch in cut)


def test_binary_files_are_left_out_and_counted_in_the_log(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    write_texts(tmp_path)
    texts = TextTransformer().train_examples(data=tmp_path, part=0, num_parts=1)
    assert not any(b"\0" in text for text in texts)
    assert "1 binary files were left out" in caplog.text


def test_a_partition_by_module_gives_a_device_whole_modules() -> None:
    shares = ClientDatasets(TextTransformer())
    modules = shares.column("module", data=None)
    rule = parse_rule("column:module", examples_per_device=None, seed=0)
    found = shares.of(rule, data=None, part=3, num_parts=modules.num_values)
    assert isinstance(found, SubsetView)
    (name,) = set(modules.values_V[modules.codes_E[found.positions]].tolist())
    text = b"".join(found.whole[position] for position in sorted(found.positions.tolist()))
    assert text == (Path(sysconfig.get_path("stdlib")) / f"{name}.py").read_bytes()


def test_pictures_tell_their_labels_and_open_no_file(tmp_path: Path) -> None:
    for name in ("3/a.png", "7/b.png"):
        (tmp_path / name).parent.mkdir()
        (tmp_path / name).write_bytes(b"no picture")
    column = ClientDatasets(ImageFolder()).column("label", data=tmp_path)
    assert column.values_V[column.codes_E].tolist() == [3, 7]


def test_the_bundled_digits_are_those_of_scikit_learn() -> None:
    images, labels = load_digits(return_X_y=True)
    inputs, targets = Digits().test_examples().tensors
    shuffle = np.random.default_rng(SPLIT_SEED).permutation(len(labels))[: len(targets)]
    assert torch.equal(inputs, torch.tensor(images[shuffle] / 16, dtype=torch.float32))
    assert targets.tolist() == labels[shuffle].tolist()


@pytest.mark.parametrize(
    ("text", "complaint"),
    [("a;b\n1,5;0\n", "semicolons between its columns"), ("a\tb\n", "no column 'mean radius'")],
)
def test_a_table_of_another_form_is_named(text: str, complaint: str, tmp_path: Path) -> None:
    (tmp_path / "table.csv").write_text(text)
    with pytest.raises(MissingData, match=complaint) as found:
        open_train_examples(TabularCsv(), data=tmp_path / "table.csv", part=0, num_parts=1)
    assert "leave that row out" in found.value.remedy
