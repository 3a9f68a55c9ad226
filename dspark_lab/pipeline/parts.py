"""The objects of one run, each built from the config when a stage first needs it."""

import gc
import inspect
import os
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from functools import cached_property, partial
from pathlib import Path
from typing import Any, cast
from uuid import uuid4

import torch
from hydra.utils import get_class
from omegaconf import DictConfig, OmegaConf

from dspark_lab.capture.client import CaptureClient
from dspark_lab.capture.endpoints import EndpointPool
from dspark_lab.checkpoint.description import format_of
from dspark_lab.checkpoint.export import Export
from dspark_lab.checkpoint.reading import Checkpoint, read_checkpoint
from dspark_lab.checkpoint.warm_start import check_fit, load_weights
from dspark_lab.cluster.local import Cluster
from dspark_lab.data.corpus import Corpus
from dspark_lab.data.datamodule import HiddenStateDataModule
from dspark_lab.data.live import LiveData, LiveRecipe
from dspark_lab.data.packing import SampleOutline
from dspark_lab.data.vocabulary import DraftVocabulary, build_draft_vocabulary, count_supervised_tokens
from dspark_lab.drafter.base import Borrowed, Drafter, Recipe
from dspark_lab.drafter.start import start_from_target
from dspark_lab.evaluation.published import Published
from dspark_lab.evaluation.recipe import Benchmark, Calibration, Evaluation, Serving
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.combinations import refuse_contradictions
from dspark_lab.pipeline.conversations import Conversations
from dspark_lab.pipeline.live import live_data
from dspark_lab.progress import console
from dspark_lab.records import content_hash
from dspark_lab.report.results import RunInfo
from dspark_lab.run import Run
from dspark_lab.store.mooncake_admin import room
from dspark_lab.store.protocol import HiddenStateStore, Manifest
from dspark_lab.target.huggingface import HuggingFaceTarget
from dspark_lab.target.protocol import Target
from dspark_lab.target.vllm import VllmTarget
from dspark_lab.training.place import Place, num_devices

FROM_TARGET = "target"  # drafter.from_pretrained: no checkpoint, but the target's last layers
LIVE_PATIENCE_S = 2.0
"""A live request waits so long for a usable server; how long training waits is ``live.engine_deadline_s``."""


class Parts:
    """What the stages of one run share. Building it checks data, benchmark and evaluation; nothing heavy is loaded."""

    def __init__(self, config: DictConfig, run: Run, info: RunInfo, place: Place) -> None:
        self.config, self.run, self.info, self.place = config, run, info, place
        self.home = Path(config.home).expanduser()
        self.corpus: Corpus = build(config, "data")
        self.benchmark: Benchmark = build(config, "benchmark")
        self.evaluation: Evaluation = build(config, "evaluate")
        self.published: Published | None = build(config, "published") if config.published else None
        self.calibration: Calibration = build(config, "calibrate")
        self.export: Export = build(config, "export")
        self.serving: Serving = build(config, "serve")
        self.live: LiveRecipe = build(config, "live")
        self._open = ExitStack()
        if place.group_folder is None:  # a rank of a group uses what the group's parent has started
            refuse_contradictions(config, info.choices, num_ranks=place.num_ranks)

    def close(self) -> None:
        """Publish what the store still buffers, and end the services that this run has started."""
        with ExitStack() as closing:
            if "cluster" in self.__dict__:
                closing.callback(self.cluster.close)
            closing.callback(self.end_capture)
            if "store" in self.__dict__:
                closing.callback(self.store.close)

    def end_capture(self) -> None:
        """Let go of the engine of live data, and of its memory."""
        self.__dict__.pop("source", None)
        self._open.close()
        if "cluster" in self.__dict__:
            self.cluster.stop_engine()

    def release(self) -> None:
        """Free the memory of target and drafter, for processes that need the same GPUs. A later stage builds them anew."""
        for name in ("target", "drafter"):
            self.__dict__.pop(name, None)
        gc.collect()
        torch.cuda.empty_cache()

    @cached_property
    def cluster(self) -> Cluster:
        """The run's services; none runs before it is needed.

        What an experiment says for another kind of cluster, e.g. how many nodes of a rack it takes, is left out.
        """
        node, known = self.config.cluster, inspect.signature(get_class(self.config.cluster._target_)).parameters
        others = [name for name in node if name != "_target_" and name not in known]
        trainer, live = self.config.trainer, self.corpus.source == "live"
        places = {
            "folder": self.run.directory / "logs",
            "num_training_devices": num_devices(trainer.devices, trainer.accelerator) if live else 0,
        }
        return build(self.config, "cluster", without=others, **{n: p for n, p in places.items() if n in known})

    @cached_property
    def target(self) -> Target:
        if self.info.choices["engine"] == "huggingface":
            return build(self.config, "engine")
        # Of a job's stages none that is done in this process asks for answers or states.
        cluster = None if self.info.choices["cluster"] == "slurm" else self.cluster
        return build(self.config, "engine", cluster=cluster, namespace=f"run-{self.owner}")

    @property
    def in_process(self) -> HuggingFaceTarget:
        """The target with its weights in this process, whoever answers and captures."""
        return self.target.in_process if isinstance(self.target, VllmTarget) else cast(HuggingFaceTarget, self.target)

    @property
    def owner(self) -> str:
        """Names what belongs to this run alone: its folder is locked, so the path on this host has one owner at a time.

        In a Slurm job, whose ranks are on several hosts, the job stands for the host.
        """
        place = os.environ.get("SLURM_JOB_ID") or socket.gethostname()
        return content_hash([place, str(self.run.directory.resolve())])

    @cached_property
    def conversations(self) -> Conversations:
        return Conversations(
            self.corpus,
            benchmark=self.benchmark,
            evaluation=self.evaluation,
            serving=self.serving,
            target=lambda: self.target,
            home=self.home,
        )

    @cached_property
    def manifest(self) -> Manifest:
        engine = self.info.choices["engine"]
        return Manifest.for_target(self.target.spec, engine=engine, dtype=self.config.capture.dtype)

    @cached_property
    def store(self) -> HiddenStateStore:
        """Of all samples; with live data, of those that training does not capture itself."""
        match self.info.choices["store"]:
            case "memory":
                return build(self.config, "store", manifest=self.manifest)
            case "mooncake" if self.config.store.keep is None:
                place: dict[str, Any] = {
                    "namespace": f"{self.run.name}-{self.owner}",
                    "founds": self.place.num_ranks == 1,
                }
                if self.info.choices["cluster"] == "local" and self.place.group_folder is None:
                    started = self.cluster.mooncake()
                    place |= {"master_address": started.master_address, "admin_url": started.admin_url}
                return build(self.config, "store", without=("keep", "disk"), manifest=self.manifest, **place)
            case "mooncake":
                return self._on_disk("store.disk")
            case _:
                return self._on_disk("store")

    def _on_disk(self, key: str) -> HiddenStateStore:
        root = self.home / "states" / self.manifest.content_hash
        return build(self.config, key, manifest=self.manifest, root=root)

    @cached_property
    def generation(self) -> str:
        """Of this start of the run in Mooncake; all its processes share it."""
        return self.config.store.generation or getattr(self.store, "generation", None) or uuid4().hex

    @cached_property
    def source(self) -> CaptureClient:
        """The servers that capture, with data.source=live, until ``end_capture``."""
        assert isinstance(self.target, VllmTarget)
        capturing = self.target.capturing(
            self.conversations.tokenized["train"], generation=self.generation, patience_s=LIVE_PATIENCE_S
        )
        return self._open.enter_context(capturing)

    @property
    def source_urls(self) -> Sequence[str]:
        assert isinstance(self.source.endpoints, EndpointPool)
        return self.source.endpoints.usable

    @cached_property
    def imported(self) -> Checkpoint | None:
        """The checkpoint of ``drafter.from_pretrained``, which fits config and target; None without one."""
        node = self.config.drafter
        source = node.get("from_pretrained")
        if source in (None, FROM_TARGET):
            return None
        algorithm = format_of(get_class(node._target_)).name
        checkpoint = read_checkpoint(str(source))
        options: Any = OmegaConf.to_container(node, resolve=True)
        check_fit(
            checkpoint,
            algorithm=algorithm,
            options=options,
            draft_vocab_size=self.corpus.draft_vocab_size,
            target=self.target.spec,
        )
        return checkpoint

    @cached_property
    def vocabulary(self) -> DraftVocabulary:
        if self.imported is not None:
            return self.imported.vocabulary
        return build_draft_vocabulary(
            self.token_counts,
            vocab_size=self.target.spec.vocab_size,
            draft_vocab_size=self.corpus.draft_vocab_size,
        )

    @cached_property
    def token_counts(self) -> torch.Tensor:
        return count_supervised_tokens(self.conversations.tokenized["train"], vocab_size=self.target.spec.vocab_size)

    @property
    def coverage(self) -> float:
        return self.vocabulary.coverage(self.token_counts)

    @cached_property
    def datamodule(self) -> HiddenStateDataModule:
        return HiddenStateDataModule(
            store=self.store,
            train=self._outlines("train"),
            validation=self._outlines("validation"),
            row_tokens=self.corpus.row_tokens,
            rows_per_batch=self.corpus.rows_per_batch,
            num_workers=self._num_workers,
            prefetch_factor=self.corpus.prefetch_factor,
            seed=self.config.seed,
            live=self.live_data if self.corpus.source == "live" else None,
        )

    @property
    def _num_workers(self) -> int:
        if self.corpus.num_workers is not None:
            return self.corpus.num_workers
        return 0 if self.info.choices["store"] == "mooncake" else 1

    def _outlines(self, split: str) -> list[SampleOutline]:
        least = self.corpus.min_supervised_tokens
        return [SampleOutline.of(sample, min_supervised_tokens=least) for sample in self.conversations.tokenized[split]]

    @property
    def live_data(self) -> LiveData:
        kept = partial(self._on_disk, "store.disk") if self.config.store.keep else None
        admin_url = self.cluster.mooncake().admin_url
        assert admin_url
        source = self.source  # before room is looked for: it removes what earlier starts left
        free_bytes = room(admin_url).free_bytes
        return live_data(
            source, self.conversations.tokenized["train"], recipe=self.live, free_bytes=free_bytes, kept=kept
        )

    @cached_property
    def drafter(self) -> Drafter:
        recipe = Recipe(
            loss=build(self.config, "loss"),
            optimizer=build(self.config, "optimizer"),
            lr_schedule=build(self.config, "lr_schedule"),
            seed=self.config.seed,
        )
        spec, imported = self.target.spec, self.imported
        seen = imported.description.layers.seen_by(spec) if imported else spec
        borrowed = Borrowed(seen, self.target.head(), self.vocabulary)
        drafter: Drafter = build(
            self.config, "drafter", without=("from_pretrained",), borrowed=borrowed, recipe=recipe
        ).float()
        if self.config.drafter.get("from_pretrained") == FROM_TARGET:
            start_from_target(drafter, self.in_process.layers())
        if imported is not None:
            load_weights(drafter, imported)
            console.print(f"drafter: weights of {imported.source} ({imported.format} format)")
        return drafter
