"""The pages: every one is in the table of contents, links and anchors lead somewhere, and tutorials run as written."""

import os
import re
import runpy
import shlex
import subprocess
import sys
import unicodedata
from functools import cache
from importlib import import_module
from pathlib import Path

import pytest
from tests.cli.calls import fedfill_

import fedfill
from fedfill.algorithms import known_algorithms
from fedfill.algorithms._registry import registered
from fedfill.catalogue import built_in

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
SITE = runpy.run_path(str(DOCS / "_ext" / "pages.py"))
PAGES = [*ROOT.glob("*.md"), *DOCS.glob("**/*.md"), *ROOT.glob("experiments/**/*.md"), ROOT / "bench" / "README.md"]
ALGORITHMS = sorted(page for page in DOCS.glob("algorithms/*.md") if page.name != "index.md")
TUTORIALS = sorted(DOCS.glob("tutorials/*.md"))
FORM = ["Idea", "Messages", "Formulas", "Settings", "Choices", "Composition", "Privacy", "Our figures"]
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def prose(page: Path) -> str:
    """A page without its code, in which a # is no heading and brackets are no link."""
    return re.sub(r"`[^`\n]+`", lambda code: code[0].replace("](", "] ("), FENCE.sub("", page.read_text()))


@cache
def anchors(page: Path) -> set[str]:
    """What Git hosts call the headings of a page."""
    found: list[str] = []
    for heading in re.findall(r"^#+ +(.+)$", prose(page), re.MULTILINE):
        words = re.sub(r"\[([^\]]+)\]\([^)]*\)", r"\1", heading).lower()
        kept = "".join(c for c in words if c in "-_ " or unicodedata.category(c)[0] in "LN")
        found.append(kept.strip().replace(" ", "-"))
    assert len(set(found)) == len(found), f"{page.name} has two headings of one name"
    return set(found)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_and_anchors_lead_somewhere(page):
    dead = []
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if "://" not in link and not (target.exists() and (not anchor or anchor in anchors(target.resolve()))):
            dead.append(link)
    assert not dead


def test_a_dead_anchor_is_found():
    assert "verdicts" in anchors(DOCS / "comparing.md")
    assert "a-head-after-a-finished-run" in anchors(DOCS / "heads.md")
    assert "no-such-heading" not in anchors(DOCS / "comparing.md")


def test_every_page_is_in_the_contents():
    seen, to_read = set(), [DOCS / "index.md"]
    while to_read:
        page = to_read.pop()
        seen.add(page)
        text = page.read_text()
        if SITE["CONTENTS"] in text:
            to_read += {(page.parent / f"{path}.md").resolve() for path in SITE["linked"](text)} - seen
    outside = {
        ROOT / "README.md",
        ROOT / "AGENTS.md",
    }  # the site has its own first page; notes for who changes the code
    assert {page.resolve() for page in PAGES} - outside == seen


@pytest.mark.parametrize("page", ALGORITHMS, ids=lambda page: page.stem)
def test_pages_of_algorithms_have_one_form(page):
    opening, *parts = re.split(r"^## ", prose(page), flags=re.MULTILINE)
    assert re.search(r"\b(Use\s+it|Try\s+it|Start with)\b", opening), "the opening says when to use it"
    assert re.search(r"\]\(\.\./\.\./src/fedfill/algorithms/\w+\.py\)", opening), "the opening leads to the code"
    heads = [part.splitlines()[0] for part in parts]
    assert [head.split(" where ")[0] for head in heads if head.split(" where ")[0] in FORM] == FORM
    assert (heads[0], heads[-1]) == (FORM[0], FORM[-1])


def test_every_algorithm_has_its_page_and_its_line():
    text = (DOCS / "algorithms/index.md").read_text()
    rows = re.findall(r"^\| \[.+?\]\((.+?)\.md\), `(.+?)` \| (.+) \|$", text, re.M)
    assert {name: use for _, name, use in rows} == built_in()
    assert {page for page, _, _ in rows} == {page.stem for page in ALGORITHMS}
    # several algorithms may have one page; what has the name of a page leads to that one
    pages = {page for page, _, _ in rows}
    assert all(page == name for page, name, _ in rows if name in pages)


def test_every_public_name_is_in_the_reference():
    text = " ".join(re.findall(r"<!-- document: (.+?) -->", (DOCS / "reference/python.md").read_text(), re.DOTALL))
    assert set(text.split()) == {f"fedfill.{name}" for name in fedfill.__all__ if name != "__version__"}


def test_names_in_the_reference_have_docstrings():
    text = " ".join(re.findall(r"<!-- document: (.+?) -->", (DOCS / "reference/authors.md").read_text(), re.DOTALL))
    for name in text.split():
        room, _, own = name.rpartition(".")
        assert getattr(import_module(room), own).__doc__


# Tutorials


def like(shown: str) -> str:
    """A pattern for what a page shows: numbers may be others, ``...`` stands for anything, blanks and rules don't count."""
    number = r"[+-]?\d[\d,]*(?:\.\d+)?"
    words = re.split(rf"({number}|\.\.\.)", plain(shown))
    return "".join(".*" if w == "..." else number if re.fullmatch(number, w) else re.escape(w) for w in words)


def plain(text: str) -> str:
    """Without the lines of tables, and with single blanks."""
    return " ".join(re.sub(r"[─━│┃┌┐└┘├┤┬┴┼\\]", " ", text).split())


def test_what_a_page_shows_is_compared_loosely():
    assert re.search(like("fedavg  48.47 ± 7.09"), plain("x\n fedavg    51.00 ± 0.10   12"))
    assert re.search(like("'digit 7' ..."), plain("'digit 3' and"))
    assert not re.search(like("fedavg 48.47"), plain("fedprox 48.47"))


@pytest.fixture
def terminal(tmp_path, monkeypatch):
    """A fresh folder, a command fedfill, and algorithms that are forgotten afterwards."""
    known = set(known_algorithms())
    commands = tmp_path / "bin"
    commands.mkdir()
    (commands / "fedfill").write_text(f'#!/bin/sh\nexec "{sys.executable}" -m fedfill "$@"\n')
    (commands / "fedfill").chmod(0o755)
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    monkeypatch.setenv("PATH", f"{commands}:{os.environ['PATH']}")
    monkeypatch.setenv("PYTHONPATH", str(Path(fedfill.__file__).parents[1]))
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("COLUMNS", "120")
    monkeypatch.syspath_prepend(".")
    yield
    for name in set(registered) - known:
        registered.pop(name)
    sys.modules.pop("my", None)


def calls_in(code: str) -> list[list[str]]:
    """The words behind each fedfill of a block of commands; none where a shell is needed to understand it."""
    lines = [shlex.split(line) for line in code.replace("\\\n", " ").splitlines()]
    plain = not set("|&;<>()$`*?[]#~{}!'") & set(code)
    return [words[1:] for words in lines] if plain and all(words[:1] == ["fedfill"] for words in lines) else []


def test_commands_that_need_a_shell_are_known():
    assert calls_in('fedfill run \\\n  x --set a=1\nfedfill predict "a b/c"\n') == [
        ["run", "x", "--set", "a=1"],
        ["predict", "a b/c"],
    ]
    for code in ("fedfill run fedavg --data $HOME", "fedfill partition > found.txt", "head -4 data.csv", "\n"):
        assert calls_in(code) == []


def entered(code: str, alone: bool) -> str:
    """What a block of commands prints, in a shell or, where none is needed, in this process, which has no start to wait for."""
    calls = [] if alone else calls_in(code)
    if not calls:
        done = subprocess.run(["bash", "-euo", "pipefail", "-c", code], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout
    shown = ""
    for words in calls:
        result = fedfill_(*words)
        assert result.exit_code == 0, (result.output, result.exception)
        shown += result.stdout
    return shown


def test_there_are_tutorials():
    assert len(TUTORIALS) == 6


@pytest.mark.parametrize("page", TUTORIALS, ids=lambda page: page.stem)
def test_a_tutorial_runs_as_written(page, terminal, capsys):
    names, shown, alone = {"__name__": "__main__"}, "", True
    for language, code in FENCE.findall(page.read_text()):
        saved = re.match(r"# (\w+\.py)\n", code)
        if language == "sh":
            shown, alone = entered(code, alone), False  # a page's first commands are processes of their own
        elif language == "py" and saved:
            Path(saved[1]).write_text(code)
        elif language == "py":
            exec(compile(code, page.name, "exec"), names)
            shown = capsys.readouterr().out
        else:
            assert language == "text"
            for line in filter(str.strip, code.splitlines()):
                assert re.search(like(line), plain(shown)), f"{line!r} is not in:\n{shown}"
