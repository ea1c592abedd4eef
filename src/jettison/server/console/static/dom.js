// Elements and texts. Whatever comes from a server or a client becomes text, never markup.

export const byId = (id) => document.getElementById(id);

export function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (value === undefined || value === null || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) made.addEventListener(event, listener);
    else made.setAttribute(name, value === true ? "" : value);
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

// Changes the document only where a text differs, so that readers' places and selections stay.
export function say(element, text) {
  if (element.textContent !== text) element.textContent = text;
}

export function table(headers, rows, { stacked = false, isText = false } = {}) {
  const head = el("thead", {}, el("tr", {}, ...headers.map((name) => el("th", { scope: "col" }, name))));
  const body = el("tbody", {}, ...rows.map((cells) => el("tr", {}, ...cells.map((cell, at) =>
    at === 0 ? el("th", { scope: "row" }, cell) : el("td", { "data-name": headers[at] }, cell)))));
  return el("table", { class: `${stacked ? "stack" : ""} ${isText ? "text" : ""}` }, head, body);
}

export function bytes(num) {
  const mib = num / 1048576;
  if (mib >= 8192) return `${(mib / 1024).toFixed(1)} GiB`;
  if (!mib) return "0 MiB";
  return mib >= 10 ? `${mib.toFixed(0)} MiB` : `${mib.toFixed(mib < 0.1 ? 2 : 1)} MiB`;
}

export function span(seconds) {
  if (seconds === null || seconds === undefined) return "–";
  if (seconds < 0.0995) return `${(1000 * seconds).toPrecision(seconds < 0.001 ? 1 : 2).replace(/\.0$/, "")} ms`;
  if (seconds < 0.9995) return `${(1000 * seconds).toFixed(0)} ms`;
  return seconds < 99.5 ? `${seconds.toPrecision(3)} s` : `${(seconds / 60).toFixed(0)} min`;
}

export function ago(seconds) {
  if (seconds < 2) return "just now";
  if (seconds < 90) return `${Math.round(seconds)} s ago`;
  return seconds < 5400 ? `${Math.round(seconds / 60)} min ago` : `${(seconds / 3600).toFixed(1)} h ago`;
}

export const counted = (num, one, many = `${one}s`) => `${num.toLocaleString("en")} ${num === 1 ? one : many}`;

export function listed(ids) {
  if (ids.length < 2) return ids.join("");
  return `${ids.slice(0, -1).join(", ")} and ${ids[ids.length - 1]}`;
}
