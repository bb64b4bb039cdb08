"""What DeepEP V1 has under its own names, for callers written against it.

`normal_mode` is `Buffer`'s calls, `layout_counts` what get_dispatch_layout counts by a kernel, `config` is `Config` and
the byte hints, `handle_tuple` a handle unpacked. The low-latency calls are in `moe_ep.low_latency`, the events in
`moe_ep.event`; `moe_ep.integrations.deep_ep` lets all of it answer as the module `deep_ep`.
"""
