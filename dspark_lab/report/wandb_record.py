"""What a run found out, as the summary, tables and media of its W&B run."""

from collections.abc import Sequence
from html import escape
from typing import Any

from dspark_lab.evaluation.examples import Example, ExampleStep
from dspark_lab.report.algorithms import algorithm_rows, domain_lengths
from dspark_lab.report.collect import Collection, RunResult

DOMAIN_COLUMNS = ("prompt set", "acceptance length", "low", "high", "prompts")
COLOURS = {True: "0,112,92", False: "163,18,58"}


def summary_of(run: RunResult) -> dict[str, float]:
    """The newest number of each name and origin; simulated ones stand for so many loads that they stay in the report."""
    return {
        f"{entry.name}/{entry.origin}": entry.value
        for entry in run.results.metrics
        if entry.value is not None and entry.origin != "simulated"
    }


def record(run: RunResult, wandb_run: Any) -> None:
    """Into a W&B run that is open."""
    import wandb

    choices = {f"{group}_name": choice for group, choice in run.results.run.choices.items()}
    wandb_run.config.update({**run.results.run.config, **choices}, allow_val_change=True)
    wandb_run.summary.update(summary_of(run))
    domains = domain_lengths(algorithm_rows(Collection((run,), {})))
    if domains:
        cells: list[Any] = [[entry.domain, entry.value, entry.low, entry.high, entry.num_prompts] for entry in domains]
        wandb_run.log({"acceptance by prompt set": wandb.Table(columns=list(DOMAIN_COLUMNS), data=cells)})
    if run.examples:
        wandb_run.log({"examples": wandb.Html(examples_html(run.examples), inject=False)})


def examples_html(examples: Sequence[Example]) -> str:
    """Accepted drafts green, rejected ones red and struck, the deeper the surer; the bonus token underlined."""
    answers = [
        f"<h4>{escape(entry.domain)}, {escape(entry.prompt_id)}: {entry.acceptance_length:.2f} tokens per verify step</h4>"
        f"<pre>{escape(entry.first)}{''.join(map(_step, entry.steps))}</pre>"
        for entry in examples
    ]
    return "<style>pre { white-space: pre-wrap; line-height: 1.8 } s { opacity: .8 }</style>" + "".join(answers)


def _step(step: ExampleStep) -> str:
    confidence = step.confidence or (1.0,) * len(step.drafts)
    drawn = []
    for index, (draft, sure) in enumerate(zip(step.drafts, confidence, strict=True)):
        accepted = index < step.num_accepted
        tag, text = ("span", draft) if accepted else ("s", draft.replace("\n", "⏎"))
        style = f"background: rgba({COLOURS[accepted]},{0.1 + 0.35 * sure:.2f})"
        drawn.append(f'<{tag} style="{style}" title="confidence {sure:.2f}">{escape(text)}</{tag}>')
    return "".join(drawn) + f"<u>{escape(step.bonus)}</u>"
