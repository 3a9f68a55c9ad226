"""Conversations of the ``datasets`` library: from the Hugging Face hub, from data files, or saved to disk."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from dspark_lab.data.shapes import Columns, read_messages, recognise
from dspark_lab.records import Conversation, content_hash
from dspark_lab.validation import checked


class HuggingFaceDataset:
    """One split of a dataset: ``path`` is a hub id, a folder of data files, or a folder that ``save_to_disk`` wrote.

    ``name`` is the dataset's configuration, where it has several; ``file`` is one JSON Lines file of a repository or folder
    that holds several unlike ones (its only split is ``train``). Chat, ShareGPT and prompt-response columns are
    recognised (``shapes.recognise``); ``columns`` maps others. ``shuffle_seed`` shuffles the rows before the first
    ``num_prompts`` are taken. Ids are hashes of the messages.

    Raises ImportError without the ``datasets`` package; ValueError for a dataset that cannot be had (with the command that
    fetches it), a split that is not there, too few rows, columns
    that are not recognised, or a row that cannot be read (named by its number after shuffling).
    """

    @checked
    def __init__(
        self,
        *,
        path: str,
        split: str,
        name: str | None = None,
        file: str | None = None,
        revision: str | None = None,
        num_prompts: int | None = None,
        shuffle_seed: int | None = None,
        columns: Columns | None = None,
        domain: str = "default",
    ) -> None:
        if num_prompts is not None and num_prompts < 1:
            raise ValueError(f"num_prompts={num_prompts}: must be at least 1, or null for the whole split")
        self.folder = Path(path).expanduser()
        if revision is not None and self.folder.is_dir():
            raise ValueError(f"revision={revision!r} cannot take effect: path={path} is a folder on this machine")
        if file is not None and name is not None:
            raise ValueError(f"name={name!r} cannot take effect: file={file!r} is read as it is")
        self.path, self.split, self.name, self.file, self.revision = path, split, name, file, revision
        self.num_prompts, self.shuffle_seed = num_prompts, shuffle_seed
        self.columns, self.domain = columns, domain

    def rows(self) -> Any:
        """The rows that are asked for, as they are."""
        rows = self._load()
        if self.shuffle_seed is not None:
            rows = rows.shuffle(seed=self.shuffle_seed)
        if self.num_prompts is not None:
            if len(rows) < self.num_prompts:
                raise ValueError(
                    f"num_prompts={self.num_prompts}: split {self.split!r} of {self.path} holds only {len(rows)}; "
                    "lower num_prompts"
                )
            rows = rows.select(range(self.num_prompts))
        return rows

    def __iter__(self) -> Iterator[Conversation]:
        rows = self.rows()
        try:
            columns = self.columns or recognise(rows.column_names)
        except ValueError as error:
            raise ValueError(f"{self.path}: {error}") from error
        for number, row in enumerate(rows):
            try:
                messages = read_messages(row, columns)
            except ValueError as error:
                raise ValueError(f"{self.path}, split {self.split!r}, row {number}: {error}") from error
            yield Conversation(id=content_hash(messages), messages=messages, domain=self.domain)

    def _load(self) -> Any:
        try:
            import datasets
        except ImportError as error:
            raise ImportError(
                "the prompt source HuggingFaceDataset needs datasets: pip install 'dspark_lab[datasets]'"
            ) from error
        datasets.disable_progress_bars()  # the stage has its own
        if not any((self.folder / name).exists() for name in ("dataset_dict.json", "state.json")):
            try:
                return datasets.load_dataset(**self._place(), split=self.split)
            except ValueError:  # a split or configuration that is not there
                raise
            except Exception as error:  # not found, offline, no network: each layer below has a family of its own
                place = self.path if self.file is None else f"{self.path}/{self.file}"
                raise ValueError(
                    f"{place} cannot be read: {error}. Fetch it where the hub answers, `hf download {self.path} --repo-type "
                    "dataset --local-dir FOLDER`, and set path=FOLDER"
                ) from error
        loaded = datasets.load_from_disk(str(self.folder))
        splits = loaded if isinstance(loaded, datasets.DatasetDict) else {str(loaded.split or "train"): loaded}
        if self.split not in splits:
            raise ValueError(f"split={self.split!r}: {self.path} holds {', '.join(map(str, splits)) or 'none'}")
        return splits[self.split]

    def _place(self) -> dict[str, Any]:
        """What ``load_dataset`` is asked for."""
        if self.file is None:
            path = str(self.folder) if self.folder.is_dir() else self.path
            return {"path": path, "name": self.name, "revision": self.revision}
        revision = "" if self.revision is None else f"@{self.revision}"
        root = str(self.folder) if self.folder.is_dir() else f"hf://datasets/{self.path}{revision}"
        return {"path": "json", "data_files": f"{root}/{self.file}"}
