"""The low-latency calls of `Buffer`.

`mode` is their face and their portable form, `node` the form where kernels serve them; `checks` looks at what callers
hand in, `layout` says where rows lie, `state` is what a buffer remembers, `survivors` ends a call that lost a rank.
"""
