// The flame graph: functions under their callers, as wide as their share of the time.
"use strict";

const LINE_PX = 24;

function kindOfCode(place) {
  if (place === "native") return "native";
  return /(site|dist)-packages|\/lib\/python3|[<]/.test(place) ? "library" : "own";
}

// The part of the graph from one function on, with its callers above it, each as wide as the page.
function showFlame(frames, chosen = []) {
  const cells = [];
  let depth = 0;
  const add = (frame, path, line, left, width) => {
    const share = percent(frame.share);
    const cell = el(
      "button",
      {
        type: "button",
        className: kindOfCode(frame.place),
        title: `${frame.name}\n${frame.place}\n${share}`,
      },
      `${frame.name} ${share}`,
    );
    cell.style.left = `${100 * left}%`;
    cell.style.width = `${100 * width}%`;
    cell.style.top = `${LINE_PX * line}px`;
    cell.addEventListener("click", () => {
      showFlame(frames, path);
      byId("flame-chosen").textContent = `${frame.name}, ${share} of the time: ${frame.place}`;
      byId("flame").children[path.length - 1].focus();
    });
    cells.push(cell);
    depth = Math.max(depth, line + 1);
  };
  const place = (parts, path, line, left, scale) => {
    for (const part of parts) {
      const width = part.share * scale;
      add(part, [...path, part], line, left, width);
      place(part.calls, [...path, part], line + 1, left, scale);
      left += width;
    }
  };
  chosen.forEach((frame, line) => add(frame, chosen.slice(0, line + 1), line, 0, 1));
  const last = chosen.at(-1);
  place(last ? last.calls : frames, chosen, chosen.length, 0, last ? 1 / last.share : 1);
  byId("flame").style.height = `${LINE_PX * depth}px`;
  fill("flame", ...cells);
}
