// The view "Batches": upload, progress, cancel, download, through /v1/files and /v1/batches.

import { byId, counted, el, say, span, table } from "./dom.js";
import { ask, askJson, post } from "./net.js";

const STATES = {
  validating: "being checked", in_progress: "running", finalizing: "being finished", completed: "done", failed: "refused",
  expired: "out of time", cancelling: "being cancelled", cancelled: "cancelled",
};
const OVER = ["completed", "failed", "expired", "cancelled"];
let shown = "";
let isBusy = false;

async function save(fileId, name) {
  say(byId("batch-status"), `Fetching ${name}.`);
  try {
    const whole = await (await ask(`v1/files/${encodeURIComponent(fileId)}/content`)).blob();
    const link = el("a", { href: URL.createObjectURL(whole), download: name });
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 60000);
    say(byId("batch-status"), `${name} is downloaded.`);
  } catch (error) {
    say(byId("batch-status"), `It could not be fetched: ${error.message}`);
  }
}

async function cancel(id) {
  try {
    await ask(`v1/batches/${encodeURIComponent(id)}/cancel`, { method: "POST" });
    say(byId("batch-status"), "The batch is being cancelled; lines that are done stay done.");
    await refresh();
  } catch (error) {
    say(byId("batch-status"), `It could not be cancelled: ${error.message}`);
  }
}

function progress(batch) {
  const { total, completed, failed } = batch.request_counts ?? { total: 0, completed: 0, failed: 0 };
  if (!total) return el("span", {}, OVER.includes(batch.status) ? "none" : "not counted yet");
  const told = `${completed + failed} of ${total}${failed ? `, ${failed} without an answer` : ""}`;
  return el("span", {}, el("progress", { max: Math.max(1, total), value: completed + failed, "aria-label": "lines done" }), ` ${told}`);
}

function due(batch, nowS) {
  if (OVER.includes(batch.status)) return "";
  const at = batch.estimated_completion_at;
  return at ? `, about ${span(Math.max(1, at - nowS))} more` : "";
}

function why(batch) {
  const errors = (batch.errors?.data ?? []).slice(0, 3).map((each) => (each.line ? `line ${each.line}: ${each.message}` : each.message));
  return errors.length ? el("span", { class: "hint" }, ` ${errors.join(" ")}`) : null;
}

function button(name, id, act) {
  return el("button", { type: "button", id, on: { click: act } }, name);
}

function deeds(batch) {
  const made = el("span", { class: "row" });
  const id = batch.id;
  if (!OVER.includes(batch.status) && batch.status !== "cancelling") made.append(button("Cancel", `c-${id}`, () => cancel(id)));
  if (batch.output_file_id) made.append(button("Download answers", `o-${id}`, () => save(batch.output_file_id, `${id}-answers.jsonl`)));
  if (batch.error_file_id) made.append(button("Download errors", `e-${id}`, () => save(batch.error_file_id, `${id}-errors.jsonl`)));
  return made;
}

// Whether batches are under way.
export async function refresh() {
  const { data } = await askJson("v1/batches?limit=50");
  const mark = JSON.stringify(data);
  const holder = byId("batch-list");
  if (mark !== shown) {
    shown = mark;
    const focused = document.activeElement?.id;
    const nowS = Date.now() / 1000;
    const rows = data.map((batch) => [
      batch.id, el("span", {}, `${STATES[batch.status] ?? batch.status}${due(batch, nowS)}`, why(batch)), progress(batch),
      batch.endpoint.replace("/v1/", "").replace("/", " "), new Date(1000 * batch.created_at).toLocaleTimeString(), deeds(batch),
    ]);
    holder.replaceChildren(rows.length ? table(["batch", "state", "lines", "kind", "begun", "to do"], rows, { stacked: true, isText: true })
      : el("p", { class: "hint" }, "This key has no batches yet."));
    if (focused && holder.querySelector(`[id="${CSS.escape(focused)}"]`)) byId(focused).focus();
  }
  return data.some((batch) => !OVER.includes(batch.status));
}

export function trouble(text) {
  byId("batch-trouble").hidden = !text;
  say(byId("batch-trouble"), text);
}

async function start(event) {
  event.preventDefault();
  const file = byId("batch-file").files[0];
  if (!file || isBusy) return;
  isBusy = true;
  byId("batch-send").disabled = true;
  try {
    say(byId("batch-status"), `Uploading ${file.name}.`);
    const form = new FormData();
    form.append("purpose", "batch");
    form.append("file", file);
    const { id, bytes } = await askJson("v1/files", { method: "POST", body: form });
    const batch = await (await post("v1/batches", {
      input_file_id: id, endpoint: byId("batch-endpoint").value, completion_window: byId("batch-window").value,
    })).json();
    say(byId("batch-status"), `${file.name} (${counted(bytes, "byte")}) is uploaded; the batch is ${batch.id}.`);
    byId("batch-form").reset();
    await refresh();
  } catch (error) {
    say(byId("batch-status"), `It was not started: ${error.message}`);
  } finally {
    isBusy = false;
    byId("batch-send").disabled = false;
  }
}

export function setUp() {
  byId("batch-form").addEventListener("submit", start);
}
