// The view "Now": what happens, where, why, and what to do.

import { ago, byId, counted, el, listed, say, span } from "./dom.js";
import { folded, more } from "./fold.js";
import { showInstances, showLoads, showSpan } from "./picture.js";

const NAMES = {
  drop: "drop", restore: "restore", migrate: "move", sleep: "sleep", harvest: "batch", preempt: "give way",
  recover: "recovery", scale: "scale",
};
const MOST_KEPT = 300;
const MOST_SHOWN = 25;
const lately = []; // newest first
let leftOut = 0;

export function forgetEvents() {
  lately.length = 0;
  leftOut = 0;
}

// Sentence and advice: the first that fits is the state of things.
export function judge(data) {
  const share = (each, use) => each.uses[use] / Math.max(1, each.uses.online + each.uses.offline + each.uses.cached + each.uses.room);
  const full = data.instances.filter((each) => each.group !== null && share(each, "online") + share(each, "offline") > 0.9);
  const down = data.instances.filter((each) => each.state === "dead");
  const asleep = data.instances.filter((each) => each.state === "asleep");
  const pipelines = data.groups.filter((group) => group.instances.length > 1);
  const where = (some) => `instance${some.length > 1 ? "s" : ""} ${listed(some.map((each) => each.id))}`;
  const ran = `${counted(data.running, "request")} ${data.running === 1 ? "runs" : "run"}`;
  const advice = [];
  if (data.state === "loading") return ["The model is loading. Requests are told to come again.", advice];
  if (data.state === "draining") return ["The server is shutting down: requests under way are finished, new ones refused.", advice];
  if (data.state === "failed") return ["The engine has failed. The server's log has the reason.", ["Start the server again."]];
  if (down.length) {
    advice.push(...data.troubles, "The process is started again by itself. If it dies often, the server's log says why.");
    return [`${where(down)[0].toUpperCase()}${where(down).slice(1)} ${down.length > 1 ? "are" : "is"} down; ${ran}, ${data.waiting} wait.`, advice];
  }
  const dropped = pipelines.length ? ` ${pipelines.length === 1 ? "Instances" : "Some instances"} ${listed(pipelines[0].instances)} run as one pipeline, to have more room.` : "";
  if (data.waiting && full.length) {
    advice.push("More --memory or --instances make room; --max-num-queued-reqs refuses what would wait too long.");
    return [`${counted(data.waiting, "request")} wait: memory for requests is full on ${where(full)}; ${ran}.${dropped}`, advice];
  }
  if (data.waiting) {
    advice.push("If this lasts: more cores or instances, as memory is not what is short.");
    return [`${counted(data.waiting, "request")} ${data.waiting === 1 ? "waits" : "wait"} for a place in a step; memory is not full; ${ran}.${dropped}`, advice];
  }
  const [limit] = data.slo;
  if (limit !== null && data.ttft[1] !== null && data.ttft[1] > limit) {
    advice.push("See Requests for the slowest ones, and why.");
    return [`${ran}, none waits. In the last minute some first tokens came later than the objective of ${span(limit)}.${dropped}`, advice];
  }
  if (!data.running && !data.batch[0]) {
    const there = data.instances.filter((each) => each.state !== "unprovisioned");
    const sleep = asleep.length === there.length && asleep.length ? " All instances sleep; the next request wakes one." : "";
    return [`Nothing to do: no request runs or waits.${sleep}${dropped}`, advice];
  }
  return [`${ran}, none waits.${dropped}`, advice];
}

function item(told, when = null, num = 1) {
  const why = told.why && `Why: ${told.why}`;
  return el("li", {}, when && el("span", { class: "when" }, when), el("span", { class: "tag" }, NAMES[told.rung] ?? told.rung), told.what,
    more(num),
    why ? el("span", { class: "why" }, why) : null);
}


function showFigures(data) {
  say(byId("f-running"), data.running.toLocaleString("en"));
  const [running, waiting] = data.batch;
  say(byId("f-batch"), running || waiting ? `${running.toLocaleString("en")} of batches, ${waiting.toLocaleString("en")} more wait` : "no batch");
  say(byId("f-waiting"), data.waiting.toLocaleString("en"));
  const [p50, p99, num] = data.ttft;
  say(byId("f-p50"), num ? span(p50) : "–");
  say(byId("f-p99"), num ? span(p99) : "–");
  say(byId("f-firsts"), num ? `of ${num.toLocaleString("en")} in the last minute` : "none in the last minute");
  say(byId("f-slo"), data.slo[0] === null ? "no objective known" : `objective: ${span(data.slo[0])}`);
  say(byId("f-tokens"), data.tokens_per_s === null ? "–" : data.tokens_per_s.toLocaleString("en", { maximumFractionDigits: data.tokens_per_s < 10 ? 1 : 0 }));
}

function replaceIfNew(holder, items, mark) {
  if (holder.dataset.mark === mark) return;
  holder.dataset.mark = mark;
  holder.replaceChildren(...items);
}

export function remember(data) {
  for (const event of data.events) lately.unshift(event);
  lately.length = Math.min(lately.length, MOST_KEPT);
  leftOut += data.left_out;
}

export function show(data) {
  const [sentence, advice] = judge(data);
  say(byId("summary"), sentence);
  replaceIfNew(byId("advice"), advice.map((text) => el("li", {}, text)), JSON.stringify(advice));
  showFigures(data);
  showInstances(data);
  showLoads(data);
  showSpan();
  const none = { rung: "none", what: "None: every instance holds the whole model and serves by itself.", why: "" };
  const works = data.at_work.length ? data.at_work.map((told) => item(told)) : [el("li", {}, none.what)];
  replaceIfNew(byId("at-work"), works, JSON.stringify(data.at_work));
  const mark = `${lately[0]?.n ?? 0}/${Math.floor(data.t / 5)}`;
  if (byId("events").dataset.mark !== mark) {
    const rows = folded(lately).slice(0, MOST_SHOWN);
    replaceIfNew(byId("events"), rows.map(([event, num]) => item(event, ago(data.t - event.t), num)), mark);
  }
  say(byId("events-hint"), lately.length ? (leftOut ? `${leftOut.toLocaleString("en")} more happened, too many at one time to list; /jettison/events has them.` : "")
    : "Nothing was moved, dropped or woken in the last ten minutes.");
}
