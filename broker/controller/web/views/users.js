// Users: the list, and one with its tags, password, permissions and limits.

import { get, path, put, remove, user as self } from "../api.js";
import { h, update } from "../dom.js";
import { listTable } from "../table.js";
import { adder, attempt, badge, dangerous, empty, facts, fold, form, inner, link, notice, section } from "../widgets.js";
import { permissionsOf } from "./permissions.js";
import { limitForm, limitTable, vhostOptions } from "./vhosts.js";

const TAGS = "administrator, monitoring, policymaker or management, with commas between them. Empty: the user only sends and receives messages, and cannot log in here";

export function users(page) {
  const list = listTable(page, {
    caption: "Users",
    where: () => "users",
    key: (row) => row.name,
    columns: [
      { label: "Name", sort: "name", cell: (row) => link(row.name, "users", row.name) },
      { label: "Tags", cell: (row) => row.tags.map((tag) => badge(tag)) },
      { label: "Password", cell: (row) => (row.password_hash ? "set" : badge("none", "warn")) },
    ],
  });
  page.show("Users", adder("Add a user", addForm(page)), section(null, list));
}

function addForm(page) {
  return form([
    { name: "name", label: "Name", required: true },
    { name: "password", label: "Password", type: "password", required: true, autocomplete: "new-password" },
    { name: "tags", label: "Tags", help: TAGS },
  ], {
    label: "Add user",
    submit: async ({ name, password, tags }) => {
      const there = await get(path("users", name)).then(() => true, (error) => {
        if (error.status !== 404) throw error;
        return false;
      });
      if (there) throw new Error(`There is a user ${name} already.`);
      await put(path("users", name), { password, tags });
      notice(`User ${name} is added. Give it permissions on its page.`);
      page.refresh();
    },
  });
}

export function user(page, name) {
  const where = path("users", name);
  const about = h("div", null, empty("…"));
  const limited = h("div", null, empty("…"));
  let isKnown = false;
  const again = page.live(async () => {
    const found = await page.get(where);
    isKnown = true;
    tags.elements.tags.defaultValue = found.tags.join(", "); // what somebody has typed stays
    update(about, facts([
      ["Tags", found.tags.length ? found.tags.map((tag) => badge(tag)) : "none"],
      ["Password", found.password_hash ? `set, kept as ${found.hashing_algorithm}` : "none: the user cannot log in with a password"],
    ]));
    update(limited, limitTable(found.limits, (limit) => path("user-limits", name, limit), again));
  });
  const password = form([
    { name: "password", label: "New password", type: "password", required: true, autocomplete: "new-password" },
  ], {
    label: "Set password",
    done: "The password is changed.",
    submit: async ({ password: said }) => {
      const { tags: kept } = await get(where);
      await put(where, { password: said, tags: kept });
      again();
    },
  });
  const tags = form([{ name: "tags", label: "Tags", help: TAGS }], {
    label: "Set tags",
    done: "The tags are set.",
    submit: async ({ tags: said }) => {
      if (!isKnown) throw new Error("The tags that the user has are not known yet.");
      const { password_hash, hashing_algorithm } = await get(where);
      await put(where, { password_hash, hashing_algorithm, tags: said });
      tags.elements.tags.defaultValue = said; // a second click must not bring the old ones back
      again();
    },
  });
  page.show(name, section(null, about),
    permissionsOf(page, { user: name }, vhostOptions(page)),
    section("Limits", inner("Set a limit", limitForm(["max-connections", "max-channels"], (limit) => path("user-limits", name, limit), again)), limited),
    fold("Password", password), fold("Tags", tags),
    self.name === name ? null : section("Delete it", dangerous("Delete", `Delete user ${name}? Its connections are closed.`, async () => {
      if (await attempt(() => remove(where), `User ${name} is deleted.`)) page.leave("users");
    })));
}
