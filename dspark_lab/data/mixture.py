"""Several weighted prompt sources as one, and the card that says what each of them gave."""

from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

from dspark_lab.data.prompts import PromptSource
from dspark_lab.records import Conversation, TokenizedConversation
from dspark_lab.validation import checked


@dataclass(frozen=True, slots=True)
class Part:
    """One source of a mixture. ``revision`` and ``licence`` are for sources that do not know their own."""

    source: PromptSource
    weight: float = 1.0
    revision: str | None = None
    licence: str | None = None

    def __post_init__(self) -> None:
        if not self.weight > 0:
            raise ValueError(f"weight={self.weight}: must be positive; remove the part to leave it out")
        for name in ("revision", "licence"):
            own, given = getattr(self.source, name, None), getattr(self, name)
            if own is not None and given is not None:
                raise ValueError(f"{name}={given!r}: the source says {own!r} itself; remove it here")


class Mixture:
    """``num_prompts`` prompts, shared out to the named parts by their weights (largest remainder).

    Each part gives the first prompts of its source. They are interleaved evenly, so that any first n are mixed by the
    weights too. Ids become ``part/id``, and ``source`` of each conversation is the part's name. Raises ValueError for
    a part that gets no prompt, or whose source runs out before its share.
    """

    @checked
    def __init__(self, *, num_prompts: int, parts: Mapping[str, Part]) -> None:
        if not parts:
            raise ValueError("parts is empty: name at least one, e.g. {math: {source: ..., weight: 1.0}}")
        self.parts = parts
        self.shares = largest_remainder(num_prompts, {name: part.weight for name, part in parts.items()})
        for name, share in self.shares.items():
            if share == 0:
                raise ValueError(
                    f"parts.{name}: its share of num_prompts={num_prompts} is 0 at weight {parts[name].weight:g}; "
                    "raise one of them, or remove the part"
                )

    def __iter__(self) -> Iterator[Conversation]:
        places = [((k + 0.5) / share, name) for name, share in self.shares.items() for k in range(share)]
        sources = {name: iter(part.source) for name, part in self.parts.items()}
        given: Counter[str] = Counter()
        for _, name in sorted(places, key=lambda place: place[0]):  # stable: ties in the order of the parts
            conversation = next(sources[name], None)
            if conversation is None:
                raise ValueError(
                    f"parts.{name}: its source holds only {given[name]} prompts, its share is {self.shares[name]}; "
                    "lower its weight or the mixture's num_prompts, or give the source more"
                )
            given[name] += 1
            yield replace(conversation, id=f"{name}/{conversation.id}", source=name)


def largest_remainder(total: int, weights: Mapping[str, float]) -> dict[str, int]:
    """Whole shares that add up to ``total``, each within 1 of its exact one; ties go to the earlier name."""
    exact = {name: total * weight / sum(weights.values()) for name, weight in weights.items()}
    shares = {name: int(share) for name, share in exact.items()}
    by_remainder = sorted(weights, key=lambda name: shares[name] - exact[name])
    for name in by_remainder[: total - sum(shares.values())]:
        shares[name] += 1
    return shares


@dataclass(frozen=True, slots=True)
class SourceCard:
    """What one source gave to training: the run card's line about it."""

    name: str
    weight: float
    revision: str | None
    licence: str | None
    num_prompts: int
    num_samples: int
    num_tokens: int
    num_supervised_tokens: int


def source_cards(
    source: PromptSource, prompts: Sequence[Conversation], samples: Iterable[TokenizedConversation]
) -> list[SourceCard]:
    """A card for each part of a mixture, one named ``train`` for any other source.

    ``prompts`` are those that were kept, ``samples`` what is trained on (each key counted once).
    """
    parts = source.parts if isinstance(source, Mixture) else {"train": Part(source)}
    by_name = {name: [] for name in parts}
    for sample in {sample.key: sample for sample in samples}.values():
        by_name[sample.source or "train"].append(sample)
    num_prompts = Counter(prompt.source or "train" for prompt in prompts)
    return [
        SourceCard(
            name=name,
            weight=part.weight,
            revision=part.revision or getattr(part.source, "revision", None),
            licence=part.licence or getattr(part.source, "licence", None),
            num_prompts=num_prompts[name],
            num_samples=len(by_name[name]),
            num_tokens=sum(map(len, by_name[name])),
            num_supervised_tokens=sum(int(sample.loss_mask.sum()) for sample in by_name[name]),
        )
        for name, part in parts.items()
    ]
