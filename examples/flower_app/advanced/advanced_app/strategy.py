"""A strategy of the app's own: it saves the best model and the results of each round."""

import json
from collections.abc import Callable
from pathlib import Path

import torch
from flwr.app import ArrayRecord, ConfigRecord, MetricRecord
from flwr.serverapp import Grid
from flwr.serverapp.strategy import Result

from headwater import SumOfGradients

Evaluate = Callable[[int, ArrayRecord], MetricRecord | None]


# Headwater: was SavingStrategy(FedAvg), with a configure_train that halved config["lr"]
class SavingStrategy(SumOfGradients):
    """Saves ``best.pt`` whenever the server's test improves, and ``results.json``."""

    folder = Path()

    def start(
        self,
        grid: Grid,
        initial_arrays: ArrayRecord,
        num_rounds: int = 3,
        timeout: float = 3600,
        train_config: ConfigRecord | None = None,
        evaluate_config: ConfigRecord | None = None,
        evaluate_fn: Evaluate | None = None,
    ) -> Result:
        """Run the rounds as every strategy does, and save beside them."""
        results: list[dict[str, object]] = []

        def evaluate_and_save(server_round: int, arrays: ArrayRecord) -> MetricRecord | None:
            metrics = None if evaluate_fn is None else evaluate_fn(server_round, arrays)
            if metrics is not None:
                accuracy = float(str(metrics["accuracy"]))
                if all(accuracy > float(str(row["accuracy"])) for row in results):
                    torch.save(arrays.to_torch_state_dict(), self.folder / "best.pt")
                results.append({"round": server_round, **metrics})
                (self.folder / "results.json").write_text(json.dumps(results))
            return metrics

        return super().start(
            grid,
            initial_arrays,
            num_rounds,
            timeout,
            train_config,
            evaluate_config,
            evaluate_and_save,
        )
