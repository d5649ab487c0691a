"""Device-level privacy by Apple's simulator pfl: the peer of ``benchmarks.privacy``.

Federated averaging with one local step of rate 1 over all of a device's images, so that a device's
model changes by its mean gradient; its Gaussian mechanism clips that and adds noise to the sum.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from benchmarks.private_ways import OPTIMIZERS, Result, Work, central_multiplier


def pfl(work: Work, epsilon: float | None, *, seed: int) -> Result:
    """Train with the noise multiplier that the epsilon asks for."""
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.aggregate.weighting import WeightByUser
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.data import FederatedDataset
    from pfl.data.dataset import Dataset
    from pfl.data.sampling import get_user_sampler
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.model.pytorch import PyTorchModel
    from pfl.privacy.gaussian_mechanism import GaussianMechanism
    from pfl.privacy.privacy_mechanism import CentrallyAppliedPrivacyMechanism

    task, chosen, number = work.task, work.choice, work.num_devices
    torch.manual_seed(seed)
    net = task.new_model()

    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = net

        def loss(self, images: Tensor, labels: Tensor, is_eval: bool = False) -> Tensor:
            return functional.cross_entropy(self.net(images), labels)

        def metrics(self, images: Tensor, labels: Tensor) -> dict[str, Any]:
            return {}

    users = {
        str(part): Dataset(
            raw_data=list(task.train_examples(data=None, part=part, num_parts=number).tensors)
        )
        for part in range(number)
    }
    data = FederatedDataset(users.__getitem__, get_user_sampler("minimize_reuse", list(users)))
    multiplier = central_multiplier(epsilon, chosen.rounds)
    mechanism = GaussianMechanism(chosen.clip, multiplier)
    private = [CentrallyAppliedPrivacyMechanism(mechanism)] if multiplier else []
    central = OPTIMIZERS[chosen.optimizer](net.parameters(), lr=chosen.learning_rate)
    FederatedAveraging().run(
        NNAlgorithmParams(
            central_num_iterations=chosen.rounds,
            evaluation_frequency=chosen.rounds + 1,
            train_cohort_size=number,
            val_cohort_size=0,
        ),
        SimulatedBackend(
            training_data=data, val_data=None, postprocessors=[WeightByUser(), *private]
        ),
        PyTorchModel(Model(), torch.optim.SGD, central),
        NNTrainHyperParams(local_num_epochs=1, local_learning_rate=1.0, local_batch_size=None),
        NNEvalHyperParams(local_batch_size=task.each),
    )
    images, labels = task.test_examples().tensors
    with torch.no_grad():
        right = net(images).argmax(1) == labels
    return Result(accuracy=float(right.float().mean()))
