// Connects to the server's event stream and shows each frame; a frame is the whole picture, so only the newest counts.

import { drawRate, drawRatio } from "./charts.js";
import { drawStrips } from "./strips.js";
import { describeTable, fillTable, number, outline } from "./table.js";

const RETRY_MS = 1000;
const SILENCE_MS = 4000; // frames come four times a second; this long without one is a lost connection

const BANNERS = {
  connecting: "Connecting to the server.",
  loading: "Loading the engines. This page turns live by itself.",
  profiling: "Measuring what a step costs on this machine. This page turns live by itself.",
  draining: "Draining: live streams finish, new requests are refused.",
  failed: "The engine failed. The server's log has the details; the process must be restarted.",
  disconnected: "The server does not answer. Trying again every second; the numbers below are the last that arrived.",
};

const byId = (id) => document.getElementById(id);
const show = (id, text) => {
  const element = byId(id);
  if (element.textContent !== text) element.textContent = text;
};
const grouped = (value) => value.toLocaleString("en-US");
const orDash = (value, format) => (value === null || value === undefined ? "–" : format(value));

let source = null;
let heardAt = 0;
let newest = null;
let tableVersion = null;
let scheduled = false;

function setState(state) {
  document.documentElement.dataset.state = state;
  show("state", state);
  const banner = byId("banner");
  banner.hidden = !(state in BANNERS);
  show("banner", BANNERS[state] ?? "");
  document.title = state === "serving" ? "dcut-trt" : `${state} – dcut-trt`;
}

function duration(seconds) {
  const [hours, minutes] = [Math.floor(seconds / 3600), Math.floor((seconds % 3600) / 60)];
  if (hours >= 24) return `${Math.floor(hours / 24)} d ${hours % 24} h`;
  if (hours) return `${hours} h ${minutes} min`;
  return minutes ? `${minutes} min ${Math.floor(seconds % 60)} s` : `${Math.floor(seconds)} s`;
}

function showServer(server) {
  setState(server.state);
  show("target", server.target);
  show("drafter", server.drafter);
  show("policy", server.policy);
  show("backend", `${server.backend}, ${server.precision}`);
  show("uptime", duration(server.uptime_s));
}

function showNow(frame) {
  const { window: now, gauges, server, history } = frame;
  const ratio = gauges.running ? history.ratio.findLast((value) => value !== null) : null;
  show("tokens_per_s", now.tokens_per_s < 100 ? now.tokens_per_s.toFixed(1) : grouped(Math.round(now.tokens_per_s)));
  show("ratio", orDash(ratio, (value) => value.toFixed(2)));
  show("running", String(gauges.running));
  show("max_batch", `of ${server.max_batch}`);
  show("waiting", String(gauges.waiting));
  show("accepted_mean", orDash(now.accepted_mean, (value) => value.toFixed(2)));
  show("draft_length", `of ${server.draft_length}`);
  show("keep_share", orDash(now.keep_share, (value) => `${Math.round(value * 100)} %`));
  showStages(now);
  drawRate(byId("rate_chart"), history.age, history.tokens_per_s);
  drawRatio(byId("ratio_chart"), history.age, history.ratio, server.ratios);
}

function showStages(now) {
  const stages = { draft: now.draft_ms, select: now.select_ms, verify: now.verify_ms };
  const known = now.step_ms !== null;
  stages.other = known ? Math.max(0, now.step_ms - now.draft_ms - now.select_ms - now.verify_ms) : null;
  show("step_ms", orDash(now.step_ms, number));
  for (const [name, value] of Object.entries(stages)) {
    show(`${name}_ms`, orDash(value, (ms) => (ms < 9.995 ? ms.toFixed(2) : number(ms))));
    byId("stage_bar").querySelector(`.${name}`).style.width = known ? `${(100 * value) / now.step_ms}%` : "0";
  }
}

function showRequests({ requests, gauges, server, totals }) {
  drawStrips(byId("strips"), requests, server.draft_length);
  const hidden = gauges.running - requests.filter((request) => request.live).length;
  byId("hidden_requests").hidden = !(requests.length && hidden > 0);
  show("hidden_requests", `${hidden} more without a strip: prompts that are read, or past the first ${requests.length}.`);
  byId("empty").hidden = requests.length > 0;
  const open = server.state === "serving";
  const idle = gauges.running + gauges.waiting === 0;
  show("empty_title", !idle ? "Reading prompts." : totals ? "Nothing is running." : "Not serving yet.");
  byId("empty_hint").hidden = byId("empty_command").hidden = !open || !idle;
  show("empty_command", `dcut-trt client --address ${server.address} "Why is the sky blue?"`);
}

function showTotals(totals, gauges) {
  for (const [name, value] of Object.entries(totals ?? {})) show(name, grouped(value));
  show("free_kv_blocks", totals ? grouped(gauges.free_kv_blocks) : "–");
}

async function showTable({ version, used }, loaded) {
  const element = byId("cost_table");
  const wanted = loaded ? version : "not loaded";
  if (wanted !== tableVersion) {
    tableVersion = wanted;
    try {
      const table = await (await fetch("api/cost-table")).json();
      fillTable(element, table);
      describeTable(byId("table_state"), byId("table_note"), table, loaded);
    } catch {
      tableVersion = null; // the next frame tries again
    }
  }
  outline(element, used);
}

function render() {
  scheduled = false;
  if (!newest || !source) return;
  showServer(newest.server);
  showNow(newest);
  showRequests(newest);
  showTotals(newest.totals, newest.gauges);
  showTable(newest.cost_table, newest.totals !== null);
}

function schedule() {
  if (scheduled) return;
  scheduled = true;
  requestAnimationFrame(render);
}

function disconnect() {
  source?.close();
  source = null;
  newest = null;
  setState("disconnected");
  setTimeout(connect, RETRY_MS);
}

function connect() {
  heardAt = performance.now();
  source = new EventSource("api/events");
  source.onmessage = (event) => {
    heardAt = performance.now();
    newest = JSON.parse(event.data);
    schedule();
  };
  source.onerror = disconnect;
}

setState("connecting");
setInterval(() => {
  if (source && performance.now() - heardAt > SILENCE_MS) disconnect();
}, 1000);
window.addEventListener("resize", schedule);
window.matchMedia("(prefers-color-scheme: dark)").addEventListener("change", schedule);
connect();
