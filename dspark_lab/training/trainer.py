"""Lightning's Trainer with the few choices that this project makes for everybody."""

from inspect import signature
from pathlib import Path
from typing import Any, Literal

import lightning as L
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy, Strategy
from torch.nn.parallel import DistributedDataParallel

from dspark_lab.target.precision import has_bfloat16, resolve_device
from dspark_lab.training.checkpoints import LAST, CheckpointFiles, SaveOnSignal, model_checkpoints
from dspark_lab.training.exactness import KeyedRandomness, LoggedStep, OptimizerKeys, Surroundings
from dspark_lab.training.place import cluster_environment, num_devices
from dspark_lab.validation import checked

Precision = Literal["auto", "bf16-mixed", "32-true"]

CHECKPOINT_FOLDER = "checkpoints"


@checked
def build_trainer(
    *,
    run_dir: Path,
    loggers: list[Logger],
    callbacks: list[Callback],
    monitor: str,
    seed: int,
    max_steps: int,
    val_every_steps: int,
    checkpoint_every_steps: int,
    precision: Precision,
    accelerator: str,
    strategy: Literal["auto", "ddp", "fsdp"],
    devices: int | Literal["auto"],
    num_nodes: int,
    gradient_clip: float,
    accumulate: int,
    log_every_steps: int,
) -> L.Trainer:
    """A Trainer that counts in optimizer steps, validates every ``val_every_steps`` of them and draws its own batches.

    Weights are fp32; ``precision`` auto computes in bf16 where the hardware multiplies it. ``seed`` keys whatever
    training draws. With more than one rank this process must be one of a group (``launch``, torchrun, srun).
    """
    if max_steps < 1 or val_every_steps < 1 or checkpoint_every_steps < 1 or accumulate < 1:
        raise ValueError(
            f"max_steps={max_steps}, val_every_steps={val_every_steps}, accumulate={accumulate} and "
            f"checkpoint_every_steps={checkpoint_every_steps} must all be at least 1"
        )
    checkpoints = run_dir / CHECKPOINT_FOLDER
    ranks_of_node = num_devices(devices, accelerator)
    return L.Trainer(
        default_root_dir=run_dir,
        logger=loggers,
        callbacks=[
            KeyedRandomness(seed),
            Surroundings(),
            OptimizerKeys(),
            LoggedStep(run_dir),
            *callbacks,
            SaveOnSignal(checkpoints / LAST),  # after all that count a step; Lightning puts checkpoints last
            *model_checkpoints(checkpoints, monitor, every_steps=checkpoint_every_steps),
        ],
        max_steps=max_steps,
        max_epochs=-1,
        check_val_every_n_epoch=None,
        val_check_interval=min(val_every_steps, max_steps) * accumulate,
        num_sanity_val_steps=0,
        precision=resolve_precision(precision),
        accelerator=accelerator,
        strategy=choose_strategy(strategy, num_ranks=ranks_of_node * num_nodes),
        devices=ranks_of_node,
        num_nodes=num_nodes,
        plugins=[cluster_environment(), CheckpointFiles()],
        gradient_clip_val=gradient_clip or None,
        accumulate_grad_batches=accumulate,
        log_every_n_steps=log_every_steps,
        use_distributed_sampler=False,
        enable_model_summary=False,
        enable_progress_bar=False,
    )


def choose_strategy(strategy: Literal["auto", "ddp", "fsdp"], *, num_ranks: int) -> Strategy | Literal["auto"]:
    """Raises ValueError for a strategy that has nothing to do."""
    if num_ranks == 1:
        if strategy != "auto":
            raise ValueError(f"strategy={strategy!r} needs several ranks: raise devices or num_nodes, or use auto")
        return "auto"
    if strategy == "fsdp":
        return ModelParallelStrategy(
            data_parallel_size=num_ranks, tensor_parallel_size=1, save_distributed_checkpoint=False
        )
    # Buffers are constants: none needs to be broadcast before every forward pass.
    renamed = "forward_sync_buffers" in signature(DistributedDataParallel.__init__).parameters  # in torch 2.13
    buffers: dict[str, Any] = {"forward_sync_buffers" if renamed else "broadcast_buffers": False}
    return DDPStrategy(gradient_as_bucket_view=True, **buffers)


def resolve_precision(precision: Precision) -> Literal["bf16-mixed", "32-true"]:
    if precision != "auto":
        return precision
    return "bf16-mixed" if has_bfloat16(resolve_device("auto")) else "32-true"
