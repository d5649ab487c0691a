"""The app on a client: train on its own rows, and test on them."""

from typing import cast

from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp

from . import task

app = ClientApp()


@app.train()
def train(message: Message, context: Context) -> Message:
    model = _model_of(message)
    train_loader, _ = _loaders(context)
    # Headwater: was a Message with ArrayRecord(model.state_dict()) and the number of batches
    return task.train(model, train_loader).reply(message)


@app.evaluate()
def evaluate(message: Message, context: Context) -> Message:
    _, test_loader = _loaders(context)
    loss, accuracy, num_rows = task.evaluate(_model_of(message), test_loader)
    metrics = MetricRecord({"loss": loss, "accuracy": accuracy, "num-examples": num_rows})
    return Message(RecordDict({"metrics": metrics}), reply_to=message)


def _model_of(message: Message) -> task.Classifier:
    model = task.Classifier()
    model.load_state_dict(cast(ArrayRecord, message.content["arrays"]).to_torch_state_dict())
    return model


def _loaders(context: Context) -> tuple[task.Loader, task.Loader]:
    node = context.node_config
    return task.load_data(int(node["partition-id"]), int(node["num-partitions"]))
