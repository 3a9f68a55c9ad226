"""A target small enough to enumerate, and drafters for it whose q is known.

The language is an order-2 Markov chain: the logits of the next token are a table row chosen by the last two tokens. Its
last hidden state is a one-hot of those two, so that ``TargetHead`` reads the table; its captured states name position
and token, so that a drafter can check that it was given the states of the right tokens.
"""

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_lab.decoding.sampling import draw, probabilities
from dspark_lab.drafter.context import DraftContext
from dspark_lab.records import Proposal, Sampling, TargetSample, TargetSpec, TokenizedConversation
from dspark_lab.target.protocol import TargetHead, VerifyOutput

EOS = 0


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    """Thousands of decodings of five tokens: a second thread would only spin (8 times the CPU time). Import to use."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(num_threads)


def random_table(vocab_size: int, *, seed: int = 0, eos_bias: float = 0.0) -> Tensor:
    """Logits [V, V, V] of the next token, by the token before the last and the last."""
    table = torch.randn(vocab_size, vocab_size, vocab_size, generator=torch.Generator().manual_seed(seed))
    table[..., EOS] += eos_bias
    return table


class ToyVerifier:
    def __init__(self, table: Tensor) -> None:
        self.table = table
        self.token_ids: list[int] = []

    def forward(self, token_ids: Tensor) -> VerifyOutput:
        first, vocab_size = len(self.token_ids), len(self.table)
        before = torch.tensor([self.token_ids[-1] if first else 0, *token_ids[:-1].tolist()])
        self.token_ids += token_ids.tolist()
        captured = torch.zeros(len(token_ids), 2, vocab_size**2)
        captured[:, 0, 0] = torch.arange(first, len(self.token_ids))
        captured[:, 1, 0] = token_ids
        states = F.one_hot(before * vocab_size + token_ids, vocab_size**2).float()
        return VerifyOutput(self.table[before, token_ids], captured, states)

    def rollback(self, num_tokens: int) -> None:
        assert 0 <= num_tokens < len(self.token_ids)
        del self.token_ids[len(self.token_ids) - num_tokens :]


class ToyTarget:
    def __init__(self, table: Tensor) -> None:
        self.table = table
        vocab_size = len(table)
        self.spec = TargetSpec(
            name="toy",
            model="toy",
            revision="0",
            fingerprint="0",
            template_hash="0",
            architecture="toy",
            hidden_size=vocab_size**2,
            intermediate_size=1,
            num_layers=2,
            num_attention_heads=1,
            num_key_value_heads=1,
            head_dim=1,
            vocab_size=vocab_size,
            rms_norm_eps=0.0,
            max_position_embeddings=1024,
            rope_parameters={},
            layer_ids=(0, 1),
            mask_token_id=1,
            eos_token_ids=(EOS,),
        )

    def verifier(self) -> ToyVerifier:
        return ToyVerifier(self.table)

    def head(self) -> TargetHead:
        """Its norm undoes the growth that RMS norm gives a one-hot, so that ``logits`` are rows of the table."""
        vocab_size = len(self.table)
        width = vocab_size**2
        matrix = self.table.reshape(width, vocab_size).T.contiguous()
        return TargetHead(matrix, torch.full((width,), width**-0.5), 0.0, matrix)

    def sample(self, token_ids: Iterable[int], *, prompt_length: int) -> TargetSample:
        ids = torch.tensor(list(token_ids))
        output = self.verifier().forward(ids)
        return TargetSample(
            ids, torch.arange(len(ids)) >= prompt_length, output.hidden_states, output.last_hidden_state
        )


class ToyBatchVerifier:
    """A toy verifier for each sequence; padding gives nonsense, as it may."""

    def __init__(self, table: torch.Tensor) -> None:
        self.table, self.one = table, []
        self.lengths: list[int] = []

    def forward(self, token_ids: torch.Tensor, lengths: torch.Tensor) -> VerifyOutput:
        self.one = self.one or [ToyVerifier(self.table) for _ in token_ids]
        assert len(token_ids) == len(self.one)
        self.lengths = lengths.tolist()
        outputs = [
            one.forward(ids[:length]) for one, ids, length in zip(self.one, token_ids, self.lengths, strict=True)
        ]
        width = token_ids.shape[1]

        def padded(rows: list[torch.Tensor]) -> torch.Tensor:
            return torch.stack(
                [torch.cat([row, row.new_full((width - len(row), *row.shape[1:]), 7.0)]) for row in rows]
            )

        return VerifyOutput(
            padded([output.logits for output in outputs]),
            padded([output.hidden_states for output in outputs]),
            padded([output.last_hidden_state for output in outputs]),
        )

    def keep(self, num_tokens: torch.Tensor) -> None:
        for one, length, kept in zip(self.one, self.lengths, num_tokens.tolist(), strict=True):
            one.rollback(length - kept)

    def select(self, rows: torch.Tensor) -> None:
        self.one = [self.one[row] for row in rows.tolist()]


class TableDrafter:
    """Drafts token by token from its own table: q of a slot depends on the drafts before it.

    ``known_tokens`` is its draft vocabulary (None: all), ``max_drafts(position)`` shortens its proposals.
    """

    def __init__(self, table: Tensor, *, known_tokens: tuple[int, ...] | None = None, max_drafts=None) -> None:
        self.table = table
        if known_tokens is not None:
            unknown = [token for token in range(len(table)) if token not in known_tokens]
            self.table = table.index_fill(-1, torch.tensor(unknown), -torch.inf)
        self.max_drafts = max_drafts
        self.forced: list[list[int]] = []

    def logits(self, before: int, last: int, slot: int) -> Tensor:
        return self.table[before, last]

    def propose(
        self, contexts: Sequence[DraftContext], *, forced_token_ids: Tensor | None = None, **options
    ) -> Proposal:
        forced = [None] * len(contexts) if forced_token_ids is None else forced_token_ids
        return together([self.one(*each, **options) for each in zip(contexts, forced, strict=True)])

    def one(
        self,
        context: DraftContext,
        forced_token_ids: Tensor | None,
        *,
        num_draft_tokens: int,
        sampling: Sampling,
        generator: torch.Generator | None = None,
    ) -> Proposal:
        self.consume(context)
        if forced_token_ids is not None:
            assert len(forced_token_ids) == num_draft_tokens
            self.forced.append(forced_token_ids.tolist())
        if self.max_drafts is not None:
            num_draft_tokens = min(num_draft_tokens, self.max_drafts(context.position))
        history = [context.cache[-1], context.anchor_token_id]
        distributions = []
        for slot in range(num_draft_tokens):
            q = probabilities(self.logits(history[-2], history[-1], slot), sampling)
            distributions.append(q)
            history.append(int(draw(q, generator) if forced_token_ids is None else forced_token_ids[slot]))
        drafts = torch.tensor(history[2:], dtype=torch.long)
        q = torch.stack(distributions) if distributions else torch.zeros(0, len(self.table))
        return Proposal(drafts, None if sampling.greedy else q, confidence=q.amax(-1), top_probability=q.amax(-1))

    @staticmethod
    def consume(context: DraftContext) -> None:
        cache = context.cache or []
        positions = context.hidden_states[:, 0, 0].tolist()
        assert positions == list(range(len(cache), len(cache) + len(context.token_ids))), "states of other positions"
        assert context.hidden_states[:, 1, 0].tolist() == context.token_ids.tolist(), "states of other tokens"
        context.cache = cache + context.token_ids.tolist()
        assert len(context.cache) == context.position
        context.token_ids, context.hidden_states = context.token_ids[:0], context.hidden_states[:0]


def together(proposals: Sequence[Proposal]) -> Proposal:
    """Proposals of equal width [K] as one [R, K]."""
    told = zip(
        *((each.token_ids, each.probabilities, each.confidence, each.top_probability) for each in proposals),
        strict=True,
    )
    return Proposal(*(None if values[0] is None else torch.stack(values) for values in told))


class SlotDrafter(TableDrafter):
    """q depends on the anchor's two tokens and the slot's number, not on the drafts before it."""

    def logits(self, before: int, last: int, slot: int) -> Tensor:
        return self.table[slot % len(self.table), slot % 2]


class ArgmaxDrafter(TableDrafter):
    """Never offers probabilities."""

    def propose(self, contexts, *, num_draft_tokens, sampling, generator=None, forced_token_ids=None) -> Proposal:
        return super().propose(contexts, num_draft_tokens=num_draft_tokens, sampling=Sampling())


def toy_drafters(table: Tensor) -> dict[str, TableDrafter]:
    vocab_size = len(table)
    noisy = table + 0.7 * random_table(vocab_size, seed=99)
    return {
        "perfect": TableDrafter(table),
        "wrong": TableDrafter(-table),
        "noisy": TableDrafter(noisy),
        "slots": SlotDrafter(noisy),
        "reduced": TableDrafter(noisy, known_tokens=tuple(range(1, vocab_size))),
        "truncated": TableDrafter(noisy, max_drafts=lambda position: position % 3),
    }


DRAFTERS = ("perfect", "wrong", "noisy", "slots", "reduced", "truncated")


def prompt(token_ids: Iterable[int], *, prompt_id: str = "p", domain: str = "toy", **kwargs) -> TokenizedConversation:
    ids = torch.tensor(list(token_ids))
    return TokenizedConversation(prompt_id, ids, torch.zeros(len(ids), dtype=torch.bool), domain, **kwargs)


def sequence_probabilities(table: Tensor, context: tuple[int, int], sampling: Sampling) -> dict[tuple[int, ...], float]:
    """Probability of every text that ends by EOS or at ``max_new_tokens``, by enumeration."""
    p = probabilities(table, sampling)
    texts: dict[tuple[int, ...], float] = {}
    for length in range(1, sampling.max_new_tokens + 1):
        for text in itertools.product(range(len(table)), repeat=length):
            ended = text[-1] == EOS
            if EOS in text[:-1] or not (ended or length == sampling.max_new_tokens):
                continue
            history, chance = list(context), 1.0
            for token in text:
                chance *= float(p[history[-2], history[-1], token])
                history.append(token)
            texts[text] = chance
    return texts


def chi_square_p_value(counts: Mapping, expected: Mapping) -> float:
    """Probability of counts at least this far from the probabilities ``expected``; 0 if something impossible came."""
    total = sum(counts.values())
    if any(expected.get(key, 0.0) == 0.0 for key in counts):
        return 0.0
    # Rare outcomes share one cell, so that each cell expects a few.
    cells: dict[object, list[float]] = {}
    for key, chance in expected.items():
        if chance == 0.0:
            continue
        cell = cells.setdefault(key if chance * total >= 5 else "rare", [0.0, 0.0])
        cell[0] += counts.get(key, 0)
        cell[1] += chance * total
    return _upper_tail(sum((seen - due) ** 2 / due for seen, due in cells.values()), len(cells) - 1)


def homogeneity_p_value(left: Counter, right: Counter) -> float:
    """Probability that two samples of one distribution differ at least this much."""
    left_total, right_total = left.total(), right.total()
    cells: dict[object, list[float]] = {}
    for key in left | right:
        cell = cells.setdefault(key if left[key] + right[key] >= 10 else "rare", [0.0, 0.0])
        cell[0] += left[key]
        cell[1] += right[key]
    statistic = 0.0
    for a, b in cells.values():
        for seen, total in ((a, left_total), (b, right_total)):
            due = (a + b) * total / (left_total + right_total)
            statistic += (seen - due) ** 2 / due
    return _upper_tail(statistic, len(cells) - 1)


def _upper_tail(statistic: float, degrees: int) -> float:
    assert degrees > 0
    return float(torch.special.gammaincc(torch.tensor(degrees / 2.0), torch.tensor(statistic / 2.0)))
