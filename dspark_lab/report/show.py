"""What was drafted, in the terminal: accepted drafts green, rejected ones red, a shade for the drafter's confidence."""

from collections.abc import Sequence

from rich.console import Console
from rich.style import Style
from rich.text import Text

from dspark_lab.evaluation.examples import Example, ExampleStep
from dspark_lab.report.algorithms import algorithm_rows
from dspark_lab.report.collect import Collection

ACCEPTED, REJECTED = (0, 112, 92), (163, 18, 58)


def show_examples(collection: Collection, console: Console) -> None:
    """One algorithm after the other. Without colours, accepted drafts stand in [ ], rejected ones in { }.

    Raises:
        ValueError: no run has any.
    """
    shown = [(row.label, row.run.examples) for row in algorithm_rows(collection) if row.run.examples]
    if not shown:
        raise ValueError("no run holds examples: evaluate with evaluate.num_examples above 0")
    plain = console.color_system is None
    console.print(_draft("accepted", 1.0, True, plain), _draft("rejected", 1.0, False, plain), "deeper: surer")
    for label, examples in shown:
        console.rule(label)
        for example in examples:
            told = f"{example.acceptance_length:.2f} tokens per verify step"
            console.print(Text(f"{example.domain}, {example.prompt_id}, {example.origin}: {told}", Style(bold=True)))
            console.print(example_text(example, plain=plain))


def example_text(example: Example, *, plain: bool = False) -> Text:
    """The answer as it came about; drafts that fell stand before the target's token that replaced them, underlined."""
    return Text(example.first, Style(dim=True)) + Text.assemble(*(_step_text(step, plain) for step in example.steps))


def _step_text(step: ExampleStep, plain: bool) -> Text:
    confidence: Sequence[float] = step.confidence or (1.0,) * len(step.drafts)
    text = Text()
    for index, (draft, sure) in enumerate(zip(step.drafts, confidence, strict=True)):
        text += _draft(draft, sure, index < step.num_accepted, plain)
    return text.append(step.bonus, Style(underline=True))


def _draft(text: str, confidence: float, accepted: bool, plain: bool) -> Text:
    """Black on a pale shade, white on a deep one."""
    shown = text if accepted else text.replace("\n", "⏎")
    if plain:
        return Text(f"[{shown}]" if accepted else f"{{{shown}}}")
    share = 0.15 + 0.85 * confidence
    red, green, blue = (round(255 + (part - 255) * share) for part in (ACCEPTED if accepted else REJECTED))
    style = Style(color="white" if share > 0.55 else "black", bgcolor=f"rgb({red},{green},{blue})", strike=not accepted)
    return Text(shown, style)
