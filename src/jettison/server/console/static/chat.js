// The view "Chat": one conversation, streamed from /v1/chat/completions.

import { byId, counted, el, say, span } from "./dom.js";
import { post } from "./net.js";

let conversation = { said: [] }; // its turns; "Begin anew" makes another one
let running = null; // its AbortController
let showWay = () => {};
let models = "";

function bubble(role, text) {
  const body = el("p", {}, text);
  byId("chat-log").append(el("h4", {}, role), body);
  return body;
}

// Yields the JSON of each event of a stream of server-sent events.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let left = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    left += value;
    const lines = left.split("\n");
    left = lines.pop();
    for (const line of lines) {
      if (!line.startsWith("data: ") || line === "data: [DONE]") continue;
      yield JSON.parse(line.slice(6));
    }
  }
}

// The answer's two texts in the page: thoughts, apart, and what is said.
function parts(body) {
  const thoughts = el("span", { class: "thoughts" });
  const holder = el("details", { hidden: true }, el("summary", {}, "Thoughts"), thoughts);
  body.before(holder);
  return (piece) => {
    holder.hidden = false;
    thoughts.append(piece);
  };
}

async function answer(mine) {
  const { said } = mine;
  const log = byId("chat-log");
  const begun = performance.now();
  const body = bubble("model", "");
  const think = parts(body);
  let first = null;
  let id = null;
  let text = "";
  let usage = null;
  let ended = "";
  running = new AbortController();
  const response = await post("v1/chat/completions", {
    model: byId("chat-model").value, messages: said, stream: true, max_tokens: Number(byId("chat-most").value) || 256,
    stream_options: { include_usage: true },
  }, { signal: running.signal });
  try {
    for await (const chunk of events(response)) {
      if (chunk.error) throw new Error(chunk.error.message);
      id ??= chunk.id;
      usage = chunk.usage ?? usage;
      const choice = chunk.choices?.[0];
      const thought = choice?.delta?.reasoning_content ?? "";
      const piece = choice?.delta?.content ?? "";
      if (thought || piece) {
        first ??= (performance.now() - begun) / 1000;
        text += piece;
        const atEnd = log.scrollHeight - log.scrollTop - log.clientHeight < 40;
        if (thought) think(thought);
        if (piece) body.append(piece);
        if (atEnd) log.scrollTop = log.scrollHeight;
      }
      ended = choice?.finish_reason ?? ended;
    }
  } catch (error) {
    if (error.name !== "AbortError") throw error;
    ended = "stopped by you";
  } finally {
    said.push({ role: "assistant", content: text }); // thoughts are not sent back
  }
  if (mine !== conversation) return "stopped by you";
  const took = (performance.now() - begun) / 1000;
  const num = usage ? `, ${counted(usage.completion_tokens, "token")}` : "";
  const told = ended === "length" ? ", cut at its most tokens" : ended === "stopped by you" ? ", stopped by you" : "";
  const note = el("p", { class: "hint" }, `First token after ${span(first)}, whole answer after ${span(took)}${num}${told}. `);
  if (id) note.append(el("button", { type: "button", class: "plain", on: { click: () => showWay(id) } }, "Why so long?"));
  log.append(note);
  log.scrollTop = log.scrollHeight;
  return ended;
}

async function send(event) {
  event.preventDefault();
  const text = byId("chat-text").value.trim();
  if (!text || running) return;
  const mine = conversation;
  mine.said.push({ role: "user", content: text });
  bubble("you", text);
  byId("chat-text").value = "";
  byId("chat-send").disabled = true;
  byId("chat-stop").disabled = false;
  say(byId("chat-status"), "The model answers.");
  try {
    const ended = await answer(mine);
    say(byId("chat-status"), ended === "stopped by you" ? "Stopped." : "The answer is complete.");
  } catch (error) {
    const stopped = error.name === "AbortError";
    if (mine.said.at(-1)?.role === "user") mine.said.pop();
    if (!stopped && mine === conversation) byId("chat-log").append(el("p", { class: "failed" }, `No answer: ${error.message}`));
    say(byId("chat-status"), stopped ? "Stopped." : "It failed.");
    if (!stopped && mine === conversation && !byId("chat-text").value) byId("chat-text").value = text;
  } finally {
    running = null;
    byId("chat-send").disabled = false;
    byId("chat-stop").disabled = true;
    byId("chat-text").focus();
  }
}

export function note(data) {
  byId("chat-none").hidden = data.has_chat;
  byId("chat-form").hidden = !data.has_chat;
  byId("chat-log").hidden = !data.has_chat;
  const names = JSON.stringify(data.models);
  if (names === models) return;
  models = names;
  byId("chat-model").replaceChildren(...data.models.map((name) => el("option", { value: name }, name)));
}

export function setUp(show) {
  showWay = show;
  byId("chat-form").addEventListener("submit", send);
  byId("chat-stop").addEventListener("click", () => running?.abort());
  byId("chat-clear").addEventListener("click", () => {
    conversation = { said: [] };
    running?.abort();
    byId("chat-log").replaceChildren();
    byId("chat-text").focus();
  });
  byId("chat-text").addEventListener("keydown", (event) => {
    if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) byId("chat-form").requestSubmit();
  });
}
