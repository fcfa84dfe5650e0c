"""The broker in five packages: `broker`, `shardd` (shards), `combined`, `supervisor`, `cluster`.

`broker` has the front door and the controller, `combined` a front door and a shard in one process,
`supervisor` has `shardctl`, too, and `cluster` has what the nodes of a cluster need to find each
other. In the repository the five packages are folders at the top, and this folder holds links to
them. The links make one importable package of them, so that an installed shardmq owns only names
that begin with `shardmq`; a package called `supervisor` at the top would be taken for the process
manager of that name on PyPI.
"""
