"""The app on a client: train on its own images, and test on them."""

from typing import cast

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from . import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    # Headwater: without the lines that restored this client's own head from context.state
    net = _net_of(message)
    trainloader, _ = _loaders(context)
    sums, train_loss = task.train(net, trainloader)
    # Headwater: was a Message with ArrayRecord(net.state_dict()) and the number of examples
    return sums.reply(message, {"train_loss": train_loss})


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    _, testloader = _loaders(context)
    loss, accuracy, num_images = task.test(_net_of(message), testloader)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": num_images})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _net_of(message: Message) -> task.Net:
    net = task.Net()
    net.load_state_dict(cast(ArrayRecord, message.content["arrays"]).to_torch_state_dict())
    return net


def _loaders(context: Context) -> tuple[task.Loader, task.Loader]:
    node = context.node_config
    return task.load_data(int(node["partition-id"]), int(node["num-partitions"]))
