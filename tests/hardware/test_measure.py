"""Timing the tiny target: shapes, the cache as it was."""

import pytest
from hydra import compose, initialize_config_dir

from dspark_lab.configs import config_folder
from dspark_lab.hardware.measure import Grid, measure_steps
from dspark_lab.pipeline.build import build
from dspark_lab.target.huggingface import HuggingFaceTarget


@pytest.fixture(scope="module")
def tiny() -> HuggingFaceTarget:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        return build(compose("config", ["target=tiny"]), "engine")


def small(**changes: object) -> Grid:
    facts = {
        "num_requests": [1, 2],
        "num_tokens": [1, 3],
        "num_prefill_tokens": [16],
        "num_context_tokens": [8, 24],
        "warmups": 1,
        "repeats": 3,
        "endpoints": [],
        "num_gpus": 1,
    }
    return Grid(**{**facts, **changes})  # pyright: ignore


def test_every_shape_of_the_grid_is_timed(tiny: HuggingFaceTarget) -> None:
    grid = small()
    found = list(measure_steps(tiny, grid, seed=0))
    assert len(found) == len(grid) == 10
    assert {(step.num_requests, step.num_tokens, step.num_context_tokens) for step in found} == {
        (requests, requests * tokens, requests * context)
        for context in (8, 24)
        for requests, choices in ((1, (1, 3, 16)), (2, (1, 3)))
        for tokens in choices
    }
    assert all(step.time_s > 0 and step.iqr_s >= 0 and step.repeats == 3 for step in found)


def test_the_context_stays_what_it_says(tiny: HuggingFaceTarget, monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []
    made = tiny.verifier

    def watched():
        verifier = made()
        verifier.cache.crop = lambda n, crop=verifier.cache.crop: (
            crop(n),
            lengths.append(verifier.cache.get_seq_length()),
        )
        return verifier

    monkeypatch.setattr(tiny, "verifier", watched)
    list(measure_steps(tiny, small(num_context_tokens=[8]), seed=0))
    assert set(lengths) == {8}


def test_a_context_beyond_the_target_is_refused(tiny: HuggingFaceTarget) -> None:
    with pytest.raises(ValueError, match=r"num_context_tokens=1020: .* that is 1036, and tiny ends at 1024"):
        list(measure_steps(tiny, small(num_context_tokens=[1020]), seed=0))
