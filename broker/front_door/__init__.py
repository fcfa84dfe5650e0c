"""The front door: the process that terminates AMQP and forwards to the shards."""
