// What users of @cloudamqp/amqp-client do, against the broker whose URL is the first argument. Each step is told as a
// line of standard output; the first that goes wrong ends this with status 1.
import assert from "node:assert/strict"
import { AMQPClient } from "@cloudamqp/amqp-client"

const [url, name] = process.argv.slice(2)

async function until(happened, what) {
  for (let waited = 0; !happened(); waited += 20) {
    assert(waited < 60_000, `waited for ${what}`)
    await new Promise((resolve) => setTimeout(resolve, 20))
  }
}

const client = new AMQPClient(url)
const connection = await client.connect()
const channel = await connection.channel()
assert.equal(channel.id, 1)
console.log("channel")

const queue = await channel.queueDeclare(name, { durable: true })
assert.deepEqual(queue, { name, messageCount: 0, consumerCount: 0 })
await channel.confirmSelect()
for (let number = 0; number < 100; number++) {
  const headers = { number, text: "t", list: [1, "two"] }
  await channel.basicPublish("", name, `message ${number}`, { deliveryMode: 2, headers })
}
console.log("confirmed")

const got = []
await channel.basicQos(10)
const consumer = await channel.basicConsume(name, { noAck: false }, async (message) => {
  got.push([message.bodyString(), message.properties.headers.number])
  await message.ack()
})
await until(() => got.length === 100, "100 messages")
assert.deepEqual(got, Array.from({ length: 100 }, (_, number) => [`message ${number}`, number]))
await consumer.cancel()
console.log("consumed in order")

const get = () => channel.basicGet(name, { noAck: true })
const large = "x".repeat(1_000_000)
await channel.basicPublish("", name, large)
assert.equal((await get()).bodyString(), large)
assert.equal(await get(), null)
console.log("got")

const returned = []
channel.onReturn = (message) => returned.push([message.replyCode, message.replyText, message.bodyString()])
await channel.basicPublish("", `${name}-nowhere`, "back", {}, true)
await until(() => returned.length === 1, "the return")
assert.deepEqual(returned, [[312, "NO_ROUTE", "back"]])
console.log("returned")

await channel.exchangeDeclare(name, "topic", { durable: false })
await channel.queueBind(name, name, "a.#")
await channel.basicPublish(name, "a.b.c", "routed")
assert.equal((await get()).bodyString(), "routed")
await channel.queueUnbind(name, name, "a.#")
console.log("routed")

const refused = await connection.channel()
await assert.rejects(refused.queueDeclare(`${name}-nowhere`, { passive: true }), /NOT_FOUND/)
console.log("refused")

const transactional = await connection.channel()
await transactional.txSelect()
await transactional.basicPublish("", name, "committed")
await transactional.txCommit()
assert.equal((await get()).bodyString(), "committed")
console.log("committed")

await channel.queueDelete(name)
await channel.exchangeDelete(name)
await connection.close()
console.log("closed")
