"""The Kimi-K3 drafters in their true size, without their memory."""

from hydra import compose, initialize_config_dir
from omegaconf import DictConfig

from dspark_lab.configs import config_folder
from dspark_lab.drafter.base import Drafter
from dspark_lab.pipeline.plan import drafter_on_meta, spec_of_facts


def true_size(experiment: str) -> tuple[DictConfig, Drafter]:
    with initialize_config_dir(str(config_folder()), version_base="1.3"):
        config = compose("config", [f"+experiment={experiment}"])
    spec = spec_of_facts(config)
    assert spec is not None
    return config, drafter_on_meta(config, spec, draft_vocab_size=None)
