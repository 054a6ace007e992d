"""Worker processes: each has its own copy of the dataset and does one request at a time.

Two threads of the worker pool talk to one process, each through an arena of its own, so that the
next request is already there: a thread that comes late, because all cores are busy, would leave the
process idle. ``transport.channel`` carries the values.

- A message ends an idle process; a busy one is killed. A parent-death signal, a pidfd of the parent
  and the closed pipe end it with its parent, however the parent dies.
- An error loses attributes that do not pickle, and carries its traceback as a note.
- A map after ``.batch``, or a ``collate``, makes a process take whole batches.
- Generators are seeded before each call of the user's code (``engine.work.call_seeds``). So a
  dataset with ``__getitems__`` is asked for one example at a time there.
- A forked process opens files anew that are open for reading: it would share their place.
- No process is forked once JAX has started threads: one that uses JAX would hang.
- A source that reads ahead is read in the training process, which sends the bytes.
"""
