// The choice of columns of a list. It is kept in this browser, for each list by itself.

import { fill, h } from "./dom.js";
import { button } from "./widgets.js";

const PHONE = "(max-width: 34rem)"; // in style.css, too, which hides minor columns there

/**
 * Return {shown, element} for a list. `shown()` gives the columns to show; `element` lets people choose, and calls
 * `changed()`. The first column and those without a label are always shown. `extra` columns are hidden until chosen, and
 * so are `minor` columns on a phone.
 */
export function columnChoice(list, columns, changed) {
  const key = `shardmq.columns.${list}`;
  let chosen = kept(key); // by label, where it differs from what is usual
  const isUsual = (column) => !column.extra && !(column.minor && matchMedia(PHONE).matches);
  const isShown = (column) => column === columns[0] || !column.label || (chosen[column.label] ?? !column.extra);
  const boxes = h("div", { class: "boxes" });
  const change = (next) => {
    chosen = next;
    if (Object.keys(next).length) localStorage.setItem(key, JSON.stringify(next));
    else localStorage.removeItem(key);
    changed();
  };
  const box = (column) => {
    const tick = () => {
      const { [column.label]: _, ...others } = chosen;
      change(input.checked === isUsual(column) ? others : { ...others, [column.label]: input.checked });
    };
    const input = h("input", { type: "checkbox", checked: chosen[column.label] ?? isUsual(column), on: { change: tick } });
    return h("label", null, input, " ", column.label);
  };
  const draw = () => fill(boxes, columns.slice(1).filter(({ label }) => label).map(box));
  const reset = () => {
    change({});
    draw();
  };
  return {
    // What somebody has chosen is shown on a phone, too.
    shown: () => columns.filter(isShown).map((column) => (chosen[column.label] ? { ...column, minor: false } : column)),
    // Boxes are drawn when they are opened, as the screen may have been turned.
    element: h("details", { class: "chooser", on: { toggle: draw } }, h("summary", null, "Columns"),
      h("fieldset", null, h("legend", { class: "hidden" }, "Columns to show"), boxes, button("Reset columns", reset))),
  };
}

function kept(key) {
  try {
    const found = JSON.parse(localStorage.getItem(key));
    return found instanceof Object ? found : {};
  } catch {
    return {};
  }
}
