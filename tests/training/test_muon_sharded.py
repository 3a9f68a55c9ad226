"""Muon on matrices that two processes share, as FSDP2 leaves them."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from dspark_lab.training.muon import MuonAdamW

SHAPES = {"muon": (5, 8), "adamw": (3, 2)}  # rows that do not divide evenly by two


def drawn(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {kind: torch.randn(shape, generator=generator) for kind, shape in SHAPES.items()}


def stepped(parameters: dict[str, nn.Parameter], gradients: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    groups = [{"params": [p], "kind": kind, "weight_decay": 0.1} for kind, p in parameters.items()]
    optimizer = MuonAdamW(groups, lr=1e-2, momentum=0.95, betas=(0.9, 0.95), eps=1e-8)
    for gradient in gradients:
        for kind, parameter in parameters.items():
            parameter.grad = gradient[kind]
        optimizer.step()
    return {kind: parameter.detach() for kind, parameter in parameters.items()}


def worker(rank: int, folder: Path) -> None:
    dist.init_process_group("gloo", init_method=f"file://{folder / 'meeting'}", rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (2,))

    def sharded(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {kind: distribute_tensor(tensor, mesh, [Shard(0)]) for kind, tensor in tensors.items()}

    gradients = [drawn(seed) for seed in (1, 2, 3)]
    expected = stepped({kind: nn.Parameter(tensor) for kind, tensor in drawn(0).items()}, gradients)
    found = stepped(
        {kind: nn.Parameter(tensor) for kind, tensor in sharded(drawn(0)).items()}, [sharded(g) for g in gradients]
    )
    for kind, tensor in found.items():
        assert isinstance(tensor, DTensor) and tensor.placements == (Shard(0),)
        assert torch.allclose(tensor.full_tensor(), expected[kind], atol=1e-6), kind
    dist.destroy_process_group()


@pytest.mark.slow
def test_shards_step_as_the_whole(tmp_path: Path) -> None:
    mp.spawn(worker, (tmp_path,), nprocs=2)
