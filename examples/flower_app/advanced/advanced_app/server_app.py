"""The app on the server: its own strategy, a test on the server, a rate that falls by round."""

from flwr.app import ArrayRecord, Context, MetricRecord
from flwr.serverapp import Grid, ServerApp

from headwater.common.settings.schema import ScheduleSettings

from .strategy import SavingStrategy
from .task import Net, load_server_data, test

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    config = context.run_config
    net = Net()
    strategy = SavingStrategy(
        net,  # Headwater: the strategy steps the model, at a rate that clients had in their config
        learning_rate=float(config["learning-rate"]),
        schedule=ScheduleSettings(
            name="StepLR", arguments={"step_size": int(config["halve-rate-every"]), "gamma": 0.5}
        ),
        fraction_evaluate=float(config["fraction-evaluate"]),
    )
    strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(net.state_dict()),
        num_rounds=int(config["num-server-rounds"]),
        evaluate_fn=evaluate,
    )


def evaluate(server_round: int, arrays: ArrayRecord) -> MetricRecord:
    """Test the global model on the server's own images."""
    net = Net()
    net.load_state_dict(arrays.to_torch_state_dict())
    loss, accuracy, _ = test(net, load_server_data())
    return MetricRecord({"loss": loss, "accuracy": accuracy})
