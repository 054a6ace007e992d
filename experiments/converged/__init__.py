"""Does echoing still pay where training ends? A language model, verbatim copies, to convergence.

Registered on 29 November 2026, before anything here was run.

The question. Trainings for equal time ended sooner than training without echoing could have gone
on. Here a text is gone over until more passes bring nothing, on storage that takes R steps' time
for a batch. Nothing is random behind the echo, so its copies are as bad as copies can be, and they
come soon, where passes bring them an epoch apart.

Trainings. 1,280 windows of 32 words of wikitext-2, the 255 most frequent and all others as one; one
layer of a transformer, 32 wide, AdamW, batches of 8 (so 160 a pass). Three arms: no echo; an echo
that follows the stall, a pool of 16 batches, at most 4 uses, at R = 2 and at R = 4
(`equal_time.schedules`: stoker's own decisions, by the exact clock). At as many passes all take the
same time and read as many fresh words. Each number of passes is a training of its own, with a
schedule of its own: warm-up, then half a cosine to 0.

Convergence. Passes double, from 1. An arm is over at the first number of passes whose validation
loss is not more than 0.005 below that of half as many. It has converged where its validation loss
is least.

Tuning. For each arm and number of passes, by the mean validation loss of two seeds that are used
for nothing else: from a peak rate of 0.01 and a warm-up of a fifth (then from what was best for
half as many passes), rate and warm-up are halved and doubled until the best has worse ones on all
four sides, so that it is inside what was tried. Warm-ups are 0.025 to 0.8 of the training. Test
losses are those of five other seeds, differences are of pairs, intervals as `method.Interval`.

Measures, for each R:

- the test loss where an echo has converged, less that where training without echoing has;
- how many times as soon: of both losses where they have converged, the worse one is the target, by
  seed; the time to it is read between trainings on a line over the logarithm of their length;
- the difference at as many passes, which is equal time and equal fresh words, wherever both ran;
- the price of soon: what an echo's loss is above that of as many steps without echoing, whose
  copies come an epoch later. That is what a cache makes possible where the text fits into one.

What counts against echoing:

1. Where it has converged its loss is higher, the interval above 0.
2. It is not sooner: the interval is not above 1.
3. At equal time its loss is higher, the interval above 0, at a number of passes at which training
   without echoing has not yet converged.

And a rule of `equal_time.sentences`, found on other trainings, is put to the test: with nothing
random behind the echo, two passes or more may end higher, and fewer do not.
"""
