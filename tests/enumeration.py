"""Every path of a drafter over a tiny vocabulary, and the exact law of what verification makes of it."""

import itertools
from collections import defaultdict
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F
from torch import Tensor

from dspark_lab.decoding.sampling import probabilities
from dspark_lab.decoding.verification import Drafts, block_acceptance, block_weights, residual, token_acceptance
from dspark_lab.records import Sampling


@dataclass(frozen=True)
class World:
    """Next-token distributions by prefix: ``target[d]`` is [V] * d + [V] for d = 0..K, ``drafter`` the same for d < K.

    ``argmax``: the drafter's distributions are one-hot and not told to verification.
    """

    target: tuple[Tensor, ...]
    drafter: tuple[Tensor, ...]
    argmax: bool = False
    paths: Tensor = field(init=False)  # every sequence of K drafts, [V ** K, K]

    def __post_init__(self) -> None:
        paths = list(itertools.product(range(self.vocab_size), repeat=self.num_slots))
        object.__setattr__(self, "paths", torch.tensor(paths).reshape(len(paths), self.num_slots))

    @property
    def vocab_size(self) -> int:
        return len(self.target[0])

    @property
    def num_slots(self) -> int:
        return len(self.drafter)

    def target_rows(self) -> Tensor:
        """p along every path, [paths, K + 1, V]."""
        return torch.stack(
            [p[tuple(self.paths[:, :d].T)].expand(len(self.paths), -1) for d, p in enumerate(self.target)], 1
        )

    def drafter_rows(self) -> Tensor:
        return torch.stack(
            [q[tuple(self.paths[:, :d].T)].expand(len(self.paths), -1) for d, q in enumerate(self.drafter)], 1
        )

    def path_probabilities(self) -> Tensor:
        return self.drafter_rows().gather(-1, self.paths[..., None]).squeeze(-1).double().prod(-1)

    def drafts(self, *, lengths: Tensor, rows: Tensor) -> Drafts:
        q = None if self.argmax else self.drafter_rows()[rows]
        return Drafts(self.paths[rows], q, lengths[rows])


def verdict_law(world: World, *, method: str, lengths: Tensor) -> tuple[Tensor, Tensor]:
    """Of every path: probability of n accepted drafts [paths, K + 1], and then of the bonus token [paths, K + 1, V]."""
    p = world.target_rows()
    drafts = world.drafts(lengths=lengths, rows=torch.arange(len(world.paths)))
    q = drafts.distributions(world.vocab_size)
    if method == "token":
        stand = token_acceptance(p, q, drafts.token_ids) * drafts.verified()
        count = F.pad(stand.double().cumprod(-1), (1, 0), value=1.0) * (1 - F.pad(stand, (0, 1)).double())
        return count, residual(p, q).double()
    weights = block_weights(p, q, drafts.token_ids)
    accept = F.pad(block_acceptance(p, q, weights) * drafts.verified(), (1, 0), value=1.0).double()
    later = F.pad((1 - accept[:, 1:]).flip(-1).cumprod(-1).flip(-1), (0, 1), value=1.0)
    rest = residual(weights[..., None] * p, q).double()
    return accept * later, rest / rest.sum(-1, keepdim=True).clamp_min(1e-300)


def emitted_texts(world: World, *, method: str, lengths: Tensor) -> Tensor:
    """Probability of every text of K + 1 tokens [V] * (K + 1), what follows a verdict drawn from the target."""
    return texts_and_accepted(world, method=method, lengths=lengths).sum(-1).float()


def texts_and_accepted(world: World, *, method: str, lengths: Tensor) -> Tensor:
    """Probability of every text *and* of n accepted drafts: [V] * (K + 1) + [K + 1]."""
    total = torch.zeros(*[world.vocab_size] * (world.num_slots + 1), world.num_slots + 1, dtype=torch.float64)
    for text, chance in verdict_texts(world, method=method, lengths=lengths).items():
        total[(*text, ..., len(text) - 1)] += chance * _continuations(world, text)
    return total


def verdict_texts(world: World, *, method: str, lengths: Tensor) -> dict[tuple[int, ...], float]:
    """Probability of what the verdicts alone emit: {tokens: probability}."""
    count, bonus = verdict_law(world, method=method, lengths=lengths)
    chances = world.path_probabilities()
    texts = defaultdict(float)
    for row, path in enumerate(world.paths.tolist()):
        for accepted, token in itertools.product(range(world.num_slots + 1), range(world.vocab_size)):
            chance = float(chances[row] * count[row, accepted] * bonus[row, accepted, token])
            if chance > 0:
                texts[(*path[:accepted], token)] += chance
    return texts


def accepted_tokens(world: World, *, method: str) -> float:
    """Mean number of accepted drafts at full width."""
    count, _ = verdict_law(world, method=method, lengths=torch.full((len(world.paths),), world.num_slots))
    accepted = torch.arange(world.num_slots + 1, dtype=torch.float64)
    return float((world.path_probabilities() * (count * accepted).sum(-1)).sum())


def target_texts(world: World) -> Tensor:
    return _continuations(world, ()).float()


def _continuations(world: World, text: tuple[int, ...]) -> Tensor:
    """The target's distribution of the tokens after ``text``, up to K + 1 in all: [V] * (K + 1 - len(text))."""
    result = torch.ones((), dtype=torch.float64)
    for p in world.target[len(text) :]:
        result = result[..., None] * p[text].double()
    return result


def random_world(*, seed: int, like: str = "") -> World:
    generator = torch.Generator().manual_seed(seed)
    sampling = Sampling(temperature=0.8, top_k=2 if like == "top-k" else 0, top_p=0.9 if like == "top-p" else 1.0)
    num_slots, vocab_size = 3, 3

    def distributions(depth: int) -> Tensor:
        logits = torch.randn(*[vocab_size] * (depth + 1), generator=generator)
        return probabilities(logits, sampling)

    target = tuple(distributions(depth) for depth in range(num_slots + 1))
    drafter = tuple(distributions(depth) for depth in range(num_slots))
    if like == "same":
        drafter = target[:-1]
    if like == "parallel":  # as DFlash: q knows nothing of the drafts before it
        drafter = tuple(q[(0,) * depth].expand_as(q) for depth, q in enumerate(drafter))
    if like == "reduced vocabulary":
        known = torch.tensor([1.0, 0.0, 1.0])
        drafter = tuple(q * known / (q * known).sum(-1, keepdim=True) for q in drafter)
    if like in ("argmax", "one-hot"):
        drafter = tuple(F.one_hot(q.argmax(-1), vocab_size).float() for q in drafter)
    return World(target, drafter, argmax=like == "argmax")


KINDS = ("drawn", "same", "parallel", "reduced vocabulary", "top-k", "top-p", "argmax", "one-hot")
WORLDS = {kind: random_world(seed=seed, like=kind) for seed, kind in enumerate(KINDS)}
