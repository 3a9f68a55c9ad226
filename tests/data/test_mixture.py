import pytest
import torch
from pydantic import ValidationError

from dspark_lab.data.mixture import Mixture, Part, largest_remainder, source_cards
from dspark_lab.records import Conversation, TokenizedConversation


class Numbered:
    """``num`` prompts whose content names the source."""

    def __init__(self, name: str, num: int) -> None:
        self.name, self.num = name, num

    def __iter__(self):
        for index in range(self.num):
            yield Conversation(str(index), ({"role": "user", "content": f"{self.name} {index}"},), domain=self.name)


class Published(Numbered):
    revision, licence = "v2", "MIT"


def mixture(num_prompts: int, **weights: float) -> Mixture:
    parts = {name: {"source": Numbered(name, 1000), "weight": weight} for name, weight in weights.items()}
    return Mixture(num_prompts=num_prompts, parts=parts)


@pytest.mark.parametrize(
    ("total", "weights", "shares"),
    [
        (10, {"a": 1, "b": 1}, {"a": 5, "b": 5}),
        (10, {"a": 1, "b": 1, "c": 1}, {"a": 4, "b": 3, "c": 3}),
        (100, {"a": 0.7, "b": 0.2, "c": 0.1}, {"a": 70, "b": 20, "c": 10}),
        (5, {"a": 3, "b": 1, "c": 1}, {"a": 3, "b": 1, "c": 1}),
        (7, {"a": 1, "b": 2.5}, {"a": 2, "b": 5}),
    ],
)
def test_shares_follow_the_weights_and_add_up(total, weights, shares):
    assert largest_remainder(total, weights) == shares


def test_any_first_prompts_are_mixed_by_the_weights():
    names = [prompt.source for prompt in mixture(400, math=2.0, code=1.0, chat=1.0)]
    assert {name: names.count(name) for name in names} == {"math": 200, "code": 100, "chat": 100}
    for num in range(1, 401):
        assert abs(names[:num].count("math") - num / 2) <= 1.5 and abs(names[:num].count("chat") - num / 4) <= 1.5


def test_a_mixture_is_the_same_each_time_and_every_prompt_knows_its_part():
    mixed = mixture(30, math=2.0, code=1.0)
    assert list(mixed) == list(mixed)
    code = [prompt for prompt in mixed if prompt.source == "code"]
    assert [prompt.id for prompt in code] == [f"code/{index}" for index in range(10)]
    assert {prompt.domain for prompt in code} == {"code"}
    assert len({prompt.id for prompt in mixed}) == 30


def test_a_source_that_runs_out_is_named():
    parts = {"big": {"source": Numbered("big", 100)}, "small": {"source": Numbered("small", 3)}}
    with pytest.raises(ValueError, match=r"parts\.small: its source holds only 3 prompts, its share is 10; lower"):
        list(Mixture(num_prompts=20, parts=parts))


def test_what_could_not_take_effect_is_refused():
    with pytest.raises(ValueError, match=r"parts\.code: its share of num_prompts=10 is 0 at weight 0\.01"):
        mixture(10, math=1.0, code=0.01)
    with pytest.raises(ValueError, match="parts is empty"):
        Mixture(num_prompts=10, parts={})
    with pytest.raises(ValidationError, match=r"parts\.math\n.*weight=0\.0: must be positive"):
        mixture(10, math=0.0)
    with pytest.raises(ValueError, match="licence='BSD': the source says 'MIT' itself"):
        Part(Published("p", 1), licence="BSD")


def sample(number: int, source: str, num_tokens: int, num_supervised: int) -> TokenizedConversation:
    token_ids = torch.arange(num_tokens) + 100 * number
    return TokenizedConversation(str(number), token_ids, torch.arange(num_tokens) < num_supervised, source=source)


def test_cards_say_what_each_source_gave():
    parts = {
        "own": Part(Numbered("own", 9), weight=3.0, revision="r1", licence="CC0"),
        "published": Part(Published("published", 9)),
    }
    mixed = Mixture(num_prompts=4, parts=parts)
    samples = [sample(0, "own", 10, 4), sample(1, "own", 6, 2), sample(1, "own", 6, 2), sample(2, "published", 5, 1)]
    own, published = source_cards(mixed, list(mixed), samples)
    assert (own.name, own.weight, own.revision, own.licence) == ("own", 3.0, "r1", "CC0")
    assert (own.num_prompts, own.num_samples, own.num_tokens, own.num_supervised_tokens) == (3, 2, 16, 6)
    assert (published.weight, published.revision, published.licence) == (1.0, "v2", "MIT")
    assert (published.num_prompts, published.num_tokens) == (1, 5)


def test_a_single_source_has_one_card():
    source = Published("p", 2)
    (card,) = source_cards(source, list(source), [sample(0, "", 7, 3)])
    assert (card.name, card.revision, card.num_prompts, card.num_tokens) == ("train", "v2", 2, 7)
