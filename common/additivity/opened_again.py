"""Tells whether a task opens the same examples each time, where it draws random numbers to do so.

``torch.randperm(n)[part::num_parts]`` without a seed gives each device a share of another division:
some examples are then on several devices, and some on none. A client that restarts goes on in its
examples where it was, and they must be in the same order.
"""

from __future__ import annotations

from headwater.common.additivity.example_cache import same
from headwater.common.additivity.hidden_state import same_random_numbers
from headwater.common.task import Examples

NUM_COMPARED = 5
OTHER_SHARES = (
    "train_examples of %s gives other examples when it is called again: it draws random numbers "
    "without a seed. Shares of devices may then overlap and leave examples out, and a client that "
    "restarts goes on in other examples. Draw from a generator with a seed of its own, as "
    "torch.randperm(n, generator=torch.Generator().manual_seed(0)) does"
)


def compared_positions(num_examples: int) -> list[int]:
    """Return five positions of so many examples, evenly spaced; fewer if there are fewer."""
    return sorted({num_examples * at // NUM_COMPARED for at in range(NUM_COMPARED)})


def differs_again(first: Examples, again: Examples) -> bool:
    """Return whether examples that were opened twice differ, in number or at five positions."""
    if len(first) != len(again):
        return True
    with same_random_numbers() as restart:
        for position in compared_positions(len(first)):
            try:
                restart()
                one = first[position]
                restart()
                if not same(one, again[position]):
                    return True
            except Exception:  # an example that cannot be read, which training leaves out
                continue
    return False
