"""`v41c inspect --html`: one page that opens without a network and shows the numbers that --json prints."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from v41c.frontend.presets import TRAINED_CHECKPOINT
from v41c.html_page import page, page_data, write_page
from v41c.inspect import engine_report
from v41c.runtime.artifact import load
from v41c.stages import engine_stages

ROOT = Path(__file__).parents[1]
EngineOf = Callable[[Path, str], Path]
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "chrome", "chrome-headless-shell")
BROWSER = next(filter(None, map(shutil.which, BROWSERS)), None)
#: written in front of the page's own script: what goes wrong from the first line on
LISTEN = """<script>
window.wrong = [];
addEventListener("error", (event) => wrong.push(event.message));
addEventListener("unhandledrejection", (event) => wrong.push(String(event.reason)));
for (const kind of ["error", "warn"]) { console[kind] = (...said) => wrong.push(said.join(" ")); }
</script>"""
#: written behind it: a visitor who clicks on everything and notes what is to be seen
VISIT = """<script>
addEventListener("load", () => {
  const numbers = new Map();
  const look = () => document.querySelectorAll("[data-path]").forEach((one) =>
    numbers.set(one.dataset.path, { value: one.dataset.value, text: one.tagName === "SPAN" ? one.textContent : null }));
  const click = (one, kind = "click") => one.dispatchEvent(new MouseEvent(kind, { bubbles: true }));
  const all = (selector) => [...document.querySelectorAll(selector)];
  const press = (place, label) => click(all(`${place} .choice button`).find((one) => one.textContent === label));
  const visit = { layers: {}, chosen: {}, passes: {}, memory: {} };
  look();
  for (const step of ["a chunk", "one token"]) {
    press("#layer", step);
    for (const box of all("#map .box")) {
      click(box);
      look();
      const nodes = all("#layer .node").map((one) => one.dataset.operation);
      visit.layers[box.dataset.layer] = { title: document.querySelector("#layer h2").textContent, nodes,
        rows: all("#layer details tbody tr").map((one) => one.dataset.operation), address: location.hash };
      click(document.querySelector("#layer .node"));
      look();
      visit.chosen[box.dataset.layer] = document.querySelector("#layer aside h3").textContent;
    }
    for (const metric of all("#costs .choice:first-child button")) { click(metric); look(); }
  }
  for (const row of all("tr.pass")) {
    click(row);
    visit.passes[row.dataset.pass] = all("#pipeline pre span").length;
    click(row);
  }
  const programs = document.querySelector("#memory select");
  for (let index = 0; index < programs.length; index++) {
    programs.selectedIndex = index;
    programs.dispatchEvent(new Event("change"));
    look();
    visit.memory[programs.value] = all("#memory rect.place").length;
  }
  const search = document.querySelector("#search input");
  search.value = "operation moe";
  search.dispatchEvent(new Event("input"));
  visit.found = all("#search li").length;
  click(document.querySelector("#search li"), "mousedown");
  visit.after_search = ["#layer h2", "#layer aside h3"].map((place) => document.querySelector(place).textContent);
  visit.figures = all("#figures .grid > div").length;
  visit.numbers = Object.fromEntries(numbers);
  visit.requests = performance.getEntriesByType("resource").map((entry) => entry.name);
  visit.wrong = wrong;
  const note = document.createElement("pre");
  note.id = "visit";
  note.textContent = JSON.stringify(visit);
  document.body.append(note);
});
</script>"""


@pytest.fixture(scope="module")
def engine(engine_of: EngineOf) -> Path:
    """The shipped model, compiled."""
    return engine_of(TRAINED_CHECKPOINT, "release")


@pytest.fixture(scope="module")
def data(engine: Path) -> dict[str, Any]:
    """What its page holds."""
    made: dict[str, Any] = json.loads(json.dumps(page_data(load(engine), str(engine))))
    return made


def printed(*arguments: object) -> Any:
    """What a command prints with --json."""
    command = [sys.executable, "-m", "v41c", *map(str, arguments), "--json"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def visit(engine: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """What a visitor saw who clicked on everything."""
    if BROWSER is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    folder = tmp_path_factory.mktemp("page")
    file = folder / "engine.html"
    write_page(engine, file)
    text = file.read_text(encoding="utf-8")
    file.write_text(
        text.replace("<style>", LISTEN + "<style>", 1).replace("</body>", VISIT + "</body>"), encoding="utf-8"
    )
    flags = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--enable-logging=stderr")
    command = [BROWSER, *flags, f"--user-data-dir={folder / 'profile'}", "--virtual-time-budget=10000", "--dump-dom"]
    done = subprocess.run([*command, file.as_uri()], capture_output=True, text=True, timeout=120)
    noted = re.search(r'<pre id="visit">(.*?)</pre>', done.stdout, re.DOTALL)
    assert noted is not None, done.stderr[-2000:]
    seen: dict[str, Any] = json.loads(html.unescape(noted[1]))
    seen["console"] = [line for line in done.stderr.splitlines() if "CONSOLE" in line]
    return seen


def test_nothing_goes_wrong_and_nothing_is_fetched(visit: dict[str, Any]) -> None:
    assert visit["wrong"] == []
    assert visit["console"] == []
    assert visit["requests"] == []


def test_every_number_is_what_json_prints(visit: dict[str, Any], data: dict[str, Any], engine: Path) -> None:
    known = data | {"inspect": printed("inspect", engine), "report": printed("report", engine)}
    kinds: Counter[str] = Counter()
    for path, seen in visit["numbers"].items():
        value: Any = known
        for key in path.split("/"):
            value = value[int(key) if isinstance(value, list) else key]
        assert float(seen["value"]) == value, path
        if seen["text"] is not None:
            shown, precision = reads_as(seen["text"])
            assert abs(shown - value) <= precision, path
        kinds[path.split("/")[0]] += 1
    print(f"numbers compared: {dict(kinds)}")
    assert set(kinds) == {"inspect", "report", "graphs", "memory"}
    assert kinds.total() > 1000
    for row in range(len(known["inspect"]["passes"])):
        for field in ("operations", "launches", "flops", "weight_bytes", "peak_bytes"):
            assert f"inspect/passes/{row}/{field}" in visit["numbers"]
    assert {f"report/{key}" for key in known["report"]["sources"]} <= set(visit["numbers"])


def reads_as(text: str) -> tuple[float, float]:
    """The number that a text with a unit means, and half of its last place."""
    found = re.fullmatch(r"(-?[\d,]+)(\.\d+)?(?: (B|KiB|MiB|GiB|flop|[kMGTP](?:flop)?))?", text)
    assert found is not None, text
    powers = {"KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "k": 1e3, "M": 1e6, "G": 1e9, "T": 1e12, "P": 1e15}
    unit = powers.get((found[3] or "").removesuffix("flop"), 1)
    decimals = len(found[2] or ".") - 1
    return float(found[1].replace(",", "") + (found[2] or "")) * unit, 0.5001 * unit * 10**-decimals


def test_clicking_a_layer_shows_its_operations(visit: dict[str, Any], data: dict[str, Any], engine: Path) -> None:
    loaded = load(engine)
    stages = engine_stages(loaded)
    for name, seen in visit["layers"].items():
        report = engine_report(loaded, stages, str(engine), layer=name)
        (entry,) = report.layers
        wanted = json.loads(json.dumps(report.to_json()["operations"]))
        assert seen["title"] == f"{name} · {entry.plan.mode} · {entry.plan.part}"
        assert seen["address"] == f"#{name}"
        for shown in (seen["nodes"], seen["rows"]):
            paths = [path.split("/") for path in shown]
            found = [data["graphs"][int(graph)]["operations"][int(index)] for _, graph, _, index in paths]
            assert sorted(found, key=place) == sorted(wanted, key=place)
        assert visit["chosen"][name] in {operation["op"] for operation in wanted}
    assert len(visit["layers"]) == 14


def place(operation: dict[str, Any]) -> tuple[str, int]:
    """Where an operation stands."""
    return operation["graph"], operation["index"]


def test_passes_open_programs_draw_and_the_search_finds(visit: dict[str, Any], data: dict[str, Any]) -> None:
    changed = {change["after"]: sum(len(graph["lines"]) for graph in change["graphs"]) for change in data["changes"]}
    assert visit["passes"] == changed
    assert changed["fuse-mhc"] > 0
    assert list(visit["memory"].values()) == [len(plan["places"]) for plan in data["memory"]]
    assert visit["found"] > 10
    layer, operation = visit["after_search"]
    assert layer.startswith("layers.0 ")
    assert "moe" in operation
    assert visit["figures"] == len(data["report"]["sources"])


def test_the_page_is_one_file_that_refers_to_nothing(engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "e.html"
    report = write_page(engine, file)
    text = file.read_text(encoding="utf-8")
    assert report.size_bytes == file.stat().st_size < 4 << 20
    assert not re.search(
        r"""<(?:link|img|iframe)\b|\bsrc\s*=|\bhref\s*=\s*["'](?!#)|@import|url\(|\bfetch\(|\bimport\(""", text
    )
    assert set(re.findall(r"https?://[\w./]+", text)) == {"http://www.w3.org/2000/svg"}
    assert "default-src 'none'" in text
    assert "{{" not in text.partition('<script type="application/json"')[0]


def test_a_name_cannot_break_out_of_the_data(engine: Path) -> None:
    name = "/tmp/</script><b>{{script}} & co"
    text = page(load(engine), name)
    block = re.search(r'<script type="application/json" id="data">(.*?)</script>', text, re.DOTALL)
    assert block is not None
    assert json.loads(block[1])["inspect"]["engine"] == name
    assert "<b>" not in text
    assert "<title>script&gt;&lt;b&gt;{{script}} &amp; co · v41c</title>" in text


def test_the_same_engine_gives_the_same_page(engine: Path) -> None:
    assert page(load(engine), "e") == page(load(engine), "e")


def test_the_command_says_what_it_wrote(engine: Path, tmp_path: Path) -> None:
    file = tmp_path / "e.html"
    made = printed("inspect", engine, "--html", file)
    assert made == {"engine": str(engine), "file": str(file), "size_bytes": file.stat().st_size}
