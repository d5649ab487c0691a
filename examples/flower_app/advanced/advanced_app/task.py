"""A convolutional net, clients with unlike shares of the labels, and the two loops."""

from functools import cache

import numpy as np
import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.data import DataLoader, TensorDataset

from headwater import GradientSum

Loader = DataLoader[tuple[Tensor, ...]]
NUM_TEST = 360


class Net(nn.Module):
    """An 8x8 image in, one of ten digits out."""

    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 16, 3, padding=1)
        self.conv2 = nn.Conv2d(16, 32, 3, padding=1)
        self.pool = nn.MaxPool2d(2, 2)
        self.fc1 = nn.Linear(32 * 2 * 2, 64)
        self.fc2 = nn.Linear(64, 10)

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.pool(functional.relu(self.conv1(images)))
        hidden = self.pool(functional.relu(self.conv2(hidden)))
        output: Tensor = self.fc2(functional.relu(self.fc1(hidden.flatten(1))))
        return output


@cache
def load_images() -> tuple[Tensor, Tensor]:
    """Return the images and the labels; the first ``NUM_TEST`` are the server's."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32).view(-1, 1, 8, 8)
    return inputs, torch.tensor(labels, dtype=torch.int64)


@cache
def partitions(num_partitions: int, concentration: float = 1.0) -> list[np.ndarray]:
    """Divide each label's images over the clients in shares drawn from a Dirichlet."""
    generator = np.random.default_rng(42)
    labels = load_images()[1][NUM_TEST:].numpy()
    parts: list[list[np.ndarray]] = [[] for _ in range(num_partitions)]
    for label in range(10):
        indices = NUM_TEST + np.flatnonzero(labels == label)
        shares = generator.dirichlet(np.full(num_partitions, concentration))
        cuts = (np.cumsum(shares)[:-1] * len(indices)).astype(int)
        for part, chunk in zip(parts, np.split(indices, cuts), strict=True):
            part.append(chunk)
    return [generator.permutation(np.concatenate(part)) for part in parts]


def load_data(partition_id: int, num_partitions: int) -> tuple[Loader, Loader]:
    """Return a client's own loaders of training and test images."""
    images, labels = load_images()
    mine = torch.from_numpy(partitions(num_partitions)[partition_id])
    test, train = mine[: len(mine) // 5], mine[len(mine) // 5 :]
    trainloader = DataLoader(
        TensorDataset(images[train], labels[train]), batch_size=32, shuffle=True
    )
    return trainloader, DataLoader(TensorDataset(images[test], labels[test]), batch_size=32)


def load_server_data() -> Loader:
    """Return the server's own loader of test images."""
    images, labels = (column[:NUM_TEST] for column in load_images())
    return DataLoader(TensorDataset(images, labels), batch_size=128)


def train(net: nn.Module, trainloader: Loader) -> tuple[GradientSum, float]:
    """Go over the client's images once; return the summed gradients and the mean loss."""
    criterion = nn.CrossEntropyLoss(reduction="sum")  # Headwater: was the default, the mean
    sums = GradientSum(net)  # Headwater: was optimizer = torch.optim.SGD(...)
    net.train()
    loss_sum = 0.0
    for images, labels in trainloader:  # Headwater: was in a loop over local epochs
        loss = criterion(net(images), labels)
        sums.backward(loss, len(labels))  # Headwater: was zero_grad(), loss.backward() and step()
        loss_sum += loss.item()
    return sums, loss_sum / sums.weight


def test(net: nn.Module, testloader: Loader) -> tuple[float, float, int]:
    """Return the mean loss, the accuracy and the number of images."""
    criterion = nn.CrossEntropyLoss(reduction="sum")
    net.eval()
    loss_sum, num_correct, num_images = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images)
            loss_sum += criterion(outputs, labels).item()
            num_correct += int((outputs.argmax(1) == labels).sum())
            num_images += len(labels)
    return loss_sum / num_images, num_correct / num_images, num_images
