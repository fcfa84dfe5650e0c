// Calls of the HTTP API, the login, and errors as texts.
//
// The login is kept in this tab only (sessionStorage) and sent in a header by this page's calls. Requests that another
// site's page makes the browser send do not have it, unlike a cookie or a password that the browser remembers. It ends
// with the tab. `credentials: "omit"` also keeps the browser from asking for a password after a wrong one.

const BASE = new URL("../api/", document.baseURI);
const KEY = "shardmq.login";
const TIMEOUT_MS = 30_000;

export class ApiError extends Error {
  /** `said`: the whole answer, or null. */
  constructor(status, reason, said = null) {
    super(reason);
    this.status = status;
    this.said = said;
  }
}

let login = sessionStorage.getItem(KEY);
/** The user that is logged in, {name, tags}, or null. */
export let user = null;
/** Whether the broker is a cluster of nodes. */
export let isCluster = false;
let onLogout = () => {};
let onWarning = () => {};

export function whenLoggedOut(then) {
  onLogout = then;
}

/** Call `then(text)` for each warning of the broker about things that have no effect. */
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

/** Log in again as the user that logged in before in this tab. Throws ApiError if this is refused. */
export async function resume() {
  try {
    const found = await get("whoami");
    isCluster = (await get("cluster-name")).nodes !== undefined;
    user = found;
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

/** Return whether the user has the tag, or a higher one. */
export function has(tag) {
  return user !== null && RANKS[tag].some((one) => user.tags.includes(one));
}

/** Return a path made of quoted names. For the default exchange use `exchangePart`. */
export function path(...parts) {
  return parts.map(quoted).join("/");
}

function quoted(part) {
  // A browser resolves these as directories, even when they are quoted, and would call another path.
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

/**
 * Return the decoded response, null without a body, or the header of the response that `header` names. Values of `query`
 * that are "", null or undefined are left out.
 */
async function call(method, where, { body, query, signal, header, timeoutMs = TIMEOUT_MS } = {}) {
  const answer = await send(method, where, { body, query, signal, timeoutMs });
  const text = await unbroken(answer.text(), signal);
  const found = text && answer.headers.get("Content-Type")?.startsWith("application/json") ? JSON.parse(text) : null;
  if (answer.ok) {
    // Each value of the header ends with a string of JSON. A browser joins the values.
    for (const [text] of (answer.headers.get("Warning") ?? "").matchAll(/"(?:[^"\\]|\\.)*"/g)) onWarning(JSON.parse(text));
    return header ? answer.headers.get(header) : found;
  }
  if (answer.status === 401 && user !== null && where !== "whoami" && found?.reason === "Login failed") logOut();
  throw new ApiError(answer.status, reason(found, answer), found);
}

/** Return the response as a file. */
export async function file(where, options = {}) {
  const answer = await send("GET", where, { timeoutMs: 10 * TIMEOUT_MS, ...options });
  if (!answer.ok) throw new ApiError(answer.status, reason(await answer.json().catch(() => null), answer));
  return unbroken(answer.blob(), options.signal);
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
  return unbroken(fetch(url, { method, headers, body: data, credentials: "omit", cache: "no-store", signal: AbortSignal.any(ends) }), signal);
}

/** Await a part of a response. Throws ApiError if the connection breaks or the time is over, but not if `signal` ends it. */
async function unbroken(part, signal) {
  try {
    return await part;
  } catch (error) {
    if (signal?.aborted) throw error;
    throw new ApiError(0, error.name === "TimeoutError" ? "The broker did not answer in time." : "The broker cannot be reached.");
  }
}

function reason(found, answer) {
  const said = found?.reason ?? found?.error;
  return said ? (typeof said === "string" ? said : JSON.stringify(said)) : `${answer.status} ${answer.statusText}`;
}
