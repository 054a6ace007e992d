"""What does a repeat cost, by the number of uses and by the distance between them?

Registered on 29 November 2026, before anything here was run.

The critics. "Internal Data Repetition Destroys Language Models" (arXiv 2606.24998, June 2026): with
a tenth of the compute spent on a repeated subset, the loss is worst at an intermediate number of
repeats, as bad as with 67 % of the compute; a misspecified linear regression shows it, too. Only
its abstract was to be had, so the linear model below is one of its kind, not a copy of it. A
subset, or whole epochs, are repeated there; echoing repeats everything, evenly and soon. So the
distance is varied here, beside the number.

Arms. Every training takes T steps of B examples. All examples are used k times, verbatim
(`orders`):

- next step: each batch in k steps in a row;
- 8 steps: eight batches' worth of examples, passed over k times, shuffled for each pass;
- pool of 16, pool of 64: stoker's own `.shuffle().echo(k, pool=16 * B).batch(B)`; uses are 16 or 64
  steps apart in the mean. (With k above the pool's batches a batch may hold an example twice.)
- an epoch: all there is, passed over k times, shuffled for each pass;
- a subset: nine tenths of the uses are fresh, one tenth are k uses each of a few examples,
  anywhere;
- evenly: a tenth of the uses are copies as well, but of every ninth example, with a pool of 16.

Measure. `damage` is 1 - T' / T, where a training of T' steps on fresh data ends with the same loss:
the share of the compute that was in vain. T' is read between trainings of T, T/2, T/4 ... steps, on
a line over logarithms of the loss (less what no weights can remove, where that is known) and of the
length, through the medians of five seeds. A seed's loss is first divided by that of its own T fresh
steps, times the median of these. Median and interval are those of five seeds. `worth` is k * (1 -
damage): how many times as much fresh data a training without repeats needs to end as well. Above 1
a repeat is better than nothing, which is what echoing is held to while storage is too slow. The
rate is tuned for each arm, count and length, on seeds that are used for nothing else; a rate at an
edge of its grid is marked.

The linear model (`linear`). Inputs are normal, with variances i**-1.5; the truth is a sum over all
of them with weights of 1 or -1 drawn at random; the model sees the first 512. What it does not see
is noise to it, as the inputs are independent. Two worlds: "misspecified", with no other noise, and
"with noise", of variance 1 in addition. B = 8, T = 8,192, plain SGD, half a cosine down to 0, rates
2**-8 to 2**0.5, 2**0.5 apart; two seeds tune, five count. The loss is exact, for the covariance is
known. k is 2 to 64 in powers of two; for the subset 256, 1,024 and 3,276 in addition, since the
peak may be there.

The language model (`language`). Words of wikitext-2, the 1,023 most frequent and all others as one;
windows of 32 words; one layer of a transformer (`equal_time.tasks.Words`), AdamW, warm-up of a
fifth. B = 16, T = 1,024; rates 0.0025, 0.005, 0.01, 0.02, tuned by one seed on a validation part. k
is 2, 8 and 32; distances are the next step, a pool of 16, an epoch, and a subset. No augmentation.

What counts against echoing, in either model:

1. With a pool of 16 and 2, 4 or 8 uses, the interval of `worth` is not above 1: copies are worth
   nothing, or less.
2. With a pool of 16, `worth` of 8 uses is below that of 4, or that of 4 below that of 2, intervals
   apart: stoker's caps are too high.
3. With 2, 4 or 8 uses, `damage` with a pool of 16 is above that of an epoch, intervals apart, by
   more than 0.05: soon costs more than late.
4. The same with a pool of 16 above a pool of 64: the default pool is too small.
5. `damage` of 10 % copies evenly is not below the worst of a subset: the critics' number holds for
   echoing as well.

And against `min_distance=8`: with 2, 4 or 8 uses, 8 steps are more than 0.05 worse than a pool of
16 (too small), or not better than the next step, intervals apart (useless).
"""
