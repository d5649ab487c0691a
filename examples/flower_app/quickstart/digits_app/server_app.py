"""The app on the server: the strategy, and the model at the end."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from headwater import SumOfGradients

from .task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    model = Net()
    # Headwater: was strategy = FedAvg(fraction_evaluate=1.0)
    strategy = SumOfGradients(
        model,
        learning_rate=float(context.run_config["learning-rate"]),
        fraction_evaluate=1.0,
    )
    result = strategy.start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
