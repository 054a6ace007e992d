"""A real browser without a driver: it opens a page, runs a script, and gives back what came."""

from __future__ import annotations

import contextlib
import html
import json
import os
import re
import shutil
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
needs_chromium = pytest.mark.skipif(
    CHROMIUM is None, reason="no chromium here: apt-get install chromium"
)
TIMEOUT_S = 240


@dataclass(frozen=True)
class Opened:
    """A page after its scripts have run."""

    console: list[str]
    """What the browser's console says: errors, and what was refused."""
    found: Any
    """What the script returned, by way of JSON."""


def opened(
    page: Path, script: str = "return null;", *, width: int = 1280, dark: bool = False
) -> Opened:
    """Open a page, with a script behind its own ones."""
    # On the page's own terms: what it refuses to itself, it refuses to the script.
    probe = (
        "<pre id='found'></pre><script>document.getElementById('found').textContent = "
        f"JSON.stringify((() => {{ {script} }})());</script></body>"
    )
    tried = page.with_suffix(".tried.html")
    tried.write_text(page.read_text("utf-8").replace("</body>", probe), "utf-8")
    assert CHROMIUM is not None
    words = [
        CHROMIUM,
        "--headless",
        "--no-sandbox",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--disable-crash-reporter",
        "--no-first-run",
        f"--user-data-dir={page.parent / 'profile'}",
        f"--window-size={width},2000",
        f"--blink-settings=preferredColorScheme={0 if dark else 1}",
        "--virtual-time-budget=2000",
        "--enable-logging=stderr",
        "--dump-dom",
        tried.as_uri(),
    ]
    running = subprocess.Popen(
        words, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True
    )
    try:
        out, errors = running.communicate(timeout=TIMEOUT_S)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(running.pid, signal.SIGKILL)
        running.communicate()
    dom = out.decode()
    said = re.search(r'<pre id="found">(.*?)</pre>', dom, re.DOTALL)
    console = [line for line in errors.decode().splitlines() if "CONSOLE" in line]
    assert said, f"the page was not shown: {errors.decode()[-2000:]}"
    assert said[1], f"the script failed: {console}"
    return Opened(console, json.loads(html.unescape(said[1])))
