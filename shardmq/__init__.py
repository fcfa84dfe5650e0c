"""The broker in three packages: `broker`, `shardd` (shards) and `supervisor` (with `shardctl`).

`broker` has the front door and the controller. In the repository the three packages are folders at
the top, and this folder holds links to them. The links make one importable package of them, so that
an installed shardmq owns only names that begin with `shardmq`; a package called `supervisor` at the
top would be taken for the process manager of that name on PyPI.
"""
