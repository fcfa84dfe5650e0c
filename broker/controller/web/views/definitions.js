// Definitions: export and import as a file of all that exists but messages, and the progress of imports.

import { file, path, post } from "../api.js";
import { h, update } from "../dom.js";
import * as format from "../format.js";
import { plainTable } from "../table.js";
import { confirmed, empty, form, notice, section, state } from "../widgets.js";

const IMPORT_MS_MAX = 600_000;
const WITHOUT_EFFECT_MS = 10_000;
const ALL = "";

export function definitions(page) {
  const imports = h("div", null, empty("…"));
  const without = h("div", null, empty("…"));
  const of = scope(page);
  page.show("Definitions",
    h("p", { class: "lead" }, "Users, permissions, virtual hosts, policies, parameters, exchanges, queues and bindings, as RabbitMQ writes them. Messages are not in it."),
    section("Download", downloadForm(page, of)), section("Upload", uploadForm(page, of)), section("Last imports", imports),
    section("Kept without effect", h("p", { class: "lead" }, "The broker keeps these settings, but does not act on them."), without));
  page.live(async () => update(imports, importTable(await page.get("imports"))), 2_000);
  page.live(async () => update(without, withoutEffect(await page.get("without-effect"))), WITHOUT_EFFECT_MS);
}

/** The field of both forms that chooses a vhost, or everything. */
function scope(page) {
  page.get("vhosts", { columns: "name" }).then((vhosts) => {
    for (const select of page.main.querySelectorAll('select[name="scope"]')) {
      select.append(...vhosts.map(({ name }) => h("option", { value: name }, `virtual host ${name}`)));
    }
  }, () => {});
  return { name: "scope", label: "Definitions of", type: "select", options: [[ALL, "everything"]] };
}

const where = (vhost) => (vhost === ALL ? "definitions" : path("definitions", vhost));

function downloadForm(page, of) {
  return form([of], {
    label: "Download definitions",
    stays: true,
    submit: async ({ scope: vhost }) => {
      const url = URL.createObjectURL(await file(where(vhost), { signal: page.signal }));
      h("a", { href: url, download: `shardmq-definitions-${new Date().toISOString().slice(0, 10)}.json` }).click();
      setTimeout(() => URL.revokeObjectURL(url), 60_000);
    },
  });
}

function uploadForm(page, of) {
  return form([of, { name: "file", label: "File", type: "file", required: true }], {
    label: "Upload definitions",
    submit: async ({ scope: vhost, file: chosen }) => {
      if (!(await confirmed(`Import ${chosen.name} (${format.bytes(chosen.size)})? Queues, exchanges and bindings that exist stay as they are. Users, policies and parameters of the same names are replaced.`, "Import"))) return;
      const answer = await post(where(vhost), chosen, { timeoutMs: IMPORT_MS_MAX });
      notice(answer?.warnings ? "The definitions are imported. Some of them have no effect here: see below." : "The definitions are imported.");
      page.refresh();
    },
  });
}

/** Warnings about all that exists and has no effect in this broker. */
function withoutEffect({ warnings }) {
  return warnings.length ? warnings.map((text) => h("p", { data: { key: text } }, text)) : empty("Everything that is defined here has an effect.");
}

function importTable(rows) {
  return plainTable("Last imports", [
    { label: "Begun", cell: (row) => format.moment(row.begun_at * 1000) },
    { label: "By", cell: (row) => row.user },
    { label: "Into", cell: (row) => row.vhost ?? "everything" },
    { label: "State", cell: (row) => (row.state.startsWith("failed") ? h("span", { class: "wrong" }, row.state) : state(row.state)) },
    { label: "Without effect", cell: (row) => row.warnings.map((text) => h("p", null, text)) },
    { label: "Done", number: true, cell: (row) => `${format.count(row.done)} of ${format.count(row.total)}` },
    { label: "Took", number: true, cell: (row) => format.duration((row.ended_at || Date.now() / 1000) - row.begun_at) },
  ], rows, (row) => String(row.id), "None since the controller's start.");
}
