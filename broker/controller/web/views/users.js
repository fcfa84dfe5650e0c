// Users: the list, and one with its tags, password, permissions and limits.

import { get, path, put, remove, user as self } from "../api.js";
import { h, update } from "../dom.js";
import { to } from "../router.js";
import { listTable } from "../table.js";
import { attempt, badge, dangerous, empty, facts, fold, form, inner, link, notice, section } from "../widgets.js";
import { limitForm, limitTable, permissionForm, permissionTable, vhostOptions } from "./vhosts.js";

const TAGS = "administrator, monitoring, policymaker, management; empty for one who only sends and receives";

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
  page.show("Users", section(null, list), fold("Add a user", addForm(page)));
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
      notice(`User ${name} is there. What it may do is said by permissions.`);
      page.refresh();
    },
  });
}

export function user(page, name) {
  const where = path("users", name);
  const about = h("div", null, empty("…"));
  const granted = h("div", null, empty("…"));
  const limited = h("div", null, empty("…"));
  let last = null;
  const again = page.live(async () => {
    const [found, permissions] = await Promise.all([page.get(where), page.get(`${where}/permissions`)]);
    last = found;
    update(about, facts([
      ["Tags", found.tags.length ? found.tags.map((tag) => badge(tag)) : "none"],
      ["Password", found.password_hash ? `set, kept as ${found.hashing_algorithm}` : "none: cannot log in by password"],
    ]));
    update(granted, permissionTable(permissions, again));
    update(limited, limitTable(found.limits, (limit) => path("user-limits", name, limit), again));
  });
  const password = form([
    { name: "password", label: "New password", type: "password", required: true, autocomplete: "new-password" },
  ], {
    label: "Set password",
    done: "The password is another now.",
    submit: async ({ password: said }) => {
      await put(where, { password: said, tags: last.tags });
      again();
    },
  });
  const tags = form([{ name: "tags", label: "Tags", help: TAGS }], {
    label: "Set tags",
    done: "The tags are set.",
    submit: async ({ tags: said }) => {
      const kept = { password_hash: last.password_hash, hashing_algorithm: last.hashing_algorithm };
      await put(where, { ...kept, tags: said });
      again();
    },
  });
  page.show(name, section(null, about),
    section("Permissions", granted, inner("Set a permission", permissionForm({ user: name }, again, vhostOptions(page)))),
    section("Limits", limited, inner("Set a limit", limitForm(["max-connections", "max-channels"], (limit) => path("user-limits", name, limit), again))),
    fold("Password", password), fold("Tags", tags),
    self.name === name ? null : section("Delete it", dangerous("Delete", `Delete user ${name}? Its connections are closed.`, async () => {
      if (await attempt(() => remove(where), `User ${name} is deleted.`)) location.hash = to("users");
    })));
}
