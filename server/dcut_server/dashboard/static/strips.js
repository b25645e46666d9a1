// One strip per request: a column per step, a block per draft, the first draft at the bottom, the newest step at the right.

const NOT_DRAFTED = -1;
const rows = new Map(); // place -> the elements of its row

function makeRow() {
  const [row, label, id, tokens, canvas, mean] = ["div", "div", "div", "div", "canvas", "div"].map((name) =>
    document.createElement(name),
  );
  row.className = "strip";
  id.className = "id";
  tokens.className = "tokens";
  mean.className = "mean";
  mean.title = "accepted drafts per step";
  canvas.setAttribute("role", "img");
  label.append(id, tokens);
  row.append(label, canvas, mean);
  return { row, id, tokens, canvas, mean };
}

// Block sizes in CSS pixels: long drafts get flatter blocks, many requests too, but a hollow one must look hollow.
function geometry(draftLength, requests) {
  const room = requests > 16 ? 28 : 42;
  const pitch = Math.max(4, Math.min(6, Math.floor(room / draftLength)));
  return { pitch, high: pitch - 1, wide: 7, step: 9, height: pitch * draftLength };
}

function colours() {
  const style = getComputedStyle(document.documentElement);
  return Object.fromEntries(["accepted", "rejected", "pruned", "line"].map((name) => [name, style.getPropertyValue(`--${name}`)]));
}

function draw(canvas, request, draftLength, size, colour) {
  const scale = window.devicePixelRatio || 1;
  const width = Math.floor(canvas.getBoundingClientRect().width);
  canvas.style.height = `${size.height}px`;
  canvas.width = Math.round(width * scale);
  canvas.height = Math.round(size.height * scale);
  const context = canvas.getContext("2d");
  context.scale(scale, scale);
  context.lineWidth = 1;
  context.strokeStyle = colour.pruned;
  const steps = Math.min(request.kept.length, Math.floor((width + 2) / size.step));
  for (let back = 0; back < steps; back += 1) {
    const index = request.kept.length - 1 - back;
    const x = width - back * size.step - size.wide;
    if (request.kept[index] === NOT_DRAFTED) {
      context.fillStyle = colour.line;
      context.fillRect(x, size.height - 2, size.wide, 1);
      continue;
    }
    for (let depth = 0; depth < draftLength; depth += 1) {
      const y = size.height - (depth + 1) * size.pitch;
      if (depth < request.kept[index]) {
        context.fillStyle = depth < request.accepted[index] ? colour.accepted : colour.rejected;
        context.fillRect(x, y, size.wide, size.high);
      } else {
        context.strokeRect(x + 0.5, y + 0.5, size.wide - 1, size.high - 1);
      }
    }
  }
  return steps;
}

function meanOf(request, steps) {
  const drafted = request.accepted.slice(-steps).filter((_, index, part) => request.kept.at(index - part.length) !== NOT_DRAFTED);
  return drafted.length ? drafted.reduce((sum, accepted) => sum + accepted, 0) / drafted.length : null;
}

export function drawStrips(container, requests, draftLength) {
  for (const place of [...rows.keys()].filter((place) => !requests.some((request) => request.place === place))) {
    rows.get(place).row.remove();
    rows.delete(place);
  }
  container.classList.toggle("two", requests.length > 8);
  container.classList.toggle("dense", requests.length > 16);
  const size = geometry(draftLength, requests.length);
  const colour = colours();
  for (const request of requests) {
    if (!rows.has(request.place)) {
      rows.set(request.place, makeRow());
      const later = [...rows.keys()].filter((place) => place > request.place);
      container.insertBefore(rows.get(request.place).row, later.length ? rows.get(Math.min(...later)).row : null);
    }
    const { row, id, tokens, canvas, mean } = rows.get(request.place);
    row.classList.toggle("ended", !request.live);
    row.dataset.id = request.id;
    id.textContent = request.id;
    id.title = request.id;
    tokens.textContent = `${request.whole ? "" : "≥ "}${request.tokens} tok`;
    const steps = draw(canvas, request, draftLength, size, colour);
    const average = meanOf(request, steps);
    mean.textContent = average === null ? "–" : average.toFixed(1);
    canvas.setAttribute("aria-label", `${mean.textContent} of ${draftLength} drafts accepted per step, over ${steps} steps`);
  }
}
