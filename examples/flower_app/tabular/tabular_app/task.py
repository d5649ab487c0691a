"""A table that each client scales by itself, a classifier with one output, and the two loops."""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_breast_cancer
from sklearn.model_selection import train_test_split
from sklearn.preprocessing import StandardScaler
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from headwater import GradientSum

Loader = DataLoader[tuple[Tensor, ...]]
NUM_COLUMNS = 30


class Classifier(nn.Module):
    """A row of the table in, the probability that the tumour is benign out."""

    def __init__(self) -> None:
        super().__init__()
        self.layer1 = nn.Linear(NUM_COLUMNS, 64)
        self.layer2 = nn.Linear(64, 32)
        self.output = nn.Linear(32, 1)

    def forward(self, rows: Tensor) -> Tensor:
        hidden = torch.relu(self.layer2(torch.relu(self.layer1(rows))))
        return torch.sigmoid(self.output(hidden))


@cache
def load_table() -> tuple[np.ndarray, np.ndarray]:
    """Return the rows and the labels."""
    rows, labels = load_breast_cancer(return_X_y=True)
    return rows, labels.astype(np.float32).reshape(-1, 1)


def load_data(partition_id: int, num_partitions: int) -> tuple[Loader, Loader]:
    """Return a client's own loaders of training and test rows."""
    mine = slice(partition_id, None, num_partitions)
    rows, labels = (column[mine] for column in load_table())
    train_rows, test_rows, train_labels, test_labels = train_test_split(
        rows, labels, test_size=0.2, random_state=42
    )
    scaler = StandardScaler().fit(train_rows)
    train_set = TensorDataset(
        torch.tensor(scaler.transform(train_rows), dtype=torch.float32), torch.tensor(train_labels)
    )
    test_set = TensorDataset(
        torch.tensor(scaler.transform(test_rows), dtype=torch.float32), torch.tensor(test_labels)
    )
    return DataLoader(train_set, batch_size=32, shuffle=True), DataLoader(test_set, batch_size=32)


def train(model: nn.Module, train_loader: Loader) -> GradientSum:
    """Go over the client's rows once; return the summed gradients."""
    criterion = nn.BCELoss(reduction="sum")  # Headwater: was the default, the mean
    sums = GradientSum(model)  # Headwater: was optimizer = torch.optim.Adam(...)
    model.train()
    for rows, labels in train_loader:
        loss = criterion(model(rows), labels)
        sums.backward(loss, len(labels))  # Headwater: was zero_grad(), loss.backward() and step()
    return sums


def evaluate(model: nn.Module, test_loader: Loader) -> tuple[float, float, int]:
    """Return the mean loss, the accuracy and the number of rows."""
    criterion = nn.BCELoss(reduction="sum")
    model.eval()
    loss_sum, num_correct, num_rows = 0.0, 0, 0
    with torch.no_grad():
        for rows, labels in test_loader:
            outputs = model(rows)
            loss_sum += criterion(outputs, labels).item()
            num_correct += int(((outputs > 0.5).float() == labels).sum())
            num_rows += len(labels)
    return loss_sum / num_rows, num_correct / num_rows, num_rows
