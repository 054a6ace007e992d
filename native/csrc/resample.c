#include "resample.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "kernels.h"
#include "stoker_native.h"

// All of it is one piece of memory: to ask for ten took as long as to blend the rows of a small image.
struct plan {
    struct axis down, across;
    const uint8_t **rows;
    int16_t *between;
};

// ---- which kernels run

static _Atomic(const struct kernels *) chosen;
static _Thread_local const char *last = "";

static const struct kernels *best(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") ? &avx2_kernels : &sse2_kernels;
#elif defined(__aarch64__)
    return &neon_kernels;
#else
    return &scalar_kernels;
#endif
}

// The names of the paths that this processor can run, the best one first.
const char *stoker_paths(void) {
#if defined(__x86_64__)
    return __builtin_cpu_supports("avx2") ? "avx2 sse2 scalar" : "sse2 scalar";
#elif defined(__aarch64__)
    return "neon scalar";
#else
    return "scalar";
#endif
}

// Has all threads take this path from now on, or the best one for "". Returns 0 if there is none.
int stoker_use_path(const char *name) {
    const struct kernels *found = NULL;
    if (!*name) found = best();
    if (!strcmp(name, "scalar")) found = &scalar_kernels;
#if defined(__x86_64__)
    if (!strcmp(name, "sse2")) found = &sse2_kernels;
    if (!strcmp(name, "avx2") && __builtin_cpu_supports("avx2")) found = &avx2_kernels;
#elif defined(__aarch64__)
    if (!strcmp(name, "neon")) found = &neon_kernels;
#endif
    if (found) chosen = found;
    return found != NULL;
}

// Which path this thread's last resampling took; "" if there was none.
const char *stoker_last_path(void) { return last; }

// ---- weights

double reach(double length, int outputs, int antialias) {
    const double scale = length / outputs;
    return antialias && scale > 1 ? scale : 1;
}

// As lround does, of what is not negative: a call of that for each weight took as long as to mix the
// columns of a small image.
static int rounded(double value) {
    const int whole = (int)value;
    return whole + (value - whole >= 0.5);
}

// The weights are those of a triangle over the input pixels' centres. Inputs are those from 0 to
// size - 1; what lies beyond has no weight. `exact` has room for `taps` numbers.
static void fill_axis(struct axis *axis, double start, double length, int size, int antialias,
                      int reversed, double *exact) {
    const int outputs = axis->outputs, taps = axis->taps, one = 1 << axis->precision;
    const double scale = length / outputs, support = reach(length, outputs, antialias);
    const double slope = 1 / support;
    for (int i = 0; i < outputs; i++) {
        const double centre = start + (i + 0.5) * scale;
        int from = (int)(centre - support + 0.5), to = (int)(centre + support + 0.5);
        if (from < 0) from = 0;
        if (from > size - 1) from = size - 1;
        if (to > size) to = size;
        if (to <= from) to = from + 1;
        if (to > from + taps) to = from + taps;
        double total = 0;
        for (int k = 0; k < to - from; k++) {
            const double away = fabs(from + k + 0.5 - centre) * slope;
            total += exact[k] = away < 1 ? 1 - away : 0;
        }
        if (total <= 0) total = exact[0] = 1;
        const double share = one / total;
        const int place = reversed ? outputs - 1 - i : i;
        int16_t *weights = axis->weights + (size_t)place * taps;
        int sum = 0, largest = 0;
        for (int k = 0; k < to - from; k++) {
            weights[k] = (int16_t)rounded(exact[k] * share);
            sum += weights[k];
            if (weights[k] > weights[largest]) largest = k;
        }
        weights[largest] += (int16_t)(one - sum);
        axis->first[place] = from;
    }
}

// ---- resampling

static struct axis axis_of(double length, int outputs, int antialias) {
    const double support = reach(length, outputs, antialias);
    return (struct axis){
        .outputs = outputs,
        .taps = ((int)ceil(2 * support) + 1) & ~1,
        // The largest weight is about 1 / support: as many bits as an int16 holds, and an int32 sums.
        .precision = support >= 4 ? 16 : support >= 2 ? 15 : 14,
    };
}

struct plan *plan_new(const struct target *to, int width, int height, int channels) {
    const struct axis down = axis_of(to->height, to->out_height, to->antialias);
    const struct axis across = axis_of(to->width, to->out_width, to->antialias);
    const size_t most = down.taps > across.taps ? down.taps : across.taps;
    const size_t weights_down = (size_t)down.outputs * down.taps;
    const size_t weights_across = (size_t)across.outputs * across.taps;
    // Weights of 0 read behind the row's end.
    const size_t wide = ((size_t)width + across.taps) * channels + LONGEST_READ;
    // From the widest numbers to the narrowest: so all are aligned.
    const size_t bytes = sizeof(struct plan) + most * sizeof(double) +
                         down.taps * sizeof(const uint8_t *) +
                         ((size_t)down.outputs + across.outputs) * sizeof(int32_t) +
                         (weights_down + weights_across + wide) * sizeof(int16_t);
    struct plan *const plan = calloc(1, bytes);
    if (!plan) return NULL;
    double *const exact = (double *)(plan + 1);
    plan->down = down;
    plan->across = across;
    plan->rows = (const uint8_t **)(exact + most);
    plan->down.first = (int32_t *)(plan->rows + down.taps);
    plan->across.first = plan->down.first + down.outputs;
    plan->down.weights = (int16_t *)(plan->across.first + across.outputs);
    plan->across.weights = plan->down.weights + weights_down;
    plan->between = plan->across.weights + weights_across;
    fill_axis(&plan->down, to->y, to->height, height, to->antialias, 0, exact);
    fill_axis(&plan->across, to->x, to->width, width, to->antialias, to->flip, exact);
    return plan;
}

int plan_rows_kept(const struct plan *plan) { return plan->down.taps; }

void plan_run(struct plan *plan, const struct target *to, const struct rows *from) {
    const struct kernels *kernels = chosen ? chosen : best();
    const struct axis *down = &plan->down;
    const size_t bytes = (size_t)to->out_width * from->channels;
    last = kernels->name;
    for (int i = 0; i < down->outputs; i++) {
        const int16_t *weights = down->weights + (size_t)i * down->taps;
        int taps = down->taps;
        while (taps > 2 && !weights[taps - 1] && !weights[taps - 2]) taps -= 2;
        for (int k = 0; k < taps; k++) {
            const int y = down->first[i] + k;
            plan->rows[k] = y < from->height ? from->at(from->self, y) : plan->rows[0];
        }
        kernels->blend_rows(plan->rows, weights, taps, down->precision,
                            from->width * from->channels, plan->between);
        kernels->mix_columns(plan->between, &plan->across, from->channels, to->out + i * bytes);
    }
}
