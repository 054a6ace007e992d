"""One example for each public function, shown in the API reference and run by its test.

A line ``# %% NAME`` begins the example of a name. What stands before the first one is not shown.
"""

# ruff: noqa: B007 - loops over batches show how they are asked for

import io
import tarfile
from pathlib import Path

import datasets
import jax
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from PIL import Image

import stoker

rng = np.random.default_rng(0)
X, y = rng.random((1_000, 8), np.float32), np.repeat(np.arange(10), 100)
dataset = torch.utils.data.TensorDataset(torch.from_numpy(X), torch.from_numpy(y))
loader = torch.utils.data.DataLoader(dataset, batch_size=32)
pixels = rng.integers(0, 255, (48, 64, 3), np.uint8)
texts = [np.arange(n) for n in rng.integers(1, 60, 500)]
model = torch.nn.Linear(8, 10)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
for name in ("cat", "dog"):
    Path("train", name).mkdir(parents=True)
    for number in range(20):
        Image.fromarray(pixels).save(f"train/{name}/{number}.jpg")
with tarfile.open("shard.tar", "w") as tar:
    for number in range(20):
        for field, content in (("jpg", Path("train/cat/0.jpg").read_bytes()), ("cls", b"1")):
            member = tarfile.TarInfo(f"{number:06}.{field}")
            member.size = len(content)
            tar.addfile(member, io.BytesIO(content))
pq.write_table(pa.table({"tokens": [[1, 2, 3]] * 100, "score": np.arange(100.0)}), "a.parquet")
rows = datasets.Dataset.from_dict({"text": ["a", "b"] * 20, "label": [0, 1] * 20})
(rng.integers(0, 500, 20_000).astype(np.uint16)).tofile("tokens.bin")
data = stoker.from_arrays(X, y, seed=0)
images = stoker.from_folder("train", seed=0).map(stoker.images.decode, on="image")


def jitter(x, rng):
    return x + rng.random(x.shape, np.float32)


# %% stoker.from_arrays
train = stoker.from_arrays(X, y, seed=0).shuffle().batch(32)
for inputs, labels in train:  # float32 [32, 8] and int64 [32]
    pass

# %% stoker.from_dataset
train = stoker.from_dataset(dataset, seed=0, max_errors="1%").shuffle().batch(32)

# %% stoker.from_files
sizes = stoker.from_files("train/**/*.jpg").map(lambda file: (file.path, len(file.data)))

# %% stoker.from_folder
train = stoker.from_folder("train/", seed=0).shuffle().map(stoker.images.decode, on="image")
assert train.class_names == ["cat", "dog"]

# %% stoker.from_huggingface
train = stoker.from_huggingface(rows, ["text", "label"], seed=0).shuffle().batch(8)

# %% stoker.from_iterable
train = stoker.from_iterable(lambda: (n**2 for n in range(100)), seed=0).shuffle(50).batch(10)

# %% stoker.from_loader
train = stoker.from_loader(loader).echo(2)

# %% stoker.from_parquet
train = stoker.from_parquet("*.parquet", ["tokens"], filters=[("score", ">=", 50)], seed=0)
assert len(train) == 50

# %% stoker.from_table
train = stoker.from_table(pa.table({"x": [1.0, 2.0, 3.0]}), seed=0).shuffle().batch(3)

# %% stoker.from_tar
train = stoker.from_tar("shard.tar", ["jpg", "cls"], seed=0).shuffle().map(int, on="cls")

# %% stoker.from_tokens
train = stoker.from_tokens("tokens.bin", 256, dtype="uint16", seed=0).shuffle().batch(16)
inputs, targets = next(iter(train))  # int64 [16, 256] each

# %% stoker.mix
odd, even = data.select(y % 2 == 1).shuffle(), data.select(y % 2 == 0).shuffle()
train = stoker.mix([odd, even], weights=[0.7, 0.3], seed=0).batch(32)

# %% stoker.concat
both = stoker.concat([stoker.from_folder("train"), stoker.from_folder("train")]).shuffle()

# %% stoker.zip
pairs = stoker.zip(stoker.from_arrays(X), stoker.from_dataset(list(y)), seed=0).shuffle()

# %% stoker.echo
train = stoker.echo(loader, 2, transform=jitter, on=0)

# %% stoker.cached
kept = stoker.cached(dataset, "64MiB", version="1")
loader_of_kept = torch.utils.data.DataLoader(kept, batch_size=32, shuffle=True)

# %% stoker.monitor
for inputs, labels in stoker.monitor(loader):
    pass

# %% stoker.serve
train = data.shuffle().batch(32)
with stoker.serve(train, port=0) as server:
    print(server.url)

# %% stoker.lr_schedule
cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=10 * len(loader))
schedule = stoker.lr_schedule(cosine, stoker.echo(loader))


# %% stoker.thread_safe
@stoker.thread_safe
def look_up(x):
    return x * 2


train = data.map(look_up, on=0)

# %% stoker.images.center_crop
valid = images.map(stoker.images.center_crop(32), on="image")

# %% stoker.images.color_jitter
train = images.random_map(stoker.images.color_jitter(brightness=0.4, hue=0.1), on="image")

# %% stoker.images.hflip
mirrored = stoker.images.hflip(pixels)

# %% stoker.images.random_crop
train = images.random_map(stoker.images.random_crop(32), on="image")

# %% stoker.images.random_erase
train = images.batch(8).random_map(stoker.images.random_erase, on="image")

# %% stoker.images.random_hflip
train = images.batch(8).random_map(stoker.images.random_hflip, on="image")

# %% stoker.images.resize
train = images.map(stoker.images.resize((32, 32)), on="image")

# %% stoker.images.resize_center_crop
valid = images.map(stoker.images.resize_center_crop(resize=40, crop=32), on="image")

# %% stoker.images.read_size
assert stoker.images.read_size(Path("train/cat/0.jpg").read_bytes()) == (48, 64)

# %% stoker.images.to_chw
assert stoker.images.to_chw(pixels).shape == (3, 48, 64)

# %% stoker.collate.varlen
packed = stoker.from_dataset(texts, seed=0).pack(128, fit="best")
batches = packed.batch(4, collate=stoker.collate.varlen())

# %% stoker.collate.pad
train = stoker.from_dataset(texts, seed=0).batch(8, collate=stoker.collate.pad(0))
values, lengths = next(iter(train))  # int64 [8, longest] and [8]

# %% stoker.testing.equal
assert stoker.testing.equal({"x": np.arange(3)}, {"x": np.arange(3)})


# %% stoker.Pipeline.apply
class Halves(stoker.Stage):
    def lower(self, pipeline):
        return pipeline.map(lambda x: x / 2, on=0)


train = data.apply(Halves())

# %% stoker.Pipeline.shuffle
train = data.shuffle().batch(32)

# %% stoker.Pipeline.sample
train = data.sample(1 / np.bincount(y)[y])

# %% stoker.Pipeline.order
train = data.order(lambda epoch, rng: rng.permutation(1_000)[:500], length=500)

# %% stoker.Pipeline.shard
train = data.shuffle().shard(rank=0, world_size=4).batch(8)

# %% stoker.Pipeline.balance
sizes = [len(text) for text in texts]
train = stoker.from_dataset(texts, seed=0).shuffle().shard(rank=0, world_size=4).balance(sizes)

# %% stoker.Pipeline.select
zeros, first = data.select(y == 0), data.select(range(10))

# %% stoker.Pipeline.split
train, valid = data.split(0.9, seed=1, stratify=y)

# %% stoker.Pipeline.folds
for train, valid in data.folds(5, stratify=y):
    assert (len(train), len(valid)) == (800, 200)

# %% stoker.Pipeline.take
few, some = data.take(100), data.take(100, seed=0)

# %% stoker.Pipeline.skip
rest = data.skip(100)

# %% stoker.Pipeline.with_index
inputs, labels, numbers = next(iter(data.with_index("id").shuffle().batch(32)))

# %% stoker.Pipeline.filter
bright = data.filter(lambda x: x.mean() > 0.5, on=0)

# %% stoker.Pipeline.map
train = data.map(np.log1p, on=0)

# %% stoker.Pipeline.random_map
train = data.shuffle().echo(2).random_map(jitter, on=0).batch(32)

# %% stoker.Pipeline.scan
sums = stoker.from_arrays(np.arange(5)).scan(lambda total, x: (total + int(x), total), 0)
assert list(sums) == [0, 0, 1, 3, 6]

# %% stoker.Pipeline.pack
packed = stoker.from_dataset(texts, seed=0).shuffle().pack(128).batch(4)
whole = stoker.from_dataset(texts, seed=0).shuffle().pack(128, fit="best")

# %% stoker.Pipeline.late
train = data.shuffle().map(np.log1p, on=0).late(2).batch(32)

# %% stoker.Pipeline.batch
train = data.shuffle().batch(32, drop_last=True)

# %% stoker.Pipeline.batch_by_tokens
train = stoker.from_dataset(texts, seed=0).shuffle()
train = train.batch_by_tokens(512, sizes, collate=stoker.collate.pad(0))

# %% stoker.Pipeline.bucket
train = stoker.from_dataset(texts, seed=0).shuffle().bucket(8, sizes)

# %% stoker.Pipeline.sizes
lengths = stoker.from_dataset(texts).sizes(len)

# %% stoker.Pipeline.echo
train = images.echo("auto", max_factor=3).random_map(stoker.images.random_crop(32), on="image")

# %% stoker.Pipeline.cache
train = stoker.from_dataset(dataset).cache("64MiB", version="1")

# %% stoker.Pipeline.workers
train = data.batch(32).workers(2, ahead=8)

# %% stoker.Pipeline.steps
assert len(data.shuffle().batch(32).steps(10)) == 10

# %% stoker.Pipeline.repeat
train = data.shuffle().batch(32).repeat().steps(100)

# %% stoker.Pipeline.to_torch
inputs, labels = next(iter(data.batch(32).to_torch()))

# %% stoker.Pipeline.to_jax
inputs, labels = next(iter(data.batch(32).to_jax(jax.devices()[0])))

# %% stoker.Pipeline.record
train = data.shuffle().batch(32).echo()
for batch in train:
    pass

# %% stoker.Pipeline.replay
again = data.shuffle().batch(32).echo().replay(train.record())

# %% stoker.Pipeline.name_of
assert stoker.from_folder("train").name_of(20) == "dog/0.jpg"

# %% stoker.Pipeline.labels
labels = stoker.from_folder("train").labels()

# %% stoker.Pipeline.example
assert data.example(5)[1] == y[5]

# %% stoker.Pipeline.peek
inputs, labels = data.shuffle().batch(32).peek()

# %% stoker.Pipeline.stats
train = data.batch(32)
for batch in train:
    pass
print(train.stats().fresh_examples)

# %% stoker.Pipeline.metrics
numbers = train.metrics(prefix="data/")
