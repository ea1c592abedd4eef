// The view "Requests": a request's way in plain words, and lists to choose from.

import { ago, byId, counted, el, say, span, table } from "./dom.js";
import { folded, more } from "./fold.js";
import { askJson } from "./net.js";

const STAGES = {
  waiting: ["waiting", "--u-cached"], first: ["until its first token", "--u-cached"], prompt: ["its prompt", "--u-parameters"], answer: ["its answer", "--u-online"],
};
const ENDS = { stop: "ended", length: "ended at its length", abort: "left by its client", error: "failed", "": "under way" };
const LISTS = [["slow", "Requests with late first tokens will stand here."], ["under_way", "None."], ["recent", "None has ended yet."]];
const AT_ONCE = 8; // choices in one answer
let clock = 0; // the server's, at the last answer
let shown = {};

export const note = (t) => { clock = t; };

function bar(stages) {
  const total = stages.reduce((sum, stage) => sum + stage.s, 0) || 1;
  const parts = stages.map((stage) => {
    const part = el("i");
    part.style.width = `${(100 * stage.s) / total}%`;
    part.style.background = `var(${STAGES[stage.name][1]})`;
    return part;
  });
  const told = stages.map((stage) => {
    const swatch = el("span", { class: "swatch" });
    swatch.style.background = `var(${STAGES[stage.name][1]})`;
    return el("li", {}, swatch, `${STAGES[stage.name][0]}: ${span(stage.s)}`);
  });
  return [el("div", { class: "bar", "aria-hidden": "true" }, ...parts), el("ul", { class: "legend" }, ...told)];
}

function card(way, at, num) {
  const events = folded(way.events).map(([event, like]) => el("li", {},
    el("span", { class: "when" }, `${span(Math.max(0, event.t - way.t))} after it came`),
    event.mine ? el("b", {}, "With this request: ") : null, event.what, more(like),
    event.why ? el("span", { class: "why" }, `Why: ${event.why}`) : null));
  const meanwhile = el("details", { open: way.events.some((event) => event.mine) || events.length < 6 },
    el("summary", {}, "What the server did meanwhile"), el("ol", { class: "told" }, ...events),
    way.left_out ? el("p", { class: "hint" }, `${counted(way.left_out, "more event")} are not shown.`) : null);
  const gap = way.gap === null ? "" : ` Its tokens came every ${span(way.gap)}${way.usual_gap === null ? "" : ` (usual here: ${span(way.usual_gap)})`}.`;
  const facts = `${way.batch ? "Of a batch. " : ""}${counted(way.prompt, "token")} of prompt (${way.cached.toLocaleString("en")} cached), `
    + `${counted(way.output, "token")} of answer; ${ENDS[way.ended] ?? way.ended} after ${span(way.took)}.${gap}`;
  return el("article", { class: "card" },
    el("h3", {}, num > 1 ? `Choice ${at + 1} of ${num}: ` : "", way.verdict),
    ...bar(way.stages), el("p", { class: "hint" }, facts),
    el("h4", {}, "Why"), el("ul", {}, ...way.why.map((text) => el("li", {}, text))),
    way.do.length ? el("h4", {}, "What to do") : null, way.do.length ? el("ul", {}, ...way.do.map((text) => el("li", {}, text))) : null,
    events.length ? meanwhile : null);
}

// Answers with many choices are told in parts.
function parts(id, { choices, first }) {
  const num = choices[0].choices;
  if (choices.length === num) return "";
  const step = (from, text) => el("button", { type: "button", on: { click: () => look(id, from) } }, text);
  return el("p", { class: "hint" }, `Choices ${first + 1} to ${first + choices.length} of ${num}. `,
    first ? step(Math.max(0, first - AT_ONCE), "Those before") : null,
    first + choices.length < num ? step(first + choices.length, "The next") : null);
}

export async function look(id, from = 0) {
  byId("way-id").value = id;
  const holder = byId("way");
  try {
    const found = await askJson(`console/request?id=${encodeURIComponent(id)}&first=${from}`);
    const { choices, first, num_others: others } = found;
    const hint = others ? el("p", { class: "hint" }, `${counted(others, "older request")} had this id, too; this is the newest. Their answers' own ids tell them apart.`) : "";
    holder.replaceChildren(hint, parts(id, found), ...choices.map((way, at) => card(way, first + at, way.choices)));
  } catch (error) {
    holder.replaceChildren(el("p", { class: "notice" }, error.status === 404
      ? `${error.message} Ids are kept in memory only: a restart forgets them.` : error.message));
  }
}

function list(name, rows, none) {
  const holder = byId(`list-${name}`);
  const mark = JSON.stringify(rows);
  if (shown[name] === mark || holder.contains(document.activeElement)) return; // a reader is in it
  shown[name] = mark;
  if (!rows.length) return holder.replaceChildren(el("p", { class: "hint" }, none));
  const cells = rows.map((row) => [
    el("button", { type: "button", class: "plain", on: { click: () => { look(row.id).then(() => byId("way").scrollIntoView({ block: "nearest" })); } } },
      row.id), ago(clock - row.t), row.ttft === null ? "none yet" : span(row.ttft), span(row.took), row.prompt.toLocaleString("en"),
    row.output.toLocaleString("en"), `${ENDS[row.ended] ?? row.ended}${row.batch ? ", of a batch" : ""}${row.preempted ? ", lost its place" : ""}${row.choices > 1 ? `, one of ${row.choices} choices` : ""}`,
  ]);
  return holder.replaceChildren(table(["request", "came", "first token", "took", "prompt", "answer", "state"], cells, { stacked: true }));
}

export async function refresh() {
  const found = await askJson("console/requests");
  const more = found.num_under_way - found.under_way.length;
  say(byId("under-way-hint"), more > 0 ? `The ${found.under_way.length} that came first, those of the chat before those of batches; ${counted(more, "more request")} are under way.` : "");
  for (const [name, none] of LISTS) list(name, found[name], none);
}

export function trouble(text) {
  byId("requests-trouble").hidden = !text;
  say(byId("requests-trouble"), text);
}

export function setUp() {
  byId("way-form").addEventListener("submit", (event) => {
    event.preventDefault();
    look(byId("way-id").value.trim());
  });
}
