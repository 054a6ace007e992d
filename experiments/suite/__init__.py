"""The experiments suite: what echoing brings, over workloads that the code was not tuned to.

`experiments/run WORKLOAD` carries out what a `plan` holds, in phases: an exact clock says when
things happen (`exact_clock`; `threads` holds it against real ones), and runs that train say what
comes of it (`training`), the learning rates first. Each leaves a row (`rows`). Everything
that is told, in tables (`tables`) and figures (`figures`), is made of rows (`summary`).
"""
