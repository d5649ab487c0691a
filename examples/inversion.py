"""Attacks updates: what a server can see of a device's images, drawn as a picture.

The server knows the model. An update is the sum of its gradients over the device's images, so the
server looks for images with the same sum: gradient inversion (Zhu et al. 2019, Geiping et al.
2020). Here it is even given the labels. What it finds is drawn below the device's own images, for

- a plain update of 1, 8 and 64 images,
- a masked update of one image, as the server receives it,
- the sum of ten masked updates of 8 images, which is all that the server opens,
- a plain update of one image in a private round (docs/privacy.md): clipped to a norm of 1, with
  noise of a deviation of 1.

A number is the mean distance per pixel, of pixels from 0 to 1, between the images and those found;
a guess that knows only the mean of all images has 0.27. This attack is a simple one: a better one
may find more. Try it::

    python -m headwater.examples.inversion --out inversion.png
"""

import argparse
import os
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor, nn

from headwater.common.privacy.clipping import clip_to_norm
from headwater.common.privacy.discrete_gaussian import RandomBits
from headwater.common.privacy.discrete_gaussian import draw as draw_integers
from headwater.common.privacy.noise_shares import plain_scale_bits, plain_sigma
from headwater.common.privacy.terms import PrivacyTerms
from headwater.common.secagg.fixed_point import decode, encode_in_place, plan_encoding
from headwater.common.secagg.masking import Stream, mask_in_place
from headwater.common.secagg.secret import Secret
from headwater.examples.digits import Digits

IMAGES_SHOWN = 8
STEPS, STARTS = 400, 4
WEIGHT_OF_COHORT = 1_000
"""The largest weight of all updates together, which fixes the ring's scale."""


@dataclass(frozen=True)
class Case:
    """A device's ``images`` [K, 64], those [K, 64] that the server found, and their distance."""

    title: str
    images: Tensor
    found: Tensor
    error: float


def main() -> None:
    """Attack each case, print the errors and draw the picture."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--out", default="inversion.png", help="the picture (default: %(default)s)")
    parser.add_argument(
        "--steps", type=int, default=STEPS, help="of each search (default: %(default)s)"
    )
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    found = cases(arguments.steps)
    for case in found:
        print(f"{case.title:<34} {case.error:.3f}")
    draw(found, arguments.out)
    print(f"picture: {arguments.out}")


def cases(steps: int = STEPS) -> list[Case]:
    """Return the attack's result for each view of the first images of the digits."""
    task = Digits()
    torch.manual_seed(0)
    model = task.new_model().double()
    images, labels = task.train_examples(data=None, part=0, num_parts=1).tensors
    images = images.double()

    def case(title: str, num_images: int, view: Tensor) -> Case:
        own = images[:num_images]
        found = invert(model, view, labels[:num_images], steps)
        return Case(title, own, *nearest(own, found))

    def update(start: int, end: int) -> Tensor:
        return gradient_sum(model, images[start:end], labels[start:end]).detach()

    one, devices = update(0, 1), [update(8 * i, 8 * i + 8) for i in range(10)]
    return [
        case("plain update of 1 image", 1, one),
        case("plain update of 8 images", 8, update(0, 8)),
        case("plain update of 64 images", 64, update(0, 64)),
        case("masked update of 1 image", 1, masked(one)),
        case("opened sum of 10 devices", 80, torch.stack(devices).sum(0)),
        case("1 image, clipped and with noise", 1, clipped_with_noise(one)),
    ]


def gradient_sum(model: nn.Module, images: Tensor, labels: Tensor) -> Tensor:
    """Return the sum [P] of the gradients over the images [K, 64]; it can be differentiated."""
    loss = nn.functional.cross_entropy(model(images), labels, reduction="sum")
    gradients = torch.autograd.grad(loss, list(model.parameters()), create_graph=True)
    return nn.utils.parameters_to_vector(gradients)


def invert(model: nn.Module, view: Tensor, labels: Tensor, steps: int) -> Tensor:
    """Return images [K, 64] whose sum of gradients is nearest to the view [P]."""
    attempts = [_descend(model, view, labels, steps, seed=seed) for seed in range(STARTS)]
    return min(attempts, key=lambda attempt: attempt[0])[1]


def _descend(
    model: nn.Module, view: Tensor, labels: Tensor, steps: int, *, seed: int
) -> tuple[float, Tensor]:
    random = torch.Generator().manual_seed(seed)
    images = torch.rand(len(labels), 64, generator=random, dtype=torch.float64).requires_grad_()
    optimizer = torch.optim.Adam([images], lr=0.05)
    scale = view.square().sum()
    loss = torch.tensor(0.0)
    for _ in range(steps):
        loss = (gradient_sum(model, images, labels) - view).square().sum() / scale
        (images.grad,) = torch.autograd.grad(loss, [images])
        optimizer.step()
        with torch.no_grad():
            images.clamp_(0, 1)
    return loss.item(), images.detach()


def masked(update: Tensor) -> Tensor:
    """Return what the server reads in a masked update: the code and the masks of a real round."""
    encoding = plan_encoding(max_weight=WEIGHT_OF_COHORT, clip=1.0)
    ring, _ = encode_in_place(update.float().clone(), weight=1, encoding=encoding)
    mask_in_place(ring, [Stream(key=Secret(os.urandom(32)), sign=1)])
    return torch.from_numpy(decode(ring, encoding))


def clipped_with_noise(update: Tensor) -> Tensor:
    """Return a sum of this update alone, as a private round opens it: the code of a real round."""
    terms = PrivacyTerms(norm_bound=1.0, noise_multiplier=1.0)
    clipped = update.float().clone()
    clip_to_norm(clipped, terms.norm_bound)
    bits = plain_scale_bits(terms)
    sigma = plain_sigma(terms, scale_bits=bits, num_values=len(update))
    steps = np.rint(np.ldexp(clipped.double().numpy(), bits))
    steps += draw_integers(sigma, len(update), RandomBits(os.urandom))
    return torch.from_numpy(np.ldexp(steps, -bits))


def nearest(images: Tensor, found: Tensor) -> tuple[Tensor, float]:
    """Pair each image with another of those found, the nearest on the whole; add their distance."""
    from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

    distances = torch.cdist(images, found) / images.shape[1] ** 0.5
    rows, columns = linear_sum_assignment(distances.numpy())
    reordered: Tensor = found[torch.from_numpy(columns)]
    return reordered, distances[rows, columns].mean().item()


def draw(found: list[Case], path: str) -> None:
    """Draw each case as two lines of images: the device's own, and what the server found."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, 1.75 * len(found)), layout="constrained")
    subplots = figure.subplots(2 * len(found), IMAGES_SHOWN)
    for number, case in enumerate(found):
        subplots[2 * number][0].set_title(f"{case.title}: {case.error:.3f}", fontsize=9, loc="left")
        for line, images in enumerate((case.images, case.found)):
            for place, axes in enumerate(subplots[2 * number + line]):
                axes.set_axis_off()
                if place < len(images):
                    axes.imshow(images[place].view(8, 8).numpy(), cmap="gray_r", vmin=0, vmax=1)
    figure.savefig(path, dpi=110)


if __name__ == "__main__":
    main()
