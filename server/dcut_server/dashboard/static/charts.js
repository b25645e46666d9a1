// The two small charts of the last minute, drawn as SVG in pixels of their own box.

const SECONDS = 60;
const SVG = "http://www.w3.org/2000/svg";

function shape(name, attributes, text) {
  const element = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) element.setAttribute(key, value);
  if (text !== undefined) element.textContent = text;
  return element;
}

function box(svg) {
  const { width, height } = svg.getBoundingClientRect();
  svg.setAttribute("viewBox", `0 0 ${width || 1} ${height || 1}`);
  return { width: width || 1, height: height || 1, x: (age) => (1 - Math.min(age, SECONDS) / SECONDS) * (width || 1) };
}

// The next round number, so that the scale does not flicker with every frame.
function ceiling(value) {
  const power = 10 ** Math.floor(Math.log10(Math.max(value, 1)));
  return power * [1, 1.5, 2, 3, 4, 5, 6, 8, 10].find((step) => step * power >= value);
}

export function drawRate(svg, ages, rates) {
  const { width, height, x } = box(svg);
  const top = ceiling(Math.max(0, ...rates));
  const y = (rate) => height - (rate / top) * (height - 2);
  const points = ages.map((age, index) => `${x(age).toFixed(1)},${y(rates[index]).toFixed(1)}`);
  const children = [
    shape("line", { class: "grid", x1: 0, x2: width, y1: height, y2: height }),
    shape("line", { class: "grid", x1: 0, x2: width, y1: 2, y2: 2 }),
    shape("text", { x: 0, y: -2 }, String(top)),
    shape("text", { x: width, y: -2, "text-anchor": "end" }, "last 60 s"),
  ];
  if (points.length > 1) {
    const [first, last] = [x(ages[0]).toFixed(1), x(ages.at(-1)).toFixed(1)];
    children.push(shape("path", { class: "area", d: `M${first},${height}L${points.join("L")}L${last},${height}Z` }));
    children.push(shape("path", { class: "line", d: `M${points.join("L")}` }));
  }
  svg.replaceChildren(...children);
}

// Steps: a ratio holds until the next frame; a gap is a time without drafts.
export function drawRatio(svg, ages, chosen, ratios) {
  const { width, height, x } = box(svg);
  const left = 30;
  const y = (ratio) => height - ratio * (height - 4) + 1;
  const at = (age) => (left + (x(age) / width) * (width - left)).toFixed(1);
  const children = ratios.flatMap((ratio) => [
    shape("line", { class: "grid", x1: left, x2: width, y1: y(ratio), y2: y(ratio) }),
    shape("text", { x: 0, y: y(ratio) + 3.5 }, ratio.toFixed(2)),
  ]);
  let path = "";
  chosen.forEach((ratio, index) => {
    if (ratio === null) return;
    const joined = index > 0 && chosen[index - 1] !== null;
    path += joined ? `V${y(ratio).toFixed(1)}` : `M${at(ages[index])},${y(ratio).toFixed(1)}`;
    path += `H${at(ages[index + 1] ?? 0)}`;
  });
  if (path) children.push(shape("path", { class: "line", d: path }));
  svg.replaceChildren(...children);
}
