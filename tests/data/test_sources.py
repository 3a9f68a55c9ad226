"""Datasets of the ``datasets`` library from local folders; a hub id goes through the same ``load_dataset``."""

import builtins
import json

import pytest

from dspark_lab.data.sources import HuggingFaceDataset

datasets = pytest.importorskip("datasets")
ROWS = [{"question": f"What is {n}?", "answer": f"It is {n}."} for n in range(20)]


@pytest.fixture(autouse=True)
def own_cache(monkeypatch, tmp_path):
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def contents(source) -> list[str]:
    return [conversation.messages[0]["content"] for conversation in source]


@pytest.fixture
def folder(tmp_path):
    """Parquet files of two splits, as a dataset repository has them."""
    data = tmp_path / "repository" / "data"
    data.mkdir(parents=True)
    datasets.Dataset.from_list(ROWS).to_parquet(data / "train-00000-of-00001.parquet")
    datasets.Dataset.from_list(ROWS[:3]).to_parquet(data / "test-00000-of-00001.parquet")
    return tmp_path / "repository"


def test_a_folder_of_parquet_files_is_read_by_split(folder):
    first, *_ = train = list(HuggingFaceDataset(path=str(folder), split="train", domain="qa"))
    assert len(train) == 20 and first.domain == "qa"
    assert [dict(message) for message in first.messages] == [
        {"role": "user", "content": "What is 0?"},
        {"role": "assistant", "content": "It is 0."},
    ]
    assert len(list(HuggingFaceDataset(path=str(folder), split="test"))) == 3


def test_rows_are_shuffled_by_the_seed_before_the_first_are_taken(folder):
    def read(**settings) -> list[str]:
        return contents(HuggingFaceDataset(path=str(folder), split="train", **settings))

    in_order = read()
    assert in_order == [row["question"] for row in ROWS]
    some = read(shuffle_seed=1, num_prompts=5)
    assert some == read(shuffle_seed=1)[:5] and some != in_order[:5] and set(some) < set(in_order)
    assert some != read(shuffle_seed=2, num_prompts=5)


def test_an_id_is_the_contents_own(folder):
    def by_content(**settings):
        return {c.messages[0]["content"]: c.id for c in HuggingFaceDataset(path=str(folder), split="train", **settings)}

    assert by_content() == by_content(shuffle_seed=3)


def test_json_lines_of_sharegpt_with_nested_nulls(tmp_path):
    (tmp_path / "json").mkdir()
    rows = [
        {
            "id": "a",
            "conversations": [{"from": "human", "value": "hi", "weight": None}, {"from": "gpt", "value": "yes"}],
        },
        {"id": "b", "conversations": [{"from": "human", "value": "ho", "weight": 1.0}, {"from": "gpt", "value": "no"}]},
    ]
    (tmp_path / "json" / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    first, second = HuggingFaceDataset(path=str(tmp_path / "json"), split="train")
    assert [message["role"] for message in first.messages] == ["user", "assistant"]
    assert "weight" not in first.messages[0] and second.messages[0]["weight"] == 1.0


def test_what_save_to_disk_wrote_is_read(tmp_path):
    rows = datasets.Dataset.from_list([{"messages": [{"role": "user", "content": "hi"}]}])
    datasets.DatasetDict({"train": rows, "held_out": rows}).save_to_disk(tmp_path / "splits")
    assert contents(HuggingFaceDataset(path=str(tmp_path / "splits"), split="held_out")) == ["hi"]
    with pytest.raises(ValueError, match=r"split='dev': .*splits holds train, held_out"):
        list(HuggingFaceDataset(path=str(tmp_path / "splits"), split="dev"))


def test_unknown_columns_are_listed_and_a_mapping_mends_it(tmp_path):
    datasets.Dataset.from_list([{"text": "hi", "label": 1}]).save_to_disk(tmp_path / "set")
    path = str(tmp_path / "set")
    with pytest.raises(ValueError, match=r"set: the columns \['label', 'text'\] are not recognised"):
        list(HuggingFaceDataset(path=path, split="train"))
    assert contents(HuggingFaceDataset(path=path, split="train", columns={"prompt": "text", "response": None})) == [
        "hi"
    ]


def test_a_row_that_cannot_be_read_is_named(tmp_path):
    rows = [{"messages": [{"role": "user", "content": "hi"}]}, {"messages": [{"role": "user", "content": None}]}]
    datasets.DatasetDict({"train": datasets.Dataset.from_list(rows)}).save_to_disk(tmp_path / "set")
    with pytest.raises(ValueError, match="split 'train', row 1: message 0: 'content' must be a string"):
        list(HuggingFaceDataset(path=str(tmp_path / "set"), split="train"))


def test_settings_that_cannot_hold_are_refused(folder):
    with pytest.raises(ValueError, match=r"num_prompts=21: split 'train' of .* holds only 20"):
        list(HuggingFaceDataset(path=str(folder), split="train", num_prompts=21))
    with pytest.raises(ValueError, match="num_prompts=0"):
        HuggingFaceDataset(path=str(folder), split="train", num_prompts=0)
    with pytest.raises(ValueError, match="revision='main' cannot take effect"):
        HuggingFaceDataset(path=str(folder), split="train", revision="main")
    with pytest.raises(ValueError, match="columns: give either messages or prompt"):
        HuggingFaceDataset(path=str(folder), split="train", columns={"response": "answer"})


def test_without_the_package_the_mend_is_named(folder, monkeypatch):
    real_import = builtins.__import__

    def without_datasets(name, *arguments, **options):
        if name == "datasets":
            raise ImportError(name)
        return real_import(name, *arguments, **options)

    monkeypatch.setattr(builtins, "__import__", without_datasets)
    with pytest.raises(ImportError, match=r"pip install 'dspark_lab\[datasets\]'"):
        list(HuggingFaceDataset(path=str(folder), split="train"))


def test_one_file_of_a_folder_with_unlike_ones(tmp_path):
    (tmp_path / "math.jsonl").write_text("".join(json.dumps({"prompt": f"{n}?"}) + "\n" for n in range(3)))
    (tmp_path / "chat.jsonl").write_text(json.dumps({"conversations": [{"from": "human", "value": "hi"}]}) + "\n")
    assert contents(HuggingFaceDataset(path=str(tmp_path), split="train", file="math.jsonl")) == ["0?", "1?", "2?"]
    assert contents(HuggingFaceDataset(path=str(tmp_path), split="train", file="chat.jsonl")) == ["hi"]
    with pytest.raises(ValueError, match=r"name='main' cannot take effect: file='math\.jsonl'"):
        HuggingFaceDataset(path=str(tmp_path), split="train", file="math.jsonl", name="main")


@pytest.mark.parametrize("file", [None, "math.jsonl"])
def test_a_dataset_that_cannot_be_had_names_the_command_that_fetches_it(file, tmp_path, monkeypatch):
    monkeypatch.setattr(datasets.config, "HF_HUB_OFFLINE", True)
    with pytest.raises(ValueError, match=r"owner/nothing.*hf download owner/nothing --repo-type dataset --local-dir"):
        list(HuggingFaceDataset(path="owner/nothing", split="train", file=file))
