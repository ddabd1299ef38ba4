"""How KV crosses a process boundary: offered by its source, pulled by its destination, acked; never reshaped in flight.

| transport | chosen when | how the bytes move |
|---|---|---|
| `inproc` | both ends are one process | `device_put`, shard by shard |
| `shm` | one host (kernel and network namespace) | one copy into pooled shared memory, adopted where it lies |
| `jax_transfer` | accelerators of one kind and one jax version on both ends | `jax.experimental.transfer` |
| `tcp` | anything else | sent from the source's memory, received into buffers that jax adopts |
| `nixl` | only by name, with the extra `nixl` | one-sided reads by NIXL |

    mine, theirs = capability("cpu"), read_capability(record)      # choose.py: exchanged over the control plane
    transport = open_transport(choose(mine, theirs), TransportConfig(secret, Identity(model, layout, dtype)))
    ticket = transport.offer(TransferId(handoff, epoch, part), shards, deadline_s)  # source: at once, computed or not
    record = ticket.to_json()                                                # travels with the control messages
    arrays = transport.pull(read_ticket(record), devices, deadline_s)        # destination, blocking, off its driver
    transport.ack(ticket)                                 # after the insert; `cancel` from either end, at any time
    transport.expire(now_s); transport.held(); transport.close()

Shard i becomes array i. Every ticket is good for one pull and ends exactly once: acked, cancelled, expired, or broken
off by a peer that went away; then neither end holds anything for it (`protocol.py` has the signatures and the errors).
Deadline are absolute, of the clock in `TransportConfig`; every operation ends by its own. A failed pull is not
retried here: whoever owns the pages offers them again.

Safety: both ends prove a shared secret and show what they run (model, layout, dtype, version) before anything else,
tickets carry an HMAC, sizes are checked against limits before memory is taken, nothing is ever unpickled, and TLS is an
option of `TransportConfig`. Without TLS the bytes of KV themselves are neither hidden nor signed, and those of
`jax_transfer` and `nixl` never are: keep them to a network you trust. `TransportConfig.link` emulates a slower
network on any of them.
"""
