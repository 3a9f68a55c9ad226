"""Templated arithmetic and instruction dialogues: the prompts of smoke runs and the whole education of ``target=tiny``.

A dialogue is a pure function of (seed, index), on every machine and Python version that keeps ``random.Random`` stable.
Numbers stay below 100 and every worked step shows its operands, so that a model of a million parameters can learn the
answers; names, things, phrasings and the number of steps vary, so that a drafter has something to learn too.
"""

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from dspark_lab.records import Conversation, Message
from dspark_lab.validation import checked

# ruff: noqa: SIM905 (word lists read better as text)
_GIRLS = "Ada Amy Anna Clara Daisy Ella Emma Eva Fiona Grace Hanna Ida Iris Jane Julia Kate Lena Lily Mia Nora".split()
_BOYS = "Adam Alan Ben Carl Daniel David Eric Felix Frank Henry Hugo Jack Jonas Leo Max Noah Oscar Paul Sam Tom".split()
_NAMES = _GIRLS + _BOYS
_THINGS = (
    "apples balls beads books boxes buttons cards candles coins cookies crayons cups eggs flowers keys lemons "
    "letters marbles muffins nuts oranges pears pencils pens photos plates plums rings rocks shells stamps stickers "
    "tickets toys"
).split()
_WORDS = (
    "apple beach bird boat book bread bridge cake chair cloud coat desk door drum farm fire fish flag forest garden "
    "gate glass green hat hill horse house island key lake lamp leaf map milk moon mouse night ocean paint paper park "
    "piano plant queen rain river road rose salt sand ship shoe silver sky snow song spoon stone storm sugar sun table "
    "tea tiger tower train tree water wheel wind window winter wolf wood yellow"
).split()
_CATEGORIES = {
    "fruits": "apple pear plum lemon orange cherry banana grape peach melon".split(),
    "animals": "cat dog horse tiger wolf rabbit mouse bear fox goat".split(),
    "colors": "red blue green yellow white black brown silver pink gray".split(),
    "tools": "hammer saw drill rope knife ladder brush shovel nail wrench".split(),
    "foods": "bread soup rice cake pasta cheese salad pizza fish beans".split(),
    "places": "park beach market school library museum forest station farm garden".split(),
    "clothes": "coat hat shirt scarf shoe dress sock glove belt jacket".split(),
    "instruments": "piano drum flute violin guitar trumpet harp organ horn cello".split(),
}
_VERBS = {
    "paints": ("painted", "paint"), "cleans": ("cleaned", "clean"), "opens": ("opened", "open"),
    "carries": ("carried", "carry"), "draws": ("drew", "draw"), "finds": ("found", "find"),
    "sells": ("sold", "sell"), "watches": ("watched", "watch"), "builds": ("built", "build"),
    "moves": ("moved", "move"), "buys": ("bought", "buy"), "hides": ("hid", "hide"),
}  # fmt: skip
_OBJECTS = "a boat|a small house|the old door|a red kite|the table|a big box|two chairs|a lamp|the gate|a map".split(
    "|"
)
_PLACES = (
    "near the river|in the garden|at the market|behind the school|on the beach|in the kitchen|by the lake|"
    "at the station|under the bridge|in the park"
).split("|")
_TIMES = "in the morning|after lunch|before dinner|in the evening|on Monday|on Friday|in summer|at noon".split("|")
_ADJECTIVES = "small old friendly clever shy brave quiet happy hungry young".split()
_SYSTEMS = ("You are a helpful assistant.", "You are a careful teacher.", "Answer clearly and stay polite.")


@dataclass(frozen=True, slots=True)
class Turn:
    """A user's message and the answer to it; ``reasoning`` is the thinking block before the answer, if any."""

    user: str
    answer: str
    reasoning: str | None = None


Task = Callable[[random.Random], list[Turn]]


def _person(rng: random.Random) -> tuple[str, str]:
    name = rng.choice(_NAMES)
    return name, "she" if name in _GIRLS else "he"


def _join(items: Sequence[str | int]) -> str:
    return ", ".join(map(str, items))


def _trade(rng: random.Random) -> list[Turn]:
    """Two or three additions and subtractions, in the open or inside a thinking block."""
    (name, pronoun), thing, total = _person(rng), rng.choice(_THINGS), rng.randint(10, 50)
    told, worked = f"{name} has {total} {thing}.", f"{name} starts with {total} {thing}."
    for link in ("First", "Then", "Later")[: rng.choice((2, 2, 3))]:
        amount = rng.randint(2, 15 if total > 15 else 9)
        gains = total - amount < 2 or (total + amount < 100 and rng.random() < 0.5)
        action = rng.choice(("buys", "finds", "gets") if gains else ("loses", "sells", "gives away"))
        told += f" {link} {pronoun} {action} {amount}{' more' if gains else ''}."
        after = total + amount if gains else total - amount
        worked += f" {link} {pronoun} {action} {amount}: {total} {'+' if gains else '-'} {amount} = {after}."
        total = after
    told += f" How many {thing} does {name} have {rng.choice(('now', 'at the end'))}?"
    final = f"So {name} has {total} {thing}."
    if rng.random() < 0.25:
        return [Turn(f"{told} Think first.", final, reasoning=worked)]
    return [Turn(rng.choice(("", "Solve this. ", "Explain step by step. ")) + told, f"{worked} {final}")]


def _packing(rng: random.Random) -> list[Turn]:
    """One product of single digits and one sum."""
    (name, pronoun), thing, container = _person(rng), rng.choice(_THINGS), rng.choice(("bag", "basket", "jar", "crate"))
    each, count, rest = rng.randint(2, 9), rng.randint(2, 9), rng.randint(2, 9)
    product = each * count
    user = f"Each {container} holds {each} {thing}. {name} fills {count} {container}s"
    user += f" and {pronoun} has {rest} {thing} left."
    question = rng.choice((f"How many {thing} are there?", f"How many {thing} does {name} have?"))
    answer = f"One {container} holds {each} {thing}, so {count} {container}s hold {count} * {each} = {product} {thing}."
    answer += f" With the {rest} left over, {product} + {rest} = {product + rest}. The answer is {product + rest}."
    return [Turn(f"{user} {question}", answer)]


def _comparing(rng: random.Random) -> list[Turn]:
    thing, names, numbers = rng.choice(_THINGS), rng.sample(_NAMES, 2), rng.sample(range(3, 60), 2)
    more, less = (0, 1) if numbers[0] > numbers[1] else (1, 0)
    user = f"{names[0]} has {numbers[0]} {thing} and {names[1]} has {numbers[1]}. Who has more?"
    answer = f"{names[more]} has more {thing}, because {numbers[more]} is larger than {numbers[less]}."
    answer += f" The difference is {numbers[more]} - {numbers[less]} = {numbers[more] - numbers[less]}."
    return [Turn(user, answer)]


def _counting(rng: random.Random) -> list[Turn]:
    start, step, count = rng.randint(0, 40), rng.choice((1, 2, 3, 4, 5, 10)), rng.randint(5, 11)
    numbers = [number for number in range(start, start + step * count, step) if number < 100]
    if rng.random() < 0.4:
        numbers.reverse()
    verb = rng.choice(("Count", "Please count", "I want you to count", "Now count"))
    direction = "forward" if numbers[0] < numbers[-1] else "backward"
    user = f"{verb} {direction} from {numbers[0]} to {numbers[-1]} in steps of {step}."
    return [Turn(user, f"I count {direction}: {_join(numbers)}. I stop at {numbers[-1]}.")]


def _copying(rng: random.Random) -> list[Turn]:
    words = rng.sample(_WORDS, rng.randint(4, 9))
    verb = rng.choice(("Repeat these words", "Copy this list", "Say the same words"))
    return [Turn(f"{verb}: {_join(words)}.", f"The words are {_join(words)}. The last word is {words[-1]}.")]


def _reversing(rng: random.Random) -> list[Turn]:
    words = rng.sample(_WORDS, rng.randint(3, 6))
    verb = rng.choice(("Reverse this list", "Say these words backwards", "Turn the order around"))
    answer = f"Backwards the list is: {_join(words[::-1])}. It begins with {words[-1]} and ends with {words[0]}."
    return [Turn(f"{verb}: {_join(words)}.", answer)]


def _numbering(rng: random.Random) -> list[Turn]:
    words = rng.sample(_WORDS, rng.randint(3, 7))
    lines = "\n".join(f"{place}. {word}" for place, word in enumerate(words, start=1))
    verb = rng.choice(("Write a numbered list of", "Number these words", "Put each word on its own line"))
    return [Turn(f"{verb}: {_join(words)}.", f"Here is the list:\n{lines}\nIt has {len(words)} lines.")]


def _sorting(rng: random.Random) -> list[Turn]:
    numbers = rng.sample(range(1, 100), rng.randint(3, 5))
    user = f"{rng.choice(('Sort these numbers', 'Order from small to large'))}: {_join(numbers)}."
    ordered = sorted(numbers)
    return [
        Turn(user, f"From small to large: {_join(ordered)}. The smallest is {ordered[0]}, the largest {ordered[-1]}.")
    ]


def _rewriting(rng: random.Random) -> list[Turn]:
    """Another tense, or another name: everything else is copied."""
    (name, _), other, verb = _person(rng), rng.choice(_NAMES), rng.choice(list(_VERBS))
    rest = f"{rng.choice(_OBJECTS)} {rng.choice(_PLACES)} {rng.choice(_TIMES)}."
    past, stem = _VERBS[verb]
    order, opening, rewritten = rng.choice(
        (
            ("Rewrite in the past", "In the past", f"{name} {past} {rest}"),
            ("Rewrite in the future", "In the future", f"{name} will {stem} {rest}"),
            (f"Replace {name} with {other}", f"With {other}", f"{other} {verb} {rest}"),
            ("Make this a question", "As a question", f"Does {name} {stem} {rest[:-1]}?"),
        )
    )
    return [Turn(f"{order}: {name} {verb} {rest}", f"{opening} the sentence reads: {rewritten}")]


def _naming(rng: random.Random) -> list[Turn]:
    """Open: the members are drawn, many answers are right."""
    friends, category, count = " and ".join(rng.sample(_NAMES, 2)), rng.choice(list(_CATEGORIES)), rng.randint(3, 6)
    lines = "\n".join(f"- {member}" for member in rng.sample(_CATEGORIES[category], count))
    verb = rng.choice(("Name", "List", "Give me", "Write down"))
    return [Turn(f"{verb} {count} {category} for {friends}.", f"Here are {count} {category} for {friends}:\n{lines}")]


def _story(rng: random.Random) -> list[Turn]:
    """Open: every sentence is drawn."""
    (name, pronoun), animal, adjective = _person(rng), rng.choice(_CATEGORIES["animals"]), rng.choice(_ADJECTIVES)
    order = rng.choice(("Tell me a short story about", "Write a little story about", "I want a story about"))
    past = [rng.choice(list(_VERBS.values()))[0] for _ in range(2)]
    place = rng.choice(_PLACES)
    answer = f"{name} met a {adjective} {animal} {place}. Together they {past[0]} {rng.choice(_OBJECTS)}"
    answer += f" {rng.choice(_TIMES)}. Then {pronoun} {past[1]} {rng.choice(_OBJECTS)} {rng.choice(_PLACES)}."
    answer += f" In the end the {animal} was {rng.choice(_ADJECTIVES)} and {name} went home."
    return [Turn(f"{order} {name} and a {adjective} {animal} {place}.", answer)]


def _remembering(rng: random.Random) -> list[Turn]:
    """Two or three turns about one list."""
    words = rng.sample(_WORDS, rng.randint(3, 5))
    place = rng.randint(1, len(words))
    follow_ups = [
        Turn(f"What is word {place}?", f"Word {place} is {words[place - 1]}. The whole list is {_join(words)}."),
        Turn("Say them backwards.", f"Backwards the list is: {_join(words[::-1])}."),
        Turn("What is the last word?", f"The last word is {words[-1]}. The whole list is {_join(words)}."),
    ]
    first = Turn(f"Remember this list: {_join(words)}.", f"I will remember {len(words)} words: {_join(words)}.")
    return [first, *rng.sample(follow_ups, rng.choice((1, 2)))]


def _tallying(rng: random.Random) -> list[Turn]:
    """A running total over two to four turns."""
    thing, total = rng.choice(_THINGS), rng.randint(5, 40)
    turns = [Turn(f"Keep a tally. I have {total} {thing}.", f"Your tally starts at {total} {thing}.")]
    for _ in range(rng.randint(1, 3)):
        amount = rng.randint(1, 9)
        gains = total < 15 or rng.random() < 0.5
        sign, before, total = ("+", total, total + amount) if gains else ("-", total, total - amount)
        user = f"{'Add' if gains else 'Take away'} {amount}{' more' if gains else ''}."
        turns.append(
            Turn(user, f"The tally was {before}. Now {before} {sign} {amount} = {total}, so you have {total} {thing}.")
        )
    return turns


TASKS: dict[str, Task] = {
    "trade": _trade, "packing": _packing, "comparing": _comparing, "counting": _counting, "copying": _copying,
    "reversing": _reversing, "numbering": _numbering, "sorting": _sorting, "rewriting": _rewriting, "naming": _naming,
    "story": _story, "remembering": _remembering, "tallying": _tallying,
}  # fmt: skip
OPEN_TASKS = frozenset({"naming", "story"})
"""Tasks with many right answers; all others have exactly one."""
_WEIGHTS = [3 if name == "trade" else 2 if name in ("packing", "tallying") else 1 for name in TASKS]


def dialogue(*, seed: int, index: int) -> Conversation:
    """Dialogue number ``index`` of ``seed``, last turn answered; ``domain`` is the name of the last turn's task.

    One in eight begins with a system turn, and one in eight changes its subject after a first, answered task.
    """
    rng = random.Random(f"dialogues-{seed}-{index}")
    messages: list[Message] = []
    if rng.random() < 1 / 8:
        messages.append({"role": "system", "content": rng.choice(_SYSTEMS)})
    names = rng.choices(list(TASKS), _WEIGHTS, k=2 if rng.random() < 1 / 8 else 1)
    for turn in (turn for name in names for turn in TASKS[name](rng)):
        reasoning = {} if turn.reasoning is None else {"reasoning_content": turn.reasoning}
        messages.append({"role": "user", "content": turn.user})
        messages.append({"role": "assistant", "content": turn.answer, **reasoning})
    return Conversation(id=f"dialogues-{seed}-{index}", messages=tuple(messages), domain=names[-1])


class Dialogues:
    """Prompts of ``num_prompts`` dialogues: everything before the last answer, ending with a user turn.

    Different seeds give different prompts (a rare coincidence apart): take one for each split. ``domain`` labels all
    prompts; None labels each with its task's name.
    """

    @checked
    def __init__(self, *, num_prompts: int, seed: int = 0, domain: str | None = None) -> None:
        if num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}: a prompt source needs at least one prompt; give 1 or more")
        self.num_prompts = num_prompts
        self.seed = seed
        self.domain = domain

    def __len__(self) -> int:
        return self.num_prompts

    def __iter__(self) -> Iterator[Conversation]:
        for index in range(self.num_prompts):
            full = dialogue(seed=self.seed, index=index)
            yield Conversation(id=full.id, messages=full.messages[:-1], domain=self.domain or full.domain)
