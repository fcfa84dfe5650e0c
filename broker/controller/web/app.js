// The frame: login, navigation, theme, and the view that the address names.

import * as api from "./api.js";
import { fill, h } from "./dom.js";
import { Page } from "./page.js";
import { here, match, to } from "./router.js";
import { button, failure, notice } from "./widgets.js";
import { channel, channels, connection, connections } from "./views/connections.js";
import { consumers } from "./views/consumers.js";
import { definitions } from "./views/definitions.js";
import { exchange, exchanges } from "./views/exchanges.js";
import { federation } from "./views/federation.js";
import { logs } from "./views/logs.js";
import { node, nodes } from "./views/nodes.js";
import { overview } from "./views/overview.js";
import { parameters } from "./views/parameters.js";
import { policies } from "./views/policies.js";
import { queue, queues } from "./views/queues.js";
import { shard, shards } from "./views/shards.js";
import { shovels } from "./views/shovels.js";
import { stream, streams } from "./views/streams.js";
import { user, users } from "./views/users.js";
import { vhost, vhosts } from "./views/vhosts.js";

const ROUTES = [
  ["", overview],
  ["nodes", nodes],
  ["nodes/:name", node],
  ["shards", shards],
  ["shards/:number", shard],
  ["streams", streams],
  ["streams/:vhost/:name", stream],
  ["connections", connections],
  ["connections/:name", connection],
  ["channels", channels],
  ["channels/:name", channel],
  ["consumers", consumers],
  ["exchanges", exchanges],
  ["exchanges/:vhost/:name", exchange],
  ["queues", queues],
  ["queues/:vhost/:name", queue],
  ["federation", federation],
  ["shovels", shovels],
  ["users", users],
  ["users/:name", user],
  ["vhosts", vhosts],
  ["vhosts/:name", vhost],
  ["policies", policies],
  ["parameters", parameters],
  ["definitions", definitions],
  ["logs", logs],
];

// For each view: the first part of its address, its label, the tag that users need, and whether only a cluster has it.
const MENU = [
  ["Broker", [["", "Overview", "management"], ["nodes", "Nodes", "monitoring", true], ["shards", "Shards", "monitoring"], ["streams", "Stream exchanges", "management"], ["logs", "Logs", "administrator"]]],
  ["Traffic", [["connections", "Connections", "management"], ["channels", "Channels", "management"], ["consumers", "Consumers", "management"], ["exchanges", "Exchanges", "management"], ["queues", "Queues", "management"], ["shovels", "Shovels", "monitoring"], ["federation", "Federation", "monitoring"]]],
  ["Rules", [["users", "Users", "administrator"], ["vhosts", "Virtual hosts", "management"], ["policies", "Policies", "management"], ["parameters", "Parameters", "policymaker"], ["definitions", "Definitions", "administrator"]]],
];

const THEMES = { auto: "System", light: "Light", dark: "Dark" };
const API_PAGE = "../api/index.html";
const root = document.getElementById("app");
let page = null;

function frame() {
  const menu = h("nav", { id: "menu", "aria-label": "Main" }, MENU.map(([title, rows]) => {
    const seen = rows.filter(([, , tag, isOfCluster]) => api.has(tag) && (!isOfCluster || api.isCluster));
    return seen.length ? h("div", { class: "group" }, h("h2", null, title), h("ul", null, seen.map(([name, label]) => h("li", null, h("a", { href: to(...(name ? [name] : [])), data: { name } }, label))))) : null;
  }), h("div", { class: "group" }, h("h2", null, "Help"), h("ul", null, h("li", null, h("a", { href: API_PAGE }, "HTTP API")))));
  const opener = h("button", { type: "button", class: "opener", "aria-expanded": "false", "aria-controls": "menu" }, "Menu");
  opener.addEventListener("click", () => openMenu(opener, menu, opener.getAttribute("aria-expanded") !== "true"));
  menu.addEventListener("click", ({ target }) => target.closest("a") && openMenu(opener, menu, false));
  const out = button("Log out", api.logOut);
  fill(root, h("header", { class: "top" }, brand(), opener, h("div", { class: "who" }, themeChoice(), h("span", { class: "name" }, api.user.name), out)),
    h("div", { class: "body" }, menu, h("main", { id: "main", tabindex: "-1" }, h("p", { id: "trouble", class: "banner bad", role: "alert", hidden: true }), h("div", { id: "view" }))));
}

function brand() {
  return h("a", { class: "brand", href: "#/" }, h("img", { src: "mark.svg", alt: "", width: 28, height: 28 }), "shardmq");
}

function openMenu(opener, menu, open) {
  opener.setAttribute("aria-expanded", String(open));
  menu.classList.toggle("open", open);
}

function themeChoice() {
  const chosen = document.documentElement.dataset.theme ?? "auto";
  const select = h("select", { "aria-label": "Colours" }, Object.entries(THEMES).map(([name, label]) => h("option", { value: name, selected: name === chosen }, label)));
  select.addEventListener("change", () => {
    if (select.value === "auto") delete document.documentElement.dataset.theme;
    else document.documentElement.dataset.theme = select.value;
    localStorage.setItem("shardmq.theme", select.value);
    document.dispatchEvent(new Event("theme")); // for what is drawn on a canvas
  });
  return select;
}

function showTrouble(reason) {
  const place = document.getElementById("trouble");
  if (!place) return;
  place.hidden = reason === null;
  if (reason !== null && place.textContent !== reason) place.textContent = reason;
}

function showView(isFirst = false) {
  page?.close();
  page = null;
  if (api.user === null) {
    if (!document.querySelector("form.login")) showLogin(); // what is typed, or under way, stays
    return;
  }
  const { parts, query } = here();
  for (const anchor of document.querySelectorAll("#menu a")) {
    if (anchor.dataset.name === (parts[0] ?? "")) anchor.setAttribute("aria-current", "page");
    else anchor.removeAttribute("aria-current");
  }
  showTrouble(null);
  page = new Page(document.getElementById("view"), query, showTrouble);
  const found = match(ROUTES, parts);
  try {
    if (found) found.view(page, ...found.names);
    else page.gone();
  } catch (error) {
    if (!(error instanceof api.ApiError)) throw error;
    page.show("Not shown", h("p", null, error.message));
  }
  // Focus the heading: a screen reader then reads it, and the keyboard goes on from the top of the new view.
  if (!isFirst) {
    window.scrollTo(0, 0);
    document.querySelector("#view h1")?.focus({ preventScroll: true });
  }
}

function showLogin() {
  document.title = "Log in · shardmq";
  const name = h("input", { id: "name", name: "name", autocomplete: "username", required: true, spellcheck: "false", autocapitalize: "none" });
  const password = h("input", { id: "password", name: "password", type: "password", autocomplete: "current-password" });
  const wrong = h("p", { class: "wrong", role: "alert" });
  const enter = h("button", { type: "submit", class: "solid" }, "Log in");
  const asks = h("form", { class: "login card" }, h("h1", null, brandMark(), "shardmq"),
    h("label", { for: "name" }, "User"), name, h("label", { for: "password" }, "Password"), password, wrong, enter);
  asks.addEventListener("submit", async (event) => {
    event.preventDefault();
    enter.disabled = true;
    wrong.textContent = "";
    try {
      await api.logIn(name.value, password.value);
      begin();
    } catch (error) {
      wrong.textContent = error.status === 401 && error.message === "Login failed" ? "User or password is wrong." : error.message;
      password.select();
    } finally {
      enter.disabled = false;
    }
  });
  fill(root, h("main", { id: "main", class: "alone", tabindex: "-1" }, asks));
  name.focus();
}

function brandMark() {
  return h("img", { src: "mark.svg", alt: "", width: 36, height: 36 });
}

function begin() {
  frame();
  showView(true);
}

async function start() {
  api.whenLoggedOut(() => showView());
  api.whenWarned((text) => notice(`Warning: ${text}`));
  window.addEventListener("hashchange", () => showView());
  document.querySelector(".skip").addEventListener("click", (event) => {
    event.preventDefault(); // the part behind # names the view
    document.getElementById("main")?.focus();
  });
  window.addEventListener("unhandledrejection", ({ reason }) => reason?.name !== "AbortError" && failure(reason));
  if (!api.hasLogin()) return showLogin();
  try {
    await api.resume();
    begin();
  } catch (error) {
    showLogin();
    failure(error);
  }
}

start();
