"""The Lightning logger behind the curves of the report."""

from argparse import Namespace
from pathlib import Path
from typing import Any

from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import Logger
from torch import Tensor
from torch.nn import Module

from dspark_lab.report.metrics_log import MetricsLog
from dspark_lab.validation import checked


class JsonLinesLogger(Logger):
    """Writes each ``log_metrics`` call as one line of ``<directory>/metrics.jsonl`` (rank 0 only; appends on resume).

    A logged ``tokens`` or ``time_s`` keeps its name; ``time_s`` is the log's own clock where it is not logged.
    """

    @checked
    def __init__(self, *, directory: Path) -> None:
        super().__init__()
        self._directory = directory
        self._log: MetricsLog | None = None

    @property
    def name(self) -> str:
        return "json_lines"

    @property
    def version(self) -> str:
        return ""

    @property
    def save_dir(self) -> str:
        return str(self._directory)

    @property
    def log(self) -> MetricsLog:
        """Opened at first use, so that a logger that is only built leaves no file."""
        if self._log is None:
            self._log = MetricsLog(self._directory)
        return self._log

    @rank_zero_only
    def log_graph(self, model: Module, input_array: Tensor | None = None) -> None:
        """Starts the clock: Lightning calls this once before the first step, whatever the logger."""
        _ = self.log

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        self.log.write(metrics, step=step)

    @rank_zero_only
    def log_hyperparams(self, params: dict[str, Any] | Namespace, *args: Any, **kwargs: Any) -> None:
        """Nothing: the resolved configuration lies in ``results.json``."""

    @rank_zero_only
    def finalize(self, status: str) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None
