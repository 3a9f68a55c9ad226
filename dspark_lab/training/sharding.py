"""FSDP2 for drafters: parameters, gradients and optimizer state in shards, one on each rank."""

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard, register_fsdp_forward_method


def shard(drafter: nn.Module, mesh: DeviceMesh) -> None:
    """Shard all parameters as one group: gathered when ``forward`` or ``propose`` begins, freed by the backward pass.

    One group and not one a layer, because layers are called several times in a step (EAGLE-3: once a step of its
    training-time test; block drafters: for the context and for their own slots), and FSDP2 sends gradients after *each*
    call of a group. As one group a step sends exactly DDP's bytes, and a drafter's methods may use its parts in any way.
    Drafters are small: what has to be split is the optimizer's state, twelve of sixteen bytes a parameter.

    What ``forward`` returns must be a pytree: FSDP2 finds the start of the backward pass by its tensors.
    """
    fully_shard(drafter, mesh=mesh)
    register_fsdp_forward_method(drafter, "propose")
