"""Stage *plan*: what this config would do on the machines it names, and whether they can. Loads no target, asks no hub."""

import json
from typing import Any, cast

import torch
from omegaconf import DictConfig, OmegaConf
from rich.table import Table

from dspark_lab.checkpoint.description import describe
from dspark_lab.cluster.plan import Plan, make_plan
from dspark_lab.cluster.plan.flow import States
from dspark_lab.cluster.plan.job import Assumptions, Job
from dspark_lab.cluster.plan.memory import DrafterSize, TrainingPlace
from dspark_lab.data.vocabulary import DraftVocabulary, bounded_size
from dspark_lab.drafter.base import Borrowed, Drafter, Recipe
from dspark_lab.drafter.block import BlockDrafter
from dspark_lab.hardware.accelerator import Accelerator
from dspark_lab.pipeline.build import build
from dspark_lab.pipeline.distributed import Outcome, count_ranks
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console
from dspark_lab.records import TargetSpec
from dspark_lab.target.facts import Facts
from dspark_lab.target.protocol import TargetHead
from dspark_lab.training.muon import kinds
from dspark_lab.training.place import num_devices

PLAN_FILE = "plan.json"


def plan(parts: Parts) -> Outcome:
    """Print the plan and write ``<run>/plan.json``. Raises ValueError for one that cannot work."""
    made = made_plan(parts)
    show(made, title=f"plan of {parts.run.name}")
    if made.impossible:
        raise ValueError("this plan cannot work: " + "; ".join(made.impossible))
    return {}, []


def made_plan(parts: Parts) -> Plan:
    spec = spec_of_facts(parts.config) or parts.target.spec
    made = make_plan(job_of(parts, spec))
    (parts.run.directory / PLAN_FILE).write_text(json.dumps(made.to_json(), indent=1))
    return made


def show(made: Plan, *, title: str) -> None:
    nodes = Table(title=f"{title}: nodes of one job", title_justify="left")
    for name in ("node", "GPUs", "does", "address"):
        nodes.add_column(name)
    for node in made.nodes:
        nodes.add_row(node.name, str(node.num_gpus), "; ".join(node.does), node.address)
    console.print(nodes)
    table = Table(title=title, title_justify="left")
    for name in ("", "figure", "value", "because"):
        table.add_column(name)
    section = None
    for line in made.lines:
        table.add_row("" if line.section == section else line.section, line.name, line.told, line.because)
        section = line.section
    console.print(table)


def spec_of_facts(config: DictConfig) -> TargetSpec | None:
    """The target as data alone; None where ``target.facts`` is null."""
    if config.target.facts is None:
        return None
    facts: Facts = build(config, "target.facts")
    return facts.spec(
        name=config.target.name,
        model=config.target.model,
        layer_ids=config.target.layer_ids,
        mask_token_id=config.target.mask_token_id,
    )


def drafter_on_meta(config: DictConfig, spec: TargetSpec, *, draft_vocab_size: int | None) -> Drafter:
    """The drafter of the config in its true size, without memory."""
    recipe = Recipe(
        loss=build(config, "loss"),
        optimizer=build(config, "optimizer"),
        lr_schedule=build(config, "lr_schedule"),
        seed=config.seed,
    )
    size = bounded_size(draft_vocab_size, vocab_size=spec.vocab_size)
    vocabulary = DraftVocabulary.of(torch.arange(size), vocab_size=spec.vocab_size)
    with torch.device("meta"):
        matrix = torch.empty(spec.vocab_size, spec.hidden_size)
        head = TargetHead(matrix, torch.empty(spec.hidden_size), spec.rms_norm_eps, torch.empty_like(matrix))
        return build(
            config, "drafter", without=("from_pretrained",), borrowed=Borrowed(spec, head, vocabulary), recipe=recipe
        )


def size_of(drafter: Drafter, *, row_tokens: int, muon: bool) -> DrafterSize:
    described = describe(drafter)
    options, target = described.options, drafter.target
    window = options["window"]
    parameters = dict(drafter.named_parameters())
    if isinstance(drafter, BlockDrafter):
        blocks = min(drafter.num_anchors, row_tokens)
        num_queries, num_slots, num_context = blocks * drafter.block_size, blocks * drafter.num_draft_tokens, row_tokens
    else:
        num_queries = num_slots = row_tokens * drafter.decays.numel()
        num_context = 0
    head_dim, size = target.head_dim, target.hidden_size
    num_key = 2 * size * target.num_key_value_heads * head_dim
    num_attention = num_key + 2 * size * target.num_attention_heads * head_dim
    if described.latent is not None:
        assert isinstance(drafter, BlockDrafter)
        head_dim = described.latent.qk_head_dim  # its values are smaller: the plan is a little high
        weights = {name: p.numel() for name, p in drafter.layers[0].self_attn.named_parameters() if p.ndim == 2}
        num_attention, num_key = sum(weights.values()), sum(n for name, n in weights.items() if name.startswith("kv_"))
    return DrafterSize(
        num_parameters=sum(parameter.numel() for parameter in parameters.values()),
        num_muon=sum(parameters[name].numel() for name, kind in kinds(drafter).items() if kind == "muon")
        if muon
        else 0,
        num_head=sum(p.numel() for module in drafter.head_modules() for p in module.parameters()),
        hidden_size=target.hidden_size,
        vocab_size=target.vocab_size,
        draft_vocab_size=described.draft_vocab_size,
        num_captured=len(target.layer_ids),
        num_layers=options["num_layers"],
        intermediate_size=options["intermediate_size"],
        num_heads=target.num_attention_heads,
        num_kv_heads=target.num_key_value_heads,
        head_dim=head_dim,
        num_attention=num_attention,
        num_key=num_key,
        window=window["tokens"] if window is not None and not window["full_layers"] else None,
        row_tokens=row_tokens,
        num_queries=num_queries,
        num_slots=num_slots,
        num_context_tokens=num_context,
        chunk_slots=drafter.head_chunk_tokens,
    )


def job_of(parts: Parts, spec: TargetSpec) -> Job:
    config, corpus = parts.config, parts.corpus
    hardware = build(config, "hardware")
    if not isinstance(hardware, Accelerator):
        raise ValueError("plan needs a data sheet: set hardware to one (gb300_nvl72, b300, h200, ...), not to measured")
    num_ranks, mooncake = count_ranks(config), parts.info.choices["store"] == "mooncake"
    muon = parts.info.choices["optimizer"] == "muon"
    drafter = drafter_on_meta(config, spec, draft_vocab_size=corpus.draft_vocab_size)
    choices = parts.info.choices
    num_sets = num_sets_of(config)
    return Job(
        hardware=hardware,
        target=None if config.target.serving is None else build(config, "target.serving"),
        states=States(
            num_layers=len(spec.layer_ids),
            hidden_size=spec.hidden_size,
            number_bytes=getattr(torch, config.capture.dtype).itemsize,
        ),
        size=size_of(drafter, row_tokens=corpus.row_tokens, muon=muon),
        trainer=TrainingPlace(
            num_ranks=num_ranks,
            sharded=config.trainer.strategy == "fsdp",
            rows_per_batch=corpus.rows_per_batch,
            bf16=config.trainer.precision == "bf16-mixed"
            or (config.trainer.precision == "auto" and hardware.name != "cpu"),
            on_cpu=hardware.name == "cpu",
            state_bytes=getattr(torch, config.capture.dtype).itemsize,
        ),
        accumulate=config.trainer.accumulate,
        max_steps=config.trainer.max_steps,
        num_training_nodes=1 if choices["cluster"] == "local" else config.trainer.num_nodes,
        num_sets=num_sets,
        one_machine=choices["cluster"] == "local",
        gpus_per_set=gpus_per_set_of(config) if choices["cluster"] == "slurm" else None,
        num_samples=num_samples_of(config),
        segment_bytes=segment_bytes_of(config, num_sets) if mooncake else None,
        window_bytes=config.live.window_bytes,
        live=corpus.source == "live",
        captures=choices["engine"] == "vllm",
        assumed=cast(Assumptions, build(config, "plan")),
    )


def num_sets_of(config: DictConfig) -> int:
    """Of serving nodes (``cluster=slurm``), or GPUs with a server each (``cluster=local``): those that training leaves."""
    sets: Any = OmegaConf.select(config, "cluster.num_sets")
    if sets is not None:
        return int(sets)
    devices: Any = OmegaConf.select(config, "cluster.vllm.visible_devices")
    if isinstance(devices, str):
        return len(devices.split(","))
    here: Any = OmegaConf.select(config, "hardware.gpus_per_node")
    if here is None or config.data.source != "live":
        return 1
    return max(here - num_devices(config.trainer.devices, config.trainer.accelerator), 1)


def gpus_per_set_of(config: DictConfig) -> int:
    """With vLLM's CPU engine (``gpus_per_node`` 0) a node is one device."""
    return config.cluster.nodes_per_set * (config.cluster.gpus_per_node or 1)


def num_samples_of(config: DictConfig) -> int:
    """Training samples, where the source says how many prompts it gives; else those that ``trainer.max_steps`` takes."""
    prompts: Any = OmegaConf.select(config, "data.train.num_prompts")
    if prompts is None:
        rows = config.trainer.max_steps * config.trainer.accumulate * config.data.rows_per_batch * count_ranks(config)
        return int(rows * config.data.row_tokens / config.plan.sample_tokens)
    return int(prompts) * config.data.samples_per_prompt


def segment_bytes_of(config: DictConfig, num_sets: int) -> float | None:
    """Memory of Mooncake of the whole job, one segment a set with Slurm; None where others provide it."""
    given = segment_bytes(config)
    return None if given is None else float(given) * (num_sets if "num_sets" in config.cluster else 1)


def segment_bytes(config: DictConfig) -> int | None:
    """Of one segment of Mooncake that this job would start; None where others start them."""
    found = OmegaConf.select(config, "cluster.storage.segment_bytes")
    return None if found is None else int(found)
