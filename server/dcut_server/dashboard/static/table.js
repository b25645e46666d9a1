// The cost table as a heat map: batch sizes down, plain decoding and the ratios across.

const NOTES = {
  measured: "Measured when this server started.",
  loaded: "Measured earlier on this machine.",
  stale: "Measured on another machine, runtime or bundle: measure it again.",
  flat: "All ratios cost the same here, so every draft is verified.",
  missing: "None was measured or loaded.",
  invalid: "The table holds impossible values.",
};

function cell(name, text, className) {
  const element = document.createElement(name);
  element.textContent = text;
  if (className) element.className = className;
  return element;
}

function heading(text, scope) {
  const element = cell("th", text);
  element.scope = scope;
  return element;
}

export const number = (value) => (value >= 99.95 ? value.toFixed(0) : value.toFixed(1));

export function fillTable(element, table) {
  const all = table.rows.flatMap((row) => [row.plain_ms, ...row.cost_ms]).filter((cost) => cost !== null);
  const [low, high] = [Math.log(Math.min(...all)), Math.log(Math.max(...all))];
  const head = document.createElement("tr");
  head.append(heading("batch", "col"), heading("plain", "col"), cell("td", "", "gap"));
  head.append(...table.ratios.map((ratio) => heading(ratio.toFixed(2), "col")));
  const body = table.rows.map((row) => {
    const line = document.createElement("tr");
    line.dataset.batch = row.batch;
    const costs = [["plain", row.plain_ms], ...row.cost_ms.map((cost, index) => [String(table.ratios[index]), cost])];
    const cells = costs.map(([column, cost]) => {
      if (cost === null) return cell("td", "–");
      const level = high > low ? (Math.log(cost) - low) / (high - low) : 0;
      const made = cell("td", number(cost), level > 0.72 ? "strong" : "");
      made.dataset.ratio = column;
      made.title = `${cost.toFixed(3)} ms`;
      made.style.setProperty("--level", level.toFixed(3));
      return made;
    });
    line.append(heading(String(row.batch), "row"), cells[0], cell("td", "", "gap"), ...cells.slice(1));
    return line;
  });
  element.replaceChildren(...(table.rows.length ? [head, ...body] : []));
}

export function describeTable(tag, note, table, loaded) {
  if (!loaded) {
    tag.textContent = "–";
    tag.className = "tag";
    note.textContent = "Known as soon as the engines are loaded.";
    return;
  }
  tag.textContent = table.state;
  tag.classList.toggle("warn", !["measured", "loaded"].includes(table.state));
  tag.title = table.measured_at;
  const day = table.measured_at ? ` ${table.measured_at.slice(0, 16).replace("T", " ")} UTC.` : "";
  const outlined = table.rows.length ? " Outlined: the cell of the latest step." : "";
  note.textContent = `${NOTES[table.state] ?? ""}${day}${outlined}`;
}

export function outline(element, used) {
  for (const marked of element.querySelectorAll(".used")) marked.classList.remove("used");
  if (!used) return;
  const line = element.querySelector(`tr[data-batch="${used.batch}"]`);
  line?.classList.add("used");
  line?.querySelector(`td[data-ratio="${used.ratio ?? "plain"}"]`)?.classList.add("used");
}
