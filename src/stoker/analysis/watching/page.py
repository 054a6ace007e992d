"""The page of a watched run: one HTML document that loads itself again, and stays at the end."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from stoker.analysis.watching.slowdown import WatchWindow
from stoker.analysis.watching.stats import WatchStats

# As often as people look; each time is a request to the run's process.
_RELOAD_S = 5
_WIDTH, _HEIGHT = 600, 120

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 2rem auto; max-width: 40rem; padding: 0 1rem }
.bar { display: flex; height: 2rem; border-radius: 4px; overflow: hidden }
.compute { background: #3a7d44 } .prep { background: #d98e04 } .fetch { background: #b23a48 }
.stall { background: #d98e04 }
h1 { font-size: 1.4rem; overflow-wrap: anywhere } td { padding-right: 1.5rem }
.key { display: inline-block; width: .8em; height: .8em; margin-right: .5em; border-radius: 2px }
svg { width: 100%; border-bottom: 1px solid }
@media (prefers-color-scheme: dark) { body { background: #181818; color: #ddd } }
"""
# A page that the browser itself loads again is an error page once the run has ended.
_RELOAD = f"""
setInterval(async () => {{
    try {{
        const text = await (await fetch(location)).text();
        document.body.innerHTML = new DOMParser().parseFromString(text, "text/html").body.innerHTML;
    }} catch {{
        document.getElementById("ended").hidden = false;
    }}
}}, {_RELOAD_S * 1000});
"""


def write_watch_page(script: str, stats: WatchStats, course: Sequence[WatchWindow]) -> str:
    """Return the page as HTML."""
    shares = [("compute", "compute", stats.compute_fraction)]
    if stats.prep_stall_fraction is None or stats.fetch_stall_fraction is None:
        shares.append(("stall", "stall", stats.stall_fraction))
    else:
        shares.append(("prep", "prep stall", stats.prep_stall_fraction))
        shares.append(("fetch", "fetch stall", stats.fetch_stall_fraction))
    bar = "".join(
        f'<div class="{kind}" style="width:{share:.2%}" title="{name}"></div>'
        for kind, name, share in shares
    )
    rows = [
        (f'<span class="key {kind}"></span>{name}', f"{share:.1%}") for kind, name, share in shares
    ]
    rows += [
        (f"wait p{percent}", f"{wait_s * 1e3:,.3g} ms")
        for percent, wait_s in (
            (50, stats.wait_p50_s),
            (95, stats.wait_p95_s),
            (99, stats.wait_p99_s),
        )
    ]
    rows += [("batches", f"{stats.batches:,}"), ("time", f"{stats.elapsed_s:,.0f} s")]
    table = "".join(f"<tr><td>{name}</td><td>{value}</td></tr>" for name, value in rows)
    warnings = "".join(f"<li>{escape(text)}</li>" for text in stats.warnings)
    title = f"{escape(script)}, rank {stats.rank}"
    return (
        "<!doctype html><html lang=en><head><meta charset=utf-8>"
        '<meta name=viewport content="width=device-width">'
        f"<title>stoker watch: {title}</title><style>{_STYLE}</style>"
        f"<script>{_RELOAD}</script></head><body>"
        f"<h1>{title}</h1>"
        "<p id=ended hidden>The run has ended, or cannot be reached. Its last numbers:</p>"
        f"<div class=bar>{bar}</div><table>{table}</table>"
        f"<h2>Time for a batch</h2>{_draw(course)}"
        f"<h2>Warnings</h2><ul>{warnings or '<li>none</li>'}</ul></body></html>"
    )


def _draw(course: Sequence[WatchWindow]) -> str:
    """Return the time for a batch over the windows, and the waiting in it, as two lines."""
    windows = [window for window in course if window.cycle_s > 0]
    if len(windows) < 2:
        return "<p>Shown after half a minute.</p>"
    most = max(window.cycle_s for window in windows)
    shown_s = sum(window.seconds for window in windows)

    def line(values: Sequence[float], colour: str) -> str:
        points = " ".join(
            f"{_WIDTH * at / (len(values) - 1):.1f},{_HEIGHT * (1 - value / most):.1f}"
            for at, value in enumerate(values)
        )
        return f'<polyline points="{points}" fill="none" stroke="{colour}" stroke-width="2"/>'

    cycle = line([window.cycle_s for window in windows], "#3a7d44")
    wait = line([window.wait_s for window in windows], "#d98e04")
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" preserveAspectRatio="none">{cycle}{wait}</svg>'
        f"<p>The last {shown_s:,.0f} s. Green: all of it, at most {most * 1e3:,.3g} ms; "
        "orange: waiting for data.</p>"
    )
