// The HTTP API as this page uses it: who is logged in, calls, and errors in words.
//
// The login is kept in this tab alone (sessionStorage) and sent in a header by our own calls: unlike a cookie, or what a
// browser remembers of its own password dialog, nothing another site makes the browser do carries it. It ends with the
// tab. `credentials: "omit"` also keeps the browser's dialog away when a password is wrong.

const BASE = new URL("../api/", document.baseURI);
const KEY = "shardmq.login";
const TIMEOUT_MS = 30_000;

export class ApiError extends Error {
  constructor(status, reason) {
    super(reason);
    this.status = status;
  }
}

let login = sessionStorage.getItem(KEY);
/** {name, tags}, once logged in. */
export let user = null;
let onLogout = () => {};
let onWarning = () => {};

export function whenLoggedOut(then) {
  onLogout = then;
}

/** `then(text)`: of each thing that the broker took and that has no effect there. */
export function whenWarned(then) {
  onWarning = then;
}

export function hasLogin() {
  return login !== null;
}

export async function logIn(name, password) {
  const bytes = new TextEncoder().encode(`${name}:${password}`);
  login = btoa(Array.from(bytes, (byte) => String.fromCharCode(byte)).join(""));
  await resume();
  sessionStorage.setItem(KEY, login);
}

/** Whoever logged in before in this tab; raises ApiError when that does not hold any more. */
export async function resume() {
  try {
    user = await get("whoami");
  } catch (error) {
    if (error.status === 401 || error.status === 403) forget();
    throw error;
  }
}

function forget() {
  login = user = null;
  sessionStorage.removeItem(KEY);
}

export function logOut() {
  forget();
  onLogout();
}

const RANKS = {
  management: ["management", "policymaker", "monitoring", "administrator"],
  policymaker: ["policymaker", "administrator"],
  monitoring: ["monitoring", "administrator"],
  administrator: ["administrator"],
};

/** Whether the user's tags let it do what `tag` lets. */
export function has(tag) {
  return user !== null && RANKS[tag].some((one) => user.tags.includes(one));
}

/** Names, put together to a path. The default exchange has a name there. */
export function path(...parts) {
  return parts.map(quoted).join("/");
}

function quoted(part) {
  // A browser takes these for directories, also when they are quoted: another thing would be meant.
  if (part === "." || part === "..") throw new ApiError(400, `A browser cannot ask for a thing called "${part}"; shardctl can.`);
  return encodeURIComponent(part);
}

export function exchangePart(name) {
  return name === "" ? "amq.default" : name;
}

export const get = (where, options) => call("GET", where, options);
export const put = (where, body, options) => call("PUT", where, { ...options, body });
export const post = (where, body, options) => call("POST", where, { ...options, body });
export const remove = (where, options) => call("DELETE", where, options);

/** The decoded answer, null for none. `query`: names and values; those that are "", null or undefined are left out. */
async function call(method, where, { body, query, signal, timeoutMs = TIMEOUT_MS } = {}) {
  const answer = await send(method, where, { body, query, signal, timeoutMs });
  const text = await answer.text();
  const found = text && answer.headers.get("Content-Type")?.startsWith("application/json") ? JSON.parse(text) : null;
  if (answer.ok) {
    // Each value of the header ends with a string of JSON; a browser puts the values into one.
    for (const [text] of (answer.headers.get("Warning") ?? "").matchAll(/"(?:[^"\\]|\\.)*"/g)) onWarning(JSON.parse(text));
    return found;
  }
  if (answer.status === 401 && user !== null && where !== "whoami" && found?.reason === "Login failed") logOut();
  throw new ApiError(answer.status, reason(found, answer));
}

/** The answer as a file. */
export async function file(where, options) {
  const answer = await send("GET", where, { timeoutMs: 10 * TIMEOUT_MS, ...options });
  if (!answer.ok) throw new ApiError(answer.status, reason(await answer.json().catch(() => null), answer));
  return answer.blob();
}

async function send(method, where, { body, query, signal, timeoutMs }) {
  const url = new URL(where, BASE);
  for (const [name, value] of Object.entries(query ?? {})) {
    if (value !== "" && value !== null && value !== undefined) url.searchParams.set(name, value);
  }
  const headers = login === null ? {} : { Authorization: `Basic ${login}` };
  if (body !== undefined) headers["Content-Type"] = "application/json";
  const data = body === undefined || body instanceof Blob ? body : JSON.stringify(body);
  const ends = [AbortSignal.timeout(timeoutMs), ...(signal ? [signal] : [])];
  try {
    return await fetch(url, { method, headers, body: data, credentials: "omit", cache: "no-store", signal: AbortSignal.any(ends) });
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, error.name === "TimeoutError" ? "The broker did not answer in time." : "The broker cannot be reached.");
  }
}

function reason(found, answer) {
  const said = found?.reason ?? found?.error;
  return said ? (typeof said === "string" ? said : JSON.stringify(said)) : `${answer.status} ${answer.statusText}`;
}
