// Requests to this server, with the key that the reader gave. Addresses are relative, so a proxy's prefix is kept.

const KEEP = "jettison-key";
const listeners = [];
let key = sessionStorage.getItem(KEEP) ?? "";

export const hasKey = () => key !== "";

export function setKey(text) {
  key = text.trim();
  if (key) sessionStorage.setItem(KEEP, key);
  else sessionStorage.removeItem(KEEP);
}

// Called where the server asks for a key, or for another one: with whether there is one already, and whether it is the
// console's own data that needs it.
export const onKeyWanted = (listener) => listeners.push(listener);

const CLIENTS_ONLY = "This needs a client's key: press Key above and give one of the server's API keys.";

export class Failed extends Error {
  constructor(message, status, code) {
    super(message);
    this.status = status;
    this.code = code;
  }
}

// The response; throws Failed with the server's own words where it says no, with status 0 where nothing answers.
export async function ask(path, options = {}) {
  const headers = { ...options.headers };
  if (key) headers.Authorization = `Bearer ${key}`;
  let response;
  try {
    response = await fetch(path, { cache: "no-store", credentials: "omit", ...options, headers });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Failed("The server does not answer.", 0);
  }
  if (response.ok) return response;
  let told = null;
  try {
    told = (await response.json()).error;
  } catch { /* a proxy's page */ }
  if (response.status === 401) listeners.forEach((listener) => listener(hasKey(), path.startsWith("console/")));
  if (response.status === 401 && !path.startsWith("console/")) throw new Failed(CLIENTS_ONLY, 401, told?.code);
  throw new Failed(told?.message ?? `The server answers ${response.status}.`, response.status, told?.code);
}

export async function askJson(path, options) {
  const response = await ask(path, options);
  try {
    return await response.json();
  } catch (error) {
    if (error instanceof SyntaxError) throw new Failed("Something else than this server answers (a proxy?).", response.status);
    throw new Failed("The server's answer broke off.", 0);
  }
}

export const post = (path, document_, options = {}) => ask(path, {
  method: "POST", body: JSON.stringify(document_), headers: { "Content-Type": "application/json" }, ...options,
});
