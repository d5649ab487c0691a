"""The app on a client: train on its own examples, and test on them."""

from typing import cast

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from .task import Loader, Net, load_data
from .task import test as test_fn
from .task import train as train_fn

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = _model_of(message)
    trainloader, _ = _loaders(context)
    sums, train_loss = train_fn(model, trainloader)
    # Headwater: was a Message with ArrayRecord(model.state_dict()) and the number of examples
    return sums.reply(message, {"train_loss": train_loss})


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    _, testloader = _loaders(context)
    loss, accuracy = test_fn(_model_of(message), testloader)
    num_examples = sum(len(labels) for _, labels in testloader)
    metrics = MetricRecord({"eval_loss": loss, "eval_acc": accuracy, "num-examples": num_examples})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _model_of(message: Message) -> Net:
    model = Net()
    model.load_state_dict(cast(ArrayRecord, message.content["arrays"]).to_torch_state_dict())
    return model


def _loaders(context: Context) -> tuple[Loader, Loader]:
    partition_id = int(context.node_config["partition-id"])
    num_partitions = int(context.node_config["num-partitions"])
    return load_data(partition_id, num_partitions, int(context.run_config["batch-size"]))
