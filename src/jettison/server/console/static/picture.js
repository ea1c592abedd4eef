// Pictures over the last minutes: memory by use, stacked as in the demo's report, and lines of the load.

import { bytes, byId, el, listed, say, span, table } from "./dom.js";

export const USES = [
  ["parameters", "the model"], ["online", "KV of the chat's requests"], ["offline", "KV of batches"],
  ["foreign", "KV kept for another instance"], ["cached", "KV cached for reuse"], ["room", "free for KV"],
  ["workspace", "workspace"], ["free", "unused, or given back"],
];
export const MINUTES = 5;
const MOST_S = 60 * MINUTES;
const LEAST_S = 60;
const STATES = {
  awake: "", leaving: "on its way to sleep", emptying: "on its way to sleep", asleep: "asleep", waking: "being woken",
  dead: "down", unprovisioned: "no process: started where it is needed", starting: "its process is being started",
};

const history = []; // {t, instances: id -> uses, load}
const marks = []; // {t, rung}

const watched = () => (history.length ? history[history.length - 1].t - history[0].t : 0);
// Seconds that the pictures show: what was watched, from one minute to MINUTES.
const length = () => Math.min(MOST_S, Math.max(LEAST_S, watched()));

export function forget() {
  history.length = 0;
  marks.length = 0;
}

export function remember(data) {
  const instances = new Map(data.instances.map((each) => [each.id, each.uses]));
  const [p50, p99] = data.ttft;
  history.push({ t: data.t, instances, waiting: data.waiting, running: data.running, tokens: data.tokens_per_s, p50, p99 });
  while (history.length && history[0].t < data.t - MOST_S) history.shift();
  for (const event of data.events) {
    if (event.mark) marks.push({ t: event.t, rung: event.rung });
  }
  while (marks.length && marks[0].t < data.t - MOST_S) marks.shift();
}

function ready(canvas) {
  const { width, height } = canvas.getBoundingClientRect();
  const scale = window.devicePixelRatio || 1;
  if (!width) return null;
  if (canvas.width !== Math.round(width * scale)) canvas.width = Math.round(width * scale);
  if (canvas.height !== Math.round(height * scale)) canvas.height = Math.round(height * scale);
  const pen = canvas.getContext("2d");
  pen.setTransform(scale, 0, 0, scale, 0, 0);
  pen.clearRect(0, 0, width, height);
  return { pen, width, height };
}

const color = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

function drawMemory(canvas, id, now, budget) {
  const on = ready(canvas);
  if (!on || !budget) return;
  const { pen, width, height } = on;
  const long = length();
  const left = now - long;
  const x = (t) => Math.max(0, ((t - left) / long) * width);
  const paints = USES.map(([use]) => color(`--u-${use}`));
  history.forEach((sample, at) => {
    const uses = sample.instances.get(id);
    if (!uses) return;
    const next = history[at + 1]?.t ?? now;
    const from = Math.round(x(sample.t)); // whole points: else seams show
    const to = Math.round(x(next - sample.t > 5 ? sample.t + 1 : next)); // a gap is where nothing was seen
    let y = height;
    USES.forEach(([use], index) => {
      const tall = (uses[use] / budget) * height;
      pen.fillStyle = paints[index];
      pen.fillRect(from, y - tall, to - from, tall);
      y -= tall;
    });
  });
  for (const mark of marks) {
    pen.fillStyle = color(`--mark-${mark.rung}`);
    pen.fillRect(x(mark.t) - 1, 0, 2, height);
  }
  pen.strokeStyle = color("--edge");
  pen.strokeRect(0.5, 0.5, width - 1, height - 1);
}

function drawLines(canvas, now, fields) {
  const on = ready(canvas);
  if (!on) return 0;
  const { pen, width, height } = on;
  const values = history.flatMap((sample) => fields.map(([field]) => sample[field] ?? 0));
  const most = Math.max(...values, 1e-9);
  const long = length();
  const left = now - long;
  fields.forEach(([field, paint]) => {
    pen.strokeStyle = color(paint);
    pen.lineWidth = 1.6;
    pen.setLineDash(paint === "--two" ? [5, 3] : []);
    pen.beginPath();
    let last = null;
    for (const sample of history) {
      const value = sample[field];
      if (value === null || value === undefined) { last = null; continue; }
      const at = [((sample.t - left) / long) * width, height - 2 - (value / most) * (height - 6)];
      if (last === null || sample.t - last > 5) pen.moveTo(...at);
      else pen.lineTo(...at);
      last = sample.t;
    }
    pen.stroke();
  });
  pen.setLineDash([]);
  pen.lineWidth = 1;
  pen.strokeStyle = color("--edge");
  pen.strokeRect(0.5, 0.5, width - 1, height - 1);
  return most;
}

const axis = () => el("div", { class: "axis", "aria-hidden": "true" }, el("span", { class: "from" }), el("span", {}, "now"));

function aboutInstance(each, groups) {
  const group = groups.find((one) => one.id === each.group);
  const parts = [];
  if (STATES[each.state] !== "") parts.push(STATES[each.state] ?? each.state);
  if (group && group.instances.length > 1) {
    const [lo, hi] = group.layers[group.instances.indexOf(each.id)] ?? [0, 0];
    parts.push(`in one pipeline with ${listed(group.instances.filter((id) => id !== each.id))}: layers ${lo} to ${hi - 1}`);
  } else if (!group && each.state === "awake") parts.push("serves no requests now");
  if (each.state === "unprovisioned" || each.state === "starting") return parts.join(", ");
  if (each.dropped && each.state !== "asleep") parts.push(`${bytes(each.dropped)} of the model dropped`);
  if (each.host[1]) parts.push(`host pool ${bytes(each.host[0])} of ${bytes(each.host[1])}`);
  return `${bytes(each.budget)}${parts.length ? `, ${parts.join(", ")}` : ""}`;
}

const shortly = (uses) => USES.filter(([use]) => uses[use] > 0).map(([use, name]) => `${name} ${bytes(uses[use])}`).join(", ");

export function showInstances(data) {
  const holder = byId("instances");
  for (const each of data.instances) {
    let figure = byId(`instance-${each.id}`);
    if (!figure) {
      figure = el("figure", { id: `instance-${each.id}` },
        el("figcaption", {}, el("b", {}, `Instance ${each.id}`), " ", el("span")), el("canvas", { role: "img" }), axis());
      holder.append(figure);
    }
    say(figure.querySelector("span"), aboutInstance(each, data.groups));
    const canvas = figure.querySelector("canvas");
    canvas.setAttribute("aria-label", `Memory of instance ${each.id}: ${shortly(each.uses)}`);
    drawMemory(canvas, each.id, data.t, each.budget);
  }
  const there = new Set(data.instances.map((each) => `instance-${each.id}`));
  for (const figure of [...holder.children]) if (!there.has(figure.id)) figure.remove();
  if (!byId("legend").children.length) {
    for (const [use, name] of USES) {
      const swatch = el("span", { class: "swatch" });
      swatch.style.background = `var(--u-${use})`;
      byId("legend").append(el("li", {}, swatch, name));
    }
    for (const [rung, name] of [["drop", "a drop"], ["restore", "a restore"]]) {
      const swatch = el("span", { class: "swatch" });
      swatch.style.background = `var(--mark-${rung})`;
      swatch.style.width = "3px";
      byId("legend").append(el("li", {}, swatch, name));
    }
  }
  const rows = data.instances.map((each) => [
    `Instance ${each.id}`, STATES[each.state] || each.state, each.group === null ? "–" : String(each.group),
    ...USES.map(([use]) => bytes(each.uses[use])), bytes(each.dropped), `${bytes(each.host[0])} of ${bytes(each.host[1])}`,
  ]);
  const made = table(["", "state", "group", ...USES.map(([, name]) => name), "dropped", "host pool"], rows);
  made.id = "memory-table";
  if (byId("memory-table").closest("details").open) byId("memory-table").replaceWith(made);
}

const LOADS = [
  ["queue", "Requests: running (line), waiting (dashes)", [["running", "--one"], ["waiting", "--two"]], (most) => `${Math.ceil(most)}`],
  ["first", "First token: half within (line), 99 % within (dashes)", [["p50", "--one"], ["p99", "--two"]], span],
  ["tokens", "Tokens a second in answers", [["tokens", "--one"]], (most) => most.toFixed(0)],
];

export function showLoads(data) {
  const holder = byId("loads");
  for (const [name, title, fields, told] of LOADS) {
    let figure = byId(`load-${name}`);
    if (!figure) {
      figure = el("figure", { id: `load-${name}` }, el("figcaption", {}, el("b", {}, title), " ", el("span", { class: "hint" })),
        el("canvas", { role: "img", "aria-label": `${title}; the figures are in the table below` }), axis());
      holder.append(figure);
    }
    const most = drawLines(figure.querySelector("canvas"), data.t, fields);
    say(figure.querySelector("span"), most > 1e-6 ? `highest: ${told(most)}` : "nothing yet");
  }
  if (!byId("load-table").closest("details").open) return;
  const step = Math.max(1, Math.ceil(history.length / 10));
  const shown = history.filter((_, at) => (history.length - 1 - at) % step === 0).reverse();
  const rows = shown.map((sample) => [
    `${Math.round(data.t - sample.t)} s ago`, String(sample.running), String(sample.waiting), span(sample.p50), span(sample.p99),
    sample.tokens === null ? "–" : sample.tokens.toFixed(0),
  ]);
  const made = table(["", "running", "waiting", "first token, half", "first token, 99 %", "tokens a second"], rows);
  made.id = "load-table";
  byId("load-table").replaceWith(made);
}

export function showSpan() {
  const seconds = watched();
  const from = length() < 90 ? `${Math.round(length())} s ago` : `${(length() / 60).toFixed(1).replace(".0", "")} min ago`;
  for (const each of document.querySelectorAll(".axis .from")) say(each, from);
  const told = seconds < MOST_S - 2
    ? `Each picture is one instance, up to its limit. This page has watched for ${seconds < 90 ? `${Math.round(seconds)} s` : `${Math.round(seconds / 60)} min`}; nothing is drawn before.`
    : `Each picture is one instance, up to its limit, over the last ${MINUTES} minutes.`;
  say(byId("span-hint"), told);
}
