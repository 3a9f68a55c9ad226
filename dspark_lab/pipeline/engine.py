"""The engine of stage *serve*: vLLM with the run's export, one server for each number of draft tokens, or a running one."""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from dspark_lab.checkpoint.engines import (
    VLLM_VERSION,
    cpu_faults,
    needs_newer_runner,
    speculative_config,
    verification_faults,
)
from dspark_lab.checkpoint.reading import Checkpoint
from dspark_lab.cluster.services import Role, ServiceError
from dspark_lab.cluster.vllm import RunningVllm, VllmApi, VllmServer
from dspark_lab.evaluation.engine import ARGUMENTS, DRAFTING_ARGUMENTS, DraftCounters, Served, serve_prompts
from dspark_lab.evaluation.recipe import NumDraftTokens
from dspark_lab.nearby import LOOPBACK
from dspark_lab.pipeline.parts import Parts
from dspark_lab.progress import console, track
from dspark_lab.records import TokenizedConversation
from dspark_lab.report.served import INTERPRETED, ServedPoint
from dspark_lab.target.precision import resolve_device


@dataclass(frozen=True, slots=True)
class Measured:
    """One combination. ``interpreted``: Triton's kernels were, so nothing is known of the engine's speed."""

    num_draft_tokens: NumDraftTokens
    concurrency: int
    served: Served
    setting: dict[str, Any]
    interpreted: bool

    @property
    def point(self) -> ServedPoint:
        served = self.served
        speeds = served.tokens_per_s, served.tokens_per_s_per_user, served.first_token_s
        known = (None, None, None) if self.interpreted else speeds
        return ServedPoint(
            self.num_draft_tokens,
            self.concurrency,
            served.acceptance_length,
            *known,
            engine=self.setting["engine"],
            undefined=INTERPRETED if self.interpreted else None,
        )


class Engine:
    """vLLM for ``prompts``, with the target of the run and the drafter in ``checkpoint.source``."""

    def __init__(self, parts: Parts, checkpoint: Checkpoint, prompts: Sequence[TokenizedConversation]) -> None:
        self.parts, self.checkpoint, self.prompts = parts, checkpoint, prompts
        self.eos_token_ids = parts.target.spec.eos_token_ids
        endpoint = parts.serving.endpoint
        elsewhere = endpoint is not None and urlsplit(endpoint).hostname not in ("localhost", LOOPBACK)
        self.on_cpu = not elsewhere and resolve_device("auto").type == "cpu"

    @property
    def faults(self) -> list[str]:
        """Where it is known to compute something else than it should."""
        found = self.checkpoint.description
        of_cpus = cpu_faults(found.algorithm, found.options) if self.on_cpu else []
        return [*of_cpus, *verification_faults(self.parts.serving.verification)]

    def measure(self, num_draft_tokens: NumDraftTokens) -> Iterator[Measured]:
        """Every concurrency with one server, each as soon as it is known.

        Raises:
            ServiceError: the server did not start, or ended.
            ValueError: ``serve.endpoint`` is not the server that the recipe says, or it refused a request.
            OSError: it did not answer.
        """
        recipe, drafts = self.parts.serving, num_draft_tokens != 0
        with self._connect() if recipe.endpoint else self._start(num_draft_tokens) as server:
            if not server.version.startswith(VLLM_VERSION):
                console.print(
                    f"[yellow]serve: vLLM {server.version}; {VLLM_VERSION} is the one that was tested[/yellow]"
                )
            if isinstance(num_draft_tokens, int) and drafts:
                check_drafts(server, num_draft_tokens)
            interpreted = self.on_cpu and drafts and self._newer_runner
            if not interpreted:  # what an engine still prepares at its first request is no part of its speed
                self._serve(server, self.prompts[:1], drafts=drafts, concurrency=1)
            for concurrency in recipe.concurrency:
                served = self._serve(server, self.prompts, drafts=drafts, concurrency=concurrency)
                setting = self._setting(num_draft_tokens, concurrency, version=server.version)
                yield Measured(num_draft_tokens, concurrency, served, setting, interpreted)

    def _serve(
        self, server: VllmApi, prompts: Sequence[TokenizedConversation], *, drafts: bool, concurrency: int
    ) -> Served:
        return serve_prompts(
            server,
            prompts,
            sampling=self.parts.serving.sampling,
            eos_token_ids=self.eos_token_ids,
            concurrency=concurrency,
            seed=self.parts.evaluation.seed,
            drafts=drafts,
            progress=partial(track, total=len(prompts)),
        )

    def _setting(self, num_draft_tokens: NumDraftTokens, concurrency: int, *, version: str) -> dict[str, Any]:
        parts = self.parts
        return {
            **asdict(parts.serving.sampling),
            "benchmark": parts.benchmark.name,
            "num_draft_tokens": num_draft_tokens,
            "verification": parts.serving.verification,
            "engine": f"vllm{'-cpu' if self.on_cpu else ''} {version}",
            "dtype": self._dtype,
            "concurrency": concurrency,
        }

    @property
    def _dtype(self) -> str:
        recipe, parts = self.parts.serving, self.parts
        if recipe.dtype or recipe.endpoint:
            return recipe.dtype or "not told"
        if parts.info.choices["engine"] == "vllm" and "decode" not in parts.evaluation.modes:
            return str(parts.config.engine.dtype)  # of the servers whose answers are replayed
        return str(parts.target.dtype).removeprefix("torch.")

    @property
    def _newer_runner(self) -> bool:
        found, recipe = self.checkpoint.description, self.parts.serving
        # On a CPU the older one verifies at temperatures that it never wrote (docs/checkpoints.md).
        sampled = self.on_cpu and not recipe.sampling.greedy
        return sampled or needs_newer_runner(found.algorithm, found.options, verification=recipe.verification)

    def _connect(self) -> RunningVllm:
        parts, url = self.parts, self.parts.serving.endpoint
        assert url is not None
        parts.release()
        names = {str(parts.config.target.model), str(parts.target.resolved.folder)}
        return RunningVllm(url, targets=names)

    def _start(self, num_draft_tokens: NumDraftTokens) -> VllmServer:
        parts, recipe, found = self.parts, self.parts.serving, self.checkpoint.description
        spec, adaptive = parts.target.spec, num_draft_tokens == "adaptive"
        number = found.num_draft_tokens if isinstance(num_draft_tokens, str) else num_draft_tokens
        longest = max(map(len, self.prompts)) + recipe.sampling.max_new_tokens + number + 1
        arguments = [
            "--dtype", self._dtype,
            "--max-model-len", str(min(longest, spec.max_position_embeddings)),
            "--generation-config", "vllm",  # else the target's own sampling defaults
            "--no-enable-prefix-caching",  # each prompt is prefilled, as here
            *ARGUMENTS,
        ]  # fmt: skip
        newer = number > 0 and self._newer_runner
        if number:
            speculative = speculative_config(
                found,
                folder=str(Path(self.checkpoint.source)),
                num_draft_tokens=number,
                verification=recipe.verification,
                adaptive=adaptive,
            )
            arguments += ["--speculative-config", json.dumps(speculative), *DRAFTING_ARGUMENTS]
        parts.release()
        role = Role(command_prefix=recipe.command_prefix, **({"python": recipe.python} if recipe.python else {}))
        drafter = f"{num_draft_tokens} draft tokens" if number else "no drafter"
        console.print(f"serve: starting vLLM, {drafter} ({parts.run.directory / 'logs' / 'vllm.log'})")
        return VllmServer(
            folder=parts.run.directory / "logs",
            model=str(parts.target.resolved.folder),
            arguments=[*arguments, *recipe.arguments],
            environment={"VLLM_USE_V2_MODEL_RUNNER": "1"} if newer else None,
            on_cpu=self.on_cpu,
            interpret=self.on_cpu and newer,
            role=role,
            deadline_s=recipe.deadline_s,
        )


def measure_frontier(engine: Engine, numbers: Sequence[NumDraftTokens]) -> tuple[list[Measured], list[str]]:
    """Everything that could be measured, and in words what failed; a server that fails takes no other's points with it.

    Raises:
        ServiceError, ValueError, OSError: the very first point failed, so there is nothing to judge.
    """
    measured: list[Measured] = []
    failures: list[str] = []
    for number in numbers:
        try:
            for found in engine.measure(number):
                console.print(f"serve: {found.point}")
                measured.append(found)
        except (ServiceError, ValueError, OSError) as error:
            if not measured:
                raise
            failures.append(f"serve.num_draft_tokens={number}: {error or repr(error)}")
            console.print(f"serve: {failures[-1]}", style="red", markup=False)
    return measured, failures


def check_drafts(server: VllmApi, num_draft_tokens: int) -> None:
    """ValueError for a server that drafts nothing, or another number of tokens."""
    told = len(DraftCounters.parse(server.get("/metrics")).accepted_at)
    if told != num_draft_tokens:
        raise ValueError(
            f"{server.url} drafts {told} tokens, not {num_draft_tokens}: set serve.num_draft_tokens={told}, or start it "
            f"with num_speculative_tokens={num_draft_tokens}"
        )
