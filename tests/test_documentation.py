"""What the documentation points at is there."""

import pathlib
import re

import pytest

TESTS = pathlib.Path(__file__).parent
PAGES = sorted((TESTS.parent / "docs").glob("*.md"))


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_named_tests_exist(page):
    text = page.read_text()
    named = set(re.findall(r"(\w+)::(test_\w+)", text))
    assert named
    assert len(named) == len(
        {name for name in re.findall(r"\btest_\w+", text) if name != "test_file"}
    )
    for file, name in sorted(named):
        source = (TESTS / f"test_{file}.py").read_text()
        assert re.search(rf"^def {name}\(", source, re.MULTILINE), f"{file}::{name}"


def test_links_lead_somewhere():
    """Relative ones."""
    for page in [*PAGES, TESTS.parent / "README.md"]:
        for target in re.findall(r"\]\(([^)#:]+)\)", page.read_text()):
            assert (page.parent / target).exists(), f"{page.name}: {target}"
