// Permissions of users in virtual hosts, and those for the routing keys of topic exchanges: lists and forms.

import { path, put, remove } from "../api.js";
import { h, update } from "../dom.js";
import { plainTable } from "../table.js";
import { attempt, dangerous, empty, exchangeLink, form, inner, link, section } from "../widgets.js";

const RULE = "A regular expression. .* means all, and an empty field means none";

/**
 * Sections with the permissions of a user or of a virtual host. `known`: {user} or {vhost}; forms ask for the other one,
 * `other` is the field for it.
 */
export function permissionsOf(page, known, other) {
  const where = known.user === undefined ? path("vhosts", known.vhost) : path("users", known.user);
  const named = h("div", null, empty("…"));
  const topics = h("div", null, empty("…"));
  const again = page.live(async () => {
    const [permissions, topicPermissions] = await Promise.all([page.get(`${where}/permissions`), page.get(`${where}/topic-permissions`)]);
    update(named, permissionTable(permissions, again));
    update(topics, topicTable(topicPermissions, again));
  });
  return [
    section("Permissions", inner("Set a permission", permissionForm(known, other, again)), named),
    section("Topic permissions",
      h("p", { class: "lead" }, "They limit the routing keys with which the user may publish to a topic exchange, or bind to it. Without one for an exchange, all routing keys are allowed."),
      inner("Set a topic permission", topicForm(known, other, again)), topics),
  ];
}

const SUBJECT = [
  { label: "User", cell: (row) => link(row.user, "users", row.user) },
  { label: "Virtual host", cell: (row) => link(row.vhost, "vhosts", row.vhost) },
];

const rule = (label, name) => ({ label, cell: (row) => h("code", null, row[name] || "(none)") });

function permissionTable(rows, again) {
  const revoke = (row) => async () => {
    if (await attempt(() => remove(path("permissions", row.vhost, row.user)), "The permission is revoked.")) again();
  };
  return plainTable("Permissions", [
    ...SUBJECT,
    rule("Configure", "configure"), rule("Write", "write"), rule("Read", "read"),
    { label: "", cell: (row) => dangerous("Revoke", `Revoke all permissions of ${row.user} in ${row.vhost}?`, revoke(row)) },
  ], rows, (row) => `${row.vhost}\n${row.user}`, "No permissions: nobody may do anything.");
}

function permissionForm(known, other, again) {
  const field = (name, label) => ({ name, label, value: ".*", help: RULE });
  return form([
    other,
    field("configure", "May declare and delete"), field("write", "May write to"), field("read", "May read from"),
  ], {
    label: "Set permission",
    done: "The permission is set.",
    submit: async (values) => {
      const { vhost, user, ...rules } = { ...values, ...known };
      await put(path("permissions", vhost, user), rules);
      again();
    },
  });
}

function topicTable(rows, again) {
  const revoke = (row) => async () => {
    const where = path("topic-permissions", row.vhost, row.user);
    if (await attempt(() => remove(where, { query: { exchange: row.exchange } }), "The topic permission is revoked.")) again();
  };
  return plainTable("Topic permissions", [
    ...SUBJECT,
    { label: "Exchange", cell: (row) => exchangeLink(row.vhost, row.exchange) },
    rule("Publish with keys", "write"), rule("Bind with keys", "read"),
    { label: "", cell: (row) => dangerous("Revoke", `Revoke the topic permission of ${row.user} for ${row.exchange} in ${row.vhost}?`, revoke(row)) },
  ], rows, (row) => `${row.vhost}\n${row.user}\n${row.exchange}`, "No topic permissions: all routing keys are allowed.");
}

function topicForm(known, other, again) {
  const field = (name, label) => ({ name, label, value: ".*", help: RULE });
  return form([
    other,
    { name: "exchange", label: "Topic exchange", required: true, value: "amq.topic" },
    field("write", "May publish with routing keys"), field("read", "May bind with routing keys"),
  ], {
    label: "Set topic permission",
    done: "The topic permission is set.",
    submit: async (values) => {
      const { vhost, user, ...rules } = { ...values, ...known };
      await put(path("topic-permissions", vhost, user), rules);
      again();
    },
  });
}
