"""A block drafter that starts as the target's own last layers, reading the newest captured state.

A drafter of random layers spends its first steps on finding the newest state of its context. Here ``fc`` hands that state on
alone, ``hidden_norm`` norms it as the first copied layer does, and the layers are the target's last ones: what the drafter
then has to learn is to do without the layers between. Measured in ``experiments/training_step``.
"""

from collections.abc import Sequence

import torch
from torch import nn

from dspark_lab.drafter.base import Drafter
from dspark_lab.drafter.block import BlockDrafter


def start_from_target(drafter: Drafter, layers: Sequence[nn.Module]) -> None:
    """``layers``: all decoder layers of the target. Norms of queries and keys that it has none of stay 1.

    Raises:
        ValueError: not a block drafter, or its layers are not shaped like the target's.
    """
    place = "drafter.from_pretrained=target"
    if not isinstance(drafter, BlockDrafter):
        raise ValueError(f"{place}: {type(drafter).__name__}'s layers are not shaped like a target's; use null")
    own = drafter.layers
    copied = list(layers)[-len(own) :]
    if len(copied) < len(own):
        raise ValueError(f"{place}: the target has {len(copied)} layers, drafter.num_layers={len(own)}: set it lower")
    with torch.no_grad():
        for layer, source in zip(own, copied, strict=True):
            theirs = source.state_dict()
            for name, parameter in layer.named_parameters():
                if name in theirs and theirs[name].shape == parameter.shape:
                    parameter.copy_(theirs[name])
                elif not name.endswith(("q_norm.weight", "k_norm.weight")):
                    found = tuple(theirs[name].shape) if name in theirs else "nothing"
                    raise ValueError(
                        f"{place}: {name} has {tuple(parameter.shape)} in the drafter and {found} in the target; leave "
                        "drafter.intermediate_size=null, or start from null"
                    )
        drafter.hidden_norm.weight.copy_(own[0].input_layernorm.weight)
    select_newest(drafter)


@torch.no_grad()
def select_newest(drafter: BlockDrafter) -> None:
    """``fc`` hands on the last captured state alone."""
    size = drafter.target.hidden_size
    drafter.fc.weight.zero_()
    drafter.fc.weight[:, -size:] = torch.eye(size)
