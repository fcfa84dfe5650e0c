// Changing the number of shard queues of a stream exchange: the plan, the change, and its progress.

import { path, post, put } from "../api.js";
import { bar } from "../charts.js";
import { fill, h, update } from "../dom.js";
import * as format from "../format.js";
import { attempt, button, facts, form } from "../widgets.js";

const EVERY_MS = 2_000;
const NONE = "none";
const STEPS = {
  closing: "Step 1 of 4: the shard queues that get keys begin to hold back new messages.",
  passing: "Step 2 of 4: new messages go the new way; those that were on their way arrive.",
  settling: "Step 3 of 4: the messages from before the change are consumed first, so that each key stays in order.",
  settled: "Step 4 of 4: the messages that were held back are released.",
};

export function reshardingOf(page, vhost, name, mayChange) {
  const where = path("exchanges", vhost, name, "shards");
  const progress = h("div", { role: "status" });
  const plan = h("div", { role: "status" });
  const begun = h("p", { class: "plan" }); // says that a change was begun here
  let wanted = null; // the number of that change
  const again = page.live(async () => {
    const found = await page.get(where);
    const parts = found.queues.filter(({ state }) => state === "active").length;
    const isDone = found.step === NONE && parts === wanted;
    if (isDone) begun.remove();
    update(progress, found.step === NONE ? h("p", null, isDone ? `The change is done. There are ${counted(parts)} now.` : `There are ${counted(parts)}. No change is under way.`) : progressOf(found));
  }, EVERY_MS);
  const change = async (number) => {
    if (!(await attempt(() => put(where, { number })))) return;
    wanted = number;
    fill(plan, fill(begun, `The change to ${counted(number)} has begun.`));
    again();
  };
  const asks = form([{ name: "number", label: "Number of shard queues", type: "number", min: 1, required: true, help: "Nothing is changed before you have seen the plan" }], {
    label: "Show the plan",
    stays: true,
    submit: async ({ number }) => fill(plan, planOf(await post(`${where}/plan`, { number }), () => change(number), () => fill(plan))),
  });
  return [progress, mayChange ? asks : null, plan];
}

const counted = (number) => (number === 1 ? "1 shard queue" : `${format.count(number)} shard queues`);

function planOf(found, begin, cancel) {
  const names = (queues) => (queues.length ? h("ul", null, queues.map((name) => h("li", null, name))) : "none");
  const isSame = !found.coming.length && !found.going.length;
  return h("div", { class: "plan" },
    h("h3", null, isSame ? `There are ${counted(found.shards)} already: nothing would change.` : `From ${counted(found.shards)} to ${counted(found.new_shards)}`),
    facts([
      ["New shard queues", names(found.coming)],
      ["Shard queues to empty and delete", names(found.going)],
      ["Keys that move", `${format.percent(found.share_moving)} of all keys get another shard queue`],
      ["Consumed first", `${format.count(found.to_settle)} messages that are there now`],
      ["Order of keys", found.keeps_order ? "is kept: messages of a key that moves wait for its older ones" : "may break: messages of a key that moves can overtake its older ones"],
    ]),
    h("div", { class: "actions" }, isSame ? null : button(`Change to ${counted(found.new_shards)}`, begin, "solid"), button("Close the plan", cancel)));
}

function progressOf(found) {
  const total = found.to_settle_at_first;
  const done = total - found.to_settle;
  return [
    h("p", null, STEPS[found.step] ?? found.step),
    total ? bar("Messages from before the change", done / total, `${format.count(done)} of ${format.count(total)} consumed`, Infinity) : null,
    found.unknown ? h("p", { class: "faint" }, `${counted(found.unknown)} did not say yet how much is left.`) : null,
    found.groups.map((group) => h("p", { data: { key: group.group } }, group.waits_for === null
      ? `Group ${group.group || "(default)"} goes over to the new shard queues.`
      : `Group ${group.group || "(default)"} reads these to the end first: ${group.waits_for.join(", ")}.`)),
  ];
}
