// Which view is shown, by what is behind the # of the address: "#/queues/%2F/orders?page=2".

/** An address of this page, of names that may hold anything. */
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

/** Keep what a table shows in the address, without a step in the history. */
export function remember(values) {
  const { query } = here();
  for (const [name, value] of Object.entries(values)) {
    if (value === "" || value === null || value === undefined || value === false) query.delete(name);
    else query.set(name, String(value));
  }
  const path = location.hash.split("?", 1)[0] || "#/";
  history.replaceState(null, "", query.size ? `${path}?${query}` : path);
}

/** The view for these parts: rows of [pattern, view], where ":name" takes any part. */
export function match(routes, parts) {
  for (const [pattern, view] of routes) {
    const wanted = pattern.split("/").filter(Boolean);
    if (wanted.length === parts.length && wanted.every((one, i) => one.startsWith(":") || one === parts[i])) {
      return { view, names: parts.filter((_, i) => wanted[i].startsWith(":")) };
    }
  }
  return null;
}
