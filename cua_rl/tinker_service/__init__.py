"""A service that the `tinker` SDK talks to: its requests become those of our trainer and model server (docs/tinker.md).

app        HTTP: keys, limits, routes
messages   what the SDK sends and reads: protobuf messages, JSON fields
data       the SDK's data as ours; what cannot be expressed is refused
models     models being trained: requests in order and once only, restored after a crash
sampling   sampling sessions and samples
trained_sequences   what the monitor shows of a step
store      everything that survives the process, in Postgres
"""
