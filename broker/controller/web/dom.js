// Makes and updates elements. No other file makes any: text goes in as text nodes, never as markup, so a name that
// looks like HTML is shown as it is written.

const SVG = "http://www.w3.org/2000/svg";

/** Make an element. `on`: listeners, `data`: data-* attributes, true and false: flags. Null children are left out. */
export function h(tag, props = null, ...children) {
  return filled(document.createElement(tag), props, children);
}

/** Make an element of SVG. */
export function svg(tag, props = null, ...children) {
  return filled(document.createElementNS(SVG, tag), props, children);
}

function filled(element, props, children) {
  for (const [name, value] of Object.entries(props ?? {})) {
    if (value === null || value === undefined || value === false) continue;
    if (name === "on") for (const [event, listener] of Object.entries(value)) element.addEventListener(event, listener);
    else if (name === "data") Object.assign(element.dataset, value);
    else if (name === "css") for (const [key, one] of Object.entries(value)) element.style.setProperty(key, one);
    else element.setAttribute(name, value === true ? "" : String(value));
  }
  add(element, children);
  return element;
}

function add(element, children) {
  for (const child of children) {
    if (child === null || child === undefined || child === false) continue;
    if (Array.isArray(child)) add(element, child);
    else element.append(child instanceof Node ? child : document.createTextNode(String(child)));
  }
}

/** Replace the children of `element`. */
export function fill(element, ...children) {
  element.replaceChildren();
  add(element, children);
  return element;
}

/**
 * Make the children of `element` equal to `children`, and keep existing nodes: focus and selection stay where they are
 * while numbers change. A node is kept for one with the same tag and the same data-key. Its listeners are kept, too, so
 * an element that listens for one object needs a key of that object.
 */
export function update(element, ...children) {
  const wanted = document.createElement("div");
  add(wanted, children);
  const focused = document.activeElement;
  bringUp(element, [...wanted.childNodes]);
  // An element that is moved loses the focus, and the keyboard would begin again at the top of the page.
  if (focused !== document.activeElement && element.contains(focused)) focused.focus({ preventScroll: true });
}

function bringUp(element, wanted) {
  const there = new Map();
  for (const node of element.childNodes) if (node.dataset?.key) there.set(node.dataset.key, node);
  let next = element.firstChild;
  for (const node of wanted) {
    const key = node.dataset?.key;
    const old = key ? there.get(key) : next && !next.dataset?.key ? next : null;
    if (old && isAlike(old, node)) {
      if (old === next) next = next.nextSibling;
      else element.insertBefore(old, next);
      become(old, node);
    } else {
      element.insertBefore(node, next);
    }
  }
  while (next) {
    const rest = next.nextSibling;
    next.remove();
    next = rest;
  }
}

function isAlike(a, b) {
  return a.nodeType === b.nodeType && a.nodeName === b.nodeName && a.dataset?.key === b.dataset?.key;
}

function become(old, node) {
  if (old.nodeType === Node.TEXT_NODE) {
    if (old.data !== node.data) old.data = node.data;
    return;
  }
  for (const { name } of [...old.attributes]) {
    if (!node.hasAttribute(name) && name !== "open") old.removeAttribute(name);
  }
  for (const { name, value } of node.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  bringUp(old, [...node.childNodes]);
}
