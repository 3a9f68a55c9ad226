"""A page in a headless Chromium, by its command line: what it drew at a width, and what it complained of."""

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

PROBE = """<script>addEventListener("load", () => setTimeout(() => {
  const said = document.createElement("output");
  said.id = "probe";
  const charts = [...document.querySelectorAll("figure > div")];
  const drawn = charts.filter(chart => chart.querySelector("svg.main-svg .trace"));
  const right = Math.max(...charts.map(chart => chart.getBoundingClientRect().right));
  said.textContent = [window.innerWidth, document.documentElement.scrollWidth, charts.length, drawn.length, right].join(" ");
  document.body.append(said);
}, 1500));</script>"""

FRAME = """<!doctype html><link rel="icon" href="data:,">
<iframe src="{source}" style="width: {width}px; height: 900px; border: 0"></iframe>
<script>addEventListener("load", () => setTimeout(() => {{
  document.body.append(document.querySelector("iframe").contentDocument.getElementById("probe"));
}}, 2500));</script>"""


@dataclass(frozen=True, slots=True)
class Seen:
    """``scroll_width`` above ``width`` is a horizontal scroll bar. ``complaints`` are the console's lines."""

    width: int
    scroll_width: int
    num_charts: int
    num_drawn: int
    right: float
    complaints: list[str]


def chromium() -> str | None:
    return next((path for name in ("chromium", "google-chrome") if (path := shutil.which(name))), None)


def look(page: Path, width: int, *, folder: Path) -> Seen:
    """Chromium makes no window narrower than 500 pixels, so the page is put into a frame of that ``width``."""
    probed = folder / f"probed-{width}.html"
    probed.write_text(page.read_text(encoding="utf-8").replace("</body>", PROBE + "</body>"), encoding="utf-8")
    frame = folder / f"frame-{width}.html"
    frame.write_text(FRAME.format(source=probed.name, width=width), encoding="utf-8")
    command = [chromium() or "chromium", "--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage",
               "--allow-file-access-from-files", "--enable-logging=stderr", "--virtual-time-budget=20000",
               f"--user-data-dir={folder / 'profile'}", "--window-size=1400,1000", "--dump-dom", frame.as_uri()]  # fmt: skip
    done = subprocess.run(command, capture_output=True, text=True, timeout=300)
    found = re.search(r'<output id="probe">([\d. ]+)</output>', done.stdout)
    assert found, f"the page did not answer:\n{done.stderr[-3000:]}"
    numbers = [float(value) for value in found[1].split()]
    complaints = [line for line in done.stderr.splitlines() if ":CONSOLE" in line]
    return Seen(*map(int, numbers[:4]), numbers[4], complaints)
