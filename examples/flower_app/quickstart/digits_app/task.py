"""Model, data and the two loops, as every Flower app has them."""

from functools import cache

import torch
from sklearn.datasets import load_digits
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from headwater import GradientSum

Loader = DataLoader[tuple[Tensor, ...]]


class Net(nn.Sequential):
    """An 8x8 image in, one of ten digits out."""

    def __init__(self) -> None:
        super().__init__(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


@cache
def load_examples() -> tuple[TensorDataset, TensorDataset]:
    """Return the training and the test examples, before they are split over the clients."""
    images, labels = load_digits(return_X_y=True)
    inputs = torch.tensor(images / 16, dtype=torch.float32)
    targets = torch.tensor(labels, dtype=torch.int64)
    return TensorDataset(inputs[360:], targets[360:]), TensorDataset(inputs[:360], targets[:360])


def load_data(partition_id: int, num_partitions: int, batch_size: int) -> tuple[Loader, Loader]:
    """Return a client's own loaders of training and test examples."""
    train_all, test_all = load_examples()
    mine = slice(partition_id, None, num_partitions)
    train_set = TensorDataset(*(tensor[mine] for tensor in train_all.tensors))
    test_set = TensorDataset(*(tensor[mine] for tensor in test_all.tensors))
    return DataLoader(train_set, batch_size, shuffle=True), DataLoader(test_set, batch_size)


def train(net: nn.Module, trainloader: Loader) -> tuple[GradientSum, float]:
    """Go over the client's examples once; return the summed gradients and the mean loss."""
    criterion = nn.CrossEntropyLoss(reduction="sum")  # Headwater: was the default, the mean
    sums = GradientSum(net)  # Headwater: was optimizer = torch.optim.SGD(...)
    net.train()
    loss_sum = 0.0
    for images, labels in trainloader:
        loss = criterion(net(images), labels)
        sums.backward(loss, len(labels))  # Headwater: was zero_grad(), loss.backward() and step()
        loss_sum += loss.item()
    return sums, loss_sum / sums.weight


def test(net: nn.Module, testloader: Loader) -> tuple[float, float]:
    """Return the mean loss and the accuracy."""
    criterion = nn.CrossEntropyLoss(reduction="sum")
    net.eval()
    loss_sum, num_correct, num_examples = 0.0, 0, 0
    with torch.no_grad():
        for images, labels in testloader:
            outputs = net(images)
            loss_sum += criterion(outputs, labels).item()
            num_correct += int((outputs.argmax(1) == labels).sum())
            num_examples += len(labels)
    return loss_sum / num_examples, num_correct / num_examples
