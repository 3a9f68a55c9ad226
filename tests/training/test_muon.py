"""Muon: which parameters it steps, how, and that all others are AdamW's."""

from typing import Any

import pytest
import torch
from tiny_world import DRAFTERS, build, tiny_batch
from torch import Tensor, nn

from dspark_lab.training import muon as muon_module
from dspark_lab.training.muon import NEWTON_SCHULZ, NEWTON_SCHULZ_STEPS, MuonAdamW, kinds, orthogonalise
from dspark_lab.training.optimizers import Muon

LAYER_MATRICES = (
    *(f"self_attn.{name}_proj.weight" for name in "qkvo"),
    *(f"mlp.{name}_proj.weight" for name in ("gate", "up", "down")),
)
ADAMW_MATRICES = {
    "eagle3": set(),
    "dflash": set(),
    "dspark": {"markov_head.markov_w1.weight", "markov_head.markov_w2.weight", "confidence_head.proj.weight"},
}


def generator(seed: int = 0) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


@pytest.fixture
def in_fp32(monkeypatch: pytest.MonkeyPatch) -> None:
    """On every machine, also on one with bf16 units."""
    monkeypatch.setattr(muon_module, "_dtype", lambda device: torch.float32)


@pytest.mark.parametrize("name", ADAMW_MATRICES)
def test_the_table_of_the_drafters(name: str) -> None:
    """Muon has the matrices of the layers and ``fc``: no embedding, vocabulary head, [1, N] weight or vector."""
    drafter = build(name)
    found = kinds(drafter)
    assert found.keys() == {name for name, _ in drafter.named_parameters()}
    matrices = {"fc.weight", *(f"layers.{index}.{suffix}" for index in range(2) for suffix in LAYER_MATRICES)}
    assert {name for name, kind in found.items() if kind == "muon"} == matrices
    others = {name for name, kind in found.items() if kind == "adamw" and drafter.get_parameter(name).ndim > 1}
    assert others == ADAMW_MATRICES[name]


def test_single_rows_columns_and_frozen_matrices_are_not_muons() -> None:
    module = nn.ModuleDict({"row": nn.Linear(4, 1), "column": nn.Linear(1, 4), "matrix": nn.Linear(3, 2, bias=False)})
    assert kinds(module) == {
        **dict.fromkeys(["row.weight", "row.bias", "column.weight", "column.bias"], "adamw"),
        "matrix.weight": "muon",
    }
    module["matrix"].requires_grad_(False)
    assert "matrix.weight" not in kinds(module)


@pytest.mark.parametrize("shape", [(16, 16), (12, 40), (40, 12), (2, 7)])
def test_orthogonalise_applies_its_polynomial_to_every_singular_value(shape: tuple[int, int]) -> None:
    """U p(p(...p(S / |S|))) V^T, computed naively through the SVD in fp64."""
    matrix = torch.randn(shape, generator=generator(), dtype=torch.float64)
    u, s, vh = torch.linalg.svd(matrix, full_matrices=False)
    a, b, c = NEWTON_SCHULZ
    s = s / matrix.norm()
    for _ in range(NEWTON_SCHULZ_STEPS):
        s = a * s + b * s**3 + c * s**5
    assert torch.allclose(orthogonalise(matrix), u @ s.diag() @ vh, atol=1e-10)
    assert torch.allclose(orthogonalise(1e-3 * matrix), orthogonalise(matrix), atol=1e-10)


@pytest.mark.parametrize("shape", [(24, 64), (64, 24)])
def test_singular_values_come_close_to_one(shape: tuple[int, int]) -> None:
    matrix = torch.randn(shape, generator=generator(1))
    values = torch.linalg.svdvals(orthogonalise(matrix))
    assert float(values.min()) > 0.65 and float(values.max()) < 1.25
    assert orthogonalise(torch.zeros(shape)).count_nonzero() == 0


def stepped(optimizer: torch.optim.Optimizer, parameter: Tensor, num_steps: int) -> Tensor:
    """The parameter after steps on gradients that only the step's number decides."""
    for step in range(num_steps):
        parameter.grad = torch.randn(parameter.shape, generator=generator(100 + step))
        optimizer.step()
    return parameter.detach().clone()


def one_group(parameter: Tensor, kind: str, *, lr: float = 1e-2, weight_decay: float = 0.1) -> MuonAdamW:
    groups: list[dict[str, Any]] = [{"params": [parameter], "kind": kind, "weight_decay": weight_decay}]
    return MuonAdamW(groups, lr=lr, momentum=0.95, betas=(0.9, 0.95), eps=1e-8)


def matrix(shape: tuple[int, ...] = (8, 12)) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape, generator=generator(5)))


@pytest.mark.parametrize("shape", [(8, 12), (12, 8)])
@pytest.mark.usefixtures("in_fp32")
def test_muon_steps_as_torchs_own_up_to_bf16(shape: tuple[int, int]) -> None:
    start, lr = matrix(shape).detach(), 1e-2
    theirs = matrix(shape)
    reference = torch.optim.Muon([theirs], lr=lr, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw")
    expected = stepped(reference, theirs, 4) - start
    ours = matrix(shape)
    found = stepped(one_group(ours, "muon", lr=lr), ours, 4) - start
    assert float((found - expected).norm() / expected.norm()) < 0.02


@pytest.mark.usefixtures("in_fp32")
def test_the_first_muon_step_is_as_large_as_adamws() -> None:
    """AdamW's first step has root mean square lr; its usual one, which Muon is scaled to, about 0.2 lr."""
    parameter = matrix((64, 64))
    before = parameter.detach().clone()
    change = stepped(one_group(parameter, "muon", lr=1e-2, weight_decay=0.0), parameter, 1) - before
    assert float(change.square().mean().sqrt()) == pytest.approx(0.2 * 1e-2, rel=0.15)


@pytest.mark.usefixtures("in_fp32")
def test_weight_decay_is_decoupled() -> None:
    decayed, plain = matrix(), matrix()
    before = plain.detach().clone()
    found = stepped(one_group(decayed, "muon", weight_decay=0.5), decayed, 1)
    expected = stepped(one_group(plain, "muon", weight_decay=0.0), plain, 1) - 1e-2 * 0.5 * before
    assert torch.allclose(found, expected, atol=1e-6)


@pytest.mark.parametrize("shape", [(5, 4), (7,)])
def test_the_other_kind_is_adamw_to_the_bit(shape: tuple[int, ...]) -> None:
    ours, theirs = matrix(shape), matrix(shape)
    found = stepped(one_group(ours, "adamw"), ours, 5)
    reference = torch.optim.AdamW([theirs], lr=1e-2, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)
    assert torch.equal(found, stepped(reference, theirs, 5))


def recipe() -> Muon:
    return Muon(lr=1e-2, momentum=0.95, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.1)


def test_parameters_without_gradient_are_left_alone() -> None:
    network = nn.Sequential(nn.Linear(4, 3), nn.Linear(3, 2))
    optimizer = recipe().build(network)
    before = {name: p.detach().clone() for name, p in network.named_parameters()}
    for parameter in network[0].parameters():
        parameter.grad = torch.ones_like(parameter)
    optimizer.step()
    changed = {name for name, p in network.named_parameters() if not torch.equal(p, before[name])}
    assert changed == {"0.weight", "0.bias"}
    assert set(optimizer.state) == set(network[0].parameters())
    optimizer.zero_grad()
    state = {id(p): {k: v.clone() for k, v in s.items()} for p, s in optimizer.state.items()}
    optimizer.step()  # what a refused step does
    assert all(torch.equal(v, state[id(p)][k]) for p, s in optimizer.state.items() for k, v in s.items())


def trained(drafter: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> dict[str, Tensor]:
    for step in steps:
        for index, parameter in enumerate(drafter.parameters()):
            parameter.grad = torch.randn(parameter.shape, generator=generator(1000 * step + index))
        optimizer.step()
    return {name: p.detach().clone() for name, p in drafter.named_parameters()}


def test_a_state_dict_continues_to_the_bit(tmp_path) -> None:
    drafter = build("dspark")
    optimizer = recipe().build(drafter)
    half = trained(drafter, optimizer, range(3))
    torch.save(optimizer.state_dict(), tmp_path / "optimizer.pt")
    whole = trained(drafter, optimizer, range(3, 6))

    resumed = build("dspark")
    resumed.load_state_dict(half, strict=False)
    again = recipe().build(resumed)
    again.load_state_dict(torch.load(tmp_path / "optimizer.pt", weights_only=True))
    found = trained(resumed, again, range(3, 6))
    assert all(torch.equal(found[name], whole[name]) for name in whole)


@pytest.mark.parametrize("name", DRAFTERS)
def test_muon_lowers_a_drafters_loss(name: str) -> None:
    drafter, batch = build(name), tiny_batch()
    optimizer = recipe().build(drafter)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = drafter.loss(drafter(batch), batch).total
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
