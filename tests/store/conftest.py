from collections.abc import Callable
from pathlib import Path

import pytest
from stored_samples import MANIFEST, key_of, open_store, sample_of

from dspark_lab.records import TargetSample
from dspark_lab.store.protocol import Manifest


@pytest.fixture
def manifest() -> Manifest:
    return MANIFEST


@pytest.fixture
def make_sample() -> Callable[..., TargetSample]:
    return sample_of


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A store of five samples in one shard."""
    with open_store(tmp_path) as store:
        for seed in range(5):
            store.put(key_of(seed), sample_of(seed))
    return tmp_path
