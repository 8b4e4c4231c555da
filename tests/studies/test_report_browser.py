"""Reports in Chromium: nothing is asked for, nothing complains, everything is reached by keys, axe's rules pass."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest
from tests.studies.folders import comparison_folder, run_folder

import fedfill

pytestmark = pytest.mark.browser

CHROMIUM = os.environ.get("CHROMIUM") or shutil.which("chromium") or shutil.which("chromium-browser")
RULES = {
    "runOnly": {"type": "tag", "values": ["wcag2a", "wcag2aa", "wcag21a", "wcag21aa", "wcag22aa", "best-practice"]}
}


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium of this machine; without one these tests fail, since a skipped one would tell nothing."""
    assert CHROMIUM is not None, "no Chromium is installed: apt-get install chromium, or set CHROMIUM to its path"
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        # a container's root has no sandbox of its own
        found = driver.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"] if os.geteuid() == 0 else [])
        yield found
        found.close()


@pytest.fixture(scope="module")
def study(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small study that has come to its end."""
    folder = tmp_path_factory.mktemp("studies") / "study"
    fedfill.study(
        rounds=2, clients=2, seeds=[0], data_fraction=0.1, model="mlp", local_epochs=1, out=folder,
        quiet=True,
    )  # fmt: skip
    return folder


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory, study: Path) -> dict[str, Path]:
    """One report of each kind."""
    folder = tmp_path_factory.mktemp("reports")
    run = run_folder(folder / "run", picture=True, epsilon=3.0)
    many = run_folder(
        folder / "many", by_client=[(i % 101) / 100 for i in range(300)], counts=[[(i * c) % 7 for c in range(60)] for i in range(300)],
        class_names=[f"a class of number {c}" for c in range(60)], by_class=[(c % 11) / 10 for c in range(60)],
    )  # fmt: skip
    finals: dict[str, list[float | None]] = {
        "fedavg": [0.5, 0.6, 0.7],
        "fedprox:mu=0.1": [0.5, 0.6, 0.7],
        "local": [0.3, 0.4, 0.2],
    }
    compared = comparison_folder(folder / "compared", finals, notes=["local: another network"])
    sweep = comparison_folder(folder / "sweep", {f"fedavg:weight_decay={k}": [0.5, 0.6] for k in range(9)})
    chosen = {"run": [run], "comparison": [compared], "study": [study], "everything": [run, many, compared, sweep]}
    return {name: fedfill.report(*paths, out=folder / f"{name}.html") for name, paths in chosen.items()}


@pytest.fixture(params=["run", "study", "everything"])
def address(request: pytest.FixtureRequest, pages: dict[str, Path]) -> str:
    return pages[request.param].as_uri()


def opened(browser: Any, address: str, **options: Any) -> tuple[Any, list[str], list[str]]:
    """A page, what it and the browser complain of, and what it asks for beside itself."""
    page = browser.new_page(**options)
    complaints: list[str] = []
    requests: list[str] = []
    page.on("console", lambda message: complaints.append(message.text))
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("request", lambda request: requests.append(request.url) if not request.url.startswith("data:") else None)
    page.goto(address)
    page.wait_for_load_state("networkidle")
    return page, complaints, requests


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_asks_for_nothing_and_nothing_complains(browser: Any, address: str, scheme: str) -> None:
    page, complaints, requests = opened(browser, address, color_scheme=scheme)
    page.emulate_media(media="print")
    page.emulate_media(media="screen")
    assert complaints == []
    assert requests == [address]
    page.close()


def test_the_policy_lets_nothing_out(browser: Any, address: str, tmp_path: Path) -> None:
    # what got into the page all the same could load and run nothing
    text = Path(address.removeprefix("file://")).read_text()
    evil = tmp_path / "evil.html"
    evil.write_text(
        text.replace("<main>", '<main><img src="http://127.0.0.1:9/x.png"><script>document.title = "run"</script>')
    )
    page, complaints, _ = opened(browser, evil.as_uri())
    assert page.title() != "run"
    assert sum("Content Security Policy" in complaint for complaint in complaints) >= 2
    page.close()


@pytest.mark.parametrize(
    ("name", "scheme", "width"),
    [
        ("run", "light", 360),
        ("comparison", "light", 1200),
        ("comparison", "dark", 1200),
        ("study", "light", 360),
        ("study", "dark", 1200),
        ("everything", "light", 1200),
        ("everything", "dark", 1200),
    ],
)
def test_rules_of_axe(browser: Any, pages: dict[str, Path], name: str, scheme: str, width: int) -> None:
    page, *_ = opened(
        browser, pages[name].as_uri(), color_scheme=scheme, viewport={"width": width, "height": 900}, bypass_csp=True
    )
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    page.evaluate(files("axe_playwright_python").joinpath("axe.min.js").read_text())
    found = page.evaluate("rules => axe.run(document, rules)", RULES)
    faults = [
        (fault["id"], node["html"][:200], node["failureSummary"])
        for fault in found["violations"]
        for node in fault["nodes"]
    ]
    assert faults == []
    assert {"color-contrast", "document-title", "heading-order", "svg-img-alt"} <= {
        rule["id"] for rule in found["passes"]
    }
    page.close()


def test_what_scrolls_and_what_opens_is_reached_by_tab(browser: Any, address: str) -> None:
    page, *_ = opened(browser, address, viewport={"width": 480, "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    page.evaluate(
        """() => {
            const scrolls = one => ["auto", "scroll"].includes(getComputedStyle(one).overflowX);
            const needed = [...document.querySelectorAll("*")].filter(one => one.matches("summary, a") || scrolls(one) && one.tagName != "HTML");
            needed.forEach((one, k) => one.dataset.needed = k);
        }"""
    )
    needed = page.locator("[data-needed]").count()
    assert needed > 10
    reached = []
    for _ in range(2 * needed + 10):
        page.keyboard.press("Tab")
        place = page.evaluate("document.activeElement.dataset.needed")
        if place is not None:
            reached.append(int(place))
            assert page.evaluate("getComputedStyle(document.activeElement).outlineStyle") != "none"  # it is seen
        if len(set(reached)) == needed:
            break
    assert sorted(set(reached)) == list(range(needed))
    assert list(dict.fromkeys(reached)) == sorted(set(reached))  # in the order of the page
    page.close()


def test_a_table_opens_by_key_without_a_script(browser: Any, pages: dict[str, Path]) -> None:
    page, *_ = opened(browser, pages["run"].as_uri(), java_script_enabled=False)
    table = page.locator("details.figures").first
    assert not table.locator("table").is_visible()
    table.locator("summary").focus()
    page.keyboard.press("Enter")
    assert table.locator("table").is_visible()
    page.close()


@pytest.mark.parametrize("width", [320, 800, 1400])
def test_the_page_itself_never_scrolls_sideways(browser: Any, address: str, width: int) -> None:
    page, *_ = opened(browser, address, viewport={"width": width, "height": 800})
    page.evaluate("document.querySelectorAll('details').forEach(one => one.open = true)")
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    page.close()


def test_no_words_of_a_drawing_are_cut_off(browser: Any, address: str) -> None:
    page, *_ = opened(browser, address)
    cut = page.evaluate(
        """() => [...document.querySelectorAll("svg.drawing")].flatMap(svg => {
            const edge = svg.getBoundingClientRect();
            return [...svg.querySelectorAll("text")].filter(one => {
                const box = one.getBoundingClientRect();
                return box.left < edge.left - 1 || box.right > edge.right + 1 || box.top < edge.top - 2 || box.bottom > edge.bottom + 2;
            }).map(one => svg.querySelector("title").textContent + ": " + one.textContent);
        })"""
    )
    assert cut == []
    page.close()


def test_dark_and_light_and_print_differ(browser: Any, pages: dict[str, Path]) -> None:
    page, *_ = opened(browser, pages["run"].as_uri(), color_scheme="dark")
    ground = "getComputedStyle(document.body).backgroundColor"
    dark = page.evaluate(ground)
    page.emulate_media(media="print", color_scheme="dark")
    paper = page.evaluate(ground)
    page.emulate_media(media="screen", color_scheme="light")
    assert (dark, paper, page.evaluate(ground)) == ("rgb(20, 24, 29)", "rgb(255, 255, 255)", "rgb(255, 255, 255)")
    page.close()
