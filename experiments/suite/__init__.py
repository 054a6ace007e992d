"""The experiments suite: what echoing brings, over workloads that the code was not tuned to.

`experiments/run WORKLOAD` carries out what a `plan` holds, in phases: how fast storage must be
(`timing`), runs with sleeping steps that say when things happen (`timing`), and runs that train and
say what comes of it (`training`), the learning rates first. Each leaves a row (`rows`). Everything
that is told, in tables (`tables`) and figures (`figures`), is made of rows (`summary`).
"""
