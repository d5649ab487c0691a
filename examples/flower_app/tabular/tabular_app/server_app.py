"""The app on the server: the strategy, and the model at the end."""

import torch
from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from headwater import SumOfGradients

from .task import Classifier

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    model = Classifier()
    result = SumOfGradients(model).start(  # Headwater: was FedAvg().start(
        grid=grid,
        initial_arrays=ArrayRecord(model.state_dict()),
        num_rounds=int(context.run_config["num-server-rounds"]),
    )
    torch.save(result.arrays.to_torch_state_dict(), "final_model.pt")
