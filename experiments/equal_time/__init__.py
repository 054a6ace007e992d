"""Does echoing last? Trainings for equal time, many at once on one accelerator.

`python -m experiments.equal_time` carries out what `plan` holds, the most telling cells first, and
adds a line of JSON to a file for each that is over (`rows`). A cell is one way of echoing, on one
task, for so many fresh batches. stoker's own schedules say which example each step uses, by an
exact clock (`schedules`, `clock`). Networks train side by side as one stack (`stacks`, `training`):
first two seeds with all rates and warm-ups, then five others with the best of them.
`experiments.evidence` makes the tables and sentences of docs/evidence.md, and of other pages, of
the rows.
"""
