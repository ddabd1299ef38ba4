"""KV transfer across processes: offered by the source, pulled by the destination and acknowledged.

| transport | chosen when | how the bytes move |
|---|---|---|
| `inproc` | both ends are one process | `device_put`, shard by shard |
| `shm` | one host (kernel and network namespace) | one copy into pooled shared memory, adopted in place |
| `jax_transfer` | accelerators of one kind and one jax version on both ends | `jax.experimental.transfer` |
| `tcp` | otherwise | sent from the source's memory, received into buffers that jax adopts |
| `nixl` | only by name, with the extra `nixl` | one-sided reads by NIXL |

    mine, theirs = capability("cpu"), read_capability(record)      # choose.py: exchanged over the control plane
    transport = open_transport(choose(mine, theirs), TransportConfig(secret, Identity(model, layout, dtype)))
    ticket = transport.offer(TransferId(handoff, epoch, part), shards, deadline_s)  # source: returns at once
    record = ticket.to_json()                                             # sent with the control messages
    arrays = transport.pull(read_ticket(record), devices, deadline_s)     # destination: blocks, off the driver thread
    transport.ack(ticket)                                 # after the insert; `cancel` from either end, at any time
    transport.expire(now_s); transport.held(); transport.close()

Shard i becomes array i, without a reshape on the way. A ticket is good for one pull and ends exactly once:
acknowledged, cancelled, expired, or broken off because a peer went away. Then neither end holds anything for it
(`ticket.py` has the signatures). Deadlines are absolute, of the clock in `TransportConfig`; every operation ends by its
own. A failed pull is not retried here: the owner of the pages offers them again.

Safety: both ends prove a shared secret and send what they run (model, layout, dtype, version) before anything else.
Tickets carry an HMAC, sizes are checked against limits before memory is allocated, nothing is ever unpickled, and
TLS is an option of `TransportConfig`. Without TLS the bytes of KV are neither encrypted nor signed, and those of
`jax_transfer` and `nixl` never are: keep them to a network you trust. `TransportConfig.link` emulates a slower
network on any of them.
"""
