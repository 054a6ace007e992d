"""Reports as analyses of real jobs would give them, without running any."""

from __future__ import annotations

import msgspec

from stoker.analysis.model.model import predict
from stoker.analysis.model.report import (
    Action,
    AsItIs,
    Cost,
    Loader,
    PrepPoint,
    Rank,
    Rate,
    Rates,
    Report,
    Split,
    to_measured,
)
from stoker.analysis.reports.verdict import write_verdict

IMAGES = 1_281_167
IMAGE_BYTES = 114_000.0


def about(value: float, spread: float = 0.03) -> Rate:
    """Return a rate with an interval of so much around it."""
    return Rate(value, value * (1 - spread), value * (1 + spread))


def job(
    *,
    G: float,
    P: dict[int, float],
    workers: int,
    S: float | None = 900.0,
    C: float | None = 24_000.0,
    cores: int = 8,
    miss_s: float = 0.0,
    cached_fraction: float = 0.0,
    echo_after_s: float | None = None,
    name: str = "train.py:41",
    ranks: int = 1,
    step_cpu_s: float = 0.0002,
) -> Report:
    """Return a report of a job with these rates; what limits it follows from them."""
    reasons = {} if S else {"S": "no file was opened by the dataset"}
    reasons |= {} if C else {"C": "nor read again"}
    loader = Loader(
        name=name,
        describes=f"ImageFolder, batches of 256, {workers} workers",
        workers=workers,
        batch_size=256.0,
        unit="examples",
        batches=120,
        trains=True,
    )
    report = Report(
        stoker="0.1.0",
        made="2026-11-20T10:31:07+00:00",
        command=["train.py", "--epochs", "90"],
        seconds=94.2,
        starts=4,
        cores=cores,
        memory_bytes=64 << 30,
        trains_on_cpu=False,
        loader=loader,
        loaders=[loader],
        examples=IMAGES,
        example_bytes=IMAGE_BYTES,
        file_bytes=IMAGE_BYTES if S and C else None,
        cached_fraction=cached_fraction,
        rates=Rates(
            G=about(G),
            P=about(P[workers]),
            S=about(S, 0.1) if S else None,
            C=about(C, 0.05) if C else None,
        ),
        reasons=reasons,
        split=Split(1.0, 0.0, 0.0),
        verdict="",
        bound="compute",
        actions=[],
        prep=[PrepPoint(count, about(rate), cpu_s=0.004) for count, rate in P.items()],
        kept=PrepPoint(workers, about(1e5 * max(1, workers)), cpu_s=1e-5),
        miss_s=miss_s,
        copy_s=0.004,
        step_cpu_s=step_cpu_s,
        echo_after_s=echo_after_s,
    )
    now = predict(to_measured(report))
    split = Split(now.compute, now.prep_stall, now.fetch_stall)
    rates = msgspec.structs.replace(
        report.rates,
        F=about(now.fetch, 0.1) if S else None,
    )
    found = msgspec.structs.replace(
        report,
        rates=rates,
        predicted=now.rate,
        split=split,
        bound=now.bound,
        actions=[
            Action(
                title="Keep the files in a cache that never evicts",
                code='dataset = stoker.cached(dataset, "64GiB")',
                gain=Rate(1.62, 1.4, 1.8),
                why="Reads 60 % of the bytes from memory; takes for granted that 64 GiB are free.",
            ),
            Action(
                title="Echo each batch twice",
                code="loader = stoker.echo(loader, 2)",
                gain=Rate(1.3, 1.1, 1.5),
                why="A repeat may be worth less than a fresh example.",
            ),
        ]
        if now.bound != "compute"
        else [],
        notes=["The first 5 batches were left out: workers were starting."],
        as_it_is=AsItIs(about(now.rate), wait_fraction=1 - now.compute, startup_s=1.8),
        ranks=[
            Rank(rank, rates, split, 1 - now.compute, 0.02 * rank)
            for rank in range(ranks if ranks > 1 else 0)
        ],
    )
    return msgspec.structs.replace(found, verdict=write_verdict(found))


FETCH = job(G=3_000, P={1: 260, 2: 515, 4: 1_020, 8: 1_900}, workers=8, miss_s=0.002)
PREP = job(
    G=3_000,
    P={1: 180, 2: 355, 4: 690},
    workers=4,
    S=2_500,
    cached_fraction=0.3,
    echo_after_s=0.0016,
)
PREP = msgspec.structs.replace(
    PREP,
    transforms=[
        Cost("PIL's decode", Rate(0.7, 0.66, 0.74), 0.0042),
        Cost("ColorJitter", Rate(0.3, 0.26, 0.34), 0.0018),
    ],
    step=[
        Cost("waiting for data", Rate(0.66, 0.6, 0.7), 0.2),
        Cost("forward", Rate(0.34, 0.3, 0.4), 0.1),
    ],
)
COMPUTE = job(G=600, P={1: 260, 2: 515, 4: 1_020}, workers=4, S=2_500)
ALONE = job(G=900, P={0: 240}, workers=0, S=700, miss_s=1 / 700)
UNKNOWN = job(G=3_000, P={1: 180, 2: 355, 4: 690}, workers=4, S=None, C=None)
ARCHIVE = job(G=4_000, P={1: 1_000, 8: 8_000}, workers=8, S=900, C=None)
RANKS = job(G=2_000, P={1: 260, 4: 1_000}, workers=4, S=800, ranks=2)
PROCESSORS = job(G=3_000, P={1: 500, 4: 1_900}, workers=4, S=2_500, cores=4, step_cpu_s=0.001)

REPORTS = {
    "fetch": FETCH,
    "prep": PREP,
    "compute": COMPUTE,
    "alone": ALONE,
    "unknown": UNKNOWN,
    "archive": ARCHIVE,
    "ranks": RANKS,
    "processors": PROCESSORS,
}
