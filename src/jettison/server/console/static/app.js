// The page: views, the key, and one question a second, while it is visible.

import * as batches from "./batches.js";
import * as chat from "./chat.js";
import { byId, say } from "./dom.js";
import { askJson, hasKey, onKeyWanted, setKey } from "./net.js";
import * as now from "./now.js";
import * as picture from "./picture.js";
import * as requests from "./requests.js";

const VIEWS = ["now", "requests", "chat", "batches"];
const PERIOD_MS = 1000;
const LISTS_EVERY = 3; // seconds between two lists of requests or batches
let after = null; // number of the newest event that is known; null: the page's first question
let latest = null;
let failures = 0;
let lostAt = null;
let ticks = 0;
let timer = null;
let isAsking = false;

const view = () => (VIEWS.includes(location.hash.slice(1)) ? location.hash.slice(1) : "now");

function showView() {
  for (const name of VIEWS) {
    byId(`view-${name}`).hidden = name !== view();
    const link = document.querySelector(`nav a[href="#${name}"]`);
    if (name === view()) link.setAttribute("aria-current", "page");
    else link.removeAttribute("aria-current");
  }
  if (latest && view() === "now") now.show(latest);
  ticks = 0;
  tick();
}

function told(state, text, isBad) {
  const badge = byId("connection");
  say(badge, text);
  badge.className = `badge ${isBad ? "bad" : state === "ready" ? "good" : ""}`;
}

function notice(text) {
  const box = byId("notice");
  box.hidden = !text;
  say(box, text);
}

function take(data) {
  if (latest && data.life !== latest.life) { // it was started again, and counts events anew
    picture.forget();
    now.forgetEvents();
    latest = null;
    after = null;
    return;
  }
  after = data.last_event;
  latest = data;
  picture.remember(data);
  now.remember(data);
  requests.note(data.t);
  chat.note(data);
  say(byId("model"), `${data.models[0]} · ${data.version}`);
  document.title = `${data.waiting ? `(${data.waiting} wait) ` : ""}${data.models[0]} – Jettison console`;
  told(data.state, data.state, data.state === "failed");
  notice("");
  if (view() === "now") now.show(data);
}

function failed(error) {
  failures += 1;
  if (error.status === 401) {
    told("", "needs a key", true);
    return notice("This server asks for a key. Press Key above and give one of its API keys.");
  }
  if (error.status === 404) {
    told("", "switched off", true);
    return notice("This server was started without the console (--no-console).");
  }
  if (error.status === 429) return told("", "too many pages watch", true);
  if (error.status !== 0) {
    told("", "no data", true);
    return notice(error.message);
  }
  lostAt ??= new Date();
  told("", "no connection", true);
  return notice(`The server does not answer since ${lostAt.toLocaleTimeString()}. What you see is from then. `
    + "Look whether it runs; this page goes on by itself when it is back.");
}

// What a list cannot tell stands in its view: the connection is told by the data above alone.
async function refreshLists() {
  const lists = { requests, batches }[view()];
  if (!lists) return;
  try {
    await lists.refresh();
    lists.trouble("");
  } catch (error) {
    lists.trouble(error.message);
  }
}

async function tick() {
  clearTimeout(timer);
  if (isAsking || document.hidden) return;
  isAsking = true;
  const begun = performance.now();
  try {
    take(await askJson(after === null ? "console/data" : `console/data?after=${after}`));
    failures = 0;
    lostAt = null;
    if (ticks % LISTS_EVERY === 0) await refreshLists();
    ticks += 1;
  } catch (error) {
    failed(error);
  } finally {
    isAsking = false;
    const wait = failures ? Math.min(5000, PERIOD_MS * failures) : Math.max(200, PERIOD_MS - (performance.now() - begun));
    const isOpen = byId("key-dialog").open;
    clearTimeout(timer);
    if (!document.hidden) timer = setTimeout(tick, isOpen ? 2000 : wait);
  }
}

function askForKey(isWrong, isConsole) {
  byId("key-button").hidden = false;
  if (!isConsole) return; // the view says so: this key, or none, opens the console's data
  say(byId("key-hint"), isWrong ? "The server does not know this key. Give another one."
    : "One of its API keys, as clients send it. It stays in this tab, until the tab is closed.");
  const dialog = byId("key-dialog");
  if (!dialog.open && !dialog.dataset.cancelled) showDialog();
}

function showDialog() {
  const dialog = byId("key-dialog");
  delete dialog.dataset.cancelled;
  dialog.returnValue = "";
  dialog.showModal();
}

function setUpKey() {
  const dialog = byId("key-dialog");
  byId("key-button").hidden = !hasKey();
  byId("key-button").addEventListener("click", showDialog);
  byId("key-form").addEventListener("submit", () => {
    setKey(byId("key-text").value);
    byId("key-text").value = "";
    failures = 0;
    tick();
  });
  byId("key-forget").addEventListener("click", () => {
    setKey("");
    dialog.dataset.cancelled = "yes";
    dialog.close();
    tick();
  });
  byId("key-cancel").addEventListener("click", () => dialog.close());
  dialog.addEventListener("close", () => { if (dialog.returnValue !== "use") dialog.dataset.cancelled = "yes"; });
  onKeyWanted(askForKey);
}

setUpKey();
requests.setUp();
batches.setUp();
chat.setUp((id) => {
  location.hash = "#requests";
  requests.look(id);
});
window.addEventListener("hashchange", () => {
  showView();
  byId("main").focus();
});
document.addEventListener("visibilitychange", tick);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => latest && now.show(latest));
window.addEventListener("resize", () => { if (latest && view() === "now") now.show(latest); });
showView();
