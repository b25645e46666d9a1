// Pointing at a policy's name fades the other lines of the charts that it is drawn in.
for (const entry of document.querySelectorAll("li[data-policy], tr[data-policy]")) {
  const name = entry.dataset.policy;
  const charts = [...entry.closest(".scenario").querySelectorAll("svg")]
    .map((svg) => [...svg.querySelectorAll(".series")])
    .filter((lines) => lines.some((line) => line.dataset.policy === name));
  const fade = (others) => {
    for (const line of charts.flat()) line.classList.toggle("faded", others && line.dataset.policy !== name);
  };
  entry.addEventListener("pointerenter", () => fade(true));
  entry.addEventListener("pointerleave", () => fade(false));
}
