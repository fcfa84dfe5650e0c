// Chooses the view by the part of the address behind #, as in "#/queues/%2F/orders?page=2".

/** Return an address of this page with these parts, which are quoted. */
export function to(...parts) {
  return `#/${parts.map(encodeURIComponent).join("/")}`;
}

export function here() {
  const [path, query = ""] = location.hash.replace(/^#\/?/, "").split("?", 2);
  const parts = path === "" ? [] : path.split("/").map(decoded);
  return { parts, query: new URLSearchParams(query) };
}

function decoded(part) {
  try {
    return decodeURIComponent(part);
  } catch {
    return part;
  }
}

/** Keep the state of a table in the address, without a step in the history. */
export function remember(values) {
  const { query } = here();
  for (const [name, value] of Object.entries(values)) {
    if (value === "" || value === null || value === undefined || value === false) query.delete(name);
    else query.set(name, String(value));
  }
  const path = location.hash.split("?", 1)[0] || "#/";
  history.replaceState(null, "", query.size ? `${path}?${query}` : path);
}

/** Return the view for these parts. `rows`: [pattern, view], where ":name" matches any part. */
export function match(routes, parts) {
  for (const [pattern, view] of routes) {
    const wanted = pattern.split("/").filter(Boolean);
    if (wanted.length === parts.length && wanted.every((one, i) => one.startsWith(":") || one === parts[i])) {
      return { view, names: parts.filter((_, i) => wanted[i].startsWith(":")) };
    }
  }
  return null;
}
