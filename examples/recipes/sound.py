"""Sound: train/CLASS/*.wav and valid/CLASS/*.wav (or .flac, .ogg), of any length.

Whenever it was stopped, start it again: it continues after the last checkpoint.
"""

import io
import os

import numpy as np
import soundfile
import torch
from torch import nn

import stoker

EPOCHS = 30
BATCH = 64
RATE = 16_000  # samples/s, in all files
SECONDS = 1.0  # that the network hears at once
WINDOW = 400  # samples of a spectrum
SAVE_EVERY = 500  # steps
FILES = [".wav", ".flac", ".ogg"]
device = "cuda" if torch.cuda.is_available() else "cpu"


# The data.
def heard(data, where):
    """Decode SECONDS of a file, at its beginning (where=0), at its end (1) or in between."""
    wanted = int(SECONDS * RATE)
    with soundfile.SoundFile(io.BytesIO(data)) as sound:
        if sound.samplerate != RATE:
            raise ValueError(f"{sound.samplerate} samples/s, not {RATE}")
        sound.seek(int(where * max(0, sound.frames - wanted)))
        samples = sound.read(wanted, dtype="float32", always_2d=True).mean(1)
    return np.pad(samples, (0, wanted - len(samples)))


def random_part(data, rng):
    return heard(data, rng.random()) * np.float32(rng.uniform(0.5, 1.5))  # and its loudness


def middle(data):
    return heard(data, 0.5)


def spectrum(samples):
    """float32 [n, samples] -> the logarithm of its spectra [n, 1, frequencies, times]."""
    hann = torch.hann_window(WINDOW, device=samples.device)
    found = torch.stft(samples, WINDOW, WINDOW // 2, window=hann, return_complex=True)
    return found.abs().add(1e-5).log()[:, None]


def ready(pipeline):
    return pipeline.batch(BATCH).to_torch(device).map(spectrum, on="data")


train = stoker.from_folder("train", extensions=FILES, seed=0).shuffle()
train = ready(train.random_map(random_part, on="data"))
valid = stoker.from_folder("valid", extensions=FILES, classes=train.class_names)
valid = ready(valid.map(middle, on="data"))

# The model: yours.
torch.manual_seed(0)
model = nn.Sequential(
    nn.Conv2d(1, 32, 5, stride=2),
    nn.ReLU(),
    nn.Conv2d(32, 64, 5, stride=2),
    nn.ReLU(),
    nn.AdaptiveAvgPool2d((8, 1)),
    nn.Flatten(),
    nn.Linear(64 * 8, len(train.class_names)),
).to(device)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS * len(train))

# The loop.
parts = {"model": model, "optimizer": optimizer, "schedule": schedule, "train": train}
if os.path.exists("checkpoint.pt"):
    saved = torch.load("checkpoint.pt", map_location=device)
    for name, part in parts.items():
        part.load_state_dict(saved[name])


def save():
    torch.save({name: part.state_dict() for name, part in parts.items()}, "checkpoint.tmp")
    os.replace("checkpoint.tmp", "checkpoint.pt")  # killed in between, there is the one before


@torch.no_grad()
def accuracy():
    model.eval()
    right = [model(sounds).argmax(1) == labels for sounds, labels in valid]
    model.train()
    return torch.cat(right).float().mean().item()


while train.epoch < EPOCHS:
    for sounds, labels in train:
        loss = nn.functional.cross_entropy(model(sounds), labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if train.counts.steps % SAVE_EVERY == 0:
            save()
    save()
    print(f"epoch {train.epoch}: loss {loss:.3f}, accuracy {accuracy():.3f}")
