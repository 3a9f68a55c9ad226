"""What the documents point to is there."""

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
DOCUMENTS = sorted([ROOT / "README.md", *ROOT.glob("docs/*.md"), *ROOT.glob("experiments/*/README.md")])
LINK = re.compile(r"\]\((?!https?://|mailto:)([^)#\s]*)(?:#([^)\s]+))?\)")


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ +(.+)$", document.read_text(encoding="utf-8"), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_every_link_leads_somewhere(document: Path) -> None:
    broken = []
    for path, anchor in LINK.findall(document.read_text(encoding="utf-8")):
        place = (document.parent / path).resolve() if path else document
        if not place.exists() or (anchor and place.suffix == ".md" and anchor not in anchors(place)):
            broken.append(f"{path}#{anchor}" if anchor else path)
    assert not broken


def test_every_document_is_reached_from_the_readme() -> None:
    linked = {path for path, _ in LINK.findall((ROOT / "README.md").read_text(encoding="utf-8"))}
    assert {f"docs/{path.name}" for path in ROOT.glob("docs/*.md")} <= linked
